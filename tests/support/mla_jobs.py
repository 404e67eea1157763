"""Jobs for the MLA decode tests: they run in a process with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import islice

import torch

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.ops import mla_decode_check as check
from dsv4tune.codegen.ops.mla_decode_call import ROW_BYTES, TOKEN_BYTES, MlaDecodeCall, MlaDecodeProblem, page_stride
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools import gather, measure
from dsv4tune.tools.interpreter import interpreted


def variant(problem: MlaDecodeProblem, config: Config) -> Variant:
    torch.set_num_threads(1)
    op = ops.get("mla_decode")
    return Variant(op, problem, config, 0, interpreted(render(op, problem, config).load()), "cpu")


def first_cases(problem: MlaDecodeProblem, config: Config, count: int) -> Verdict:
    """The first `count` cases alone; the search runs them all."""
    op = ops.get("mla_decode")
    small, width = op.small(problem)
    cases = islice(op.cases(small, width, (width,), "cpu", 0), count)
    judged = ((name, call, op.expect(small, call)) for name, call in cases)
    return measure.check(op, small, judged, variant(small, config))


def warnings_of(problem: MlaDecodeProblem, config: Config) -> list[str]:
    """What the interpreter warns of in the first case."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first_cases(problem, config, 1)
    return [str(one.message) for one in seen if issubclass(one.category, RuntimeWarning)]


def neighbours(problem: MlaDecodeProblem, config: Config) -> list[bool]:
    """Whether each row's output is the same to the bit where all other rows are empty."""
    op = ops.get("mla_decode")
    small, _ = op.small(problem)
    run = variant(small, config)
    _, call = next(iter(check.cases(small, (), "cpu", seed=0)))
    run(call)
    together = call.out.clone()
    same = []
    for row in range(small.rows):
        run(check.alone(call, row))
        same.append(torch.equal(call.out[row].view(torch.int16), together[row].view(torch.int16)))
    return same


def _far_cache(page_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose last pages lie past 2^31 bytes, and slots there. What is never touched takes no memory."""
    stride = page_stride(page_size)
    pages = 2**31 // stride + 4
    pool = torch.empty(pages * stride, dtype=torch.uint8)
    cache = pool.as_strided((pages, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))
    slots = pages * page_size - 1 - torch.arange(2 * page_size if page_size > 2 else 6)
    assert int(slots.min()) // page_size * stride + ROW_BYTES > 2**31
    check.fill(cache, slots, generator)
    return cache, slots.to(torch.int32)


def far(problem: MlaDecodeProblem, config: Config) -> Verdict:
    """Tokens whose byte offset passes 2^31, in both caches."""
    op = ops.get("mla_decode")
    small = replace(problem, rows=1, width=64, extra_width=64)
    generator = torch.Generator().manual_seed(0)
    _, call = next(iter(check.cases(small, (), "cpu", seed=0)))

    def moved(page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache, slots = _far_cache(page_size, generator)
        return cache, slots[torch.arange(64) % slots.shape[0]][None, :]

    cache, indices = moved(small.page_size)
    extra_cache, extra_indices = moved(small.extra_page_size)
    whole = torch.tensor([64], dtype=torch.int32)
    call = replace(
        call, cache=cache, indices=indices, lengths=whole,
        extra_cache=extra_cache, extra_indices=extra_indices, extra_lengths=whole,
    )  # fmt: skip
    variant(small, config)(call)
    return op.verify(small, call, check.expect(small, call))


def output_of(problem: MlaDecodeProblem, config: Config, call: MlaDecodeCall) -> torch.Tensor:
    variant(problem, config)(call)
    return call.out


def gathered() -> tuple[int, int]:
    """What the gather floor sums over one mixed case, and what the bytes of its live tokens sum to, as int32."""
    op = ops.get("mla_decode")
    problem, width = op.small(op.problem(3, devices.named("h200").silicon))
    call = next(call for name, call in op.cases(problem, width, (width,), "cpu", 1) if name.startswith("mixed"))
    run, sums = gather.prepared(call)
    run()
    assert call.extra_cache is not None and call.extra_indices is not None and call.extra_lengths is not None
    want = 0
    for cache, indices, lengths in (
        (call.cache, call.indices, call.lengths),
        (call.extra_cache, call.extra_indices, call.extra_lengths),
    ):
        size, stride = cache.shape[1], page_stride(cache.shape[1])
        flat = cache.as_strided((cache.shape[0] * stride,), (1,), cache.storage_offset())
        for row, live in enumerate(lengths.tolist()):
            for slot in indices[row, :live].tolist():
                if slot >= 0:
                    page, inside = slot // size * stride, slot % size
                    for first, count in (
                        (page + inside * ROW_BYTES, ROW_BYTES),
                        (page + size * ROW_BYTES + inside * 8, 8),
                    ):
                        token = flat[first : first + count].clone().view(torch.int32)
                        # Scales are loaded as one word of 8 bytes, whose halves are folded.
                        halves = token.tolist() if count > 8 else [int(token[0]) ^ int(token[1])]
                        want += sum(halves)
    wrapped = torch.tensor([want]).to(torch.int32)
    return int(sums.sum(dtype=torch.int64).to(torch.int32)), int(wrapped)
