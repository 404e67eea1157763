"""Reading the database for people: overview, one problem's evidence, and the exported file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.render import Source, render
from dsv4tune.codegen.space import Config
from dsv4tune.tools.tune import best_json
from dsv4tune.tuned.records import Catalogue, Entry, Trial
from dsv4tune.tuned.store import Store


def overview(path: Path, kernel: str | None) -> list[dict[str, Any]]:
    """One item for each problem and range that it was tried over: its trials by status and its best."""
    if kernel is not None:
        ops.get(kernel)
    store = Store(path, create=False)
    rows = []
    for key in store.problems(kernel):
        problem = next(store.trials(key)).problem
        for over in store.ranges(key):
            best = store.best(key, over)
            rows.append(
                {
                    "problem": {**problem, "key": key, "range": over.model_dump()},
                    "trials": store.counts(key, over),
                    "best": best_json(best) if best is not None else None,
                }
            )
    return rows


def details(path: Path, kernel: str, rows: int, target: str | None) -> list[dict[str, Any]]:
    """The winners of every silicon that this problem was tuned for.

    Raises:
        ValueError: none was.
    """
    op = ops.get(kernel)
    store = Store(path, create=False)
    found = []
    for key in store.problems(kernel, rows):
        best = store.best(key)
        problem = ops.problem_from_json(best.problem) if best is not None else None
        if best is None or problem is None or (target is not None and problem.silicon.target != target):
            continue
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
                "source": str(source.save()) if source is not None else None,
                "words": _words(op, problem, best),
                "source_is_current": source is not None and source.sha == best.source_sha,
            }
        )
    if not found:
        held = ", ".join(store.problems()) or "nothing"
        raise ValueError(f"no usable trial of {kernel} with {rows} rows in {path}, which holds {held}: run a search")
    return found


def _words(op: Op[Any, Any], problem: Problem, trial: Trial) -> dict[str, str]:
    """What each word of the config decides."""
    record = trial.device
    card = Device(record.name, problem.silicon, record.shared_bytes, record.l2_bytes, 1.0, "its record")
    return {p.name: p.help for p in op.space(problem, card).parameters}


def _source(op: Op[Any, Any], problem: Problem, trial: Trial) -> Source | None:
    """What this version renders for a stored config, or None where it has other words by now."""
    try:
        return render(op, problem, Config(trial.config))
    except Exception:
        return None


def export(path: Path, kernel: str | None) -> tuple[str, list[str]]:
    """The exported file's text, and a line for each problem that it leaves out."""
    if kernel is not None:
        ops.get(kernel)
    store = Store(path, create=False)
    entries, left_out = [], []
    for key in store.problems(kernel):
        best = store.best(key)
        if best is None:
            left_out.append(f"left out, no usable trial: {key}")
        elif best.baseline is not None and best.score is not None and best.score >= 1.0:
            left_out.append(f"left out, not faster than {best.baseline.name} ({best.score:.3f} of it): {key}")
        else:
            entries.append(Entry.of(best))
    catalogue = Catalogue(entries=sorted(entries, key=lambda entry: entry.problem_key))
    return json.dumps(catalogue.model_dump(mode="json"), indent=1, sort_keys=True) + "\n", left_out


def write_whole(path: Path, text: str) -> None:
    """The whole file or, where the disk or the process fails, the one that was there."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device takes the text; replaced, it would be gone
        return
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
