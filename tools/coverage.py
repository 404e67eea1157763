"""Which of the calls that a server captures have an entry, by the rules that the server itself goes by."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.models import FLASH, by_topk
from dsv4tune.codegen.ops.mla_decode_call import CACHES
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.words import written
from dsv4tune.runtime.wanted import CALLS, Server
from dsv4tune.tools import explain
from dsv4tune.tools.like import spread
from dsv4tune.tuned.selector import Decision, Policy

Say = Callable[[str], None]


@dataclass(frozen=True)
class Like:
    """A start command, and what was said of what it doesn't say; "" where nothing was."""

    command: str
    gpu_memory: str = ""
    model: str = ""


@dataclass(frozen=True)
class Cell:
    """One captured row count: ``exact``, ``between`` two row counts, ``predicted`` only, ``server`` where a search here
    left the server's own kernel, or ``none``; and why."""

    rows: int
    state: str
    why: str


@dataclass(frozen=True)
class Strip:
    """The captured sizes of one kernel and cache, and the command that fills the gaps; "" where no option names it."""

    kernel: str
    name: str
    cells: tuple[Cell, ...]
    command: str = ""

    def count(self, *states: str) -> int:
        return sum(cell.state in states for cell in self.cells)

    @property
    def open(self) -> list[int]:
        """Row counts of which nothing was measured."""
        return [cell.rows for cell in self.cells if cell.state in ("none", "predicted")]


def strips(card: Device, kernel: str, server: Server, context: int, database: Path | None, say: Say) -> list[Strip]:
    """One strip for each kind of call of this kernel that such a server captures; what none of them fits has none.

    Raises:
        ValueError: the kernel serves none of its calls, or a database was named that is not there.
    """
    if kernel not in CALLS:
        return []
    server = replace(server, prefill_rows=())
    found = decisions(card, kernel, server, "measured", database, say)
    # The same lines were told by the first look.
    lenient = decisions(card, kernel, server, "predicted", database, lambda line: None)
    predicted = {d.problem.key: d for d in lenient}
    grouped: dict[str, list[Cell]] = {}
    problems: dict[str, Problem] = {}
    for decision in found:
        name = decision.problem.kind
        problems.setdefault(name, decision.problem)
        grouped.setdefault(name, []).append(_cell(decision, predicted[decision.problem.key]))
    whole = [Strip(kernel, name, tuple(cells)) for name, cells in grouped.items()]
    return [replace(strip, command=command(problems[strip.name], context, strip.open)) for strip in whole]


def decisions(
    card: Device, kernel: str, server: Server, policy: Policy, database: Path | None, say: Say
) -> list[Decision]:
    request = explain.Request(server, [kernel], card, policy, database)
    return [decision for _, decision in explain.decide(request, say)]


def _cell(decision: Decision, lenient: Decision) -> Cell:
    rows = decision.problem.rows
    if decision.entry is not None:
        state = "exact" if decision.why.startswith("exact") else "between"
        return Cell(rows, state, f"{decision.why}; {decision.origin}")
    if decision.settled:
        return Cell(rows, "server", decision.why)
    if lenient.entry is not None:
        return Cell(rows, "predicted", decision.why)
    return Cell(rows, "none", decision.why)


def command(problem: Problem, context: int, rows: Sequence[int]) -> str:
    """The search that would fill these gaps: the fewest row counts whose neighbours enclose the others."""
    if not rows:
        return ""
    parts = [f"dsv4tune search --kernel {problem.op} --rows {','.join(str(n) for n in spread(rows))}"]
    parts.append(f"--context {written(context)}")
    if problem.op == "mla_decode":
        size, width = getattr(problem, "extra_page_size", 0), getattr(problem, "extra_width", 0)
        cache = CACHES.get(size, "c4")
        parts.append(f"--heads {getattr(problem, 'heads', 0)} --cache {cache}")
        if cache == "c4":
            model = by_topk(width)
            if model is None:
                return ""  # of a model that only --like can read
            parts += [f"--model {model}"] if model is not FLASH else []
    return " ".join(parts)


def command_like(like: Like, found: Sequence[Strip]) -> str:
    """The one search that would fill the gaps of all these strips, of the server that starts so."""
    words = ["dsv4tune", "search", "--like", like.command]
    words += ["--gpu-memory", like.gpu_memory] if like.gpu_memory else []
    words += ["--model", like.model] if like.model else []
    kernels = {strip.kernel for strip in found if strip.open}
    if len(kernels) == 1:
        words += ["--kernel", *kernels]
    rows = {count for strip in found for count in strip.open}
    # Where all sizes are missing, --like alone takes those that enclose them, and prompts where they are served.
    if rows and rows < {cell.rows for strip in found for cell in strip.cells}:
        words += ["--rows", ",".join(map(str, spread(sorted(rows))))]
    return shlex.join(words)
