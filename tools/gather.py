"""What attention can't be faster than: a kernel that loads each live token's bytes and does nothing with them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from dsv4tune.codegen.ops.mla_decode_call import FOOTER_BYTES, ROW_BYTES, MlaDecodeCall, page_stride

#: Tokens and warps a program: the fastest of 18 tried (benchmarks/README.md).
_BLOCK_T, _WARPS = 32, 8


@triton.jit
def _load(ids, length, tile, cache, PAGE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_T: tl.constexpr):
    # Ids don't wait for the length: what lies past it is garbage, but it is there.
    at = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(ids + at)
    valid = (at < length) & (slot >= 0)
    page = cache + (slot // PAGE).to(tl.int64) * STRIDE
    # 576 bytes as words of 4: 128 + 16.
    start = tl.multiple_of(page + (slot % PAGE) * 576, 16).to(tl.pointer_type(tl.int32))
    head = tl.load(start[:, None] + tl.arange(0, 128)[None, :], mask=valid[:, None], other=0)
    tail = tl.load(start[:, None] + (128 + tl.arange(0, 16))[None, :], mask=valid[:, None], other=0)
    scales = tl.load((page + PAGE * 576 + (slot % PAGE) * 8).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    return tl.sum(tl.sum(head, axis=1) + tl.sum(tail, axis=1) + (scales ^ (scales >> 32)).to(tl.int32))


@triton.jit
def gather(
    cache,
    indices,
    lengths,
    extra_cache,
    extra_indices,
    extra_lengths,
    out,
    indices_stride,
    extra_indices_stride,
    window_tiles,
    PAGE: tl.constexpr,
    STRIDE: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,
    EXTRA_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (row, tile): the sum of the words of one tile's tokens, so that no load is left out."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tile < window_tiles:
        ids, length = indices + row * indices_stride, tl.load(lengths + row)
        total = _load(ids, length, tile, cache, PAGE, STRIDE, BLOCK_T)
    else:
        ids, length = extra_indices + row * extra_indices_stride, tl.load(extra_lengths + row)
        total = _load(ids, length, tile - window_tiles, extra_cache, EXTRA_PAGE, EXTRA_STRIDE, BLOCK_T)
    tl.store(out + row * tl.num_programs(1) + tile, total)


def prepared(call: MlaDecodeCall) -> tuple[Callable[[], None], torch.Tensor]:
    """A launch and the sums that it leaves, int32 ``[rows, tiles]``; as many tiles as the longest row has."""
    sides = [(call.cache, call.indices, call.lengths.contiguous())]
    if call.extra_cache is not None and call.extra_indices is not None and call.extra_lengths is not None:
        sides.append((call.extra_cache, call.extra_indices, call.extra_lengths.contiguous()))
    tiles = [-(-int(lengths.max()) // _BLOCK_T) for _, _, lengths in sides]
    out = torch.zeros(call.q.shape[0], max(1, sum(tiles)), dtype=torch.int32, device=call.q.device)
    extra_cache, extra_indices, extra_lengths = sides[-1]
    constants = {"BLOCK_T": _BLOCK_T}
    for prefix, (cache, _, _) in (("", sides[0]), ("EXTRA_", sides[-1])):
        constants |= {f"{prefix}PAGE": cache.shape[1], f"{prefix}STRIDE": page_stride(cache.shape[1])}

    def run() -> None:
        gather[out.shape](
            call.cache,
            call.indices,
            sides[0][2],
            extra_cache,
            extra_indices,
            extra_lengths,
            out,
            call.indices.stride(0),
            extra_indices.stride(0),
            tiles[0],
            **constants,
            num_warps=_WARPS,
        )

    return run, out


assert (ROW_BYTES, FOOTER_BYTES) == (576, 8), "the kernel's word counts"
