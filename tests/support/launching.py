"""Variants for tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4tune.codegen.compile import compile_config
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools.evaluate import default_jobs
from dsv4tune.tools.measure import compile_job
from dsv4tune.tools.workers import Pool, collect


def every_design(op: Op[Any, Any], problem: Problem, gpu: Device, words: Sequence[str]) -> list[Config]:
    """One valid config for each combination of these words, compiled into Triton's cache on every core."""
    designs: dict[Any, Config] = {}
    for config in op.space(problem, gpu).valid():
        designs.setdefault(tuple(config[word] for word in words), config)
    pool = Pool(default_jobs(), 120)
    for config in designs.values():
        pool.submit(config, compile_job, problem, config)
    failed = []
    while pool.pending:
        failed += [answer for _, answer in collect([pool], 5.0) if answer.kind != "ok"]
    pool.close()
    assert not failed, failed
    return list(designs.values())


def variant(op: Op[Any, Any], problem: Problem, config: Config, width: int) -> Variant:
    return Variant(op, problem, config, width, compile_config(op, problem, config).compiled)
