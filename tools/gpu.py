"""The state of the GPU here, as nvidia-smi tells it: driver, clocks, throttling, other processes."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class State:
    """Empty strings where nvidia-smi says nothing."""

    driver: str = ""
    clocks: str = ""
    warnings: tuple[str, ...] = ()


def state() -> State:
    """The state now; asked at most once in 30 seconds, because asking takes longer than timing many candidates."""
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
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
