"""The GPUs here: which there are, and the state of one by nvidia-smi (driver, clocks, throttling, other processes)."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache

from dsv4tune.codegen import devices
from dsv4tune.codegen.devices import Device


@dataclass(frozen=True)
class Card:
    """One GPU of this machine.

    Attributes:
        index: its number, as ``--gpus`` and ``cuda:1`` have it.
        uuid: the name that is its own.
        visible: what ``CUDA_VISIBLE_DEVICES`` holds for a process that sees no other.
    """

    index: int
    uuid: str
    visible: str
    device: Device


def cards(wanted: str | None = None) -> list[Card]:
    """The GPUs that ``--gpus`` names, in its order: ``all`` that can serve, numbers, or the first for None.

    Raises:
        ValueError: no such words, a number that is not here or named twice, a GPU without fp8.
    """
    import torch

    count = torch.cuda.device_count() if torch.version.cuda is not None and torch.cuda.is_available() else 0
    if wanted is None:
        return [_card(0)] if count else []
    if not count:
        raise ValueError("--gpus names GPUs to measure on, and there is none here: leave it out to predict")
    if wanted == "all":
        return [card for card in map(_card_or_none, range(count)) if card is not None]
    words = [word.strip() for word in wanted.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"--gpus takes 'all' or different numbers such as 0,1, not '{wanted}'")
    missing = [word for word in words if int(word) >= count]
    if missing:
        there = "only GPU 0 is" if count == 1 else f"GPUs 0 to {count - 1} are"
        raise ValueError(f"there is no GPU {missing[0]} here: {there}")
    return [_card(int(word)) for word in words]


def _card_or_none(index: int) -> Card | None:
    try:
        return _card(index)
    except ValueError:  # an older card beside the one that serves
        return None


def _card(index: int) -> Card:
    device = devices.here(index)
    assert device is not None
    given = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return Card(index, uuid(index), given[index] if index < len(given) else str(index), device)


def uuid(index: int = 0) -> str:
    """A GPU's own name, as nvidia-smi has it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


@dataclass(frozen=True)
class State:
    """Empty strings where nvidia-smi says nothing."""

    driver: str = ""
    clocks: str = ""
    warnings: tuple[str, ...] = ()


def state() -> State:
    """Of this process's GPU now; asked at most once in 30 seconds, because asking takes longer than timing many
    candidates."""
    return _state(int(time.monotonic() // 30))


_FIELDS = "driver_version,clocks.max.sm,clocks.max.mem,clocks_event_reasons.active"
# NVML's bits for clocks held down by power or heat; an idle GPU and a user's own setting are none of these.
_THROTTLED = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "hardware heat", 0x80: "power brake"}


@lru_cache(maxsize=1)
def _state(_tick: int) -> State:
    text = _query("--query-gpu=" + _FIELDS)
    if not text:
        return State()
    driver, sm, memory, reasons = (part.strip() for part in text.splitlines()[0].split(","))
    warnings = []
    try:
        bits = int(reasons, 16)
    except ValueError:
        bits = 0
    held = [name for bit, name in _THROTTLED.items() if bits & bit]
    if held:
        warnings.append(f"clocks held down by {', '.join(held)}")
    lines = _query("--query-compute-apps=pid").splitlines()
    others = [int(n) for n in lines if n.strip().isdigit() and int(n) not in (os.getpid(), os.getppid())]
    if others:
        warnings.append(f"{len(others)} other process(es) on this GPU")
    return State(driver, f"sm {sm}, memory {memory}", tuple(warnings))


def _query(what: str) -> str:
    try:
        # By its own name: nvidia-smi counts in another order, and past CUDA_VISIBLE_DEVICES.
        command = ["nvidia-smi", what, "--format=csv,noheader,nounits", "-i", uuid()]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, AssertionError, RuntimeError):
        return ""
