"""Every test of the runtime has a table, a plugin and a database of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4tune.runtime import kernels, plugin
from dsv4tune.runtime.dispatch import Table

SWITCHES = (
    "DSV4TUNE_DISABLE",
    "DSV4TUNE_POLICY",
    "DSV4TUNE_TARGET",
    "DSV4TUNE_JOBS",
    "DSV4TUNE_RANK_SECONDS",
    "SGLANG_SM120_MMA_INDEXER",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
    "SGLANG_OPT_USE_AITER_INDEXER",
    "SGLANG_SM120_FLASHMLA_BACKEND",
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(kernels, "TABLE", Table())
    for name in ("_ours", "_said", "_pending"):
        monkeypatch.setattr(plugin, name, type(getattr(plugin, name))())
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    # As SGLang sets it on sm_120.
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "1")
    caplog.set_level(logging.INFO, logger="dsv4tune")
    yield


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuned.db"
    monkeypatch.setenv("DSV4TUNE_DB", str(path))
    return path
