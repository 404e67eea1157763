"""Tests with SGLang's real code; `make test-sglang` runs them in an environment that has it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's database with an entry for both kernels, and the environment of a server on sm_120."""
    import serving

    path = tmp_path_factory.mktemp("user") / "tuned.db"
    for kernel in ("indexer", "mla_decode"):
        serving.write_entry(path, kernel, config=dict(serving.config_of(kernel)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4TUNE_DB", str(path))
        patch.setenv("DSV4TUNE_TARGET", "sm_120")
        # What SGLang sets on sm_120 in the main process, once it knows its arguments.
        patch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "1")
        patch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
        yield path


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A table and a plugin of the test's own."""
    from dsv4tune.runtime import kernels, plugin
    from dsv4tune.runtime.dispatch import Table

    monkeypatch.setattr(kernels, "TABLE", Table())
    for name in ("_ours", "_said", "_pending"):
        monkeypatch.setattr(plugin, name, type(getattr(plugin, name))())
    caplog.set_level(logging.INFO, logger="dsv4tune")


@pytest.fixture(scope="session")
def hooked(database: Path) -> set[str]:
    """The targets that SGLang's own registry patched in this process."""
    import sglang_server as server

    return server.boot()


@pytest.fixture
def served(hooked: set[str]) -> None:
    """A model runner that has been through SGLang's `init_cuda_graphs`."""
    import serving
    import sglang_server as server

    assert server.capture(serving.model_runner()) == "eager"
