"""Entries as they come from elsewhere: consistent in themselves, with this version's source hash."""

from __future__ import annotations

import json
from typing import Any

from fakes import make_final, make_problem, make_trial

from dsv4tune.codegen import ops
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tuned.records import Baseline, DeviceRecord, Entry, Trial

BESIDE = {128: 4.0, 262_208: 1500.0}


def measured(rows: int, speed: float = 1.25, config: Config | None = None, **changes: Any) -> Trial:
    """A trial that was `speed` times as fast as the server's kernel on a card with 188 SMs."""
    problem, card = make_problem(rows)
    op = ops.get("indexer")
    config = op.space(problem, card).check(config or op.default(problem, card))
    device = DeviceRecord(
        capability=card.silicon.capability,
        sm_count=card.silicon.sm_count,
        shared_bytes=card.silicon.shared_bytes,
        l2_bytes=card.l2_bytes,
        name="card of a friend",
    )
    values: dict[str, Any] = {
        "provenance": "measured",
        "checked_by": "gpu",
        "source_sha": render(op, problem, config).sha,
        "times_us": {n: us / speed for n, us in BESIDE.items()},
        "spread": dict.fromkeys(BESIDE, 0.01),
        "baseline": Baseline(name="tilelang", version="0.1.12", times_us=BESIDE),
        "score": 1 / speed,
        "yardstick": "tilelang",
        "finished_at": "2026-11-29T10:00:00+00:00",
        "final": make_final(1, runner_up=dict(config), runner_up_score=1.01 / speed),
    }
    return make_trial(config, rows, **{**values, **changes}).model_copy(update={"device": device})


def make_entry(rows: int, **changes: Any) -> dict[str, Any]:
    """Its JSON."""
    entry: dict[str, Any] = json.loads(Entry.of(measured(rows, **changes)).model_dump_json())
    return entry
