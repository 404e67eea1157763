"""Ranks agree through a real store, or all of them keep the server's own kernels; none ever waits past its limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch._C._distributed_c10d as _C
import torch.distributed as dist
from faults import Store

from dsv4tune.runtime import runner
from dsv4tune.runtime.ranks import agree

RANKS = (0, 1, 2, 3)


@pytest.fixture(params=["tcp", "hash"])
def stores(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """A connection for each rank, to one store."""
    if request.param == "hash":
        store = _C.HashStore()
        yield lambda: store
        return
    # Every later client connects to the port that the first was given.
    first = _C.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    yield lambda: _C.TCPStore("127.0.0.1", first.port, None, False, timedelta(seconds=10))


def together(
    stores: Callable[[], Any], digests: dict[int, str], limit_s: float = 3.0, delays: dict[int, float] | None = None
) -> dict[int, str]:
    """What each rank is told; ranks without a digest never come."""
    told: dict[int, str] = {}

    def rank(number: int) -> None:
        time.sleep((delays or {}).get(number, 0.0))
        told[number] = agree(stores(), "0-3/1", number, RANKS, digests[number], limit_s)

    threads = [threading.Thread(target=rank, args=(number,)) for number in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_equal_tables_are_used(stores: Callable[[], Any]) -> None:
    assert together(stores, dict.fromkeys(RANKS, "abc")) == dict.fromkeys(RANKS, "")


def test_one_other_table_switches_off_everywhere(stores: Callable[[], Any]) -> None:
    told = together(stores, {0: "abc", 1: "abc", 2: "xyz", 3: "abc"})
    assert len(told) == 4 and all("xyz" in why and "abc" in why for why in told.values())
    assert len(set(told.values())) == 1  # one verdict, read by all


def test_silence_switches_off_everywhere_within_the_limit(stores: Callable[[], Any]) -> None:
    started = time.monotonic()
    told = together(stores, {0: "abc", 1: "abc", 3: "abc"}, limit_s=0.5)
    assert time.monotonic() - started < 5
    assert set(told) == {0, 1, 3} and all("rank 2 said nothing in 0.5 s" in why for why in told.values())


def test_a_late_rank_reads_the_verdict_that_the_others_came_to(stores: Callable[[], Any]) -> None:
    told = together(stores, dict.fromkeys(RANKS, "abc"), limit_s=0.5, delays={2: 1.5})
    assert all("rank 2 said nothing" in why for why in told.values()) and len(told) == 4


def test_the_first_verdict_stays() -> None:
    store = Store()
    assert agree(store, "a/1", 0, (0,), "abc", 1.0) == ""
    store.set("dsv4tune/a/1/1", "abc")
    assert agree(store, "a/1", 1, (0, 1), "abc", 1.0) == ""
    assert "the others agreed on abc" in agree(store, "a/1", 2, (0, 1, 2), "xyz", 1.0)


def test_a_store_that_hangs_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.set = lambda key, value: time.sleep(3600)  # type: ignore[method-assign]
    monkeypatch.setattr("dsv4tune.runtime.ranks.GRACE_S", 0.2)
    started = time.monotonic()
    assert "gave no answer" in agree(store, "a/1", 0, (0, 1), "abc", 0.2)
    assert time.monotonic() - started < 5


def test_who_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.ranks_of(SimpleNamespace()) is None  # no process group
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    store = Store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    group = SimpleNamespace(ranks=[4, 5, 6, 7])
    assert runner.ranks_of(SimpleNamespace(tp_group=group)) == (5, (4, 5, 6, 7), store)
    assert runner.ranks_of(SimpleNamespace(tp_group=SimpleNamespace(ranks=[5]))) is None
    assert runner.ranks_of(SimpleNamespace()) == (5, tuple(range(8)), store)
