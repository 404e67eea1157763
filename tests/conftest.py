"""Shared fixtures: a cache folder of the test's own, and the problems that most tests use."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else "needs an NVIDIA GPU"
    for item in items:
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rendered sources and compiled kernels of a test run don't come from, or land in, the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4TUNE_CACHE", str(folder))
        # Compiles of earlier runs would hide what a fresh machine sees; within a run they may be shared.
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield folder


@pytest.fixture(scope="session")
def indexer() -> Indexer:
    op = ops.get("indexer")
    assert isinstance(op, Indexer)
    return op


@pytest.fixture(scope="session")
def card() -> Device:
    return devices.DEVICES["rtx-pro-6000"]


@pytest.fixture(scope="session")
def problem(indexer: Indexer, card: Device) -> IndexerProblem:
    return indexer.problem(64, card.silicon)


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
