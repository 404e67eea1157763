"""The shipped catalogue, and who gets which entry of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_problem, make_trial

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.render import render
from dsv4tune.tuned.selector import entry_for, shipped
from dsv4tune.tuned.store import Store


@pytest.mark.parametrize("entry", shipped(), ids=lambda e: e.problem_key)
def test_a_shipped_entry_is_one_that_this_version_would_render(entry: object) -> None:
    from dsv4tune.tuned.records import Entry

    assert isinstance(entry, Entry)
    op, problem = ops.get(str(entry.problem["op"])), ops.problem_from_json(entry.problem)
    assert problem.key == entry.problem_key
    card = Device(entry.device.name, problem.silicon, 233_472, entry.device.l2_bytes, 1.0, "test")
    config = op.space(problem, card).check(entry.config)
    assert render(op, problem, config).sha == entry.source_sha
    assert entry.resources.shared_bytes <= problem.silicon.shared_bytes
    # Attention multiplies in bf16.
    assert entry.resources.native_fp8 or op.name == "mla_decode"
    assert 0 <= entry.error <= {"indexer": 1e-3, "mla_decode": 3e-3}[op.name]
    if entry.provenance == "measured":
        assert entry.baseline is not None and entry.score < 1.0 and entry.checked_by == "gpu"


def test_the_h200_has_entries() -> None:
    card = devices.DEVICES["h200"]
    for rows in (1, 16, 64):
        found = entry_for(ops.get("indexer").problem(rows, card.silicon), None)
        assert found is not None and found.provenance == "measured"
    assert entry_for(ops.get("indexer").problem(63, card.silicon), None) is None


def test_the_users_own_entry_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuned.db")
    problem, _ = make_problem(1, "h200")
    store.add(make_trial(rows=1, device="h200", score=0.5))
    mine = entry_for(problem, store)
    assert mine is not None and mine.score == 0.5
    assert entry_for(make_problem(16, "h200")[0], store) == entry_for(make_problem(16, "h200")[0], None)
