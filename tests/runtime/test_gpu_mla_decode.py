"""MLA decode on a real GPU: every design, head count and page size, capture and replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from launching import every_design, variant

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops import mla_decode_check as check
from dsv4tune.codegen.ops.mla_decode import MlaDecode
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeProblem
from dsv4tune.codegen.space import Config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Device:
    found = devices.here()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def op() -> MlaDecode:
    found = ops.get("mla_decode")
    assert isinstance(found, MlaDecode)
    return found


def designs(op: MlaDecode, problem: MlaDecodeProblem, gpu: Device) -> list[Config]:
    """One config for each way that this card has, with and without splits."""
    words = ("dialect", "operand_order", "heads_per_program", "convert", "load", "loop")
    return every_design(op, problem, gpu, words)


def assert_right(op: MlaDecode, problem: MlaDecodeProblem, configs: list[Config]) -> None:
    width = problem.extra_width or problem.width
    lengths = op.profile(problem, width).lengths
    cases = [(n, c, op.expect(problem, c)) for n, c in op.cases(problem, width, lengths, "cuda", seed=problem.rows)]
    for config in configs:
        run = variant(op, problem, config, width)
        for name, call, expected in cases:
            run(call)
            verdict = op.verify(problem, call, expected)
            assert verdict.ok, (config, name, verdict)


@pytest.mark.parametrize(("heads", "rows"), [(8, 1), (8, 5), (12, 16), (16, 64), (32, 16), (64, 7), (128, 5)])
def test_every_design_is_right(op: MlaDecode, gpu: Device, heads: int, rows: int) -> None:
    problem = op.problem(rows, gpu.silicon, heads=heads)
    assert_right(op, problem, designs(op, problem, gpu))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(
    "shapes",
    [
        {"extra_page_size": 0, "extra_width": 0},
        {"page_size": 64, "width": 192, "extra_page_size": 32, "extra_width": 1152},
        {"page_size": 128, "extra_page_size": 2, "extra_width": 8256},
        {"page_size": 32, "width": 64, "extra_page_size": 128, "extra_width": 64, "lse": True},
        {"page_size": 2, "extra_page_size": 256, "extra_width": 1024, "lse": True},
    ],
)
def test_every_cache_is_served(op: MlaDecode, gpu: Device, heads: int, shapes: dict[str, Any]) -> None:
    problem = op.problem(6, gpu.silicon, heads=heads, **shapes)
    assert_right(op, problem, every_design(op, problem, gpu, ("dialect", "operand_order", "load")))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("heads", [8, 64])
def test_one_captured_launch_serves_every_length(op: MlaDecode, gpu: Device, heads: int, rows: int) -> None:
    """Captured with empty rows, as a server does; replayed for other lengths and slots, after other allocations."""
    problem = op.problem(rows, gpu.silicon, heads=heads)
    calls = [call for name, call in op.cases(problem, 512, (1, 64), "cuda", seed=3) if name.startswith("mixed")]
    pages = [max(c.shape[0] for c in side) for side in ([x.cache for x in calls], [x.extra_cache for x in calls])]  # type: ignore[union-attr]
    held = replace(
        calls[0],
        cache=check.empty_cache(problem.page_size, pages[0], "cuda"),
        extra_cache=check.empty_cache(problem.extra_page_size, pages[1], "cuda"),
        lengths=torch.zeros_like(calls[0].lengths),
        extra_lengths=torch.zeros_like(calls[0].lengths),
        indices=calls[0].indices.clone(),
        extra_indices=calls[0].extra_indices.clone(),  # type: ignore[union-attr]
    )
    for config in every_design(op, problem, gpu, ("dialect", "operand_order", "load", "pdl")):
        run = variant(op, problem, config, 512)
        held.lengths.zero_()
        held.extra_lengths.zero_()  # type: ignore[union-attr]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                run(held)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(held)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
        for number, call in enumerate(calls):
            for name in ("lengths", "extra_lengths", "indices", "extra_indices", "q", "sink"):
                getattr(held, name).copy_(getattr(call, name))
            for mine, theirs in ((held.cache, call.cache), (held.extra_cache, call.extra_cache)):
                for target, source in zip(check.parts(mine), check.parts(theirs), strict=True):  # type: ignore[arg-type]
                    target[: source.shape[0]] = source
            graph.replay()
            # Slots past the smaller cache are none in the one that is held: judged by what it holds.
            verdict = op.verify(problem, held, op.expect(problem, held))
            assert verdict.ok, (config, number, verdict)
        del junk


def test_a_prefill_chunk_is_served(op: MlaDecode, gpu: Device) -> None:
    problem = op.problem(16_384, gpu.silicon, heads=8)
    assert_right(op, problem, [op.default(problem, gpu)])


def test_a_row_does_not_depend_on_its_neighbours(op: MlaDecode, gpu: Device) -> None:
    """Batch invariance: to the bit, for one config and number of rows, whatever the other rows hold."""
    problem = op.problem(8, gpu.silicon, heads=8)
    call = next(call for name, call in op.cases(problem, 512, (64, 512), "cuda", seed=5) if name == "mixed 0")
    for config in every_design(op, problem, gpu, ("dialect", "operand_order", "load")):
        run = variant(op, problem, config, 512)
        run(call)
        together = call.out.clone()
        for row in (0, 5):
            run(check.alone(call, row))
            assert torch.equal(call.out[row].view(torch.int16), together[row].view(torch.int16)), config
