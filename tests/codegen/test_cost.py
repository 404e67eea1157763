"""The cost model's file, and what it predicts with and without a compile report."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4tune.codegen import cost, ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config

CARD = DEVICES["h200"]
CONFIGS = Path(__file__).parents[2] / "tuned" / "configs"
REPORT = Report(128, 0, 0, 40_000, "wgmma", True, "tma", 500, 0.0, "0" * 64)


def predicted(
    device: str = "h200", report: Report | None = REPORT, model: cost.Model | None = None, **knobs: Any
) -> float:
    op, card = ops.get("indexer"), DEVICES[device]
    problem = op.problem(64, card.silicon)
    config = op.reference_config(problem, card).with_(schedule="split", splits=8, num_stages=3, **knobs)
    return cost.predict_us(op, problem, config, op.profile(problem, 262_208), 32_768, report, card, model)


def test_the_shipped_model_says_where_it_comes_from() -> None:
    model = cost.read(cost.SHIPPED)
    assert {(one.target, one.op) for one in model.sources} == {("sm_90", "indexer"), ("sm_90", "mla_decode")}
    assert all(one.configs > 100 and one.rows for one in model.sources) and len(model.left_out) >= 2
    at_home, elsewhere = model.says(CARD), model.says(DEVICES["rtx-pro-6000"])
    assert at_home.startswith("fitted on sm_90 (H200); rank correlation with what was measured there: indexer 0.")
    # What it says for another card is what its constants alone reached.
    for said, judged in ((at_home, "effects"), (elsewhere, "constants")):
        for op in ("indexer", "mla_decode"):
            figures = [getattr(one.trials, judged) for one in model.left_out if one.recording.startswith(op)]
            assert f"{op} {min(figures):.2f} to {max(figures):.2f}" in said


def test_the_bar_is_reached_by_every_recording() -> None:
    for one in cost.read(cost.SHIPPED).left_out:
        for judged in (one.recordings, one.trials):
            assert judged.effects is not None and judged.effects >= 0.6, one
            # With 64 heads a program fills an SM's registers. The constants alone, for other cards, know nothing of it.
            assert judged.constants is not None and judged.constants >= (0.45 if "h64" in one.recording else 0.65), one


def test_shipped_predictions_are_this_model_s() -> None:
    """Whoever refits it searches them anew: `search --device` and `export`, as docs/sharing.md says."""
    model, found = cost.read(cost.SHIPPED), 0
    for path in sorted(CONFIGS.glob("*/*.json")):
        for entry in json.loads(path.read_text())["entries"]:
            if entry["provenance"] != "predicted":
                continue
            problem, config = ops.problem_from_json(entry["problem"]), Config(entry["config"])
            over, report, card = entry["range"], Report(**entry["resources"]), DEVICES[path.parent.name]
            profile = Profile(over["width"], tuple(over["lengths"]), tuple(over["weights"]), over["causal"])
            for length, us in entry["times_us"].items():
                of = (ops.get(problem.op), problem, config, profile, int(length), report, card, model)
                assert cost.predict_us(*of) == pytest.approx(us, abs=1e-4), (path, str(config))
                found += 1
    assert found == 112


def test_what_one_architecture_was_seen_to_do_says_nothing_of_another() -> None:
    model = cost.read(cost.SHIPPED)
    far = replace(model, effects={"sm_90": {"indexer": {"load": {"pointer": math.log(2.0)}}}})
    none = replace(model, effects={})
    assert predicted(model=far) == pytest.approx(2 * predicted(model=none))
    assert predicted("rtx-pro-6000", model=far) == predicted("rtx-pro-6000", model=none)


def test_a_config_is_predicted_before_it_is_compiled() -> None:
    times = [predicted(report=None, num_warps=warps) for warps in (2, 4)]
    assert all(0 < us < 1e5 for us in times)
    assert predicted(report=REPORT) == pytest.approx(predicted(report=None), rel=0.2)
    assert predicted(report=replace(REPORT, spill_bytes=8)) > predicted(report=REPORT)


def test_nothing_beats_the_byte_floor_by_the_constants() -> None:
    model = replace(cost.read(cost.SHIPPED), effects={})
    assert model.constants.reached <= 1.0
    op = ops.get("indexer")
    for device in DEVICES.values():
        problem = op.problem(64, device.silicon)
        profile = op.profile(problem, 262_208)
        for length in profile.lengths:
            config = op.default(problem, device)
            us = cost.predict_us(op, problem, config, profile, length, None, device, model)
            assert us > op.bytes_moved(problem, op.shape(problem, profile, length)) / device.bandwidth * 1e6


def test_the_users_own_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(cost.read(cost.SHIPPED), effects={})
    own = replace(own, constants=replace(own.constants, start=1000.0))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own.to_json()))
    before = predicted()
    monkeypatch.setenv("DSV4TUNE_COST_MODEL", str(path))
    assert cost.load() == own and predicted() > 1000.0 > before


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    data = cost.read(cost.SHIPPED).to_json()
    data = json.loads(json.dumps(data))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "no object with cost_model 1"),
        ('{"cost_model": 2}', "no object with cost_model 1"),
        ('{"cost_model": 1}', "'constants' is missing"),
        (broken(lambda d: d["constants"].pop("start")), "constants are "),
        (broken(lambda d: d["constants"].update(start=0)), "constant start is 0, not a number above 0"),
        (broken(lambda d: d["constants"].update(start=True)), "constant start is True"),
        (broken(lambda d: d["constants"].update(start=float("nan"))), "constant start is nan"),
        (broken(lambda d: d["effects"]["sm_90"]["indexer"]["load"].update(tma="fast")), "effect of load=tma"),
        (broken(lambda d: d["effects"].update(sm_90=3)), "no attribute"),
        (broken(lambda d: d["sources"][0].update(colour="red")), "colour"),
        (broken(lambda d: d.pop("left_out")), "'left_out' is missing"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    monkeypatch.setenv("DSV4TUNE_COST_MODEL", str(path))
    with pytest.raises(cost.CostModelError, match=why) as caught:
        cost.load()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(cost.CostModelError, match="No such file"):
        cost.read(tmp_path / "none.json")


def test_importing_it_reads_nothing() -> None:
    code = "from dsv4tune.codegen import cost; assert cost.read.cache_info().misses == 0; cost.load(); cost.load()"
    subprocess.run([sys.executable, "-c", f"{code}; assert cost.read.cache_info().misses == 1"], check=True)
