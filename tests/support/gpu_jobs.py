"""Candidates that break the GPU's context, its clock or its memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4tune.codegen.space import Config
from dsv4tune.tools import measure
from dsv4tune.tools.measure import Setup


@triton.jit
def store_far(pointer, offset):  # type: ignore[no-untyped-def]
    tl.store(pointer + offset, 1)


@triton.jit
def spin(pointer):  # type: ignore[no-untyped-def]
    while tl.load(pointer, volatile=True) == 0:
        pass


def _in_place_of_a_candidate(setup: Setup, config: Config, behave: Any) -> Any:
    session = measure._session(setup)
    session.measure = behave  # type: ignore[method-assign]
    try:
        return measure.device_job(setup, config, None)
    finally:
        del session.measure


def fault(setup: Setup, config: Config) -> Any:
    def behave(*_: Any) -> None:
        store_far[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), 1 << 40)
        torch.cuda.synchronize()

    return _in_place_of_a_candidate(setup, config, behave)


def hang(setup: Setup, config: Config) -> Any:
    def behave(*_: Any) -> None:
        spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()

    return _in_place_of_a_candidate(setup, config, behave)


def fail_with_memory(setup: Setup, config: Config) -> Any:
    def behave(*_: Any) -> None:
        held = torch.empty(1 << 28, device="cuda")
        raise RuntimeError(f"a failing candidate that held {held.nbytes} bytes")

    return _in_place_of_a_candidate(setup, config, behave)


def allocated() -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())
