"""Spawned worker processes with a time limit for each job: a job that crashes or hangs costs itself alone."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dsv4tune.tools.executor import Answer, Executor, Job, Last, Poisoned, Seat, Unusable

#: From linux/prctl.h: the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1
#: What a worker says when it takes a job up.
_BEGUN = "begun"
#: Seconds between looks at a running job's memory, or at a killed process that does not end.
_LOOK_S = 1.0
#: Seconds that a killed process may hold its seat, as one does whose GPU has to be reset.
_END_S = 60.0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None
    started: float = 0.0
    #: Whether its process has taken the job up, and has answered one before.
    begun: bool = False
    answered: bool = False


class Pool(Executor):
    """Processes of this machine, started when there is work for them.

    Attributes:
        limit_s: seconds a job may take; its process is killed and replaced.
        prepare_s: seconds more for the first job of a process, and for those that prepare it.
        environment: variables set in the processes before they import anything.
        nice: how far they stand back for other processes.
        memory: bytes that a process may hold, of the machine's memory; unlimited if None. A job that takes more is
            killed, a process that keeps more is replaced.
    """

    def __init__(
        self,
        size: int,
        limit_s: float,
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        *,
        seats: Sequence[Seat] = (),
        prepare_s: float = 0.0,
        memory: int | None = None,
        what: str = "a process",
    ) -> None:
        """`size` processes, or one for each of `seats`."""
        super().__init__(seats or [Seat()] * size, what)
        self.limit_s, self.prepare_s, self.memory = limit_s, prepare_s, memory
        self.environment, self.nice = dict(environment or {}), nice
        self._workers: dict[int, _Worker] = {}
        #: Killed processes that have not ended yet, and since when.
        self._ending: dict[int, tuple[_Worker, float]] = {}
        self._looked = 0.0

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _running(self) -> int:
        return sum(w.job is not None for w in self._workers.values())

    def _free(self) -> Iterable[int]:
        for number in self._open():
            self._wait_for_end(number)
            worker = self._workers.get(number)
            # One that died while idle, of the system's need for memory say, is no fault of the next job.
            if worker is not None and worker.job is None and not worker.process.is_alive():
                self._discard(number)
            if number not in self._ending and number not in self._closed:
                worker = self._workers.get(number)
                if worker is None or worker.job is None:
                    yield number

    def _start(self, number: int, job: Job) -> None:
        worker = self._workers.get(number)
        if worker is None:
            worker = self._spawn(number)
            if self._preparation is not None and not job.long:
                # So that a candidate's own limit holds for it, and what fails before it is not its fault.
                self._queue.appendleft(job)
                job = self._prepares(number)
        worker.job, worker.started, worker.begun = job, time.monotonic(), False
        # One that dies now has a closed pipe, which is seen as such.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.pipe.send((job.function.__module__, job.function.__qualname__, job.arguments))

    def _limit(self, worker: _Worker) -> float:
        more = worker.job is not None and (worker.job.long or not worker.answered)
        return self.limit_s + (self.prepare_s if more else 0.0)

    def _spawn(self, number: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        environment = {**self.environment, **self.seats[number].environment}
        process = context.Process(target=_serve, args=(theirs, environment, self.nice), daemon=True)
        # Born with Ctrl-C blocked, which is the parent's to handle; nor may a signal come between start and note.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
            theirs.close()
            worker = self._workers[number] = _Worker(process, ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return worker

    # -- ends ---------------------------------------------------------------------------------------------------

    def _discard(self, number: int) -> None:
        worker = self._workers.pop(number)
        # Its group first: a compiler that hangs is as often the assembler that it started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.pipe.close()
        self._ending[number] = worker, time.monotonic()
        # At once as a rule. A GPU that has to be reset takes seconds, in which other seats go on.
        worker.process.join(0.5)
        self._wait_for_end(number)

    def _wait_for_end(self, number: int) -> None:
        worker, since = self._ending.get(number, (None, 0.0))
        if worker is None:
            return
        if not worker.process.is_alive():
            del self._ending[number]
        elif time.monotonic() - since > _END_S and number not in self._closed:
            self._give_up(number, f"process {worker.process.pid} can't be ended: it hangs in the driver")

    def ready(self, connections: Sequence[Any]) -> list[Answer]:
        answers = []
        now = time.monotonic()
        look = self.memory is not None and now - self._looked > _LOOK_S
        self._looked = now if look else self._looked
        for number, worker in list(self._workers.items()):
            job = worker.job
            if job is None:
                continue
            answer = None
            late = now - worker.started > self._limit(worker)
            # It may have answered while this process had other things to do, or was stopped.
            if worker.pipe in connections or (late and worker.pipe.poll()):
                answer = self._receive(number, worker, job)
            elif late:
                answer = self._end(number, job, "timeout", f"no answer in {self._limit(worker):g} s")
            elif look and self._takes_too_much(worker):
                answer = self._end(number, job, "died", f"took more than {_gib(self.memory)} of memory")
            answer = answer and self._settle(number, job, answer)
            if answer is not None:
                answers.append(answer)
        self._start_queued()
        return self._with_lost(answers)

    def _receive(self, number: int, worker: _Worker, job: Job) -> Answer | None:
        try:
            kind, value, reason, last = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            code = worker.process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
            answer = self._end(number, job, "died", f"its process ended with {how}")
            if worker.begun or not worker.answered:
                return answer
            # It was dying already when the job was sent: that is another's to do.
            self._queue.appendleft(job)
            return None
        except Exception as error:
            return self._end(number, job, "died", f"its answer can't be read: {_line(error)}")
        if kind == _BEGUN:
            worker.begun = True
            return None
        answer = Answer(job.tag, kind, value, reason, time.monotonic() - worker.started, self.seats[number])
        worker.job, worker.answered = None, True
        if last or self._takes_too_much(worker):
            self._discard(number)
        return answer

    def _end(self, number: int, job: Job, kind: str, reason: str) -> Answer:
        """The answer of a job whose process goes with it."""
        seconds = time.monotonic() - self._workers[number].started
        self._discard(number)
        return Answer(job.tag, kind, None, reason, seconds, self.seats[number])

    def _takes_too_much(self, worker: _Worker) -> bool:
        return self.memory is not None and _resident(worker.process.pid) > self.memory

    def connections(self) -> list[Connection]:
        return [w.pipe for w in self._workers.values() if w.job is not None]

    def next_limit(self) -> float:
        now = time.monotonic()
        limits = [w.started + self._limit(w) - now for w in self._workers.values() if w.job is not None]
        if (limits and self.memory is not None) or (self._queue and self._ending):
            limits.append(_LOOK_S)
        return 0.0 if self._lost else min(limits, default=float("inf"))

    def close(self) -> None:
        self._queue.clear()
        for number in list(self._workers):
            self._discard(number)


def _gib(count: int | None) -> str:
    return f"{(count or 0) / 2**30:.3g} GiB"


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system doesn't tell, or where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- in the process ---------------------------------------------------------------------------------------------


def _serve(pipe: Connection, environment: dict[str, str], nice: int) -> None:
    """A worker's life, in a process group of its own; it ends with its parent, whatever ends that."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or os.getppid() != parent.pid:
            return  # it died before the signal was asked for
        # Where memory runs out, a candidate goes before the search that holds its results.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ.update(environment)
    os.nice(nice)
    # Compilers and libraries print to stdout; a search's own output there is one JSON object.
    os.dup2(2, 1)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            pipe.send((_BEGUN, None, "", False))
        except (BrokenPipeError, ConnectionResetError):
            return
        reply = _reply(module, name, arguments)
        try:
            pipe.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # what can't be pickled; nothing of it was sent
            pipe.send(("raised", None, _line(error), False))
        if reply[3]:
            return


def _line(error: Exception) -> str:
    # Imported where it is needed: torch comes along, which takes seconds.
    from dsv4tune.codegen.compile import first_line

    return first_line(error)


def _reply(module: str, name: str, arguments: Sequence[Any]) -> tuple[str, Any, str, bool]:
    """Kind, value and reason of an answer, and whether this process must not be used again."""
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
    except Poisoned as error:
        return "died", None, str(error), True
    except Unusable as error:
        return "unusable", None, str(error), True
    except Exception as error:
        if os.environ.get("DSV4TUNE_DEBUG"):
            traceback.print_exc()
        return "raised", None, _line(error), False
    return ("ok", value.value, "", True) if isinstance(value, Last) else ("ok", value, "", False)
