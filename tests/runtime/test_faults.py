"""Every fault of `faults`: the output is the server's own, one line, no exception; and again for the next call."""

from __future__ import annotations

from pathlib import Path

import pytest
import serving
import torch
from faults import FAULTS, Scene, matches, told

from dsv4tune.runtime import plugin


def their_own(*arguments: object, **words: object) -> torch.Tensor:
    """Takes whatever a fault passes."""
    return serving.their_indexer()


def test_without_a_fault_ours_answers(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(database, monkeypatch)
    sizes_of(monkeypatch)
    scene.start()
    assert not torch.equal(plugin.indexer(their_own, *scene.arguments()), their_own())


@pytest.mark.parametrize("name", FAULTS)
def test_the_servers_own_function_answers_and_one_line_says_so(
    name: str, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject, says = FAULTS[name]
    scene = Scene(database, monkeypatch)
    sizes_of(monkeypatch)
    inject(scene)
    scene.start()
    for _ in range(3):
        got = plugin.indexer(their_own, *scene.arguments(), **scene.words)
        assert torch.equal(got, their_own())
    lines = told(caplog.records)
    assert len(lines) == 1 and matches(lines[0], says), lines
    assert len(lines[0].splitlines()) == 1


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 25


def sizes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang, which knows the captured sizes, is not here."""
    monkeypatch.setattr("dsv4tune.runtime.runner._captured_rows", lambda *_: (serving.ROWS,))
