"""Timed calls of MLA decode: their shapes, the caches that they read, and the bytes that they must move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4tune.codegen.later import torch
from dsv4tune.codegen.ops.mla_decode_call import HEAD_DIM, TOKEN_BYTES, MlaDecodeCall, MlaDecodeProblem, page_stride
from dsv4tune.codegen.ops.mla_decode_check import SCALE, empty_cache, fill
from dsv4tune.codegen.problem import Profile, Shape

#: Tokens of a compressed cache's entry by its page size; 4 elsewhere.
_ENTRY_TOKENS = {0: 1, 2: 128}


class Pool(NamedTuple):
    """What timed calls read: both caches, every slot filled."""

    cache: torch.Tensor
    extra_cache: torch.Tensor | None


def shape_of(problem: MlaDecodeProblem, profile: Profile, length: int) -> Shape:
    """The call that a profile means: this many live extra tokens in every row, and a full window; without an extra
    cache, this many in the window. Causal: consecutive queries of one prompt, of which 4 or 128 see the same entries.
    """
    rows = problem.rows
    if not profile.causal:
        return Shape(f"{rows}x{length}", "decode", profile.width, (length,) * rows, tuple(range(rows)))
    tokens = _ENTRY_TOKENS.get(problem.extra_page_size, 4)
    live = tuple(max(0, length - back // tokens) for back in range(rows - 1, -1, -1))
    return Shape(f"{rows} to {length}", "prefill", profile.width, live, (0,) * rows)


@dataclass(frozen=True)
class _Side:
    """One cache's part of a shape.

    Attributes:
        width: columns of its indices.
        page: tokens a page.
        run: tokens that lie side by side, as a server's cache holds them.
        live: tokens of each row.
        skipped: tokens of its request before the row's first.
        request: of each row, counted from 0.
        held: distinct tokens of each request.
    """

    width: int
    page: int
    run: int
    live: torch.Tensor
    skipped: torch.Tensor
    request: torch.Tensor
    held: torch.Tensor

    @property
    def runs(self) -> torch.Tensor:
        """Of each request."""
        return (self.held + self.run - 1) // self.run


def _sides(problem: MlaDecodeProblem, shape: Shape) -> list[_Side]:
    """The window's and, where there is one, the extra cache's; rows of one request read the same tokens."""
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(shape.owner))}
    seen: Counter[int] = Counter()
    before = []
    for owner in shape.owner:
        before.append(seen[owner])
        seen[owner] += 1
    request = torch.tensor([numbers[owner] for owner in shape.owner])

    def side(width: int, page: int, run: int, live: torch.Tensor, skipped: torch.Tensor) -> _Side:
        held = torch.zeros(len(numbers), dtype=torch.int64).scatter_reduce(0, request, live + skipped, "amax")
        return _Side(width, page, run, live, skipped, request, held)

    live = torch.tensor(shape.live)
    window = torch.full_like(live, problem.width) if problem.extra_width else live
    # A request's last tokens lie side by side; a query's window begins one token after its predecessor's.
    found = [side(problem.width, problem.page_size, min(problem.page_size, 128), window, torch.tensor(before))]
    if problem.extra_width:
        # Selected entries lie anywhere; where all are taken, pages of 2 are.
        run = 2 if problem.extra_page_size == 2 else 1
        found.append(side(problem.extra_width, problem.extra_page_size, run, live, torch.zeros_like(live)))
    return found


def timing_pool(problem: MlaDecodeProblem, shapes: Sequence[Shape], min_bytes: int, device: str, seed: int) -> Pool:
    """Caches that hold each call's tokens, and no less than `min_bytes` between them."""
    generator = torch.Generator(device).manual_seed(seed)
    caches = []
    for sides in zip(*(_sides(problem, shape) for shape in shapes), strict=True):
        page = sides[0].page
        need = max(int(side.runs.sum()) * side.run for side in sides)
        share = min_bytes // (2 if problem.extra_width else 1)
        pages = max(1, -(-need // page), -(-share // page_stride(page)))
        caches.append(empty_cache(page, pages, device))
        fill(caches[-1], torch.arange(pages * page, device=device), generator)
    return Pool(caches[0], caches[1] if problem.extra_width else None)


def timing_sets(
    problem: MlaDecodeProblem, shape: Shape, sets: int, device: str, seed: int, pool: Pool
) -> list[MlaDecodeCall]:
    """Calls on different tokens of `pool` and one output, as a server's graph reuses its own."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, heads = shape.rows, problem.heads
    out = torch.empty(rows, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    lse = torch.empty(rows, heads, device=device) if problem.lse else None
    window, *extra = _sides(problem, shape)
    indices = _timed_indices(window, pool.cache, sets, generator)
    extra_indices: list[torch.Tensor | None] = [None] * sets
    if extra and pool.extra_cache is not None:
        extra_indices = [*_timed_indices(extra[0], pool.extra_cache, sets, generator)]
    return [
        MlaDecodeCall(
            q=torch.randn(rows, heads, HEAD_DIM, device=device, generator=generator).bfloat16(),
            cache=pool.cache,
            indices=indices[number],
            lengths=window.live.to(device, torch.int32),
            extra_cache=pool.extra_cache,
            extra_indices=extra_indices[number],
            extra_lengths=extra[0].live.to(device, torch.int32) if extra else None,
            sink=torch.randn(heads, device=device, generator=generator),
            scale=SCALE,
            out=out,
            lse=lse,
        )
        for number in range(sets)
    ]


def _timed_indices(side: _Side, cache: torch.Tensor, sets: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Slots of each set. Runs lie anywhere in the pool, those of different sets apart for as long as it has some."""
    device, need = cache.device, int(side.runs.sum())
    before = (side.runs.cumsum(0) - side.runs)[side.request].to(device)[:, None]
    column = torch.arange(side.width, device=device)[None, :]
    token = column + side.skipped.to(device)[:, None]
    dead = column >= side.live.to(device)[:, None]
    order = torch.randperm(cache.shape[0] * side.page // side.run, device=device, generator=generator)
    found = []
    for number in range(sets):
        run = order[(number * need + before + token // side.run) % order.shape[0]]
        found.append((run * side.run + token % side.run).masked_fill_(dead, -1).to(torch.int32))
    return found


def bytes_moved(problem: MlaDecodeProblem, shape: Shape) -> int:
    """Each distinct token once, queries, outputs, indices of live tokens, lengths and sinks."""
    sides = _sides(problem, shape)
    tokens = sum(int(side.held.sum()) for side in sides) * TOKEN_BYTES
    indices = sum(int(side.live.sum()) for side in sides) * 4
    per_row = problem.heads * (2 * HEAD_DIM * 2 + 4 * problem.lse) + 4 * len(sides)
    return tokens + indices + shape.rows * per_row + problem.heads * 4


def memory_needed(problem: MlaDecodeProblem, shape: Shape) -> int:
    """Device bytes that checking and measuring this shape takes, besides a pool's minimum."""
    pool = sum(int(side.runs.sum()) * side.run for side in _sides(problem, shape)) * TOKEN_BYTES
    values = problem.rows * problem.heads * HEAD_DIM
    padded = problem.rows * max(64, problem.heads) * HEAD_DIM
    indices = problem.rows * (problem.width + problem.extra_width) * 4
    # bf16 queries and outputs of the check and of a timed set, padded ones of a case and of a peer, fp32 expected
    # outputs of some 7 calls, their indices, and what making indices takes in passing.
    return pool + 8 * values + 8 * padded + 28 * values + 15 * indices


def describe(shape: Shape) -> dict[str, Any]:
    """A row's ``shape`` in a bench's result."""
    return {
        "name": shape.name,
        "kind": shape.kind,
        "heads": shape.options["heads"],
        "rows": shape.rows,
        "topk": shape.options["width"],
        "extra": shape.options["extra_width"],
        "live": max(shape.live),
        "cached": shape.cached,
    }


#: Word, extra width, live tokens and extra page size. The last is what the wide one has live, in a width that fits.
_MIXES = (("128+512", 512, 512, 64), ("128", 0, 128, 0), ("128+8256", 8256, 256, 2), ("128+256", 256, 256, 2))


def bench_shapes() -> list[Shape]:
    """What `bench` times unless told otherwise: all mixes on other tokens each time, the first also on those in L2."""
    found = []
    for cached, mixes in ((False, _MIXES), (True, _MIXES[:1])):
        for heads in (8, 16, 32, 64):
            for mix, extra, live, page in mixes:
                options = {"heads": heads, "width": 128, "extra_width": extra, "extra_page_size": page}
                for rows in (1, 4, 16, 64, 128, 256):
                    name = f"{heads}x{rows} {mix}{' cached' if cached else ''}"
                    shape = ("decode", extra or 128, (live,) * rows, tuple(range(rows)), options, cached)
                    found.append(Shape(name, *shape))
    return found
