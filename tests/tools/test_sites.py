"""Which GPUs a search measures on: those that are named, and of one silicon."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsv4tune.codegen.devices import DEVICES
from dsv4tune.tools import gpu
from dsv4tune.tools.cli import app
from dsv4tune.tools.executor import Executor, Job, Seat
from dsv4tune.tools.sites import Local
from dsv4tune.tools.tune import choose_device

H200 = ("NVIDIA H200", 9, 0, 132, 232_448)
PRO = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0, 188, 101_376)
A100 = ("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166_912)


def there(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int, int, int, int]) -> None:
    def properties(index: int = 0) -> Any:
        name, major, minor, sms, shared = found[index]
        return SimpleNamespace(
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
            uuid=f"uuid-{index}",
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def seats(site: Local, said: list[str]) -> list[Seat]:
    device, on_gpu = choose_device(None, None, site)
    assert on_gpu
    return site.pools(1, device, on_gpu, said.append).judges.seats


def test_one_process_for_each_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there(monkeypatch, H200, H200, H200)
    said: list[str] = []
    assert [seat.card for seat in seats(Local(), said)] == ["GPU-uuid-0"] and said == []
    found = seats(Local("0, 2"), said)
    assert [seat.environment for seat in found] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    assert said == ["one process measures on each of GPUs 0, 2"]
    assert len(seats(Local("all"), said)) == 3


def test_numbers_count_within_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-77")
    there(monkeypatch, H200, H200)
    assert [card.visible for card in gpu.cards("all")] == ["5", "GPU-77"]
    assert [card.visible for card in gpu.cards("1")] == ["GPU-77"]


def test_no_search_mixes_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, H200, PRO, A100, H200)
    said: list[str] = []
    assert [seat.card for seat in seats(Local("all"), said)] == ["GPU-uuid-0", "GPU-uuid-3"]
    assert said[0] == f"GPU 1 is {PRO[0]} (sm_120), not NVIDIA H200: left out; search for it with --gpus 1"
    assert [seat.card for seat in seats(Local("1"), said)] == ["GPU-uuid-1"]
    with pytest.raises(ValueError, match=r"GPU 1 is .* \(sm_120\), not NVIDIA H200: search for it in a run of its own"):
        seats(Local("0,1"), said)
    # A card that is named is looked for among the GPUs.
    site = Local("all")
    device, on_gpu = choose_device("rtx-pro-6000", None, site)
    assert on_gpu and [s.card for s in site.pools(1, device, on_gpu, said.append).judges.seats] == ["GPU-uuid-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0,0", "--gpus takes 'all' or different numbers such as 0,1, not '0,0'"),
        ("both", "--gpus takes 'all' or different numbers"),
        ("-1", "--gpus takes 'all' or different numbers"),
        ("", "--gpus takes 'all' or different numbers"),
        ("0,2", "there is no GPU 2 here: GPUs 0 to 1 are"),
    ],
)
def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, words: str, message: str) -> None:
    there(monkeypatch, H200, H200)
    with pytest.raises(ValueError, match=message):
        Local(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "all"], "--gpus names GPUs to measure on, and there is none here"),
        (["--gpus", "0", "--executor", "ray"], "--gpus names GPUs of this machine: with --executor ray"),
    ],
)
def test_bad_words_are_one_line(monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["search", "--kernel", "indexer", *options])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_named_gpu_and_another_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpus with a --target that is not here: nothing would be measured where the user asked for it."""
    there(monkeypatch, H200)
    site = Local("0")
    device, on_gpu = choose_device(None, "sm_120", site)
    assert device == DEVICES["rtx-pro-6000"] and not on_gpu
    with pytest.raises(ValueError, match=r"GPU 0 is NVIDIA H200 \(sm_90\), not rtx-pro-6000"):
        site.pools(1, device, on_gpu, print)


class Recorder(Executor):
    """Starts nothing."""

    started: list[tuple[int, Any]]

    def __init__(self, hosts: Iterable[str]) -> None:
        super().__init__([Seat(host=host) for host in hosts], "a machine")
        self.started = []

    def _free(self) -> Iterable[int]:
        return [n for n in self._open() if n not in dict(self.started)]

    def _start(self, number: int, job: Job) -> None:
        self.started.append((number, job.tag))

    def _running(self) -> int:
        return len(self.started)

    def connections(self) -> list[Any]:
        return []

    def next_limit(self) -> float:
        return 0.0

    def ready(self, connections: Any) -> list[Any]:
        return []

    def close(self) -> None: ...


def test_what_was_compiled_on_a_machine_is_measured_there_unless_others_would_idle() -> None:
    executor = Recorder(["x", "y"])
    executor._queue = deque(Job(n, print, (), near=near) for n, near in enumerate(["y", "y", "x", "y"]))
    executor._start_queued()
    assert executor.started == [(0, 2), (1, 0)]
    executor.started = [(1, 0)]
    executor._start_queued()
    assert executor.started == [(1, 0), (0, 1)]
