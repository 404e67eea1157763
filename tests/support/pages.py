"""A database and a bench file with everything that a report can show, for its tests and its pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fakes import make_problem, make_trial

from dsv4tune.codegen import ops
from dsv4tune.tuned.records import Baseline, Range
from dsv4tune.tuned.store import Store

LENGTHS = (128, 2048, 32_768, 262_208)
RANGE = Range(width=262_208, lengths=list(LENGTHS), weights=[1.0] * 4)


def write_searches(
    path: Path,
    rows: tuple[int, ...] = (1, 64),
    trials: int = 60,
    device: str = "rtx-pro-6000",
    slower: tuple[int, ...] = (),
) -> None:
    """Measured searches in which one knob decides nearly everything, with a candidate that failed in each.

    Args:
        slower: row counts at whose longest length nothing wins.
    """
    found = []
    for count in rows:
        problem, card = make_problem(count, device)
        space = ops.get("indexer").space(problem, card).valid()
        for number, config in enumerate(random.Random(0).sample(space, trials)):
            slow = 1.0 + 0.5 * (config["schedule"] != "persistent") + 0.01 * (number % 7)
            ours = {n: slow * (3.0 + n * count / 4e4) for n in LENGTHS}
            if count in slower:
                ours[LENGTHS[-1]] *= 1.5
            theirs = {n: 1.2 * (3.0 + n * count / 4e4) for n in LENGTHS}
            status: dict[str, Any] = (
                {"status": "failed", "score": None, "reason": "no"} if number == 5 else {"score": slow / 1.2}
            )
            baseline = Baseline(name="tilelang", version="0.1.12", times_us=theirs)
            found.append(
                make_trial(
                    config, count, device, provenance="measured", yardstick="tilelang", range=RANGE, times_us=ours,
                    baseline=baseline, checked_by="gpu", **status,
                )
            )  # fmt: skip
    store = Store(path)
    store.add_all(found)
    store.close()


def write_bench(path: Path, rows: int = 64, device: str = "rtx-pro-6000") -> None:
    """What ``bench -o`` would write for one row count, with a kernel whose time follows the maximum."""
    found = []
    for live in LENGTHS:
        shape = {"name": f"{rows}x{live}", "kind": "decode", "rows": rows, "live": live, "width": 262_208}
        us = {"tuned": 3.0 + live * rows / 4e4, "default": 3.5 + live * rows / 4e4, "tilelang": 4.0 + live * rows / 3e4}
        found.append(
            {"shape": shape | {"positions": rows * live}, "floor_us": live * rows / 5e4, "us": us | {"torch": 9e3}}
        )
    environment = {"device": device, "triton": "3.9.0"}
    bench = {"kernel": "indexer", "environment": environment, "copy_gb_per_s": 1500.0, "warnings": [], "rows": found}
    path.write_text(json.dumps(bench))
