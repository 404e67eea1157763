"""One self-contained HTML page: it loads nothing, so it may be mailed and opened offline."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from dsv4tune import __version__
from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.problem import Silicon
from dsv4tune.codegen.words import counted
from dsv4tune.runtime.wanted import Server
from dsv4tune.tools import coverage, peers
from dsv4tune.tools.like import spread
from dsv4tune.tools.progress import in_words
from dsv4tune.tools.report import budget, collect, knobs, plots
from dsv4tune.tools.report.budget import Step
from dsv4tune.tools.report.collect import Bench, Say, Section, Studied
from dsv4tune.tools.report.plots import Chart
from dsv4tune.tuned.store import StoreError

#: Problems of one kind that are shown one by one; of more a few are, and the others where the reader asks for them.
MANY = 8
#: Cards of one kind that are drawn at once where there are more than `MANY`.
FEW = 6
#: Below this share of the server's speed a time is a loss, no noise.
SLOWER = 0.99


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
        database: None for the one that a server would read, which need not be there.
        server: whose captured sizes and steps are looked at.
        context: tokens, of that server.
        layers: of the model, by compressed cache.
        command: the start command that `server` was read from, or "".
        card: whose silicon alone is shown; None for all.
    """

    database: Path | None
    benches: Sequence[Path]
    kernel: str | None
    server: Server
    context: int
    layers: Mapping[str, int]
    command: str = ""
    card: Device | None = None


@dataclass(frozen=True)
class Card:
    """What is shown of so many rows under a title: a chart, a step or what is known of knobs."""

    rows: int
    title: str
    shown: Any
    prompt: bool = False


@dataclass(frozen=True)
class Cards:
    """Cards of one kind: the fixed ones, and one more place in which the reader picks any other.

    Attributes:
        picked: which of `picks` is seen at first; None where all cards are fixed.
    """

    fixed: Sequence[Card]
    picks: Sequence[Card] = ()
    picked: Card | None = None


def render(request: Request, say: Say) -> str:
    """The page's text.

    Raises:
        ValueError: nothing is known of what was asked for, or a file is not what it should be.
        StoreError: the database can't be read.
        OSError: a file can't be read.
    """
    from dsv4tune.tuned.reader import default_path

    database = request.database or default_path()
    if not database.exists():
        if request.database is not None:
            raise StoreError(f"no database at {database}: run a search first, or name another with --db")
        say(f"no database at {database} yet: showing what is shipped; run a search first to see your own")
        database_read = None
    else:
        database_read = database
    benches = [collect.read_bench(path) for path in request.benches]
    silicon = request.card.silicon if request.card is not None else None
    found = collect.sections(database_read, benches, request.kernel, say, silicon)
    if not found:
        of = f" of {request.card.name}" if request.card is not None else ""
        raise ValueError(f"nothing to report{of}: run a search first, or name another database with --db")
    views = [_view(section, request, database_read, say) for section in found]
    kernels = list(ops.OPS) if request.kernel is None else [request.kernel]
    steps = budget.steps(found, kernels, request.layers, request.server, request.context, database_read)
    loader = jinja2.PackageLoader("dsv4tune.tools.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"us": _us, "ratio": _ratio, "tokens": _tokens, "signed": _signed}
    numbers = itertools.count()
    environment.globals["slower"] = SLOWER
    environment.globals["next_id"] = lambda: f"figure-{next(numbers)}"
    folder = resources.files("dsv4tune.tools.report")
    text = environment.get_template("page.html.j2").render(
        version=__version__,
        triton=metadata.version("triton"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        database=str(database_read) if database_read is not None else "none",
        request=request,
        sections=views,
        totals=_totals(views),
        steps=_steps(steps),
        shown={"compared" if step.compared else "saves" if step.saves else "predicted" for step in steps},
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=folder.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a file's name may hold bytes that are no text


# -- what the template is told ----------------------------------------------------------------------------------


def _totals(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entries = [one.best for view in views for one in view["section"].studied if one.best is not None]
    speeds = [
        before / us
        for entry in entries
        if entry.baseline is not None
        for length, us in entry.times_us.items()
        if (before := entry.baseline.times_us.get(length)) is not None
    ]
    # A server runs on one card: of several, that of the most trials, else of the most entries for this server.
    counted: dict[Silicon, dict[str, Any]] = {}
    for view in views:
        section = view["section"]
        of = counted.setdefault(
            section.device.silicon, {"card": section.device.name, "trials": 0, "covered": 0, "captured": 0}
        )
        of["trials"] += section.trials
        of["covered"] += sum(strip.count("exact", "between") for strip in view["strips"])
        of["captured"] += sum(len(strip.cells) for strip in view["strips"])
    return {
        "entries": len(entries),
        "measured": sum(entry.provenance == "measured" for entry in entries),
        "best": max(speeds, default=None),
        "cards": len(counted),
        **max(counted.values(), key=lambda of: (of["trials"], of["covered"])),
    }


def _view(section: Section, request: Request, database: Path | None, say: Say) -> dict[str, Any]:
    server = peers.baseline(section.kernel, section.studied[0].problem.silicon)
    name = server.name if server is not None else None
    grouped: dict[str, list[Studied]] = {}
    for one in section.studied:
        grouped.setdefault(one.family, []).append(one)
    # This server's heads first, then by their number, all caches of one together.
    mine = f"{request.server.heads[0]} heads"
    heads = {family: getattr(some[0].problem, "heads", 0) for family, some in grouped.items()}
    families = sorted(grouped, key=lambda name: (not name.startswith(mine), heads[name], len(name), name))
    opened = [name for name in families if name.startswith(mine)] or families[:1]
    place = f"{section.kernel}-{section.device.name}".lower().replace(" ", "-").replace("_", "-")
    return {
        "id": place,
        "section": section,
        "server": name,
        "families": [
            _family(family, f"{place}-{at}", grouped[family], section, name) for at, family in enumerate(families)
        ],
        "opened": opened[:1] if any(len(grouped[name]) > MANY for name in opened) else opened,
        "strips": coverage.strips(
            section.device.card(), section.kernel, request.server, request.context, database, say
        ),
        "benches": [_bench(bench, name) for bench in section.benches],
    }


def _family(name: str, of: str, studied: Sequence[Studied], section: Section, server: str | None) -> dict[str, Any]:
    """Problems that differ in their row counts alone; `of` begins the ids of their places in the page."""
    benched = [_benched(one, section.benches) for one in studied]
    problems = [
        _problem(o, rows) | {"id": f"{of}-{n}"} for n, (o, rows) in enumerate(zip(studied, benched, strict=True))
    ]
    gains = [1.0 / one.best.score for one in studied if one.best is not None and one.best.baseline is not None]
    return {
        "name": name,
        "problems": problems,
        "many": len(problems) > MANY,
        "lengths": sorted({line["length"] for problem in problems for line in problem["lines"]}),
        "slower": [p for p in problems if any(line["speed"] and line["speed"] < SLOWER for line in p["lines"])],
        "empty": [problem for problem in problems if problem["one"].best is None],
        "gain": (min(gains), max(gains)) if gains else None,
        "others": list(dict.fromkeys(name for problem in problems for name in problem["others"])),
        "times": _cards(
            _of(studied, [plots.time_by_length(o, r, server) for o, r in zip(studied, benched, strict=True)])
        ),
        "histories": _cards(_of(studied, [plots.history(one) for one in studied])),
        "knobs": _cards(_of(studied, [_knobs(one) for one in studied]), 1),  # each is several charts
    }


def _of(studied: Sequence[Studied], shown: Sequence[Any]) -> list[Card]:
    """What there is of each problem; titled with its columns too where it was tried over several widths, and with its
    evidence where there is a prediction beside what was measured."""
    titles = [one.title for one in studied]
    details = (
        [f", {one.range.width:,} columns" for one in studied],
        [f", {one.best.provenance}" if one.best is not None else "" for one in studied],
    )
    for detail in details:
        kinds: dict[str, set[str]] = {}
        for title, more in zip(titles, detail, strict=True):
            kinds.setdefault(title, set()).add(more)
        titles = [title + more * (len(kinds[title]) > 1) for title, more in zip(titles, detail, strict=True)]
    return [
        Card(one.problem.rows, title, what, one.range.causal)
        for one, title, what in zip(studied, titles, shown, strict=True)
        if what is not None
    ]


def _cards(cards: Sequence[Card], few: int = FEW) -> Cards:
    """Of many, so few whose row counts span what there is; the last of them is the one picked at first."""
    if len(cards) <= MANY:
        return Cards(cards)
    decodes = [card for card in cards if not card.prompt] or cards
    rows = spread([card.rows for card in decodes])
    few = min(few, len(rows))
    # Rounded up: of all doublings, every second one from 1 on.
    chosen = [rows[-(-at * (len(rows) - 1) // (few - 1))] for at in range(few - 1)]
    fixed = [next(card for card in decodes if card.rows == count) for count in chosen]
    picks = [card for card in cards if not any(card is one for one in fixed)]
    return Cards(fixed, picks, next(card for card in picks if card.rows == rows[-1]))


def _benched(one: Studied, benches: Sequence[Bench]) -> list[dict[str, Any]]:
    """Of the last named bench that timed this problem."""
    found = [rows for bench in benches if (rows := bench.decode(one.problem, one.range.width))]
    return found[-1] if found else []


def _problem(one: Studied, bench: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of the table: a live length each, with every time that is known of it."""
    entry = one.best
    shown: dict[str, Any] = {"one": one, "config": "", "lines": [], "others": []}
    if entry is None:
        return shown
    timed = {row["shape"]["live"]: row["us"] for row in bench}
    skip = {"tuned", "default", entry.baseline.name if entry.baseline is not None else ""}
    others = [name for name in dict.fromkeys(n for us in timed.values() for n in us) if name not in skip]
    lines = []
    for length, us in sorted(entry.times_us.items()):
        before = entry.baseline.times_us.get(length) if entry.baseline is not None else None
        floor = one.floors_us.get(length)
        beside = timed.get(length, {})
        lines.append(
            {
                "length": length,
                "us": us,
                "before": before,
                "speed": before / us if before is not None else None,
                "floor": floor,
                "of_floor": floor / us if floor is not None else None,
                "others": {name: beside.get(name) for name in others},
            }
        )
    return shown | {"config": in_words(entry).brief, "lines": lines, "others": others}


def _knobs(one: Studied) -> dict[str, Any] | None:
    trials = [trial for _, trial in one.scored]
    shares = knobs.importances(trials)
    if not shares:
        return None
    top = [name for name, share in list(shares.items())[: knobs.SLICES] if share > 0.01]
    return {
        "trials": len(trials),
        "importances": plots.importances(one.title, {name: s for name, s in shares.items() if s >= 0.005}),
        "slices": [plots.slices(one, name, trials, knobs.values_of(name, trials)) for name in top],
    }


def _bench(bench: Bench, server: str | None) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in bench.rows for name in row["us"]))
    lines = []
    for row in bench.rows:
        us = row["us"]
        beside = us.get(server) if server is not None else None
        speed = beside / us["tuned"] if beside is not None and "tuned" in us else None
        fastest = min(us, key=us.get, default=None)  # none where memory was too small for any
        lines.append({"row": row, "us": [us.get(name) for name in names], "speed": speed, "fastest": fastest})
    return {"bench": bench, "names": names, "lines": lines}


def _steps(steps: Sequence[Step]) -> list[Cards]:
    """Those of each card (the GPU) by themselves."""
    grouped: dict[str, list[Card]] = {}
    for step in steps:
        chart: Chart | None = None
        if step.compared:
            before = {part.name: part.before for part in step.parts if part.before is not None}
            after = {part.name: part.after for part in step.parts if part.after is not None}
            chart = plots.step([_tokens(n) for n in step.contexts], before, after)
        title = f"{counted(step.rows, 'row')} on {step.device}"
        grouped.setdefault(step.device, []).append(Card(step.rows, title, {"step": step, "chart": chart}))
    return [_cards(cards) for cards in grouped.values()]


# -- figures ----------------------------------------------------------------------------------------------------


def _us(value: float | None) -> str:
    """Three significant digits, as many as a timing is good for."""
    if value is None:
        return "\N{EN DASH}"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 0.01:
        return f"{value:.{1 if value >= 10 else 2}f}"
    return f"{value:.3f}"


def _signed(value: float) -> str:
    return ("\N{MINUS SIGN}" if value < 0 else "") + _us(abs(value))


def _ratio(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.2f}\N{MULTIPLICATION SIGN}"


def _tokens(value: int) -> str:
    """A context as its users say it: 1M, 128k, 512; what is not whole in full."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        # A context of 1M has a table a little wider.
        if value >= size and abs(value / size - round(value / size)) < 0.001:
            return f"{round(value / size)}{unit}"
    return f"{value:,}"
