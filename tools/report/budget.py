"""How long a decode step is in our kernels, before and after: times of a launch by the layers that launch it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4tune.codegen.ops.mla_decode_call import CACHES
from dsv4tune.codegen.problem import Problem
from dsv4tune.runtime.wanted import Server
from dsv4tune.tools.report.collect import Section, Studied
from dsv4tune.tuned.records import Entry

#: Tokens for an entry of each compressed cache.
_RATIOS = {"c4": 4, "c128": 128}


@dataclass(frozen=True)
class Part:
    """One kernel's share of a step: microseconds at each context, before None where no server kernel was timed."""

    name: str
    layers: int
    entry: Entry
    before: tuple[float, ...] | None
    after: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """The kernels of a decode step of so many rows on one card, at each context in tokens."""

    device: str
    rows: int
    contexts: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def compared(self) -> bool:
        return all(part.before is not None for part in self.parts)

    def before(self, at: int) -> float:
        return sum(part.before[at] for part in self.parts if part.before is not None)

    def after(self, at: int) -> float:
        return sum(part.after[at] for part in self.parts)


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


def steps(sections: Sequence[Section], layers: Mapping[str, int], server: Server) -> list[Step]:
    """A step for each card and row count that some kernel has an entry for, prompts left out.

    Where something was measured on a card, what is only predicted for it is left out: a server keeps its own kernel
    there, whose time isn't known.

    Args:
        layers: by compressed cache.
        server: MLA decodes with other heads, or with c4 caches of another width, are of other servers.
    """
    cards: dict[tuple[str, int], list[Studied]] = {}
    for section in sections:
        for one in section.studied:
            if one.best is not None and _served(one.problem, server) and not one.range.causal:
                cards.setdefault((section.device.name, one.problem.rows), []).append(one)
    measured = {card for (card, _), some in cards.items() if any(_measured(one) for one in some)}
    found = []
    for (card, rows), some in sorted(cards.items()):
        studied = [one for one in some if card not in measured or _measured(one)]
        # One part for each kernel and cache: the widest range that was tried.
        chosen: dict[str, Studied] = {}
        for one in sorted(studied, key=lambda one: one.range.width):
            chosen[part_name(one.problem)] = one
        width = max((one.range.width for one in chosen.values() if one.problem.op == "indexer"), default=32768)
        contexts = tuple(n * 4 for n in (128, 2048, 32768, width) if n <= width)
        parts = [_part(name, one, layers, contexts) for name, one in sorted(chosen.items())]
        found.append(Step(card, rows, tuple(dict.fromkeys(contexts)), tuple(p for p in parts if p.layers)))
    return _complete([step for step in found if step.parts])


def _served(problem: Problem, server: Server) -> bool:
    if problem.op != "mla_decode":
        return True
    extra = (getattr(problem, "extra_page_size", 0), getattr(problem, "extra_width", 0))
    # The width of a c128 cache is that of a context: the widest tells of all shorter ones.
    return getattr(problem, "heads", 0) in server.heads and (CACHES.get(extra[0]) != "c4" or extra in server.extras)


def _measured(one: Studied) -> bool:
    return one.best is not None and one.best.provenance == "measured"


def _complete(steps: Sequence[Step]) -> list[Step]:
    """Those that name every kernel that some step of the card has, so that none leaves one out unsaid."""
    names: dict[str, set[str]] = {}
    for step in steps:
        names.setdefault(step.device, set()).update(part.name for part in step.parts)
    whole = [step for step in steps if {part.name for part in step.parts} == names[step.device]]
    cards = {step.device for step in whole}
    return [*whole, *(step for step in steps if step.device not in cards)]


def part_name(problem: Problem) -> str:
    if problem.op != "mla_decode":
        return problem.op
    cache = getattr(problem, "extra_page_size", 0)
    return f"mla_decode {CACHES.get(cache, cache)}"


def _part(name: str, one: Studied, layers: Mapping[str, int], contexts: Sequence[int]) -> Part:
    assert one.best is not None
    cache = "c4" if one.problem.op == "indexer" else CACHES.get(getattr(one.problem, "extra_page_size", 0), "none")
    count = layers.get(cache, 0)
    most = max(one.range.lengths)
    lives = [min(most, max(1, context // _RATIOS.get(cache, 1))) for context in dict.fromkeys(contexts)]
    after = tuple(count * between(one.best.times_us, live) for live in lives)
    beside = one.best.baseline
    before = tuple(count * between(beside.times_us, live) for live in lives) if beside is not None else None
    return Part(name, count, one.best, before, after)


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
