"""A whole space on file: every valid config of one problem compiled, checked and timed on the GPU here.

What it leaves is a recording (`dsv4tune.tools.recording`), which needs no GPU to be read.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Plan
from dsv4tune.codegen.render import cache_folder, try_writing
from dsv4tune.codegen.space import Config
from dsv4tune.tools import recording
from dsv4tune.tools.evaluate import Pools, environment
from dsv4tune.tools.executor import Answer, collect
from dsv4tune.tools.measure import Compiled, Setup, Timed, compile_job, rounds_job
from dsv4tune.tools.progress import LINE_S, Problem, Watcher, count_line
from dsv4tune.tools.recording import NEAR, Header, Record, Recording
from dsv4tune.tools.sites import Site
from dsv4tune.tools.tune import HERE, fitting, interrupted_once, timed_baseline

#: Of the inputs, and of the order in which a space is measured.
SEED = 0
STATUSES = ("ok", "refused", "wrong", "failed", "timeout")


@dataclass(frozen=True)
class Request:
    """What the command line asked for; `file` is named after the problem if None."""

    kernel: str
    rows: int
    max_context: int
    draft_tokens: int
    options: Mapping[str, Any]
    device: Device
    on_gpu: bool
    passes: int = 2
    budget_s: float | None = None
    jobs: int | None = None
    file: Path | None = None
    site: Site = HERE

    @property
    def path(self) -> Path:
        words = [self.kernel, *(f"{word}{value}" for word, value in self.options.items()), f"rows{self.rows}"]
        return self.file or Path("_".join([*words, self.device.silicon.target]) + ".jsonl.gz")


def record(request: Request, watch: Watcher) -> dict[str, Any]:
    """Measure a space into its file, or what is missing of it there; what the file holds then.

    Raises:
        ValueError: no such GPU here, a file of something else, or a problem that the kernel does not serve.
        OSError: the file or the cache folder can't be written.
    """
    started = time.monotonic()
    op = ops.get(request.kernel)
    problem = op.problem(
        request.rows,
        request.device.silicon,
        **op.options(request.options, request.max_context, request.draft_tokens),
    )
    profile = op.profile(problem, op.width(request.max_context, request.draft_tokens))
    if not request.on_gpu:
        wanted = f"{request.device.name} ({request.device.silicon.target})" if request.site.devices() else "GPU"
        raise ValueError(f"record measures, and there is no {wanted} here: run it on the machine that has one")
    valid = op.space(problem, request.device).valid()
    header = Header(
        problem=problem,
        profile=profile,
        device=request.device,
        seed=SEED,
        environment={"triton": metadata.version("triton")},
        baseline=None,
        valid=len(valid),
        wanted=len(valid),
        warnings=(),
        words=tuple(valid[0]),
    )
    # What can be seen to be in vain costs no time on the GPU.
    old = _earlier(request.path, header)
    try_writing(cache_folder(), "DSV4TUNE_CACHE")
    pools = request.site.pools(request.jobs, request.device, True, watch.say)
    deadline = None if request.budget_s is None else started + request.budget_s
    with interrupted_once():
        try:
            pools.warm()
            watch.phase("timing the server's own kernel")
            setup = fitting(op, Setup(problem, profile, request.device, SEED), pools, watch.say)
            baseline, _ = timed_baseline(setup, pools, watch.say, others=())
            header = replace(
                header,
                profile=setup.profile,
                environment=environment(problem.silicon.arch, True).model_dump(),
                baseline=None if baseline is None else (baseline.name, baseline.version),
                warnings=() if old is None else old.header.warnings,
            )
            if old is not None:
                _agree(request.path, old.header, header, _ALL)
            kept = Recording(header, {} if old is None else old.records)
            # Whole, so that what comes is not appended to a line that was cut off.
            recording.write(request.path, kept)
            have = f"{len(kept.records)} of {len(valid)} configs are in {request.path}"
            watch.say(f"recording {problem.key}: {have}")
            status = Recorder(setup, pools, kept, request.path, watch, deadline).run(request.passes)
        except KeyboardInterrupt:
            raise ValueError("interrupted before anything was measured") from None
        finally:
            pools.close()
        recording.write(request.path, kept)
    seconds = time.monotonic() - started
    return {"status": status, **told(request.path, recording.read(request.path)), "seconds": round(seconds, 2)}


# -- an earlier run's file --------------------------------------------------------------------------------------

#: What two runs must have in common to be one recording; the first ones are known before anything is measured.
_AT_ONCE: dict[str, Callable[[Header], Any]] = {
    "problem": lambda header: header.problem.key,
    "words": lambda header: " ".join(header.words),
    "Triton": lambda header: header.environment["triton"],
}
_ALL: dict[str, Callable[[Header], Any]] = {
    **_AT_ONCE,
    "range": lambda header: f"{', '.join(map(str, header.profile.lengths))} of {header.profile.width}",
    "baseline": lambda header: " ".join(header.baseline or ("none",)),
}


def _earlier(path: Path, header: Header) -> Recording | None:
    """What the file holds already."""
    if path.exists():
        found = recording.read(path)
        _agree(path, found.header, header, _AT_ONCE)
        return found
    if not path.absolute().parent.is_dir():
        raise ValueError(f"folder {path.absolute().parent} does not exist: create it")
    return None


def _agree(path: Path, old: Header, new: Header, facts: Mapping[str, Callable[[Header], Any]]) -> None:
    for word, fact in facts.items():
        if fact(old) != fact(new):
            raise ValueError(f"{path} was recorded with {word} {fact(old)}, not {fact(new)}: name another file with -o")


# -- the run ----------------------------------------------------------------------------------------------------


class Recorder:
    """Measures the configs of a space that its recording lacks, and appends each to the file the moment it ends."""

    def __init__(
        self, setup: Setup, pools: Pools, kept: Recording, path: Path, watch: Watcher, deadline: float | None
    ) -> None:
        self.setup, self.pools, self.kept, self.path = setup, pools, kept, path
        self.watch, self.deadline = watch, deadline
        self.op = ops.get(setup.problem.op)
        self.records = kept.records
        #: Who of one machine code and launch plan is measured, and who waits for its result.
        self._first: dict[tuple[str, Plan], Config] = {}
        self._waiting: dict[Config, list[Record]] = {}
        self._under_way: dict[Config, Record] = {}
        for record in self.records.values():
            if record.code and record.same_as is None and record.status != "refused":
                self._first[self._key(record)] = record.config
        pools.prepare(setup)

    def _key(self, record: Record) -> tuple[str, Plan]:
        return record.code, self.op.plan(self.setup.problem, record.config, self.setup.profile.width)

    def run(self, passes: int) -> str:
        """How it ended: ``complete``, ``budget`` or ``interrupted``."""
        try:
            for number in range(1, passes + 1):
                if not self._work_off(number, passes):
                    return "budget"
        except KeyboardInterrupt:
            return "interrupted"
        return "complete"

    def _work_off(self, number: int, passes: int) -> bool:
        """One pass; False where the time runs out before it ends."""
        if number == 1:
            # Neighbours apart, so that a slow spell of the GPU is nobody's alone.
            order = list(self.op.space(self.setup.problem, self.setup.device).valid())
            random.Random(SEED).shuffle(order)
            todo = [config for config in order if config not in self.records]
            known = len(self.records)
        else:
            # Backwards: what drifts over a pass shows as a difference between the two.
            own = [r for r in reversed(self.records.values()) if r.status == "ok" and r.same_as is None]
            todo = [record.config for record in own if record.passes < number]
            known = len(own) - len(todo)
        name = f"pass {number} of {passes}"
        self.watch.phase(name)
        self._shown = Problem(name, known + len(todo), known, self.deadline, self.pools.under_way, what="configs")
        self._told = time.monotonic()
        waiting, self._open = deque(todo), 0
        while waiting or self._open:
            if self.deadline is not None and time.monotonic() >= self.deadline:
                return False
            # Enough compiled ahead that the GPU never waits for a compiler.
            while waiting and self._open < 2 * max(self.pools.compilers.size, self.pools.judges.size):
                self._submit(waiting.popleft(), number)
            left = 1.0 if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            for pool, answer in collect([self.pools.compilers, self.pools.judges], min(1.0, left)):
                if pool is self.pools.compilers:
                    self._compiled(answer.tag, answer)
                else:
                    self._judged(answer.tag, answer)
        return True

    def _submit(self, config: Config, number: int) -> None:
        self._open += 1
        if number == 1:
            self.pools.compilers.submit(config, compile_job, self.setup.problem, config)
        else:
            self._measure(self.records[config])

    def _measure(self, record: Record, near: str = "") -> None:
        self._under_way[record.config] = record
        baseline = self.kept.header.baseline[0] if self.kept.header.baseline is not None else None
        self.pools.judges.submit(record.config, rounds_job, self.setup, record.config, baseline, near=near)

    def _compiled(self, config: Config, answer: Answer) -> None:
        seconds = (round(answer.seconds, 3), 0.0)
        if answer.kind != "ok":
            self._end(Record(config, answer.failure, f"compile: {answer.reason}", seconds=seconds))
            return
        compiled: Compiled = answer.value
        record = Record(config, "ok", report=compiled.report, code=compiled.code, seconds=seconds)
        refusal = compiled.report.refusal(self.setup.problem.silicon)
        if refusal is not None:
            self._end(replace(record, status="refused", reason=refusal))
            return
        first = self._first.setdefault(self._key(record), config)
        if first == config:
            self._measure(record, answer.seat.host)
        elif first in self._under_way:
            self._waiting.setdefault(first, []).append(record)
        else:
            self._end(_like(record, self.records[first]))

    def _judged(self, config: Config, answer: Answer) -> None:
        record = self._under_way.pop(config)
        again = record.passes > 0
        if not again:
            record = replace(record, seconds=(record.seconds[0], round(answer.seconds, 3)))
        if answer.kind == "ok":
            self._warn(answer.value.warnings)
        record = _judged(record, answer)
        self._end(record)
        if not again:
            for other in self._waiting.pop(config, []):
                self._end(_like(other, record))
        elif record.status != "ok":
            for other in [other for other in self.records.values() if other.same_as == config]:
                self._end(_like(other, record), counts=False)

    def _warn(self, warnings: Sequence[str]) -> None:
        header = self.kept.header
        self.kept.header = replace(header, warnings=tuple(dict.fromkeys((*header.warnings, *warnings))))

    def _end(self, record: Record, counts: bool = True) -> None:
        self.records[record.config] = record
        recording.append(self.path, record)
        if not counts:
            return
        self._open -= 1
        now = time.monotonic()
        self._shown.ended.append(now)
        if now - self._told > LINE_S or self._shown.done == self._shown.trials:
            self._told = now
            self.watch.say(f"{self._shown.label}: {count_line(self._shown)}")


def _judged(record: Record, answer: Answer) -> Record:
    """With what its check and one more pass found."""
    if answer.kind != "ok":
        status, reason, error = answer.failure, answer.reason, None
    else:
        timed: Timed = answer.value
        error = timed.verdict.error if math.isfinite(timed.verdict.error) else None
        if timed.verdict.fault is None:
            return replace(record, error=error).with_pass(timed.us, timed.baseline_us)
        status, reason = "wrong", timed.verdict.fault
    if record.passes:
        reason = f"pass {record.passes + 1}: {reason}"
    # What runs and what is right now and then only can't be used: earlier times don't count.
    return replace(record, status=status, reason=reason, error=error, us={}, baseline_us={})


def _like(record: Record, first: Record) -> Record:
    """The record of a config whose machine code and launch plan are those of a measured one."""
    return replace(record, status=first.status, reason=first.reason, error=first.error, same_as=first.config)


# -- what it holds ----------------------------------------------------------------------------------------------


def told(path: Path, kept: Recording) -> dict[str, Any]:
    """A recording in figures, as the command prints it."""
    header, records = kept.header, kept.records.values()
    counts = Counter(record.status for record in records)
    scores = kept.scores()
    best = min(scores, key=lambda config: scores[config], default=None)
    passes = max((record.passes for record in records), default=0)
    return {
        "file": str(path),
        "problem": {**header.problem.to_json(), "key": header.problem.key, "range": header.profile.to_json()},
        "yardstick": header.baseline[0] if header.baseline is not None else "byte floor",
        "wanted": header.wanted,
        "recorded": len(kept.records),
        "statuses": {name: counts.get(name, 0) for name in STATUSES},
        "codes": len({record.code for record in records if record.code}),
        "same_as_another": sum(record.same_as is not None for record in records),
        "measured": [sum(record.passes > number for record in records) for number in range(passes)],
        "near_best": sum(score <= (1 + NEAR) * scores[best] for score in scores.values()) if best is not None else 0,
        "best": None if best is None else {"config": dict(best), "score": round(scores[best], 6)},
        "warnings": list(header.warnings),
    }


def in_words(result: Mapping[str, Any]) -> str:
    """What `record` returns, as lines for people."""
    counts = ", ".join(f"{n} {name}" for name, n in result["statuses"].items() if n)
    passes = ", ".join(f"{n} in pass {number}" for number, n in enumerate(result["measured"], start=1))
    lines = [
        result["problem"]["key"],
        f"  {result['status']}: {result['recorded']} of {result['wanted']} configs ({counts or 'none'}) in "
        f"{result['seconds']:.1f} s",
        f"  {result['codes']} different machine codes; {result['same_as_another']} configs are launched as another one "
        "is, and have its times",
        f"  measured: {passes or 'none'}",
    ]
    best = result["best"]
    if best is None:
        lines.append("  nothing usable")
    else:
        lines.append(f"  best {best['score']:.3f} of {result['yardstick']}: {Config(best['config']).brief}")
        lines.append(f"  {result['near_best']} configs within {NEAR:.0%} of it, itself among them")
    return "\n".join([*lines, *(f"  doubtful: {text}" for text in result["warnings"]), f"  in {result['file']}"])
