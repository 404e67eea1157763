"""What an MLA decode kernel is tuned for, the tensors of one call, and what must hold of them before a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dsv4tune.codegen.later import torch
from dsv4tune.codegen.models import by_topk
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.words import written

#: Values of a query, key or output of one head: 448 without and 64 with rotary position.
HEAD_DIM, NOPE_DIM, ROPE_DIM = 512, 448, 64
#: Bytes a token takes in a page: e4m3 values, bf16 rotary values; then the page's footer: a UE8M0 scale for 64 values
#: and one byte of padding.
ROW_BYTES, FOOTER_BYTES = 576, 8
TOKEN_BYTES = ROW_BYTES + FOOTER_BYTES

LAYOUTS = ("fp8_ue8m0_bf16_rope",)
#: Compressed caches of the model's layers by their page size; the command line's words.
CACHES = {0: "none", 64: "c4", 2: "c128"}
PAGE_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
MAX_HEADS = 128
#: Bounds of the kernels' 32-bit counts: programs of a grid, and columns.
MAX_ROWS, MAX_WIDTH = 1 << 18, 1 << 20
#: Read or written 16 bytes at a time.
_VECTORS = ("q", "cache", "indices", "out")
#: Slots are int32.
MAX_SLOTS = (1 << 31) - 1


def page_stride(page_size: int) -> int:
    """Bytes from one page to the next: whole rows."""
    return -(-page_size * TOKEN_BYTES // ROW_BYTES) * ROW_BYTES


@dataclass(frozen=True, kw_only=True)
class MlaDecodeProblem(Problem):
    """Sparse MLA attention of one decode step.

    Attributes:
        heads: real query heads of a rank; a call may carry more, which are padding.
        page_size: tokens a page of the window's cache.
        width: columns of its index tensor, the most tokens a row takes from it.
        extra_page_size: tokens a page of the compressed cache; 0 where there is none.
        extra_width: columns of its index tensor; 0 where there is none.
        layout: of a token in both caches.
        lse: also return the log-sum-exp of each row and head.
    """

    op: ClassVar[str] = "mla_decode"
    heads: int
    page_size: int = 256
    width: int = 128
    extra_page_size: int = 64
    extra_width: int = 512
    layout: str = LAYOUTS[0]
    lse: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be 1 to {MAX_ROWS}, not {self.rows}")
        if not 1 <= self.heads <= MAX_HEADS:
            raise ValueError(f"heads must be 1 to {MAX_HEADS}, not {self.heads}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout '{self.layout}': use one of {', '.join(LAYOUTS)}")
        _check_cache("", self.page_size, self.width)
        if self.extra_page_size or self.extra_width:
            _check_cache("extra_", self.extra_page_size, self.extra_width)

    @property
    def kind(self) -> str:
        return f"{self.op}, {self.heads} heads, {self._layers}"

    @property
    def said(self) -> tuple[str, ...]:
        told = ("heads", "extra_page_size", "extra_width", "rows")
        others = (f"{name}={value}" for name, value in self._shape().items() if name not in told)
        return f"{self.heads} heads", self._layers + self._extent, *others

    @property
    def _layers(self) -> str:
        if not self.extra_page_size:
            return "layers without a compressed cache"
        size = self.extra_page_size
        return f"{CACHES[size]} layers" if size in CACHES else f"layers of {size} entries a page"

    @property
    def _extent(self) -> str:
        """What the extra cache's width follows from: the context or the model."""
        cache, width = CACHES.get(self.extra_page_size), self.extra_width
        if cache == "none":
            return ""
        if cache == "c128" and width % 64 == 0:
            # Two columns for 256 tokens, in whole 64s, and SGLang asks for some tokens more than the context: that of
            # 128k has 17 of them, as any other up to 136k.
            tokens = (width // 64 - 1) * 8192
            return f" at a context of about {written(tokens)}" if tokens else " at a context below 8k"
        model = by_topk(width) if cache == "c4" else None
        return f" of {model.title}" if model is not None else f" with {width} columns"


@dataclass(frozen=True)
class MlaDecodeCall:
    """One call, as SGLang makes it (without its dimension of one query token a row).

    Attributes:
        q: bf16 ``[rows, padded_heads, 512]``, contiguous; padded heads may hold NaN.
        cache: uint8 ``[pages, page_size, 1, 584]``, a view whose page stride is `page_stride` bytes.
        indices: int32 ``[rows, width]``, any row stride of a multiple of 16; token slots, -1 for none, garbage past the
            row's length.
        lengths: int32 ``[rows]``, any stride; 0 allowed.
        extra_cache, extra_indices, extra_lengths: likewise for the compressed cache, or all None.
        sink: fp32 ``[padded_heads]``; joins the softmax's denominator only.
        scale: of the scores.
        out: bf16 ``[rows, padded_heads, 512]``, contiguous; only real heads are written.
        lse: fp32 ``[rows, padded_heads]``, natural logarithm, without the sink; None unless asked for.
        guard: what lies around the output; a check made it and sees that it stays.
    """

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    extra_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_lengths: torch.Tensor | None
    sink: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor | None = None
    guard: torch.Tensor | None = None

    @property
    def padded_heads(self) -> int:
        return self.q.shape[1]

    def validate(self, problem: MlaDecodeProblem) -> None:
        """Refuse what the kernel would misread; metadata only, so it may run under capture.

        Raises:
            ValueError: naming the tensor and what it should be.
        """
        rows, padded = problem.rows, self.q.shape[1] if self.q.dim() == 3 else problem.heads
        if padded < problem.heads:
            raise ValueError(f"q has {padded} heads, fewer than the {problem.heads} that are real")
        for name, tensor in (("q", self.q), ("out", self.out)):
            self._expect(name, tensor, torch.bfloat16, (rows, padded, HEAD_DIM), contiguous=True)
        self._expect("sink", self.sink, torch.float32, (padded,), contiguous=True)
        if (self.lse is not None) != problem.lse:
            raise ValueError(f"lse is {'missing' if problem.lse else 'given'}: the problem says lse={problem.lse}")
        if self.lse is not None:
            self._expect("lse", self.lse, torch.float32, (rows, padded), contiguous=True)
        self._expect_cache("", self.cache, self.indices, self.lengths, rows, problem.page_size, problem.width)
        extra = (self.extra_cache, self.extra_indices, self.extra_lengths)
        if problem.extra_width:
            self._expect_cache("extra_", *extra, rows, problem.extra_page_size, problem.extra_width)
        elif any(tensor is not None for tensor in extra):
            raise ValueError("the call has an extra cache, the problem has none")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}: it must be above 0 and finite")

    def _expect_cache(
        self,
        prefix: str,
        cache: torch.Tensor | None,
        indices: torch.Tensor | None,
        lengths: torch.Tensor | None,
        rows: int,
        page_size: int,
        width: int,
    ) -> None:
        if cache is None or indices is None or lengths is None:
            raise ValueError(f"{prefix}cache, {prefix}indices and {prefix}lengths belong together: some are missing")
        name, pages = f"{prefix}cache", cache.shape[0] if cache.dim() else 0
        self._expect(name, cache, torch.uint8, (pages, page_size, 1, TOKEN_BYTES))
        if pages < 1:
            raise ValueError(f"{name} has no pages")
        if pages * page_size > MAX_SLOTS:
            raise ValueError(f"{name} has {pages * page_size} slots: int32 indices reach {MAX_SLOTS}")
        strides = (page_stride(page_size), TOKEN_BYTES, cache.stride(2), 1)  # of a dimension of 1: anything
        if cache.stride() != strides:
            raise ValueError(
                f"{name} has strides {tuple(cache.stride())}: pages of {page_size} lie {strides[0]} bytes apart, "
                f"their tokens {TOKEN_BYTES}"
            )
        name = f"{prefix}indices"
        self._expect(name, indices, torch.int32, (rows, width))
        if indices.stride(1) != 1 or (rows > 1 and indices.stride(0) % 16):
            raise ValueError(
                f"{name} has strides {indices.stride()}: columns must be adjacent, rows a multiple of 16 apart"
            )
        # Any stride: a slice of a larger tensor.
        self._expect(f"{prefix}lengths", lengths, torch.int32, (rows,))

    def _expect(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], contiguous: bool = False
    ) -> None:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}, expected {dtype}{list(shape)}")
        if tensor.device != self.q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {self.q.device}")
        if contiguous and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")
        # Allocations are aligned, so the offset into them tells; an address can't be asked for under FakeTensorMode.
        if name.removeprefix("extra_") in _VECTORS and tensor.storage_offset() * tensor.element_size() % 16:
            raise ValueError(f"{name} starts {tensor.storage_offset()} elements into its memory: not 16-byte aligned")


def _check_cache(prefix: str, page_size: int, width: int) -> None:
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{prefix}page_size={page_size}: pages hold {', '.join(map(str, PAGE_SIZES))} tokens")
    if not 64 <= width <= MAX_WIDTH or width % 64:
        raise ValueError(f"{prefix}width={width}: it must be a multiple of 64, 64 to {MAX_WIDTH}")
