"""How long a decode step of one server is in our kernels, before and after: a launch's times, times the layers that
launch it, by the decisions that the server itself takes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4tune.codegen.models import RATIOS
from dsv4tune.codegen.ops.mla_decode_call import CACHES
from dsv4tune.codegen.problem import Problem
from dsv4tune.runtime import targets
from dsv4tune.runtime.wanted import CALLS, Server
from dsv4tune.tools import explain
from dsv4tune.tools.report.collect import Section
from dsv4tune.tuned.records import Entry
from dsv4tune.tuned.selector import Decision, columns_asked

#: Of every server, as far as its own context goes; in tokens.
_CONTEXTS = (512, 8192, 131_072)


@dataclass(frozen=True)
class Part:
    """One kernel's share of a step, in microseconds at each context.

    Attributes:
        gets: what the server runs here, in words.
        before: of the server's own kernel; None where it was not timed.
        after: of what runs here; None where that was not timed at these rows.
    """

    name: str
    layers: int
    gets: str
    before: tuple[float, ...] | None = None
    after: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Step:
    """The kernels of a decode step of so many rows on one card, at each context in tokens."""

    device: str
    rows: int
    contexts: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def timed(self) -> list[Part]:
        return [part for part in self.parts if part.after is not None]

    @property
    def compared(self) -> bool:
        """Whether every kernel was timed, before and after."""
        return all(part.before is not None and part.after is not None for part in self.parts)

    @property
    def saves(self) -> bool:
        """Whether it is known what the timed kernels save, though not of how much."""
        return all(part.before is not None for part in self.timed)

    def before(self, at: int) -> float:
        return sum(part.before[at] for part in self.parts if part.before is not None)

    def after(self, at: int) -> float:
        return sum(part.after[at] for part in self.parts if part.after is not None)


def read_layers(text: str) -> dict[str, int]:
    """Layers by compressed cache, from ``c4=21,c128=20,none=2``.

    Raises:
        ValueError: it is not of that form.
    """
    found = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in CACHES.values() or not number.isdecimal():
            raise ValueError(f"--layers takes numbers of layers such as c4=21,c128=20,none=2, not '{part.strip()}'")
        found[name] = int(number)
    return found


def steps(
    sections: Sequence[Section],
    kernels: Sequence[str],
    layers: Mapping[str, int],
    server: Server,
    context: int,
    database: Path | None,
) -> list[Step]:
    """A step of this server for each card, and each of its row counts at which most kernels were timed; no prompts.

    A layer whose call has no entry keeps the server's own kernel, before and after. Only a card of which nothing was
    measured has steps of what is predicted.

    Args:
        kernels: that the step is of; none of one that no server calls.
        layers: by compressed cache.
        context: tokens, of the server.
        database: None for the one that a server would read.
    """
    kernels = [kernel for kernel in kernels if kernel in CALLS]
    if not kernels:
        return []
    contexts = (*(tokens for tokens in _CONTEXTS if tokens < context), context)
    cards = {section.device.silicon: section.device for section in sections}
    found = []
    for silicon, device in sorted(cards.items(), key=lambda item: item[1].name):
        studied = [one for section in sections if section.device.silicon == silicon for one in section.studied]
        measured = any(one.best is not None and one.best.provenance == "measured" for one in studied)
        request = explain.Request(
            replace(server, prefill_rows=()), kernels, device.card(), "measured" if measured else "predicted", database
        )
        # What can't be read was told by the look at the captured sizes.
        decisions = [decision for _, decision in explain.decide(request, lambda line: None)]
        by_place = {(part_name(d.problem), d.problem.rows): d for d in decisions}
        whole = []
        for rows in sorted(set(server.rows)):
            parts = [
                _part(name, layers[cache], RATIOS[cache], by_place.get((name, rows)), contexts)
                for name, cache in _kinds(kernels)
                if layers.get(cache)
            ]
            whole.append(Step(device.name, rows, contexts, tuple(parts)))
        most = max(len(step.timed) for step in whole)
        found += [step for step in whole if most and len(step.timed) == most]
    return found


def _kinds(kernels: Sequence[str]) -> list[tuple[str, str]]:
    """Each kernel that a step may have, and the compressed cache of the layers that launch it."""
    found = [("indexer", "c4")] if "indexer" in kernels else []
    return found + [(f"mla_decode {cache}", cache) for cache in sorted(CACHES.values()) if "mla_decode" in kernels]


def part_name(problem: Problem) -> str:
    if problem.op != "mla_decode":
        return problem.op
    cache = getattr(problem, "extra_page_size", 0)
    return f"mla_decode {CACHES.get(cache, cache)}"


def _part(name: str, layers: int, ratio: int, decision: Decision | None, contexts: Sequence[int]) -> Part:
    ours = decision.entry if decision is not None else None
    entry = ours or (_beside(decision) if decision is not None else None)
    if decision is None or entry is None:
        return Part(name, layers, "the server's own kernel, not timed")
    if entry.problem_key != decision.problem.key:
        return Part(name, layers, "the config of both neighbours, not timed at these rows")
    # Layers without a compressed cache have a window alone, whose length any context holds.
    lives = [min(max(entry.range.lengths), max(1, context // (ratio or 1))) for context in contexts]
    beside = entry.baseline
    before = tuple(layers * between(beside.times_us, live) for live in lives) if beside is not None else None
    if ours is None:
        return Part(name, layers, "the server's own kernel", before, before)
    return Part(name, layers, entry.provenance, before, tuple(layers * between(entry.times_us, n) for n in lives))


def _beside(decision: Decision) -> Entry | None:
    """The entry that was no ground to replace the server's own kernel, and beside which that was timed; or None."""
    problem = decision.problem
    theirs = targets.baselines(problem.silicon.arch).get(problem.op)
    width = columns_asked(problem, decision.width)
    for entry in (one.found.entry for one in decision.considered):
        fits = entry.problem_key == problem.key and entry.range.width >= width
        if fits and entry.baseline is not None and entry.baseline.name == theirs:
            return entry
    return None


def between(times: Mapping[int, float], live: int) -> float:
    """The time at a live length, on straight lines in logarithms between those that were timed."""
    lengths = sorted(times)
    if live <= lengths[0]:
        return times[lengths[0]]
    if live >= lengths[-1]:
        return times[lengths[-1]]
    above = bisect.bisect_left(lengths, live)
    low, high = lengths[above - 1], lengths[above]
    share = math.log(live / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(times[low]) + share * math.log(times[high]))
