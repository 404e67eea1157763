"""One candidate's way: compile in one process, check and time in another, and a finished trial at the end of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from dsv4tune import __version__
from dsv4tune.codegen import cost, ops
from dsv4tune.codegen.compile import Report, cache_environment, ptxas_version
from dsv4tune.codegen.op import Plan, Verdict
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tools import gpu
from dsv4tune.tools.executor import Answer, Executor, Seat, collect
from dsv4tune.tools.gpu import Card
from dsv4tune.tools.measure import (
    Compiled,
    Measured,
    Rounds,
    Setup,
    Timing,
    compile_job,
    device_job,
    floors_us,
    import_job,
    interpret_job,
    session_job,
)
from dsv4tune.tools.search import Pick
from dsv4tune.tools.timing import middle
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.records import Baseline, DeviceRecord, Environment, Final, Range, Resources, Trial, plain

#: Seconds that one compile, one check with its timing, and one check in the interpreter may take; and how much longer
#: the first one of a process, which imports torch and makes a problem's inputs and expected values.
COMPILE_LIMIT_S, JUDGE_LIMIT_S, INTERPRET_LIMIT_S, PREPARE_S = 60.0, 30.0, 300.0, 90.0
#: Bytes of the machine's memory that one compile or check without a GPU, and one process that measures, may hold.
CANDIDATE_BYTES, JUDGE_BYTES = 8 << 30, 32 << 30


@dataclass(frozen=True)
class Kind:
    """What a pool's processes are like, wherever they run."""

    what: str
    limit_s: float
    memory: int
    environment: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0

    def settings(self) -> dict[str, Any]:
        """The arguments of a `Pool` on this machine; all kinds share one cache of compiled kernels."""
        return {
            "what": self.what,
            "limit_s": self.limit_s,
            "prepare_s": PREPARE_S,
            "memory": self.memory,
            "environment": {**cache_environment(), **self.environment},
            "nice": self.nice,
        }


_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# Compilers fill every core; the process that times must not wait for one.
COMPILERS = Kind("the compiler", COMPILE_LIMIT_S, CANDIDATE_BYTES, _NO_GPU, nice=10)
MEASURERS = Kind("the GPU", JUDGE_LIMIT_S, JUDGE_BYTES)
# A process a core: products this small are slower on more threads.
_INTERPRET = {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
INTERPRETERS = Kind("Triton's interpreter", INTERPRET_LIMIT_S, CANDIDATE_BYTES, {**_NO_GPU, **_INTERPRET})


@dataclass
class Pools:
    """The processes of a search; they outlive the problem, because starting one takes seconds.

    `leave` is called once they have ended.
    """

    compilers: Executor
    judges: Executor
    on_gpu: bool
    leave: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, jobs: int, on_gpu: bool, cards: Sequence[Card] = ()) -> Pools:
        """Processes of this machine: `jobs` compilers, and a judge for each of the cards (or for the first GPU)."""
        compilers = Pool(jobs, **COMPILERS.settings())
        if not on_gpu:
            return cls(compilers, Pool(jobs, **INTERPRETERS.settings()), False)
        seats = [Seat(card=card.uuid, environment={"CUDA_VISIBLE_DEVICES": card.visible}) for card in cards]
        return cls(compilers, Pool(1, **MEASURERS.settings(), seats=seats), True)

    def warm(self) -> None:
        """Compilers import Triton, which takes seconds, while the caller prepares its inputs."""
        self.compilers.prepare(import_job)

    def prepare(self, setup: Setup) -> None:
        """Every process that measures makes the problem's inputs, while the first candidates are compiled."""
        if self.on_gpu:
            self.judges.prepare(session_job, setup)

    def under_way(self) -> dict[str, int]:
        """Candidates that wait for a process or are in one, by what it does with them."""
        return {"compile": self.compilers.pending, "check and measure" if self.on_gpu else "check": self.judges.pending}

    def close(self) -> None:
        self.compilers.close()
        self.judges.close()
        self.leave()


def environment(arch: int, on_gpu: bool) -> Environment:
    state = gpu.state() if on_gpu else gpu.State()
    return Environment(
        dsv4tune=__version__,
        triton=metadata.version("triton"),
        ptxas=ptxas_version(arch),
        torch=metadata.version("torch"),
        driver=plain(state.driver),
        clocks=plain(state.clocks),
    )


class Evaluation:
    """Evaluates configs of one problem; see `dsv4tune.tools.search.Evaluator`."""

    def __init__(self, setup: Setup, pools: Pools, baseline: Baseline | None, halving: bool = False) -> None:
        self.setup, self.pools, self.baseline, self.halving = setup, pools, baseline, halving
        self.op = ops.get(setup.problem.op)
        self.environment = environment(setup.problem.silicon.arch, pools.on_gpu)
        self.floors = floors_us(setup.problem, setup.profile, setup.device.bandwidth)
        self._built: dict[Config, tuple[Compiled, float]] = {}
        # Configs of one machine code and launch plan are one kernel: the first is measured, the others get its figures.
        self._first: dict[tuple[str, Plan], Config] = {}
        self._twins: dict[Config, list[Config]] = {}
        self._ended: dict[Config, Trial] = {}
        #: Compiled, with the machine that has the binary.
        self._ready: dict[Config, str] = {}
        self.pick: Pick = lambda compiled: next(iter(compiled))
        pools.prepare(setup)

    @property
    def capacity(self) -> int:
        # Enough compiled ahead that neither compilers nor judges wait, few enough that the sampler learns.
        return 2 * max(self.pools.compilers.size, self.pools.judges.size)

    @property
    def yardstick(self) -> str:
        """What this search holds times against: the server's kernel, or each byte moved once."""
        return self.baseline_name or "byte floor"

    @property
    def baseline_name(self) -> str | None:
        return self.baseline.name if self.baseline is not None else None

    def submit(self, config: Config) -> None:
        self.pools.compilers.submit((self, config), compile_job, self.setup.problem, config)

    def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
        done: list[tuple[Config, Trial]] = []
        for pool, answer in collect([self.pools.compilers, self.pools.judges], timeout):
            asker, config = answer.tag
            if asker is not self:
                continue  # of an earlier search, which ended before
            trial = self._compiled(config, answer) if pool is self.pools.compilers else self._judged(config, answer)
            if trial is not None:
                done.append((config, trial))
            if trial is not None and config in self._twins:
                self._ended[config] = trial
                done += [(twin, self._same(twin, trial)) for twin in self._twins[config]]
        self._send()
        return done

    def _send(self) -> None:
        """Have what is compiled measured, one more at a time than can be: what is learned meanwhile counts."""
        judges = self.pools.judges
        while self._ready and judges.pending <= judges.size:
            # Who waits for the figures of one that is ready is chosen by having that one measured.
            ready = {twin: first for first in self._ready for twin in (first, *self._twins.get(first, ()))}
            chosen = self.pick(ready)
            if chosen is None:
                break
            config = ready[chosen]
            near, tag = self._ready.pop(config), (self, config)
            if self.pools.on_gpu:
                judges.submit(tag, device_job, self.setup, config, self.baseline_name, self.halving, near=near)
            else:
                judges.submit(tag, interpret_job, self.setup.problem, config, near=near)

    def close(self) -> None:
        """Drop what is under way; its answers are nobody's."""
        self._ready.clear()
        self.pools.compilers.forget()
        self.pools.judges.forget()

    def knows(self, trial: Trial) -> None:
        """What an earlier run measured need not be measured for another config either."""
        config = Config(trial.config)
        if trial.code and not trial.same_as and config not in self._twins:
            self._first[trial.code, self.op.plan(self.setup.problem, config, self.setup.profile.width)] = config
            self._twins[config], self._ended[config] = [], trial

    def _compiled(self, config: Config, answer: Answer) -> Trial | None:
        """A trial that ends at the compiler, or None where the candidate goes on to its check."""
        if answer.kind != "ok":
            return self._trial(config, answer.failure, reason=f"compile: {answer.reason}")
        built: Compiled = answer.value
        report = built.report
        self._built[config] = built, answer.seconds
        refusal = report.refusal(self.setup.problem.silicon)
        if refusal is None and not self.pools.on_gpu and report.spill_bytes:
            refusal = f"spills {report.spill_bytes} B a thread: a prediction is no ground for using it"
        if refusal is not None:
            return self._trial(config, "refused", reason=refusal)
        unchecked = None if self.pools.on_gpu else self.op.unchecked(config)
        if unchecked is not None:
            return self._trial(config, "unchecked", reason=unchecked)
        if not self.pools.on_gpu:
            self._ready[config] = answer.seat.host
            return None
        plan = self.op.plan(self.setup.problem, config, self.setup.profile.width)
        first = self._first.setdefault((built.code, plan), config)
        if first in self._ended:
            return self._same(config, self._ended[first])
        if first != config:
            self._twins[first].append(config)
            return None
        self._twins[config] = []
        self._ready[config] = answer.seat.host
        return None

    def _same(self, config: Config, first: Trial) -> Trial:
        """A config that is the same kernel as one which was measured."""
        names = ("reason", "score", "yardstick", "times_us", "spread", "baseline", "error", "checked_by", "card")
        shared = {name: getattr(first, name) for name in names}
        return self._trial(config, first.status, **shared, warnings=first.warnings, same_as=first.config)

    def _judged(self, config: Config, answer: Answer) -> Trial:
        judged: dict[str, Any] = {"card": answer.seat.card, "judge_seconds": round(answer.seconds, 3)}
        if answer.kind != "ok":
            return self._trial(config, answer.failure, reason=answer.reason, **judged)
        measured = answer.value if self.pools.on_gpu else self._predicted(config, answer.value)
        verdict: Verdict = measured.verdict
        error = verdict.error if math.isfinite(verdict.error) else None
        if not verdict.ok:
            return self._trial(config, "wrong", reason=verdict.fault or "", error=error, **judged)
        times = {n: t.us for n, t in measured.timings.items()}
        spread = {n: t.spread for n, t in measured.timings.items()}
        beside = {n: t.baseline_us for n, t in measured.timings.items() if t.baseline_us is not None}
        baseline = None
        if self.baseline is not None and beside:
            baseline = Baseline(name=self.baseline.name, version=self.baseline.version, times_us=_rounded(beside))
        return self._trial(
            config,
            "pruned" if measured.pruned else "ok",
            reason=measured.pruned,
            score=round(self.setup.profile.only(times).score(times, beside or self.floors), 6),
            yardstick=baseline.name if baseline is not None else "byte floor",
            times_us=_rounded(times),
            spread=_rounded(spread),
            baseline=baseline,
            error=error,
            checked_by="gpu" if self.pools.on_gpu else "interpreter",
            warnings=list(measured.warnings),
            **judged,
        )

    def timed_again(self, trial: Trial, part: Final, score: float, us: Rounds, beside: Rounds, answer: Answer) -> Trial:
        """A candidate's part in the final, as a trial of its own."""
        timed = {n: middle(times) for n, times in us.items()}
        baseline = None
        if self.baseline is not None and beside:
            times_us = _rounded({n: middle(times)[0] for n, times in beside.items()})
            baseline = self.baseline.model_copy(update={"times_us": times_us})
        changes = {
            "environment": self.environment,
            "score": round(score, 6),
            "yardstick": baseline.name if baseline is not None else "byte floor",
            "times_us": _rounded({n: median for n, (median, _) in timed.items()}),
            "spread": _rounded({n: spread for n, (_, spread) in timed.items()}),
            "baseline": baseline,
            "card": answer.seat.card,
            "judge_seconds": round(answer.seconds, 3),
            "finished_at": _now(),
            "final": part,
        }
        return trial.model_copy(update=changes)

    def _predicted(self, config: Config, verdict: Verdict) -> Measured:
        report = self._built[config][0].report
        return Measured(verdict, {n: Timing(us, 0.0) for n, us in predicted_us(self.setup, config, report).items()})

    def _trial(self, config: Config, status: Any, **result: Any) -> Trial:
        built, compiling = self._built.pop(config, (None, 0.0))
        result |= {
            "source_sha": built.source_sha if built else render(self.op, self.setup.problem, config).sha,
            "code": built.code if built else "",
            "status": status,
            "provenance": "measured" if self.pools.on_gpu else "predicted",
            "compile_seconds": round(compiling, 3),
        }
        return finished_trial(self.setup, self.environment, config, built.report if built else None, **result)


def finished_trial(
    setup: Setup, environment: Environment, config: Config, report: Report | None, **result: Any
) -> Trial:
    """A trial that ends now."""
    problem = setup.problem
    return Trial(
        problem=problem.to_json(),
        problem_key=problem.key,
        device=DeviceRecord.of(setup.device),
        environment=environment,
        config=dict(config),
        range=Range(**setup.profile.to_json()),
        resources=Resources(**report.to_json()) if report is not None else None,
        seed=setup.seed,
        finished_at=_now(),
        **result,
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def predicted_us(setup: Setup, config: Config, report: Report | None) -> dict[int, float]:
    """By live length, of the cost model; without a report as well as it can tell before anything is compiled."""
    op, problem, profile = ops.get(setup.problem.op), setup.problem, setup.profile
    return {n: cost.predict_us(op, problem, config, profile, n, report, setup.device) for n in profile.lengths}


def expected(setup: Setup) -> Callable[[Config], float]:
    """The cost model's view of configs that nobody compiled yet: logarithms of what their scores go by."""

    def of(config: Config) -> float:
        times = predicted_us(setup, config, None)
        return math.log(setup.profile.score(times, dict.fromkeys(times, 1.0)))

    return of


def _rounded(values: Mapping[int, float]) -> dict[int, float]:
    return {n: round(v, 4) for n, v in values.items()}


def default_jobs() -> int:
    return max(1, len(os.sched_getaffinity(0)))
