"""The tensors of one indexer call, and what must hold of them before a kernel sees their addresses."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4tune.codegen.later import torch

#: Read or written 16 bytes at a time.
_VECTORS = ("q", "kv", "weights", "logits")


@dataclass(frozen=True)
class IndexerCall:
    """One call, as SGLang makes it.

    Attributes:
        q: e4m3 ``[rows, heads, head_dim]``, contiguous.
        kv: uint8 ``[pages, page_bytes]``, contiguous.
        weights: fp32 ``[rows, heads]``, contiguous.
        seq_lens: int32 ``[rows]``, any stride.
        page_table: int32 ``[rows, >= width / page_size]``, any row stride.
        logits: fp32 ``[rows, width]``, column stride 1; the output.
        guard: what lies around the output; a check made it and sees that it stays.
    """

    q: torch.Tensor
    kv: torch.Tensor
    weights: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    logits: torch.Tensor
    guard: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    def validate(self, heads: int, head_dim: int, page_size: int, page_bytes: int) -> None:
        """Refuse what the kernel would misread; metadata only, so it may run under capture.

        Raises:
            ValueError: naming the tensor and what it should be.
        """
        rows = self.q.shape[0]
        width = self.width
        _expect("q", self.q, torch.float8_e4m3fn, (rows, heads, head_dim), contiguous=True)
        _expect("kv", self.kv, torch.uint8, (self.kv.shape[0], page_bytes), contiguous=True)
        _expect("weights", self.weights, torch.float32, (rows, heads), contiguous=True)
        _expect("seq_lens", self.seq_lens, torch.int32, (rows,))
        _expect("page_table", self.page_table, torch.int32, (rows, self.page_table.shape[-1]))
        _expect("logits", self.logits, torch.float32, (rows, width))
        for name in ("kv", "weights", "seq_lens", "page_table", "logits"):
            if getattr(self, name).device != self.q.device:
                raise ValueError(f"{name} is on {getattr(self, name).device}, q on {self.q.device}")
        if width % page_size or width > self.page_table.shape[1] * page_size:
            raise ValueError(
                f"width {width} must be whole pages of {page_size} that the table's {self.page_table.shape[1]} "
                "columns cover"
            )
        if self.page_table.stride(1) != 1 or self.logits.stride(1) != 1:
            raise ValueError("page_table and logits need column stride 1")
        if self.logits.stride(0) % 16:
            raise ValueError(f"logits row stride {self.logits.stride(0)} must be a multiple of 16")
        if self.kv.shape[0] < 1:
            raise ValueError("kv has no pages")


def _expect(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], contiguous: bool = False
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}, expected {dtype}{list(shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")
    # Allocations are aligned, so the offset into them tells; an address can't be asked for under FakeTensorMode.
    if name in _VECTORS and tensor.storage_offset() * tensor.element_size() % 16:
        raise ValueError(f"{name} starts {tensor.storage_offset()} elements into its memory: not 16-byte aligned")
