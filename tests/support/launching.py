"""Variants for tests on a GPU."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import cache
from typing import Any

from pools import answers

from dsv4tune.codegen.compile import compile_config
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools.evaluate import default_jobs
from dsv4tune.tools.measure import compile_job
from dsv4tune.tools.workers import Pool


@cache
def _compilers() -> Pool:
    """One for all tests: its processes take seconds to start."""
    pool = Pool(default_jobs(), 120)
    atexit.register(pool.close)
    return pool


def every_design(op: Op[Any, Any], problem: Problem, gpu: Device, words: Sequence[str]) -> list[Config]:
    """One valid config for each combination of these words and number of kernels, compiled on every core."""
    designs: dict[Any, Config] = {}
    for config in op.space(problem, gpu).valid():
        kernels = len(op.plan(problem, config, 64).launches)
        designs.setdefault((kernels, *(config[word] for word in words)), config)
    done = answers(_compilers(), {config: (compile_job, problem, config) for config in designs.values()})
    failed = [answer for answer in done.values() if answer.kind != "ok"]
    assert not failed, failed
    return list(designs.values())


def variant(op: Op[Any, Any], problem: Problem, config: Config, width: int) -> Variant:
    return Variant(op, problem, config, width, compile_config(op, problem, config).compiled)
