"""Reading the database for people: overview, and one problem's evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.render import Source, render
from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import listed
from dsv4tune.tools.tune import best_json
from dsv4tune.tuned.records import Trial
from dsv4tune.tuned.store import Filter, Store


def overview(path: Path, only: Filter) -> Iterator[dict[str, Any]]:
    """One item for each problem and range that it was tried over: its trials by status and its best."""
    store = Store(path, create=False)
    best_of_all = dict(store.winners(only))
    for key, tallies in groupby(store.tallies(only), lambda tally: tally.key):
        ranges = list(tallies)
        for _, problem, over, counts in ranges:
            # Mostly there is one range, and the best of all is its best.
            best = store.best(key, over) if len(ranges) > 1 else best_of_all.get(key)
            yield {
                "problem": {**problem, "key": key, "range": over.model_dump()},
                "trials": counts,
                "best": best_json(best) if best is not None else None,
            }


def details(path: Path, only: Filter) -> list[dict[str, Any]]:
    """The winners of all problems that are meant.

    Raises:
        ValueError: none was.
    """
    store = Store(path, create=False)
    found = []
    for key in store.problems(only):
        best = store.best(key)
        if best is None:
            continue
        problem = ops.problem_from_json(best.problem)
        op = ops.get(problem.op)
        source = _source(op, problem, best)
        found.append(
            {
                "problem": {**best.problem, "key": key, "range": best.range.model_dump()},
                **best_json(best),
                "device": best.device.model_dump(),
                "environment": best.environment.model_dump(),
                "spread": {str(n): s for n, s in best.spread.items()},
                "warnings": best.warnings,
                "finished_at": best.finished_at,
                "imported": best.imported,
                "source": _saved(source),
                "words": _words(op, problem, best),
                "source_is_current": source is not None and source.sha == best.source_sha,
            }
        )
    if not found:
        wanted = " ".join([only.op or "any kernel", *only.in_key])
        raise ValueError(f"no usable trial of {wanted} in {path}, which holds {_held(store.problems())}: run a search")
    return found


def _held(keys: Sequence[str]) -> str:
    """Kernels and row counts of a database's problems, in a line."""
    rows: dict[str, set[int]] = {}
    for key in keys:
        op, count = key.split()[0], re.search(r"rows=(\d+)", key)
        rows.setdefault(op, set()).update([int(count[1])] if count is not None else [])
    return "; ".join(f"{op} of {listed(some)} rows" for op, some in rows.items()) or "nothing"


def _saved(source: Source | None) -> str | None:
    """Where its text lies now; None where there is none, or no folder for it."""
    try:
        return str(source.save()) if source is not None else None
    except OSError:
        return None


def _words(op: Op[Any, Any], problem: Problem, trial: Trial) -> dict[str, str]:
    """What each word of the config decides."""
    return {p.name: p.help for p in op.space(problem, trial.device.card(problem.silicon)).parameters}


def _source(op: Op[Any, Any], problem: Problem, trial: Trial) -> Source | None:
    """What this version renders for a stored config, or None where it has other words by now."""
    try:
        return render(op, problem, Config(trial.config))
    except Exception:
        return None
