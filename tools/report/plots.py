"""The report's charts, as Plotly figures without colours of text and grid: the page sets those for light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from dsv4tune.tools.report.collect import Studied
from dsv4tune.tuned.records import STATUSES, Tried

#: Okabe and Ito's colours, which readers of any colour vision tell apart on white and on near-black.
OURS, SERVER = "#0072b2", "#d55e00"
OTHERS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
QUIET = "#8a8f98"
#: Ticks of a score's logarithmic axis: near 1, where it matters, close together.
_SCORES = (*(0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5), *(10, 20, 50, 100, 1000))
_MARKERS = ("square", "diamond", "triangle-up", "cross")


@dataclass(frozen=True)
class Chart:
    """A figure and the words around it; `height` in pixels."""

    title: str
    note: str
    figure: go.Figure
    height: int = 340

    @property
    def json(self) -> str:
        """For a script element of the page."""
        return str(self.figure.to_json()).replace("</", "<\\/")


def _figure(x: str, y: str, **layout: Any) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        margin={"l": 58, "r": 14, "t": 12, "b": 46},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left"},
        hovermode="closest",
        xaxis={"title": {"text": x, "standoff": 8}, "automargin": True, "zeroline": False},
        yaxis={"title": {"text": y, "standoff": 8}, "automargin": True, "zeroline": False},
    )
    figure.update_layout(**layout)
    return figure


# -- time against live length -----------------------------------------------------------------------------------


def time_by_length(one: Studied, bench: Sequence[Mapping[str, Any]], server: str | None) -> Chart | None:
    """Microseconds of a launch against live length; from one bench where there is one, else from the entry.

    Times of two runs are never in one chart.
    """
    lines, floors = _bench_lines(bench) if len(bench) > 1 else _entry_lines(one)
    if not lines or max(len(points) for points in lines.values()) < 2:
        return None
    figure = _figure("live entries of a row", "µs a launch")
    figure.update_xaxes(type="log", dtick=1, tickformat="~s")
    figure.update_yaxes(type="log", dtick=1, tickformat=",~g")
    ours = next(iter(lines))
    others = itertools.cycle(zip(OTHERS, _MARKERS, strict=True))
    for name, points in lines.items():
        colour, marker = (OURS, "circle") if name == ours else (SERVER, "circle") if name == server else next(others)
        label = f"{name} (the server's own)" if name == server else name
        figure.add_trace(
            go.Scatter(
                x=list(points), y=list(points.values()), name=label, mode="lines+markers",
                line={"color": colour, "width": 3 if name == ours else 2},
                marker={"symbol": marker, "size": 8 if name == ours else 7},
                hovertemplate=f"{name}: %{{y:.2f}} µs at %{{x:,}}<extra></extra>",
            )
        )  # fmt: skip
    if floors:
        figure.add_trace(
            go.Scatter(
                x=list(floors), y=list(floors.values()), name="byte floor", mode="lines",
                line={"color": QUIET, "width": 2, "dash": "dash"},
                hovertemplate="byte floor: %{y:.3f} µs at %{x:,}<extra></extra>",
            )
        )  # fmt: skip
    last = max(lines[ours])
    flat = lines[ours][last]
    figure.add_trace(
        go.Scatter(
            x=[min(lines[ours]), last], y=[flat, flat], name="if work followed the maximum", mode="lines",
            line={"color": QUIET, "width": 2, "dash": "dot"},
            hovertemplate=f"{flat:.1f} µs at every length<extra></extra>",
        )
    )  # fmt: skip
    note = "From one bench, on the same tensors." if len(bench) > 1 else f"From the search that found it; {one.origin}."
    return Chart(one.title, note, figure, 400)


Lines = dict[str, dict[int, float]]


def _bench_lines(rows: Sequence[Mapping[str, Any]]) -> tuple[Lines, dict[int, float]]:
    lines: Lines = {}
    # The default is the tuned config or near it, and a schedule kernel is run once for all layers: both would clutter.
    names = [name for name in rows[0]["us"] if name != "default" and not name.endswith("_schedule")]
    for name in sorted(names, key=lambda name: name != "tuned"):
        lines[name] = {row["shape"]["live"]: row["us"][name] for row in rows if name in row["us"]}
    return lines, {row["shape"]["live"]: row["floor_us"] for row in rows}


def _entry_lines(one: Studied) -> tuple[Lines, dict[int, float]]:
    if one.best is None:
        return {}, {}
    lines = {"tuned" if one.best.provenance == "measured" else "predicted": dict(sorted(one.best.times_us.items()))}
    if one.best.baseline is not None:
        lines[one.best.baseline.name] = dict(sorted(one.best.baseline.times_us.items()))
    return lines, dict(sorted(one.floors_us.items()))


# -- search -----------------------------------------------------------------------------------------------------


def history(one: Studied) -> Chart | None:
    """Score of every usable trial in the order they ended, and the best so far of those that were measured whole."""
    whole = [(n, t) for n, t in one.scored if t.status == "ok"]
    early = [(n, t) for n, t in one.scored if t.status == "pruned"]
    if one.best is None or not whole or len(one.scored) < 2:
        return None
    yardstick = one.best.yardstick
    figure = _figure("trial", f"time / {yardstick}")
    figure.update_yaxes(type="log", tickvals=_SCORES)
    for name, shown, symbol in (("stopped early", early, "circle-open"), ("trial", whole, "circle")):
        if not shown:
            continue
        figure.add_trace(
            go.Scatter(
                x=[n for n, _ in shown], y=[t.score for _, t in shown], name=name, mode="markers",
                marker={"color": OTHERS[3], "size": 6, "opacity": 0.75, "symbol": symbol},
                customdata=[_brief(t) for _, t in shown],
                hovertemplate="trial %{x}: %{y:.3f}<br>%{customdata}<extra></extra>",
            )
        )  # fmt: skip
    best = list(itertools.accumulate((float(t.score or 0.0) for _, t in whole), min))
    figure.add_trace(
        go.Scatter(
            x=[*(n for n, _ in whole), len(one.trials)], y=[*best, best[-1]], name="best so far", mode="lines",
            line={"color": OURS, "width": 3, "shape": "hv"}, hovertemplate="best %{y:.3f}<extra></extra>",
        )
    )  # fmt: skip
    server = yardstick != "byte floor"
    if server:
        figure.add_hline(y=1.0, line={"color": SERVER, "dash": "dash", "width": 2})
    lines = [_counts(one.trials), "Under the dashed line: faster than the server's own kernel." if server else ""]
    if early:
        lines.append("What was stopped early is drawn as if it were as far behind at all lengths.")
    return Chart(one.title, " ".join(filter(None, lines)), figure, 320)


def _counts(trials: Sequence[Tried]) -> str:
    counted = [(name, sum(t.status == name for t in trials)) for name in STATUSES]
    return f"{len(trials)} trials: " + ", ".join(f"{n} {name}" for name, n in counted if n) + "."


def _brief(trial: Tried) -> str:
    words = [f"{k}={v}" for k, v in trial.config.items() if v not in (0, "auto")]
    return "<br>".join(" ".join(words[i : i + 4]) for i in range(0, len(words), 4))


# -- knobs ------------------------------------------------------------------------------------------------------


def importances(title: str, shares: Mapping[str, float]) -> Chart:
    """Bars of what each knob decides, the largest on top."""
    figure = _figure("importance", "")
    names = list(shares)[::-1]
    figure.add_trace(
        go.Bar(
            x=[shares[n] for n in names], y=names, orientation="h", marker={"color": OURS},
            text=[f"{shares[n]:.0%}" for n in names], textposition="auto",
            hovertemplate="%{y}: %{x:.1%}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(showlegend=False, bargap=0.35, margin={"l": 10, "r": 14, "t": 8, "b": 46})
    figure.update_xaxes(tickformat=".0%")
    return Chart(title, "", figure, 90 + 30 * len(names))


def slices(one: Studied, knob: str, trials: Sequence[Tried], values: Sequence[object]) -> Chart:
    """Scores by one knob's value: every trial, whatever its other knobs."""
    figure = _figure(knob, f"time / {trials[0].yardstick}")
    figure.update_yaxes(type="log", tickvals=_SCORES)
    for value in values:
        scores = [t.score for t in trials if t.config.get(knob) == value]
        figure.add_trace(
            go.Box(
                y=scores, name=str(value), boxpoints="all", jitter=0.5, pointpos=0, showlegend=False,
                line={"color": OURS, "width": 1}, fillcolor="rgba(0,114,178,0.12)",
                marker={"color": OTHERS[3], "size": 4, "opacity": 0.8},
                hovertemplate=f"{knob}={value}: %{{y:.3f}}<extra></extra>",
            )
        )  # fmt: skip
    if one.best is not None and knob in one.best.config:
        figure.update_xaxes(type="category")
    return Chart(knob, "", figure, 280)


# -- a decode step ----------------------------------------------------------------------------------------------


def step(contexts: Sequence[str], before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Chart:
    """Each kernel's share of these kernels' time in a decode step: the server's own, and to their right the tuned ones.

    Args:
        before, after: by kernel, a time for each context, of any unit.
    """
    figure = _figure("context of every request", "% of the time before")
    wholes = [sum(times) for times in zip(*before.values(), strict=True)]
    colours = dict(zip(before, (OURS, *OTHERS), strict=False))
    for when, values, opacity in (("before", before, 0.4), ("after", after, 1.0)):
        for kernel, times in values.items():
            shares = [time / whole for time, whole in zip(times, wholes, strict=True)]
            figure.add_trace(
                go.Bar(
                    x=list(contexts), y=shares, name=kernel, offsetgroup=when,
                    showlegend=when == "after", opacity=opacity,
                    marker={"color": colours[kernel]},
                    hovertemplate=f"{kernel} {when}: %{{y:.1%}} at %{{x}}<extra></extra>",
                )
            )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.2, legend={"traceorder": "normal"})
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Chart("", "", figure, 320)
