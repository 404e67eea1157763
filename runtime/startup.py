"""From entries to ready variants: choose, compile in parallel, load, check once, publish; a line for each choice."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import Kernel, Report, compile_source, first_line, ptxas_version
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.ops.indexer import PREFILL_ROWS
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.words import counted
from dsv4tune.runtime import compilers, kernels
from dsv4tune.runtime.compilers import Job, Outcome
from dsv4tune.runtime.dispatch import Key
from dsv4tune.runtime.launch import Arena, Variant, scratch_bytes
from dsv4tune.runtime.targets import baselines
from dsv4tune.runtime.wanted import Wanted
from dsv4tune.tuned.reader import default_path
from dsv4tune.tuned.records import Entry
from dsv4tune.tuned.selector import POLICIES, Book, Decision, Policy, Rules

logger = logging.getLogger("dsv4tune")

#: Calls of a check at start: the edge cases of as many rows. All of them were checked when the entry was measured.
CHECKED_CALLS = 3

Tell = Callable[[str], None]


class Machine(Protocol):
    """Where variants run. Tests have others than the GPU here."""

    device: str

    def compile(self, jobs: Sequence[Job]) -> dict[str, Outcome]: ...

    def launchers(self, job: Job) -> Mapping[str, Any]:
        """What launches a job's kernels; its machine code is loaded now, not in a call."""


class Gpu:
    """The current device of this process."""

    device = "cuda"

    def __init__(self, processes: int = 0) -> None:
        self.processes = processes

    def compile(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        return compilers.compile_all(jobs, self.processes)

    def launchers(self, job: Job) -> Mapping[str, Any]:
        arguments = ops.get(job.problem.op).arguments(job.problem, job.config)
        with compilers.our_cache():
            kernel: Kernel = compile_source(job.source, arguments, job.problem.silicon)
        return kernel.compiled


@dataclass(frozen=True)
class Choice:
    """What became of one call shape: a ready variant, or the reason why the server's own kernel stays."""

    wanted: Wanted
    decision: Decision
    variant: Variant | None
    reason: str
    note: str = ""


@dataclass
class Prepared:
    """Choices, and the table's extension that they make."""

    choices: list[Choice] = field(default_factory=list)

    @property
    def found(self) -> dict[Key, Variant]:
        return {key: c.variant for c in self.choices if c.variant is not None for key in c.wanted.keys}


def rules_here(policy: Policy, silicon: Silicon, baseline: Mapping[str, str]) -> Rules:
    """The rules under the Triton that runs here."""
    return Rules(policy, baseline, metadata.version("triton"), ptxas_version(silicon.arch))


def prepare(
    problems: Iterable[Problem],
    width: int = 0,
    *,
    policy: Policy = "measured",
    database: Path | str | None = None,
    machine: Machine | None = None,
) -> list[Choice]:
    """Have the best stored kernels ready for these problems on the current GPU; calls of others raise `NotReadyError`.

    Not during graph capture: it compiles, loads and launches.

    Args:
        problems: as ``dsv4tune.codegen.ops.get(kernel).problem(rows, silicon, ...)`` makes them.
        width: columns of the indexer's logits, 64 for each page of the server's table. An MLA decode has its own; 0
            for prompts of 1,024 rows and more, which have any.
        policy: what evidence an entry needs: measured, strict or predicted.
        database: read before the shipped entries; ``$DSV4TUNE_DB`` or the user's own unless given.

    Raises:
        ValueError: an unknown policy, problems of different silicon, or an indexer's without a width.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy '{policy}': use one of {', '.join(POLICIES)}")
    wanted = [Wanted(problem, width) for problem in problems]
    if len({w.problem.silicon for w in wanted}) > 1:
        raise ValueError("problems of different silicon: prepare those of the current GPU")
    if not width and any(w.problem.op == "indexer" and w.problem.rows < PREFILL_ROWS for w in wanted):
        raise ValueError("an indexer's problem needs width, the columns of its logits")
    if not wanted:
        return []
    silicon = wanted[0].problem.silicon
    rules = rules_here(policy, silicon, baselines(silicon.arch))
    path = Path(database) if database is not None else default_path()
    prepared = make_ready(choose(wanted, rules, path, logger.warning), rules, machine or Gpu())
    kernels.TABLE.extend(prepared.found)
    for level, line in lines(prepared.choices):
        logger.log(level, "dsv4tune: %s", line)
    return prepared.choices


def choose(wanted: Sequence[Wanted], rules: Rules, database: Path | None, tell: Tell) -> list[tuple[Wanted, Decision]]:
    """The entry of each shape, from the files alone."""
    with contextlib.closing(Book.read(wanted[0].problem.silicon, database, tell)) as book:
        return [(w, book.choose(w.problem, w.width, rules)) for w in wanted]


def make_ready(decisions: Sequence[tuple[Wanted, Decision]], rules: Rules, machine: Machine) -> Prepared:
    """Compile, load and check what was chosen; whatever fails is a choice with a reason, never an exception."""
    jobs: dict[int, Job] = {}
    failed: dict[int, str] = {}
    for number, (wanted, decision) in enumerate(decisions):
        if decision.entry is not None:
            try:
                jobs[number] = Job.of(wanted.problem, decision.config)
            except Exception as error:
                failed[number] = f"can't be rendered: {first_line(error)}"
    outcomes = machine.compile(list(jobs.values()))
    widths = {number: _columns(*decisions[number]) for number in jobs}
    ready = _Ready(machine, [plan_bytes(job, widths[number]) for number, job in jobs.items()])
    prepared = Prepared()
    with _no_collections():
        for number, (wanted, decision) in enumerate(decisions):
            variant, reason, note = None, failed.get(number, decision.why), ""
            if number in jobs and decision.entry is not None:
                outcome = outcomes.get(jobs[number].source.sha, "not compiled")
                reason, note = _compared(outcome, decision.entry, jobs[number], rules)
                if not reason:
                    reason = _depends_on_columns(jobs[number], widths[number]) if not wanted.width else ""
                if not reason:
                    variant, reason = ready.variant(jobs[number], widths[number])
            prepared.choices.append(Choice(wanted, decision, variant, reason, note))
    return prepared


def _columns(wanted: Wanted, decision: Decision) -> int:
    """That a variant is planned for: the call's, or, for prompts, the most that its entry was timed over."""
    assert decision.entry is not None
    return wanted.width or decision.entry.range.width


def _depends_on_columns(job: Job, most: int) -> str:
    op = ops.get(job.problem.op)
    if op.plan(job.problem, job.config, 64) == op.plan(job.problem, job.config, most):
        return ""
    return "its launch depends on the columns, which differ from prompt to prompt"


def plan_bytes(job: Job, width: int) -> int:
    return scratch_bytes(ops.get(job.problem.op).plan(job.problem, job.config, width))


def _compared(outcome: Outcome, entry: Entry, job: Job, rules: Rules) -> tuple[str, str]:
    """Why a compiled text can't stand for what was measured, or "", and what to say of it otherwise."""
    if isinstance(outcome, str):
        return f"can't be compiled here: {outcome}", ""
    refusal = outcome.refusal(job.problem.silicon)
    if refusal is not None:
        return refusal, ""
    was = entry.resources
    if outcome.binary == was.binary:
        return "", ""
    if job.source.sha == entry.source_sha and rules.same_compiler(entry):
        # Rows of a range may differ in what they compile to; the text is the same for what was timed.
        return "", ""
    worse = _worse(outcome, entry)
    if worse:
        return f"compiles to worse code than was timed ({worse})", ""
    if rules.policy == "strict" and job.problem.rows == entry.problem["rows"]:
        return "compiles to other code than was timed (policy strict)", ""
    return "", "compiled anew, no worse by its report"


def _worse(now: Report, entry: Entry) -> str:
    was = entry.resources
    found = [
        f"{name} {getattr(was, name)} to {getattr(now, name)} B"
        for name in ("spill_bytes", "stack_bytes")
        if getattr(now, name) > getattr(was, name)
    ]
    if was.native_fp8 and not now.native_fp8:
        found.append("no fp8 MMA any more")
    if was.async_copy and now.async_copy != was.async_copy:
        found.append(f"loads by {now.async_copy or 'registers'}, not {was.async_copy}")
    return ", ".join(found)


class _Ready:
    """Loads each text once, checks each text and launch plan once, and shares one arena of scratch memory."""

    def __init__(self, machine: Machine, scratch: Sequence[int]) -> None:
        self.machine = machine
        self.arena = Arena(machine.device, max(scratch, default=0))
        self._launchers: dict[str, Any] = {}
        self._checked: dict[tuple[str, str], str] = {}
        self._samples: dict[tuple[Problem, int], list[_Sample]] = {}

    def variant(self, job: Job, width: int) -> tuple[Variant | None, str]:
        op = ops.get(job.problem.op)
        try:
            launchers = self._launchers.get(job.source.sha)
            if launchers is None:
                launchers = self._launchers[job.source.sha] = self.machine.launchers(job)
            fault = self._check(op, job, launchers)
            if fault:
                return None, f"failed its check: {fault}"
            where = (launchers, self.machine.device, job.source.sha, self.arena)
            made = Variant(op, job.problem, job.config, width, *where)
        except Exception as error:
            return None, f"can't be loaded: {first_line(error)}"
        return made, ""

    def _check(self, op: Op[Any, Any], job: Job, launchers: Any) -> str:
        key = (job.source.sha, job.config.key)
        if key not in self._checked:
            self._checked[key] = self._judged(op, job, launchers)
        return self._checked[key]

    def _judged(self, op: Op[Any, Any], job: Job, launchers: Any) -> str:
        """On tensors and references that texts of one small problem share: making them takes longer than the check."""
        small, width = form = op.small(job.problem)
        variant = Variant(op, small, job.config, width, launchers, self.machine.device)
        samples = self._samples.pop(form, None)
        # A kernel before this one may have written where it must not: only new tensors convict.
        if samples is None or _fault(variant, samples):
            samples = _samples(op, small, width, self.machine.device)
            fault = _fault(variant, samples)
            if fault:
                return fault
        self._samples[form] = samples
        return ""


#: A synthetic call, its name, and what the op's float64 reference leaves.
_Sample: TypeAlias = tuple[str, Any, Any]


def _samples(op: Op[Any, Any], small: Problem, width: int, device: str) -> list[_Sample]:
    calls = islice(op.cases(small, width, (width,), device, seed=0), CHECKED_CALLS)
    return [(name, call, op.expect(small, call)) for name, call in calls]


def _fault(variant: Variant, samples: Sequence[_Sample]) -> str:
    """What is wrong with a variant on these calls; "" for nothing."""
    for name, call, expected in samples:
        variant(call)
        verdict = variant.op.verify(variant.problem, call, expected)
        if not verdict.ok:
            return f"case '{name}': {verdict.fault}"
    return ""


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage waits: modules that load make objects enough for several collections, each over all that a server has."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- what is said -----------------------------------------------------------------------------------------------


def lines(choices: Sequence[Choice]) -> list[tuple[int, str]]:
    """A logging level and a line for each choice; rows that got the same share one."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for choice in choices:
        problem = choice.wanted.problem
        shape = replace(problem, rows=1).label.replace("rows=1", "").replace("  ", " ").strip()
        group = (problem.op, shape, choice.wanted.width, _level(choice), _said(choice))
        groups.setdefault(group, []).append(problem.rows)
    return [
        (level, f"{op} {span(rows)}, {width or 'any'} columns ({shape}): {said}")
        for (op, shape, width, level, said), rows in groups.items()
    ]


def _level(choice: Choice) -> int:
    """An entry that was chosen and can't be used is a fault; to have none is not."""
    failed = choice.variant is None and choice.decision.entry is not None
    return logging.WARNING if failed else logging.INFO


def span(rows: Sequence[int]) -> str:
    if len(rows) == 1:
        return f"rows {rows[0]}"
    return f"rows {min(rows)} to {max(rows)} ({len(rows)} sizes)"


def _said(choice: Choice) -> str:
    entry = choice.decision.entry
    if choice.variant is None:
        tried = f"{choice.decision.origin}, {choice.decision.config.brief}: " if entry is not None else ""
        return f"the server's own kernel stays: {tried}{choice.reason}"
    assert entry is not None
    beside = entry.baseline.times_us if entry.baseline is not None else {}
    times = ", ".join(
        f"{us:.2f}{f'/{beside[n]:.2f}' if n in beside else ''} us at {n}" for n, us in sorted(entry.times_us.items())
    )
    note = f"; {choice.note}" if choice.note else ""
    where = f"{entry.provenance} on {entry.device.name}, {counted(cast(int, entry.problem['rows']), 'row')}"
    return (
        f"{choice.decision.config.brief}; {where}: {times}, {entry.score:.3f} of {entry.yardstick}; "
        f"{choice.decision.origin}, {choice.decision.why}{note}"
    )


def silicon_here() -> Silicon | None:
    """Of this process's current device."""
    import torch

    found = devices.here(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return found.silicon if found is not None else None
