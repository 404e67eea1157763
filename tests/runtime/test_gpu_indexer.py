"""The indexer on a real GPU: every schedule and load, capture and replay, and offsets past 31 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launching import every_design, variant

from dsv4tune.codegen import devices
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Profile, Shape
from dsv4tune.codegen.space import Config

pytestmark = pytest.mark.gpu

WIDTH = 40 * 64


@pytest.fixture(scope="module")
def gpu() -> Device:
    found = devices.here()
    assert found is not None
    return found


def uniform(rows: int, width: int) -> Shape:
    return indexer_check.shape_of(rows, Profile(width, (width,), (1.0,)), width)


def designs(op: Indexer, problem: IndexerProblem, gpu: Device) -> list[Config]:
    """One config for each schedule, load, dialect and operand order that this card has."""
    words = ("dialect", "schedule", "load", "operand_order", "block_t", "refill", "page_ahead")
    return every_design(op, problem, gpu, words)


@pytest.mark.parametrize("rows", [1, 3, 64, 100, 700, 1500])
def test_every_design_is_right(indexer: Indexer, gpu: Device, rows: int) -> None:
    problem = indexer.problem(rows, gpu.silicon)
    cases = [
        (name, call, indexer.expect(problem, call))
        for name, call in indexer.cases(problem, WIDTH, (128, 2048, WIDTH), "cuda", seed=rows)
    ]
    for config in designs(indexer, problem, gpu):
        run = variant(indexer, problem, config, WIDTH)
        for name, call, expected in cases:
            run(call)
            verdict = indexer.verify(problem, call, expected)
            assert verdict.ok, (config, name, verdict)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_one_captured_launch_serves_every_length(indexer: Indexer, gpu: Device, rows: int) -> None:
    """Captured at length 0, as a server does; replayed for other lengths and page tables, after other allocations."""
    problem = indexer.problem(rows, gpu.silicon)
    template = next(iter(indexer.cases(problem, WIDTH, (WIDTH,), "cuda", seed=1)))[1]
    assert template.guard is not None
    guard = torch.empty_like(template.guard)
    held = replace(
        template,
        seq_lens=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        page_table=torch.zeros_like(template.page_table),
        kv=torch.zeros(4096, problem.page_bytes, dtype=torch.uint8, device="cuda"),
        logits=guard[1:-1, :WIDTH],
        guard=guard,
    )
    for config in designs(indexer, problem, gpu):
        run = variant(indexer, problem, config, WIDTH)
        guard.view(torch.int32).fill_(0x7FC0BEEF)
        held.seq_lens.zero_()
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
        for number, (name, call) in enumerate(indexer.cases(problem, WIDTH, (64, 2048), "cuda", seed=7)):
            held.q.copy_(call.q.view(torch.uint8).view(torch.float8_e4m3fn))
            held.weights.copy_(call.weights)
            held.kv[: call.kv.shape[0]] = call.kv
            held.page_table.copy_(call.page_table)
            held.seq_lens.copy_(call.seq_lens)
            graph.replay()
            verdict = indexer.verify(problem, held, indexer.expect(problem, held))
            assert verdict.ok, (config, number, name, verdict)
        del junk


def test_page_offsets_past_31_bits(indexer: Indexer, gpu: Device) -> None:
    pages = 2**31 // 8448 + 300
    if torch.cuda.mem_get_info()[0] < 3 * pages * 8448:
        pytest.skip("needs 7 GB of free GPU memory")
    problem = indexer.problem(4, gpu.silicon)
    pool = indexer_check.random_pool(problem, pages, "cuda", 0)
    (call,) = indexer.timing_sets(problem, uniform(4, WIDTH), 1, "cuda", 0, pool)
    call.page_table.copy_(torch.randint(pages - 300, pages, call.page_table.shape, device="cuda"))
    expected = indexer.expect(problem, call)
    for config in designs(indexer, problem, gpu):
        call.logits.fill_(float("nan"))
        variant(indexer, problem, config, WIDTH)(call)
        assert indexer.verify(problem, call, expected).ok, config


def test_output_offsets_past_31_bits(indexer: Indexer, gpu: Device) -> None:
    """8,192 rows of 262,208 columns, as a prefill chunk has them: rows far apart by stride, in little memory."""
    rows, width = 8192, 4 * 64
    stride = 2**31 // rows + 64
    if torch.cuda.mem_get_info()[0] < 5 * rows * stride:
        pytest.skip("needs 10 GB of free GPU memory")
    problem = indexer.problem(rows, gpu.silicon)
    pool = indexer_check.random_pool(problem, 64, "cuda", 0)
    (call,) = indexer.timing_sets(problem, uniform(rows, width), 1, "cuda", 0, pool)
    far = torch.empty(rows, stride, device="cuda")
    call = replace(call, logits=far[:, :width])
    expected = indexer.expect(problem, call)
    for config in designs(indexer, problem, gpu):
        variant(indexer, problem, config, width)(call)
        assert indexer.verify(problem, call, expected).ok, config


def test_more_rows_than_a_grid_dimension(indexer: Indexer, gpu: Device) -> None:
    rows, width = 70_000, 2 * 64
    problem = indexer.problem(rows, gpu.silicon)
    pool = indexer_check.random_pool(problem, 64, "cuda", 0)
    (call,) = indexer.timing_sets(problem, uniform(rows, width), 1, "cuda", 0, pool)
    expected = indexer.expect(problem, call)
    config = indexer.default(problem, gpu)
    variant(indexer, problem, config, width)(call)
    assert indexer.verify(problem, call, expected).ok


def test_verify_rows_equal_single_rows(indexer: Indexer, gpu: Device) -> None:
    """Draft tokens of one request share its pages; each row's result is that of the row alone, to the bit."""
    rows = 8
    problem, single = indexer.problem(rows, gpu.silicon), indexer.problem(1, gpu.silicon)
    pool = indexer_check.random_pool(problem, 64, "cuda", 3)
    (call,) = indexer.timing_sets(problem, uniform(rows, WIDTH), 1, "cuda", 3, pool)
    call.page_table.copy_(call.page_table[:1].expand_as(call.page_table))
    call.seq_lens.copy_(torch.arange(1000, 1000 + rows))
    for config in designs(indexer, problem, gpu):
        call.logits.fill_(float("nan"))
        variant(indexer, problem, config, WIDTH)(call)
        alone = indexer.default(single, gpu)
        if alone["operand_order"] != config["operand_order"] or alone["dialect"] != config["dialect"]:
            continue
        run = variant(indexer, single, alone.with_(block_t=alone["block_t"]), WIDTH)
        for row in range(rows):
            one = IndexerCall(
                call.q[row : row + 1],
                call.kv,
                call.weights[row : row + 1],
                call.seq_lens[row : row + 1],
                call.page_table[row : row + 1],
                torch.empty(1, WIDTH, device="cuda"),
            )
            run(one)
            length = 1000 + row
            torch.testing.assert_close(one.logits[0, :length], call.logits[row, :length], rtol=1e-5, atol=1e-6)
