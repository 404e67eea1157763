"""Every fault of `faults` in SGLang's real code: what its functions leave is what they leave without the plugin."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import sglang_server as server
import torch
from faults import FAULTS, Scene, matches, told

from dsv4tune.runtime import targets


def outcome(function: Any, scene: Scene) -> Any:
    """The logits of live columns, or the kind of exception."""
    try:
        logits = function(*scene.arguments(), **scene.words)
    except Exception as error:
        return type(error).__name__
    return torch.where(torch.isfinite(logits), logits, 0.0)


@pytest.mark.parametrize("name", FAULTS)
def test_sglangs_own_functions_answer(
    name: str, hooked: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject, says = FAULTS[name]
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "tuned.db"))
    scene = Scene(tmp_path / "tuned.db", monkeypatch, capture=server.capture)
    inject(scene)
    scene.start()
    module: Any = importlib.import_module(targets.TILELANG.module)
    got = outcome(module.tilelang_fp8_paged_mqa_logits, scene)
    want = outcome(server.their_tilelang, scene)
    assert type(got) is type(want) and (got == want if isinstance(want, str) else torch.equal(got, want))
    lines = told(caplog.records)
    assert len(lines) == 1 and matches(lines[0], says), lines
    # The real caller, over fake pools: it passes what it always does, whatever was changed above.
    selected = server.slots(server.forward_c4_indexer(scene.call))
    for mine, expected in zip(selected, server.expected_slots(scene.call), strict=True):
        assert len(mine) == len(expected) and len(mine & expected) >= 0.97 * len(expected)
