"""Both kernels under SGLang's own signatures. A call looks into the table and launches what it finds, or says why not.

Whoever calls these has a way out: where nothing is ready or a tensor is not what the kernels take, they raise before
anything is written.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4tune.codegen.ops.indexer import PREFILL_ROWS
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.ops.mla_decode_call import HEAD_DIM, MlaDecodeCall
from dsv4tune.codegen.problem import Problem
from dsv4tune.runtime.dispatch import Key, Table

#: What this process serves from.
TABLE = Table()


_SCALE = HEAD_DIM**-0.5
#: Arguments of FlashMLA's function that decide nothing for sparse fp8 calls.
_FLASH_MLA = {"block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "is_fp8_kvcache", "use_legacy"}


class NotReadyError(LookupError):
    """No variant is ready for a call of this shape."""


class UnservedCallError(ValueError):
    """A tensor of the call is not what the kernels take."""


def mla_decode_key(rows: int, heads: int, width: int, page: int, extra_width: int, extra_page: int) -> Key:
    return ("mla_decode", rows, heads, (width, page, extra_width, extra_page))


def key_of(problem: Any, width: int, heads: int | None = None) -> Key:
    """Where a problem's calls look; `heads` are those that the call shows, if other than the real ones.

    An indexer's `width` of 0 means prompts, whose tables are as wide as they are long.
    """
    shown = heads or problem.heads
    if problem.op == "indexer":
        return ("indexer", problem.rows, shown, width or None)
    p = problem
    return mla_decode_key(p.rows, shown, p.width, p.page_size, p.extra_width, p.extra_page_size)


def paged_mqa_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: Any,
    max_seq_len: int,
    clean_logits: bool = False,
    *,
    heads: int | None = None,
) -> torch.Tensor:
    """The indexer's logits, fp32 ``[rows, max_seq_len]``; columns at and past a row's length are undefined.

    Args:
        q_fp8: e4m3 ``[rows, 1, heads, 128]``.
        kvcache_fp8: uint8 ``[pages, 64, 1, 132]``: a page's values, then its fp32 scales.
        weight: fp32 ``[rows, heads]``.
        seq_lens: int32 ``[rows]`` or ``[rows, 1]``, in cached entries (one for 4 tokens); 0 allowed.
        page_table: int32 ``[rows, >= max_seq_len / 64]``.
        deep_gemm_metadata: not looked at.
        max_seq_len: columns; the server's configured maximum.
        clean_logits: must be False.
        heads: index heads, 64 unless given; they are never split over ranks.

    Raises:
        NotReadyError: nothing is ready for these rows and columns; call `prepare` first.
        UnservedCallError: a tensor's shape, dtype, stride, device or alignment is not as above.
    """
    rows, _, shown, _ = q_fp8.shape
    variant = TABLE.find(("indexer", rows, heads or shown, max_seq_len))
    if variant is None and rows >= PREFILL_ROWS:
        variant = TABLE.find(("indexer", rows, heads or shown, None))
    if variant is None or max_seq_len > variant.width:
        raise NotReadyError(f"indexer: nothing is ready for {rows} rows of {max_seq_len} columns")
    if clean_logits:
        raise UnservedCallError("indexer: clean_logits=True is not served, and no consumer needs it")
    logits = torch.empty((rows, max_seq_len), dtype=torch.float32, device=q_fp8.device)
    try:
        variant.serve((q_fp8, kvcache_fp8, weight, seq_lens, page_table), None, _indexer_call, logits)
    except ValueError as error:
        raise UnservedCallError(f"indexer: {error}") from error
    return logits


def _indexer_call(tensors: tuple[Any, ...], _: None, logits: torch.Tensor) -> IndexerCall:
    q, kv, weights, lens, table = tensors
    rows = q.shape[0]
    lens = lens if lens.dim() == 1 else _viewed("seq_lens", lens, rows)
    pages = _viewed("kvcache_fp8", kv, kv.shape[0], -1)
    return IndexerCall(_viewed("q_fp8", q, rows, -1, 128), pages, weights, lens, table, logits)


def _viewed(name: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Without a copy, or a ValueError."""
    try:
        return tensor.view(shape)
    except RuntimeError as error:
        raise ValueError(
            f"{name} is {list(tensor.shape)} with strides {tensor.stride()}: no view as {shape}"
        ) from error


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor,
    attn_sink: torch.Tensor,
    head_dim_v: int = HEAD_DIM,
    softmax_scale: float | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    heads: int | None = None,
    **theirs: Any,
) -> tuple[torch.Tensor, None]:
    """Sparse attention over one or two paged fp8 caches: ``(out, None)``, out bf16 ``[rows, 1, heads, 512]``.

    SGLang reads nothing but the first of the two. Outputs of padded heads stay unwritten.

    Args:
        q: bf16 ``[rows, 1, padded heads, 512]``; padded heads may hold anything.
        k_cache: fp8 or uint8 ``[pages, page size, 1, 584]``, the window's tokens.
        indices: int32 ``[rows, 1, width]``: slots in the cache, -1 for none.
        topk_length: int32 ``[rows]``, live indices of each row; 0 allowed.
        attn_sink: fp32 ``[padded heads]``.
        head_dim_v: 512.
        softmax_scale: ``512 ** -0.5`` unless given.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the compressed cache likewise, or all None.
        heads: the real ones; all of q's unless given, or those that `prepare` was told of.
        theirs: further arguments of FlashMLA's function that say nothing here, such as its schedule.

    Raises:
        NotReadyError: nothing is ready for this shape; call `prepare` first.
        UnservedCallError: a tensor's shape, dtype, stride, device or alignment is not as above.
    """
    rows, _, shown, _ = q.shape
    if extra_k_cache is None or extra_indices_in_kvcache is None:
        form = (indices.shape[-1], k_cache.shape[1], 0, 0)
    else:
        form = (indices.shape[-1], k_cache.shape[1], extra_indices_in_kvcache.shape[-1], extra_k_cache.shape[1])
    variant = TABLE.find(("mla_decode", rows, heads or shown, form))
    if variant is None:
        raise NotReadyError(
            f"mla_decode: nothing is ready for {rows} rows of {heads or shown} heads, window {form[0]} in pages of "
            f"{form[1]}, extra {form[2]} in pages of {form[3]}"
        )
    if theirs and not theirs.keys() <= _FLASH_MLA:
        raise UnservedCallError(f"mla_decode: unknown arguments {', '.join(sorted(theirs.keys() - _FLASH_MLA))}")
    if head_dim_v != HEAD_DIM:
        raise UnservedCallError(f"mla_decode: head_dim_v is {head_dim_v}, not {HEAD_DIM}")
    out = torch.empty_like(q)
    tensors = (q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, attn_sink)
    scale = _SCALE if softmax_scale is None else softmax_scale
    try:
        variant.serve(tensors, scale, _mla_decode_call, None, out)
    except ValueError as error:
        raise UnservedCallError(f"mla_decode: {error}") from error
    return out, None


def _mla_decode_call(tensors: tuple[Any, ...], scale: float, _: None, out: torch.Tensor) -> MlaDecodeCall:
    """The field between tensors and output is the scale."""
    q, cache, indices, lengths, extra_cache, extra_indices, extra_lengths, sink = tensors
    for name, needed in (("indices", indices), ("topk_length", lengths), ("attn_sink", sink)):
        if needed is None:
            raise ValueError(f"{name} is missing")
    rows, shown = q.shape[0], q.shape[-2]
    return MlaDecodeCall(
        _viewed("q", q, rows, shown, HEAD_DIM),
        _bytes(cache),
        _viewed("indices", indices, rows, indices.shape[-1]),
        lengths,
        None if extra_cache is None else _bytes(extra_cache),
        None if extra_indices is None else _viewed("extra indices", extra_indices, rows, extra_indices.shape[-1]),
        extra_lengths,
        sink,
        scale,
        _viewed("out", out, rows, shown, HEAD_DIM),
    )


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)


def is_prepared(problem: Problem, width: int) -> bool:
    return TABLE.find(key_of(problem, width)) is not None
