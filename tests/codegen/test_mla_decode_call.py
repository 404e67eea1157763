"""What an MLA decode problem and call may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4tune.codegen import devices
from dsv4tune.codegen.models import PRO
from dsv4tune.codegen.ops.mla_decode import MlaDecode
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeCall, MlaDecodeProblem, page_stride
from dsv4tune.codegen.words import written

SILICON = devices.DEVICES["h200"].silicon
BF16, I32 = torch.bfloat16, torch.int32


def problem_of(rows: int = 3, **options: Any) -> MlaDecodeProblem:
    return MlaDecodeProblem(**{"rows": rows, "heads": 8, "silicon": SILICON, **options})


def cache_of(page_size: int, pages: int = 5, device: str = "cpu") -> torch.Tensor:
    """The view that SGLang passes of its pool."""
    pool = torch.empty(pages, page_stride(page_size), dtype=torch.uint8, device=device)
    return pool[:, : page_size * 584].view(pages, page_size, 1, 584)


def call_of(problem: MlaDecodeProblem, padded: int | None = None, device: str = "cpu") -> MlaDecodeCall:
    rows, padded = problem.rows, padded or problem.heads
    extra: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    if problem.extra_width:
        extra = (
            cache_of(problem.extra_page_size, device=device),
            torch.empty(rows, problem.extra_width, dtype=I32, device=device),
            torch.empty(rows, dtype=I32, device=device),
        )
    return MlaDecodeCall(
        torch.empty(rows, padded, 512, dtype=BF16, device=device),
        cache_of(problem.page_size, device=device),
        torch.empty(rows, problem.width, dtype=I32, device=device),
        torch.empty(rows, dtype=I32, device=device),
        *extra,
        sink=torch.empty(padded, device=device),
        scale=512**-0.5,
        out=torch.empty(rows, padded, 512, dtype=BF16, device=device),
        lse=torch.empty(rows, padded, device=device) if problem.lse else None,
    )


def test_page_strides_are_the_contracts() -> None:
    assert [page_stride(n) for n in (2, 64, 256)] == [1_728, 37_440, 149_760]


@pytest.mark.parametrize("context", [1 << 20, 1 << 17, 196_608, 1 << 13])
@pytest.mark.parametrize("drafts", [0, 4])
def test_the_width_of_a_c128_cache_says_for_which_context_it_is(context: int, drafts: int) -> None:
    problem = problem_of(extra_page_size=2, extra_width=MlaDecode().width(context, drafts))
    assert problem.said[:2] == ("8 heads", f"c128 layers at a context of about {written(context)}")
    # Others of these 8k have that width too.
    assert MlaDecode().width(context + 8000, drafts) == problem.extra_width


def test_what_the_words_for_a_call_follow_from() -> None:
    assert problem_of(extra_page_size=2, extra_width=64).said[1] == "c128 layers at a context below 8k"
    assert problem_of(extra_width=PRO.topk).said[1] == "c4 layers of DeepSeek-V4-Pro"
    assert problem_of(extra_page_size=32, extra_width=512).said[1] == "layers of 32 entries a page with 512 columns"
    assert problem_of(heads=16, extra_page_size=0, extra_width=0).kind == (
        "mla_decode, 16 heads, layers without a compressed cache"
    )
    assert "lse=True" in problem_of(lse=True).said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be 1 to"),
        ({"rows": 1 << 20}, "rows must be 1 to"),
        ({"heads": 0}, "heads must be 1 to 128, not 0"),
        ({"heads": 129}, "heads must be 1 to 128, not 129"),
        ({"layout": "v41"}, "unknown layout 'v41': use one of fp8_ue8m0_bf16_rope"),
        ({"page_size": 1}, "page_size=1: pages hold 2, 4"),
        ({"page_size": 48}, "page_size=48"),
        ({"page_size": 512}, "page_size=512"),
        ({"width": 0}, "width=0: it must be a multiple of 64"),
        ({"width": 100}, "width=100"),
        ({"extra_width": 8194}, "extra_width=8194"),
        ({"extra_width": 0}, "extra_width=0"),
        ({"extra_page_size": 0}, "extra_page_size=0"),
        ({"extra_page_size": 3}, "extra_page_size=3"),
    ],
)
def test_a_problem_that_is_not_served_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem_of(**options)


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [2, 32, 64, 128, 256])
def test_problems_of_the_contract_are_served(heads: int, page_size: int) -> None:
    problem = problem_of(16_384, heads=heads, page_size=page_size, extra_page_size=page_size, extra_width=1152)
    assert f"heads={heads}" in problem.key and "sm_90" in problem.key
    problem_of(heads=heads, width=192, extra_width=0, extra_page_size=0)


# Without values: whatever would ask for one fails.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "problem",
    [
        problem_of(),
        problem_of(lse=True, extra_page_size=2, extra_width=8256),
        problem_of(1, extra_page_size=0, extra_width=0),
    ],
    ids=lambda p: p.label,
)
def test_a_call_of_sglang_is_taken(problem: MlaDecodeProblem, device: str) -> None:
    for padded in (8, 64):
        call = call_of(problem, padded, device)
        call.validate(problem)
        assert call.padded_heads == padded
        # Any stride of lengths, and rows of a larger tensor of indices.
        wide = torch.empty(problem.rows, problem.width + 16, dtype=I32, device=device)
        lengths = torch.empty(problem.rows, 2, dtype=I32, device=device)[:, 0]
        replace(call, indices=wide[:, : problem.width], lengths=lengths).validate(problem)


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same shape and strides, `by` elements into its memory."""
    memory = torch.empty(tensor.untyped_storage().nbytes() + 64, dtype=torch.uint8).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), by)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"q": c.q.float()}, r"q is torch.float32"),
        (lambda c: {"q": c.q[:2]}, r"q is .*\[2, 8, 512\], expected .*\[3, 8, 512\]"),
        (lambda c: {"q": c.q[:, None]}, r"q is .*\[3, 1, 8, 512\]"),
        (lambda c: {"q": c.q[..., :448]}, r"q is .*\[3, 8, 448\]"),
        (lambda c: {"q": c.q[:, :4]}, "q has 4 heads, fewer than the 8 that are real"),
        (lambda c: {"q": torch.empty(3, 64, 512, dtype=BF16)[:, :8]}, "q has strides"),
        (lambda c: {"q": shifted(c.q, 4)}, "q starts 4 elements .* not 16-byte aligned"),
        (lambda c: {"out": torch.empty(3, 64, 512, dtype=BF16)}, r"out is .*expected .*\[3, 8, 512\]"),
        (lambda c: {"out": c.out.transpose(0, 1).contiguous().transpose(0, 1)}, "out has strides"),
        (lambda c: {"out": c.out.half()}, "out is torch.float16"),
        (lambda c: {"out": shifted(c.out, 1)}, "out starts 1"),
        (lambda c: {"out": c.out.to("meta")}, "out is on meta, q on cpu"),
        (lambda c: {"sink": c.sink.bfloat16()}, "sink is torch.bfloat16"),
        (lambda c: {"sink": torch.empty(64)}, r"sink is .*\[64\], expected .*\[8\]"),
        (lambda c: {"sink": torch.empty(16)[::2]}, "sink has strides"),
        (lambda c: {"lse": torch.empty(3, 8)}, "lse is given"),
        (lambda c: {"cache": c.cache.view(torch.float8_e4m3fn)}, "cache is torch.float8_e4m3fn"),
        (lambda c: {"cache": c.extra_cache}, r"cache is .*\[5, 64, 1, 584\], expected .*\[5, 256, 1, 584\]"),
        (lambda c: {"cache": c.cache[..., :528]}, "cache is"),
        (lambda c: {"cache": c.cache[:0]}, "cache has no pages"),
        (lambda c: {"cache": c.cache.contiguous()}, r"cache has strides .* lie 149760 bytes apart"),
        (lambda c: {"cache": c.cache.expand(5, 256, 1, 584)[::2]}, "cache has strides"),
        (lambda c: {"cache": c.cache[:1].expand(9_000_000, 256, 1, 584)}, "2304000000 slots: int32 indices reach"),
        (lambda c: {"cache": shifted(c.cache, 8)}, "cache starts 8"),
        (lambda c: {"extra_cache": cache_of(2)}, r"extra_cache is .*\[5, 2, 1, 584\]"),
        (lambda c: {"indices": c.indices.long()}, "indices is torch.int64"),
        (lambda c: {"indices": c.indices[:, None]}, r"indices is .*\[3, 1, 128\]"),
        (lambda c: {"indices": c.indices[:, :64]}, r"indices is .*\[3, 64\]"),
        (lambda c: {"indices": c.indices.T.contiguous().T}, "indices has strides .* columns must be adjacent"),
        (lambda c: {"indices": torch.empty(3, 130, dtype=I32)[:, :128]}, "a multiple of 16 apart"),
        (lambda c: {"indices": torch.empty(3, 160, dtype=I32)[:, 1:129]}, "indices starts 1 elements"),
        (lambda c: {"extra_indices": torch.empty(3, 576, dtype=I32)[:, 2:514]}, "extra_indices starts 2"),
        (lambda c: {"extra_indices": c.extra_indices[:2]}, r"extra_indices is .*\[2, 512\]"),
        (lambda c: {"lengths": c.lengths[:, None]}, r"lengths is .*\[3, 1\], expected .*\[3\]"),
        (lambda c: {"lengths": c.lengths.long()}, "lengths is torch.int64"),
        (lambda c: {"extra_lengths": c.extra_lengths.float()}, "extra_lengths is torch.float32"),
        (lambda c: {"extra_lengths": None}, "belong together"),
        (lambda c: {"extra_cache": None, "extra_indices": None, "extra_lengths": None}, "belong together"),
        (lambda c: {"scale": float("nan")}, "scale is nan"),
        (lambda c: {"scale": 0.0}, r"scale is 0.0"),
        (lambda c: {"scale": -1.0}, r"scale is -1.0"),
    ],
)
def test_a_call_that_would_be_misread_is_refused(change: Any, message: str) -> None:
    problem = problem_of()
    call = call_of(problem)
    with pytest.raises(ValueError, match=message):
        replace(call, **change(call)).validate(problem)


def test_what_the_problem_has_and_the_call_has_not() -> None:
    with pytest.raises(ValueError, match="lse is missing"):
        replace(call_of(problem_of(lse=True)), lse=None).validate(problem_of(lse=True))
    alone = problem_of(extra_page_size=0, extra_width=0)
    with pytest.raises(ValueError, match="the call has an extra cache, the problem has none"):
        call_of(problem_of()).validate(alone)
