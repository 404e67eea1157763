"""A recording's jobs without a compiler and a GPU, in this process: configs go wrong as they are told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes import RESOURCES

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import CompileError, Report, first_line
from dsv4tune.codegen.devices import DEVICES, Device
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools import evaluate, record
from dsv4tune.tools.evaluate import Pools
from dsv4tune.tools.executor import Answer, Executor, Job, Seat, Unusable
from dsv4tune.tools.measure import Compiled, Setup, Timed
from dsv4tune.tuned.records import Baseline

CARD = DEVICES["h200"]
BASELINE = Baseline(name="deep_gemm", version="1", times_us={128: 4.0})


class Crash(BaseException):
    """In the place of whatever ends the command without a word."""


class Inline(Executor):
    """Runs each job where it stands; what a job raises may name the kind of its answer."""

    def __init__(self, what: str) -> None:
        super().__init__([Seat()], what)
        self._jobs: list[Job] = []

    def _running(self) -> int:
        return len(self._jobs)

    def _free(self) -> Iterable[int]:
        return () if self._jobs or not self._open() else (0,)

    def _start(self, number: int, job: Job) -> None:
        self._jobs.append(job)

    def connections(self) -> list[Any]:
        return []

    def next_limit(self) -> float:
        return 0.0 if self._jobs else float("inf")

    def ready(self, connections: Sequence[Any]) -> list[Answer]:
        found = []
        for job in self._jobs:
            try:
                answer = Answer(job.tag, "ok", job.function(*job.arguments))
            except TimeoutError as error:
                answer = Answer(job.tag, "timeout", reason=str(error))
            except Unusable as error:
                answer = Answer(job.tag, "unusable", reason=str(error))
            except Exception as error:
                answer = Answer(job.tag, "raised", reason=first_line(error))
            found.append(self._settle(0, job, answer))
        self._jobs.clear()
        self._start_queued()
        return self._with_lost([answer for answer in found if answer is not None])

    def close(self) -> None:
        self._queue.clear()


@dataclass
class Site:
    """A machine with an H200, of a kind; its processes are `made`."""

    found: Sequence[Device] = (CARD,)
    made: Callable[[], Pools] = lambda: Pools(Inline("the compiler"), Inline("the GPU"), True)

    def devices(self) -> Sequence[Device]:
        return self.found

    def pools(self, jobs: int | None, device: Device, on_gpu: bool, say: Callable[[str], None]) -> Pools:
        assert on_gpu
        return self.made()


@dataclass
class Bench:
    """What the jobs do, and what they were asked for.

    Attributes:
        orders: what becomes of a config: ``compile`` and ``shared`` at once, ``wrong``, ``hang`` and ``fault`` when it
            is measured; ``later`` before any of these means in the second pass.
        crash_after: jobs on the GPU after which the command ends.
    """

    orders: dict[Config, str] = field(default_factory=dict)
    crash_after: int | None = None
    crash: type[BaseException] = Crash
    compiled: list[Config] = field(default_factory=list)
    measured: list[Config] = field(default_factory=list)

    def compile_job(self, problem: Any, config: Config) -> Compiled:
        self.compiled.append(config)
        order = self.orders.get(config)
        if order == "compile":
            raise CompileError("no such layout")
        shared = 1 << 20 if order == "shared" else 20_000
        report = Report(**{**RESOURCES.model_dump(), "shared_bytes": shared})
        # Configs that differ in their buffers alone are one machine code, as Triton makes it of a pointer load.
        return Compiled("0" * 64, report, config.with_(num_stages=0, splits=0).key)

    def rounds_job(self, setup: Setup, config: Config, baseline: str | None) -> Timed:
        if len(self.measured) == self.crash_after:
            raise self.crash
        self.measured.append(config)
        order = self.orders.get(config, "")
        if not order.startswith("later ") or self.measured.count(config) > 1:
            match order.removeprefix("later "):
                case "wrong":
                    return Timed(Verdict(float("inf"), "case 'one': NaN"), {}, {})
                case "hang":
                    raise TimeoutError("no answer in 30 s")
                case "fault":
                    raise RuntimeError("device fault")
        us = {n: [time_of(config) + n / 1e6, time_of(config)] for n in setup.profile.lengths}
        beside = {} if baseline is None else {n: [4.0, 4.0] for n in setup.profile.lengths}
        return Timed(Verdict(1e-7), us, beside, ("clocks held down",))


def time_of(config: Config) -> float:
    return 1.0 + config.int("splits") / 8 + config.int("num_warps") / 64


def narrow(monkeypatch: pytest.MonkeyPatch, keep: Callable[[Config], bool]) -> None:
    """The indexer's space, with these of its configs only."""
    kind = type(ops.get("indexer"))
    whole = kind.space

    def space(self: Any, problem: Any, device: Device) -> Space:
        found = whole(self, problem, device)
        few = [config for config in found.valid() if keep(config)]
        assert few, "none is left of the space"
        return Space(found.parameters, found.refuse, found.branches, few)

    monkeypatch.setattr(kind, "space", space)


def nothing_job(*_: Any) -> None:
    pass


def install(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    """This bench's jobs in the place of those on a GPU."""
    for name in ("import_job", "session_job"):
        monkeypatch.setattr(evaluate, name, nothing_job)
    monkeypatch.setattr(record, "compile_job", bench.compile_job)
    monkeypatch.setattr(record, "rounds_job", bench.rounds_job)
    monkeypatch.setattr(record, "fitting", lambda op, setup, pools, say: setup)
    monkeypatch.setattr(record, "timed_baseline", lambda *_, **__: (BASELINE, {}))
