"""Which card is meant: the one here, a named one, and one that can't serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.tools.tune import choose_device


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int, sms: int, shared: int) -> None:
    properties: Any = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=sms,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=1 << 26,
        memory_clock_rate=2_000_000,
        memory_bus_width=512,
        total_memory=96 << 30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_without_a_gpu_the_rtx_pro_6000_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    card, on_gpu = choose_device(None, None)
    assert card.name == "rtx-pro-6000" and not on_gpu


def test_the_card_here_is_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", 9, 0, 132, 232_448)
    card, on_gpu = choose_device(None, None)
    assert card.name == "NVIDIA H200" and on_gpu and card.bandwidth == devices.DEVICES["h200"].bandwidth
    assert choose_device(None, "sm_90")[1] and choose_device("h200", None)[1]
    assert choose_device(None, "sm_120") == (devices.DEVICES["rtx-pro-6000"], False)
    assert choose_device("b200", None) == (devices.DEVICES["b200"], False)


def test_another_edition_of_the_same_silicon_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 12, 0, 188, 101_376)
    card, on_gpu = choose_device("rtx-pro-6000", None)
    assert on_gpu and card.silicon == devices.DEVICES["rtx-pro-6000"].silicon
    # As many SMs as no known card has: its own silicon, with the bandwidth that its memory clock and bus give.
    pretend(monkeypatch, "NVIDIA RTX PRO 5000 Blackwell", 12, 0, 110, 101_376)
    card, on_gpu = choose_device(None, None)
    assert on_gpu and card.silicon.sm_count == 110 and card.bandwidth == pytest.approx(2.56e11)


def test_a_gpu_without_fp8_is_refused_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA A100-SXM4-80GB", 8, 0, 108, 166_912)
    with pytest.raises(ValueError, match=r"compute capability 8\.0: its tensor cores have no fp8"):
        choose_device(None, None)
    assert choose_device(None, "sm_120") == (devices.DEVICES["rtx-pro-6000"], False)


@pytest.mark.parametrize(("major", "minor", "sms"), [(10, 3, 160), (11, 0, 20), (12, 1, 48)])
def test_silicon_that_no_table_knows_has_a_space(
    monkeypatch: pytest.MonkeyPatch, indexer: Indexer, major: int, minor: int, sms: int
) -> None:
    pretend(monkeypatch, "NVIDIA something new", major, minor, sms, 101_376)
    card, on_gpu = choose_device(None, None)
    problem = indexer.problem(16, card.silicon)
    assert on_gpu and indexer.default(problem, card) in indexer.space(problem, card).valid()
