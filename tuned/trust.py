"""An entry from outside against what this version knows: its problem, its config, its kernel's text, its figures.

Types and bounds are the records' (`dsv4tune.tuned.records.Entry`); here is what no schema can say. Nothing is rendered
before the config is one of the space's, and nothing is ever run.
"""

from __future__ import annotations

import math

from dsv4tune.codegen import ops
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tuned.records import Entry

#: How far a score may lie from the one that its own times give; times are rounded to a tenth of a nanosecond.
_SCORE_TOLERANCE = 1e-3


class Distrust(ValueError):
    """What stands against an entry: the path of the value, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def check(entry: Entry, *, current_source: bool = True) -> Problem:
    """The entry's problem, if all that it says agrees with itself and with this version.

    Args:
        current_source: whether its kernel must be the text that this version renders; not where it is measured anew.

    Raises:
        Distrust: it doesn't.
    """
    problem = _problem(entry)
    _same_silicon(entry, problem)
    _figures(entry)
    config = valid_config(entry, problem)
    sha = render(ops.get(problem.op), problem, config).sha
    if current_source and sha != entry.source_sha:
        raise Distrust(
            "source_sha",
            f"{entry.source_sha[:16]} is not the kernel that this version renders ({sha[:16]}), so its times are not "
            "this kernel's: measure it anew with `dsv4tune verify FILE` on the card",
        )
    return problem


def valid_config(entry: Entry, problem: Problem) -> Config:
    """The entry's config as one of the space, in the op's order of words.

    Raises:
        Distrust: the space has no such config for these rows.
    """
    try:
        return ops.get(problem.op).space(problem, entry.device.card(problem.silicon)).check(entry.config)
    except ValueError as error:
        raise Distrust("config", str(error)) from error


def _problem(entry: Entry) -> Problem:
    try:
        problem = ops.problem_from_json(entry.problem)
    except (ValueError, TypeError) as error:
        raise Distrust("problem", str(error)) from error
    if problem.key != entry.problem_key:
        raise Distrust("problem_key", f"is '{entry.problem_key}', and the problem's is '{problem.key}'")
    return problem


def _same_silicon(entry: Entry, problem: Problem) -> None:
    record, silicon = entry.device, problem.silicon
    for name in ("capability", "sm_count", "shared_bytes"):
        if getattr(record, name) != getattr(silicon, name):
            raise Distrust(f"device.{name}", f"{getattr(record, name)}, and the problem's is {getattr(silicon, name)}")
    if entry.resources.shared_bytes > silicon.shared_bytes:
        raise Distrust("resources.shared_bytes", f"{entry.resources.shared_bytes} of {silicon.shared_bytes} there are")


def _figures(entry: Entry) -> None:
    over, beside = entry.range, entry.baseline
    try:
        profile = over.profile
    except ValueError as error:
        raise Distrust("range", str(error)) from error
    for name, times in (("times_us", entry.times_us), ("spread", entry.spread)):
        if times and set(times) != set(over.lengths):
            raise Distrust(name, f"is of lengths {sorted(times)}, and the range of {sorted(over.lengths)}")
    if (entry.provenance == "measured") != (entry.checked_by == "gpu"):
        raise Distrust("checked_by", f"'{entry.checked_by}' for an entry that is {entry.provenance}")
    if entry.yardstick != (beside.name if beside is not None else "byte floor"):
        raise Distrust("yardstick", f"'{entry.yardstick}', and the baseline is {beside.name if beside else 'none'}")
    if beside is None:
        return
    if entry.provenance != "measured":
        raise Distrust("baseline", "a predicted entry was timed beside nothing")
    if set(beside.times_us) != set(over.lengths):
        raise Distrust("baseline.times_us", f"is of lengths {sorted(beside.times_us)}, not the range's")
    try:
        score = profile.score(entry.times_us, beside.times_us)
    except (ValueError, OverflowError) as error:
        raise Distrust("times_us", "are so far from the baseline's that no score follows from them") from error
    if not math.isclose(score, entry.score, rel_tol=_SCORE_TOLERANCE):
        raise Distrust("score", f"{entry.score:g}, and its own times give {score:.6f}")
