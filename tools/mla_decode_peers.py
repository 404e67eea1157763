"""What a server would run instead of our MLA decode: thin adapters that call installed kernels as SGLang calls them.

Call shapes were read off SGLang 0.5.23 (srt/layers/attention/deepseek_v4_backend.py and
kernels/ops/attention/flash_mla_sm120.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from dsv4tune.codegen.compile import first_line
from dsv4tune.codegen.ops.mla_decode_call import HEAD_DIM, MlaDecodeCall
from dsv4tune.tools.peer import SGLANG, Peer

#: FlashMLA and FlashInfer's decode serve these head counts; SGLang pads to the first that holds the rank's.
_PADDED = (64, 128)
#: Rows up to which SGLang takes FlashInfer's decode path on sm_120, padded where that lacks the head count.
_SM120_DECODE_ROWS = 64


def _padded(heads: int) -> int:
    return next(n for n in _PADDED if n >= heads)


def _mla_arguments(call: MlaDecodeCall, real: int, heads: int) -> dict[str, Any]:
    """SGLang's keywords for both FlashMLA and the sm_120 entry: one query token a row, `heads` heads of which `real`
    are real. Padded queries are left as they are in a server, where they hold what the memory held; zeros here."""
    rows = call.q.shape[0]
    q = call.q.new_zeros(rows, 1, heads, HEAD_DIM)
    q[:, 0, :real] = call.q[:, :real]
    sink = call.sink.new_zeros(heads)
    sink[:real] = call.sink[:real]
    extra_indices = None if call.extra_indices is None else call.extra_indices.contiguous()[:, None]
    return {
        "q": q,
        "k_cache": call.cache,
        "head_dim_v": HEAD_DIM,
        "softmax_scale": call.scale,
        "indices": call.indices.contiguous()[:, None],
        "topk_length": call.lengths.contiguous(),
        "attn_sink": sink,
        "extra_k_cache": call.extra_cache,
        "extra_indices_in_kvcache": extra_indices,
        "extra_topk_length": None if call.extra_lengths is None else call.extra_lengths.contiguous(),
    }


class FlashMla(Peer):
    """The default on sm_90 and sm_100, padded to 64 or 128 heads outside the call, as the server's queries are. Its
    schedule is made by the first call and kept, as a server keeps it for the layers of a step."""

    name = "flash_mla"
    op = "mla_decode"
    module = "flash_mla"
    packages = ("sgl-flash-mla",)
    install = "pip install --no-deps sgl-flash-mla==1.0.0"
    server = True

    def prepare(self, problem: Any, call: MlaDecodeCall) -> Callable[[], Any]:
        flash_mla = importlib.import_module(self.module)
        heads = problem.heads
        arguments = {
            **_mla_arguments(call, heads, _padded(heads)),
            "block_table": None,
            "cache_seqlens": None,
            "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
            "is_fp8_kvcache": True,
            # sm_90 and the 584-byte layout; what SGLang passes for it.
            "use_legacy": True,
        }
        return lambda: flash_mla.flash_mla_with_kvcache(**arguments)[0][:, 0, :heads]


class _Sm120Peer(Peer):
    """One of the three functions behind SGLang's entry for sm_120, which its environment chooses from."""

    op = "mla_decode"
    module = "sglang.kernels.ops.attention.flash_mla_sm120"
    packages: ClassVar[tuple[str, ...]] = ("sglang",)
    install = SGLANG
    slow = True

    def _positional(self, call: MlaDecodeCall, real: int, heads: int) -> tuple[Any, ...]:
        a = _mla_arguments(call, real, heads)
        extra = (a["extra_k_cache"], a["extra_indices_in_kvcache"], a["extra_topk_length"])
        first = (a["q"], a["k_cache"], a["indices"], a["topk_length"], a["attn_sink"])
        return (*first, a["head_dim_v"], a["softmax_scale"], *extra)


class SglangTriton(_Sm120Peer):
    """SGLang's Triton v2 with the real heads. A server passes it 64 up to 64 rows, for which it takes 8 times as long
    as for 8; it goes through the whole width, whatever is live."""

    name = "sglang_triton"
    module = "sglang.kernels.ops.attention.flash_mla_sm120_triton"

    def prepare(self, problem: Any, call: MlaDecodeCall) -> Callable[[], Any]:
        run = importlib.import_module(self.module).flash_mla_sparse_decode_triton
        heads = problem.heads
        arguments = self._positional(call, heads, heads)
        return lambda: run(*arguments)[0][:, 0]


class SglangTorch(_Sm120Peer):
    """SGLang's torch fallback on sm_120, with the real heads."""

    name = "sglang_torch"

    def prepare(self, problem: Any, call: MlaDecodeCall) -> Callable[[], Any]:
        run = importlib.import_module(self.module)._sm120_sparse_decode_fwd
        heads = problem.heads
        arguments = self._positional(call, heads, heads)
        return lambda: run(*arguments)[0][:, 0]


class FlashInfer(_Sm120Peer):
    """SGLang's default on sm_120: FlashInfer's sparse MLA, and before it the copy of every touched 256-token page to
    pages of 64, which is part of each call."""

    name = "flashinfer"
    packages = ("flashinfer-python", "sglang")
    install = f"{SGLANG} (it needs flashinfer-python==0.7.2)"
    slow = False
    server = True

    def missing(self) -> str | None:
        found = super().missing()
        if found is not None:
            return found
        try:
            importlib.import_module("flashinfer.mla._sparse_mla_sm120")
        except Exception as error:
            return first_line(error)
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 12:
            return "FlashInfer's sparse MLA needs sm_120 or sm_121"
        return None

    def prepare(self, problem: Any, call: MlaDecodeCall) -> Callable[[], Any]:
        module = importlib.import_module(self.module)
        heads, rows = problem.heads, call.q.shape[0]
        decode = rows <= _SM120_DECODE_ROWS
        native = not decode or module.flashinfer_dsv4_decode_supports_num_heads(heads, rows)
        run = module._flash_mla_flashinfer if decode else module._flash_mla_sm120_prefill
        arguments = self._positional(call, heads, heads if native else _padded(heads))
        return lambda: run(*arguments)[0][:, 0, :heads]


class Gather(Peer):
    """Ours, and no peer: loads the tokens' bytes and does nothing with them, which no kernel undercuts."""

    name = "gather"
    op = "mla_decode"
    module = "dsv4tune.tools.gather"
    packages = ("triton",)
    install = "pip install triton"
    #: Nothing to judge: it returns no output.
    computes = False

    def prepare(self, problem: Any, call: MlaDecodeCall) -> Callable[[], Any]:
        return importlib.import_module(self.module).prepared(call)[0]  # type: ignore[no-any-return]
