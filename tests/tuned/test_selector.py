"""The shipped catalogue, and who gets which entry of it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import cast

import pytest
from fakes import make_problem, make_trial

from dsv4tune.codegen import devices, ops
from dsv4tune.tuned import files, share
from dsv4tune.tuned.selector import POLICIES, Book, Rules, entry_for, shipped, shipped_near
from dsv4tune.tuned.store import Store

CONFIGS = Path(str(resources.files("dsv4tune.tuned"))) / "configs"
FILES = sorted(CONFIGS.glob("*/*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_shipped_file_is_one_that_could_be_imported(file: Path) -> None:
    """In its format, its bounds and its place, and of kernels that this version renders."""
    card = devices.DEVICES[file.parent.name]
    with files.opened(str(file)) as sources:
        entries = list(share.trusted(sources[0]))
    assert entries and len({entry.problem_key for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.problem["op"] == file.stem and ops.problem_from_json(entry.problem).silicon == card.silicon
        # Attention multiplies in bf16.
        assert entry.resources.native_fp8 or file.stem == "mla_decode"
        assert entry.error <= {"indexer": 1e-3, "mla_decode": 3e-3}[file.stem]
        if entry.provenance == "measured":
            assert entry.baseline is not None and entry.score < 1.0
        else:
            assert entry.device.name == card.name and entry.resources.spill_bytes == 0
            assert entry.yardstick == "byte floor"


def test_no_other_files_lie_there() -> None:
    found = {path for path in CONFIGS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert found == {*FILES, CONFIGS / "__init__.py"}


@pytest.mark.parametrize("device", ["rtx-pro-6000", "rtx-5090", "gb10", "rtx-4090", "b200"])
def test_what_is_only_predicted_says_so_and_no_server_takes_it_by_itself(device: str) -> None:
    problem = ops.get("indexer").problem(64, devices.DEVICES[device].silicon)
    found = entry_for(problem, None)
    assert found is not None and found.provenance == "predicted"
    book = Book.read(problem.silicon, None, pytest.fail)
    decisions = [book.choose(problem, 262_208, Rules(policy, {}, "3.9.0", "13.0")) for policy in POLICIES]
    assert [decision.entry is not None for decision in decisions] == [policy == "predicted" for policy in POLICIES]


def test_the_h200_has_entries() -> None:
    card = devices.DEVICES["h200"]
    for rows in (1, 16, 64):
        found = entry_for(ops.get("indexer").problem(rows, card.silicon), None)
        assert found is not None and found.provenance == "measured"
    assert entry_for(ops.get("indexer").problem(63, card.silicon), None) is None


def test_the_shipped_entries_nearest_to_a_problem() -> None:
    """Of the same shapes on the same silicon: its own row count and the next ones below and above."""
    problem = make_problem(64, "h200")[0]
    of = [cast(int, e.problem["rows"]) for e in shipped() if {**e.problem, "rows": 64} == problem.to_json()]
    rows = sorted(of)
    at = rows.index(64)
    assert [e.problem["rows"] for e in shipped_near(problem)] == [64, rows[at - 1], rows[at + 1]]
    assert [e.problem["rows"] for e in shipped_near(make_problem(63, "h200")[0])] == [rows[at - 1], 64]
    assert [e.problem["rows"] for e in shipped_near(make_problem(2 * rows[-1], "h200")[0])] == [rows[-1]]
    assert {e.problem_key for e in shipped_near(make_problem(64, "rtx-5090")[0])} & {problem.key} == set()


def test_the_users_own_entry_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuned.db")
    problem, _ = make_problem(1, "h200")
    store.add(make_trial(rows=1, device="h200", score=0.5))
    mine = entry_for(problem, store)
    assert mine is not None and mine.score == 0.5
    assert entry_for(make_problem(16, "h200")[0], store) == entry_for(make_problem(16, "h200")[0], None)
