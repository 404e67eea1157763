"""Candidates that break the GPU's context, its clock or its memory, as they are told to."""

from __future__ import annotations

import ctypes
from typing import Any

import sabotage
import torch
import triton
import triton.language as tl

from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.space import Config
from dsv4tune.tools import measure
from dsv4tune.tools.measure import Setup, Timed


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


_kept: list[Any] = []


def device_job(setup: Setup, config: Config, baseline: str | None, halving: bool = False) -> Any:
    order = sabotage.order(config)
    if not order:
        return measure.device_job(setup, config, baseline, halving)

    def behave(*_: Any) -> Timed:
        one = torch.zeros(1, dtype=torch.int32, device="cuda")
        match order:
            case "fault":
                store_far[(1,)](one, 1 << 40)
                torch.cuda.synchronize()
            case "poison":  # seen by whoever comes next
                store_far[(1,)](one, 1 << 40)
            case "hang":
                spin[(1,)](one)
                torch.cuda.synchronize()
            case "crash":
                ctypes.string_at(0)
            case "leak" | "leak and raise":
                _kept.append(torch.empty(measure.LEAK_BYTES + (1 << 28), dtype=torch.uint8, device="cuda"))
        if order == "leak and raise":
            raise RuntimeError("a candidate that failed")
        return Timed(Verdict(1e-7), {n: [10.0, 10.1] for n in setup.profile.lengths}, {})

    return _in_place_of_a_candidate(setup, config, behave)


def compile_job(problem: Any, config: Config) -> Any:
    if "compile" in sabotage.order(config):
        return sabotage.compile_job(problem, config)
    return measure.compile_job(problem, config)


def fail_with_memory(setup: Setup, config: Config) -> Any:
    def behave(*_: Any) -> None:
        held = torch.empty(1 << 28, device="cuda")
        raise RuntimeError(f"a failing candidate that held {held.nbytes} bytes")

    return _in_place_of_a_candidate(setup, config, behave)


def allocated() -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())
