"""The jobs of `workers` on an existing Ray cluster (extra ``dsv4tune[ray]``).

Ray places one actor a seat and tells when its node is lost. What a job may do to its process is the business of the
same `Pool` as on one machine, of one process, inside the actor: so a hang, a fault or a leak end there as here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from dsv4tune import __version__
from dsv4tune.codegen import devices
from dsv4tune.codegen.compile import first_line
from dsv4tune.codegen.devices import Device
from dsv4tune.tools import gpu
from dsv4tune.tools.evaluate import COMPILERS, INTERPRETERS, MEASURERS, PREPARE_S, Kind, Pools
from dsv4tune.tools.executor import Answer, Executor, Job, NoSeatsLeft, Seat, collect
from dsv4tune.tools.workers import Pool

#: Seconds that the cluster has for starting an actor; one that takes longer finds its node busy with other work.
PLACED_S = 120.0
#: Seconds past a job's own limit after which its actor counts as lost.
SILENT_S = 60.0


@dataclass(frozen=True)
class Facts:
    """What a worker's process tells of itself."""

    device: Device | None
    card: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    return {"dsv4tune": __version__, **{name: metadata.version(name) for name in ("triton", "torch")}}


def facts_job() -> Facts:
    with contextlib.suppress(ValueError):  # a GPU that can't serve counts as none
        here = devices.here()
        return Facts(here, gpu.uuid() if here is not None else "", versions())
    return Facts(None, "", versions())


class Worker:
    """A seat's actor."""

    def __init__(self, kind: Kind) -> None:
        self._pool = Pool(1, **kind.settings())

    def run(self, job: Job) -> Answer:
        """Run a job in the process; ``unusable`` where this machine can't."""
        if job.needed:
            self._pool.prepares_with(job.function, *job.arguments)
            job.needed = False
        self._pool._add(job)
        try:
            while True:
                for _, answer in collect([self._pool], 1.0):
                    return answer
        except NoSeatsLeft as error:
            return Answer(job.tag, "unusable", reason=str(error))


@dataclass
class _Running:
    job: Job
    reference: Any
    started: float = field(default_factory=time.monotonic)


class RayPool(Executor):
    """Actors of a cluster, one a seat. An actor that is lost gives its job to another."""

    def __init__(self, seats: Sequence[Seat], actors: Sequence[Any], kind: Kind) -> None:
        super().__init__(seats, kind.what)
        self._actors, self._kind = list(actors), kind
        self._jobs: dict[int, _Running] = {}
        # Ray tells in a thread of its own that a job ended; the pipe wakes `collect`.
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        # Held while the pipe is written and closed: its number may be another file's afterwards.
        self._lock, self._gone = threading.Lock(), False

    def _running(self) -> int:
        return len(self._jobs)

    def _free(self) -> Iterable[int]:
        return [number for number in self._open() if number not in self._jobs]

    def _start(self, number: int, job: Job) -> None:
        reference = self._actors[number].run.remote(
            Job(None, job.function, job.arguments, long=job.long, needed=job.needed)
        )
        self._jobs[number] = _Running(job, reference)

        def ended(future: Any) -> None:
            self._ended.put((number, future))
            with self._lock:
                if not self._gone:
                    os.write(self._woken, b".")

        reference.future().add_done_callback(ended)

    def connections(self) -> list[Any]:
        return [self._wake] if self._jobs else []

    def _limit(self, running: _Running) -> float:
        # Twice the job's own: a seat that is no good says so after two processes.
        return running.started + 2 * (self._kind.limit_s + PREPARE_S) + SILENT_S

    def next_limit(self) -> float:
        now = time.monotonic()
        return 0.0 if self._lost else min((self._limit(r) - now for r in self._jobs.values()), default=float("inf"))

    def ready(self, connections: Sequence[Any]) -> list[Answer]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)
        found = []
        while not self._ended.empty():
            number, future = self._ended.get()
            running = self._jobs.pop(number, None)
            if running is not None:
                found.append(self._finish(number, running, future))
        now = time.monotonic()
        for number, running in list(self._jobs.items()):
            if now > self._limit(running):
                del self._jobs[number]
                found.append(self._lose(number, running, "the node does not answer"))
        self._start_queued()
        return self._with_lost([answer for answer in found if answer is not None])

    def _finish(self, number: int, running: _Running, future: Any) -> Answer | None:
        import ray

        try:
            answer: Answer = future.result()
        except ray.exceptions.RayActorError:
            return self._lose(number, running, "the node is lost")
        except Exception as error:  # an answer or a job that can't be pickled
            reason = str(error).strip().splitlines()[-1]
            answer = Answer(None, "raised", reason=reason)
        answer = Answer(running.job.tag, answer.kind, answer.value, answer.reason, answer.seconds, self.seats[number])
        # What is unusable there was so twice already.
        return self._settle(number, running.job, answer, may_fail=1)

    def _lose(self, number: int, running: _Running, reason: str) -> Answer | None:
        _kill(self._actors[number])
        seat = self.seats[number]
        seconds = time.monotonic() - running.started
        answer = Answer(running.job.tag, "unusable", None, f"{seat.host}: {reason}", seconds, seat)
        return self._settle(number, running.job, answer, may_fail=1)

    def close(self) -> None:
        self._queue.clear()
        for actor in self._actors:
            _kill(actor)
        self._jobs.clear()
        with self._lock:
            if not self._gone:
                self._gone = True
                os.close(self._wake)
                os.close(self._woken)


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # gone with its node, or with the cluster
        ray.kill(actor)


# -- the cluster ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    host: str
    id: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class _Wish:
    """An actor to be placed: `cpus` and `gpus` are what Ray reserves for it."""

    node: _Node
    kind: Kind
    cpus: float
    gpus: int = 0


@dataclass(frozen=True)
class _Placed:
    kind: Kind
    seat: Seat
    actor: Any
    device: Device | None


class RayCluster:
    """The machines of a running Ray cluster as a site; see `dsv4tune.tools.sites.Site`."""

    def __init__(self, say: Callable[[str], None], facts: Callable[[], Facts] = facts_job) -> None:
        """Connect to the cluster of ``RAY_ADDRESS``, else to the one that runs here; `facts` is what its workers are
        asked.

        Raises:
            ValueError: Ray is not installed, or there is no cluster.
        """
        self._say, self._facts = say, facts
        try:
            import ray
        except ImportError:
            raise ValueError("--executor ray needs Ray: pip install 'dsv4tune[ray]'") from None
        # Ray prints what it has to say of lost nodes, in a thread; a search's own stdout is one JSON object.
        self._quiet = contextlib.redirect_stdout(sys.stderr)
        self._quiet.__enter__()
        try:
            if not ray.is_initialized():
                address = os.environ.get("RAY_ADDRESS") or "auto"
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            how = "start one with 'ray start --head', or set RAY_ADDRESS"
            raise ValueError(f"no Ray cluster can be used ({first_line(error)}): {how}") from None
        self._nodes = []
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            has, host = node["Resources"], f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}"
            if node["Alive"] and has.get("CPU", 0) >= 1:
                self._nodes.append(_Node(host, node["NodeID"], int(has["CPU"]), int(has.get("GPU", 0))))
        # One GPU of each node is asked what it is: Ray's own words for accelerators don't tell editions apart.
        asked = self._place([_Wish(node, MEASURERS, 0, 1) for node in self._nodes if node.gpus])
        self._first = {placed.seat.host: placed for placed in asked if placed.device is not None}

    def devices(self) -> Sequence[Device]:
        """Those that most GPUs of the cluster are first."""
        count: Counter[Device] = Counter()
        for node in self._nodes:
            if node.host in self._first and (device := self._first[node.host].device) is not None:
                count[device] += node.gpus
        return sorted(count, key=lambda device: (-count[device], device.name))

    def pools(self, jobs: int | None, device: Device, on_gpu: bool, say: Callable[[str], None]) -> Pools:
        placed = [p for p in self._first.values() if on_gpu and p.device and p.device.silicon == device.silicon]
        for other in self._first.values():
            if other not in placed:
                _kill(other.actor)
        wishes = []
        for node in self._nodes:
            count = min(jobs or node.cpus, node.cpus)
            if not on_gpu:
                # Half a core each: what is compiled is then checked.
                wishes += [_Wish(node, COMPILERS, 0.5), _Wish(node, INTERPRETERS, 0.5)] * count
            elif node.host in {p.seat.host for p in placed}:
                # Compiled where it is measured, because a machine's cache is its own; a core stays free for each GPU.
                wishes += [_Wish(node, MEASURERS, 0, 1)] * (node.gpus - 1)
                wishes += [_Wish(node, COMPILERS, 1)] * max(1, min(count, node.cpus - node.gpus))
        placed += [p for p in self._place(wishes) if p.device is None or p.device.silicon == device.silicon]
        compilers, judges = (self._pool(placed, kind) for kind in (COMPILERS, MEASURERS if on_gpu else INTERPRETERS))
        compilers.say = judges.say = say
        if not compilers.size or not judges.size:
            raise ValueError("the Ray cluster has no free cores for a search: wait for its other jobs, or add a node")
        hosts = {p.seat.host for p in placed}
        say(f"on {len(hosts)} Ray nodes: {compilers.size} processes compile, {judges.size} check or measure")
        return Pools(compilers, judges, on_gpu, self.close)

    def close(self) -> None:
        """Leave the cluster."""
        import ray

        ray.shutdown()
        self._quiet.__exit__(None, None, None)

    def _pool(self, placed: Sequence[_Placed], kind: Kind) -> RayPool:
        mine = [p for p in placed if p.kind is kind]
        return RayPool([p.seat for p in mine], [p.actor for p in mine], kind)

    def _place(self, wishes: Sequence[_Wish]) -> list[_Placed]:
        """Start actors, and leave out those that get no place in time or are not like this machine."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        worker: Any = ray.remote(Worker)
        started = []
        for wish in wishes:
            where = NodeAffinitySchedulingStrategy(wish.node.id, soft=False)
            options = {"num_cpus": wish.cpus, "num_gpus": wish.gpus, "scheduling_strategy": where}
            actor = worker.options(max_restarts=0, **options).remote(wish.kind)
            started.append((wish, actor, actor.run.remote(Job(None, self._facts, (), long=True))))
        references = [reference for _, _, reference in started]
        ready = set(ray.wait(references, num_returns=len(references), timeout=PLACED_S)[0]) if references else set()
        found, left_out = [], []
        for wish, actor, reference in started:
            reason = f"no place in {PLACED_S:g} s"
            if reference in ready:
                try:
                    facts = _facts_of(ray.get(reference))
                    seat = Seat(wish.node.host, facts.card)
                    found.append(_Placed(wish.kind, seat, actor, facts.device))
                    continue
                except Exception as error:
                    reason = str(error).strip().splitlines()[-1]
            _kill(actor)
            left_out.append(f"Ray node {wish.node.host} left out: {reason}")
        for line in dict.fromkeys(left_out):
            self._say(line)
        return found


def _knock(address: str) -> None:
    """See that somebody listens there: Ray itself tries for many minutes.

    Raises:
        OSError: nobody does.
        ValueError: it is the address of a Ray client's proxy, where actors can't be placed by node.
    """
    if address.startswith("ray://"):
        raise ValueError(f"{address} is a client's address, use the head's own such as 10.0.0.1:6379")
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _facts_of(answer: Answer) -> Facts:
    """What a worker told.

    Raises:
        ValueError: it could not, or has other versions than this machine.
    """
    if answer.kind != "ok":
        raise ValueError(answer.reason)
    facts: Facts = answer.value
    for name, here in versions().items():
        if facts.versions[name] != here:
            raise ValueError(f"it has {name} {facts.versions[name]}, here is {here}: install the same")
    return facts
