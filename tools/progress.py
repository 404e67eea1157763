"""What a search shows while it runs: phases, the best so far, candidates a second, time left. All of it on stderr.

A recording and `verify` show their progress by the same means.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import visible
from dsv4tune.tuned.records import Entry, Trial

#: Seconds between two plain lines of one problem.
LINE_S = 5.0
#: Seconds between two pictures on a terminal.
REFRESH_S = 0.2
#: Candidates that ended lately, from which the rate is told: the first ones wait for compilers to start.
RECENT = 40


@dataclass
class Problem:
    """One search under way, or something else that ends piece by piece.

    Attributes:
        label: its name on a line.
        trials: candidates asked for, those of earlier runs included.
        known: those of earlier runs.
        deadline: of ``time.monotonic``, or None.
        under_way: jobs that wait or run, by phase.
        best: the best usable trial, of earlier runs too.
        what: the word for what ends.
        race: whether one of them is to be the best.
    """

    label: str
    trials: int
    known: int
    deadline: float | None
    under_way: Callable[[], dict[str, int]]
    best: Trial | None = None
    what: str = "trials"
    race: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    ended: list[float] = field(default_factory=list)
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def done(self) -> int:
        return self.known + len(self.ended)

    @property
    def rate(self) -> float:
        """Candidates a second, of the latest ones."""
        recent = self.ended[-RECENT:]
        since = self.ended[-RECENT - 1] if len(self.ended) > RECENT else self.started
        return len(recent) / max(1e-6, recent[-1] - since) if recent else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the trials or the budget end, None where nothing is known yet."""
        left = (self.trials - self.done) / self.rate if self.rate else None
        if self.deadline is None:
            return left
        return max(0.0, min(left if left is not None else 1e9, self.deadline - time.monotonic()))


class Watcher:
    """Told of everything, shows nothing: the base of those that show something, and what ``--quiet`` takes."""

    problem: Problem | None = None

    def say(self, text: str) -> None:
        """A line that is no result."""

    def phase(self, what: str) -> None:
        """Something begins in which no candidate ends, such as enumerating the space, or timing finalists again."""

    def begin(self, problem: Problem) -> None:
        """A problem's candidates are about to be tried."""
        self.problem = problem

    def trial(self, trial: Trial) -> None:
        """A candidate ended."""
        if self.problem is None:
            return
        best = self.problem.best
        if trial.status == "ok" and trial.score is not None and (best is None or trial.score < (best.score or 0.0)):
            self.problem.best = trial
        self.ended(trial.status)

    def ended(self, status: str) -> None:
        """One of them ended, no matter how well."""
        if self.problem is None:
            return
        self.problem.ended.append(time.monotonic())
        self.problem.counts[status] += 1
        self.show()

    def show(self) -> None:
        """Something changed, or a second went by."""

    def end(self) -> None:
        """The problem's candidates are done."""
        self.problem = None

    def aside(self) -> contextlib.AbstractContextManager[object]:
        """While something is written to stdout, which may be the terminal that this shows itself on."""
        return contextlib.nullcontext()


class Lines(Watcher):
    """Plain lines, as for a file or a pipe."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._told, self._count = 0.0, 0

    def say(self, text: str) -> None:
        self._write(text)

    def begin(self, problem: Problem) -> None:
        super().begin(problem)
        self._told, self._count = time.monotonic(), 0

    def show(self) -> None:
        problem = self.problem
        now = time.monotonic()
        if problem is None or not problem.ended:
            return
        last = problem.done >= problem.trials and len(problem.ended) != self._count
        if now - self._told < LINE_S and not last:
            return
        self._told, self._count = now, len(problem.ended)
        best = f"; {best_line(problem.best)}" if problem.race else ""
        self._write(count_line(problem) + best)


class Terminal(Watcher):
    """A bar with the counts and the best so far under it, redrawn in place; lines scroll by above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._phase = ""
        self._live = self._picture()
        self._shown = 0.0

    def _picture(self) -> Live:
        # No thread of rich's own: it would take signals that a starting worker must not meet.
        return Live(
            console=self.console, get_renderable=self._render, auto_refresh=False, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Terminal:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(Text("\n".join(map(visible, text.split("\n")))), soft_wrap=True)

    def phase(self, what: str) -> None:
        self._phase = what
        self._live.refresh()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._live.stop()
        try:
            yield
        finally:
            # A new one: the old one would erase as many lines as it had, which are others' now.
            self._live = self._picture()
            self._live.start(refresh=True)

    def show(self) -> None:
        now = time.monotonic()
        if now - self._shown > REFRESH_S:
            self._shown = now
            self._live.refresh()

    def _render(self) -> RenderableType:
        problem = self.problem
        if problem is None:
            return Text(self._phase, style="dim")
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=problem.trials, completed=problem.done, width=28)
        line.add_row(bar, Text(count_line(problem)))
        waiting = ", ".join(f"{n} to {phase}" for phase, n in problem.under_way().items() if n)
        ended = ", ".join(f"{n} {status}" for status, n in problem.counts.items())
        states = Text("  " + "; ".join(part for part in (ended, waiting) if part), style="dim")
        label = Text(problem.label, overflow="ellipsis", no_wrap=True)
        best = [Text("  " + best_line(problem.best), style="bold" if problem.best else "")] if problem.race else []
        return Group(label, line, states, *best)


def count_line(problem: Problem) -> str:
    left = problem.left_s
    left_text = "" if left is None else f", {duration(left)} left"
    return f"{problem.done}/{problem.trials} {problem.what}, {problem.rate:.1f}/s{left_text}"


def best_line(best: Trial | None) -> str:
    if best is None:
        return "nothing usable yet"
    return f"best {best.score:.3f} of {best.yardstick} ({in_words(best).brief})"


def in_words(trial: Trial | Entry) -> Config:
    """A stored config with its words in the op's order; the database sorts them."""
    from dsv4tune.codegen import ops

    op = ops.get(str(trial.problem["op"]))
    return Config({word: trial.config[word] for word in op.words if word in trial.config})


def duration(seconds: float) -> str:
    """``5 s``, ``3 min``, ``1 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def watching(quiet: bool, write: Callable[[str], None]) -> Iterator[Watcher]:
    """The watcher that suits this process's stderr; NO_COLOR and TERM=dumb are rich's to heed."""
    if quiet:
        yield Watcher()
        return
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or not _open(sys.stderr):
        yield Lines(write)
        return
    with Terminal(console) as terminal:
        yield terminal


def _open(stream: object) -> bool:
    return stream is not None and not getattr(stream, "closed", False)
