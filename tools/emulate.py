"""Another architecture's code, checked by running it on an sm_90 GPU; see `dsv4tune.codegen.retarget`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import CompileError, Report, cache_environment, compile_config, first_line
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op, Verdict
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.render import render
from dsv4tune.codegen.retarget import retarget
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools.evaluate import environment, finished_trial, predicted_us
from dsv4tune.tools.executor import Answer, Poisoned, collect
from dsv4tune.tools.measure import Setup, check, floors_us
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.records import Trial

#: Runs of each case: a race shows in some of them only.
RUNS = 3
#: Seconds that one variant may take; a wait that never ends is one of the faults looked for.
LIMIT_S = 120.0
#: Context length of the default configs' calls, in tokens: the one that a search assumes.
MAX_CONTEXT = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """One variant to check; `origin` is ``default`` or ``stored``."""

    origin: str
    problem: Problem
    config: Config
    width: int


@dataclass(frozen=True)
class Emulated:
    """How a candidate's check ended.

    Attributes:
        status: ``ok``, ``wrong`` (it ran and failed) or ``not run`` (`reason` says why it can't be).
        error: the worst relative error, None where there is no finite one.
    """

    candidate: Candidate
    status: str
    error: float | None = None
    reason: str = ""
    report: Report | None = None

    @classmethod
    def of(cls, answer: Answer) -> Emulated:
        if answer.kind != "ok":
            return cls(answer.tag, "not run" if answer.kind == "raised" else "wrong", reason=answer.reason)
        verdict: Verdict
        verdict, report = answer.value
        error = verdict.error if math.isfinite(verdict.error) else None
        return cls(answer.tag, "ok" if verdict.ok else "wrong", error, verdict.fault or "", report)

    def to_json(self) -> dict[str, Any]:
        c = self.candidate
        return {
            "status": self.status,
            "error": self.error,
            "reason": self.reason,
            "origin": c.origin,
            "problem": {**c.problem.to_json(), "key": c.problem.key},
            "config": dict(c.config),
            "width": c.width,
        }

    def __str__(self) -> str:
        c = self.candidate
        error = "" if self.error is None else f"error {self.error:.1e}, "
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.status}: {error}{c.problem.label} width={c.width} {c.origin}: {c.config}{reason}"

    def trial(self, device: Device) -> Trial | None:
        """What was found right, as a predicted trial; None where it was not."""
        if self.status != "ok" or self.report is None:
            return None
        c, op = self.candidate, ops.get(self.candidate.problem.op)
        setup = Setup(c.problem, op.profile(c.problem, c.width), device, 0)
        times = predicted_us(setup, c.config, self.report)
        return finished_trial(
            setup,
            environment(device.silicon.arch, False),
            c.config,
            self.report,
            source_sha=render(op, c.problem, c.config).sha,
            status="ok",
            provenance="predicted",
            score=round(setup.profile.score(times, floors_us(c.problem, setup.profile, device.bandwidth)), 6),
            yardstick="byte floor",
            times_us={n: round(us, 4) for n, us in times.items()},
            error=self.error,
            checked_by="emulation",
        )


def emulate(op: Op[Any, Any], problem: Problem, config: Config, width: int) -> tuple[Verdict, Report]:
    """Run every case of the op with the code that the problem's silicon gets, on the sm_90 GPU here.

    Raises:
        CompileError: it doesn't compile, or uses what sm_90 has no counterpart of.
        ValueError: the problem's own silicon couldn't launch it.
    """
    kernel = compile_config(op, problem, config)
    refusal = kernel.report.refusal(problem.silicon)
    if refusal is not None:
        raise ValueError(refusal)
    run = Variant(op, problem, config, width, retarget(kernel))
    cases = op.cases(problem, width, op.profile(problem, width).lengths, "cuda", seed=0)
    verdict = check(op, problem, ((name, call, op.expect(problem, call)) for name, call in cases), run, RUNS)
    return verdict, kernel.report


def emulate_job(problem: Problem, config: Config, width: int) -> tuple[Verdict, Report]:
    """`emulate` in a worker process.

    Raises:
        Poisoned: the GPU's context may be broken; this process must end.
    """
    import torch

    try:
        return emulate(ops.get(problem.op), problem, config, width)
    except (CompileError, ValueError, torch.cuda.OutOfMemoryError):
        raise  # says nothing of the variant's code
    except Exception as error:
        raise Poisoned(first_line(error)) from error


def hopper_here() -> Device:
    """The GPU here.

    Raises:
        ValueError: it is not of compute capability 9.0, or there is none.
    """
    found = devices.here()
    if found is None or found.silicon.capability != "9.0":
        here = "there is none here" if found is None else f"{found.name} here is {found.silicon.target}"
        raise ValueError(f"emulate needs an sm_90 GPU (H100, H200, GH200): {here}")
    return found


def candidates(
    op: Op[Any, Any], device: Device, rows: Sequence[int], db: Path | None, given: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """The default config of each rows value, then the best stored ones of the device's target, whatever their rows.

    Raises:
        ValueError: a problem that the kernel does not serve.
        StoreError: the database can't be read.
    """
    # Imported here: running one variant needs no database.
    from dsv4tune.tuned.store import Filter, Store

    found = []
    options = op.options(given or {}, MAX_CONTEXT, 0)
    for n in rows:
        problem = op.problem(n, device.silicon, **options)
        found.append(Candidate("default", problem, op.default(problem, device), op.width(MAX_CONTEXT, 0)))
    if db is not None:
        store = Store(db, create=False)
        for key in store.problems(Filter(op.name)):
            best = store.best(key)
            if best is None:
                continue
            problem = op.problem_from_json(best.problem)
            if problem.silicon.target == device.silicon.target:
                found.append(Candidate("stored", problem, Config(best.config), best.range.width))
        store.close()
    return found


def emulate_all(wanted: Sequence[Candidate]) -> Iterator[Emulated]:
    """Check each candidate in a process that a fault or a hang costs; results in order, as they come."""
    pool = Pool(1, LIMIT_S, cache_environment())
    try:
        for candidate in wanted:
            pool.submit(candidate, emulate_job, candidate.problem, candidate.config, candidate.width)
        while pool.pending:
            for _, answer in collect([pool], 1.0):
                yield Emulated.of(answer)
    finally:
        pool.close()
