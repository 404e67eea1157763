"""What a server would run instead of our indexer: thin adapters that call installed kernels as SGLang calls them.

Call shapes were read off SGLang 0.5.23 (srt/layers/attention/dsv4/indexer.py) and its callees' signatures.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.tools.peer import SGLANG, Peer


def _sglang_arguments(call: IndexerCall) -> tuple[Any, Any, Any]:
    """q, kv and weights in the shapes that SGLang passes: its view of a page has a made-up stride of 132."""
    rows, heads, dim = call.q.shape
    return call.q.view(rows, 1, heads, dim), call.kv.view(call.kv.shape[0], 64, 1, dim + 4), call.weights


class DeepGemm(Peer):
    """The default on sm_90 and sm_100. Its schedule is made once a step for all layers, so outside the call."""

    name = "deep_gemm"
    op = "indexer"
    module = "deep_gemm"
    packages = ("sgl-deep-gemm", "deep-gemm")
    install = "pip install --no-deps sgl-deep-gemm==0.1.2 apache-tvm-ffi==0.1.11"
    server = True

    def prepare(self, problem: Any, call: IndexerCall) -> Callable[[], Any]:
        deep_gemm = importlib.import_module("deep_gemm")
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous().view(-1, 1)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, problem.silicon.sm_count)
        logits = deep_gemm.fp8_paged_mqa_logits
        return lambda: logits(q, kv, weights, lens, call.page_table, schedule, call.width, clean_logits=False)


class DeepGemmSchedule(DeepGemm):
    """The same with its schedule made in every call: what it costs where nothing shares a step's schedule."""

    name = "deep_gemm_schedule"
    server = False

    def prepare(self, problem: Any, call: IndexerCall) -> Callable[[], Any]:
        deep_gemm = importlib.import_module("deep_gemm")
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous().view(-1, 1)
        schedule, logits = deep_gemm.get_paged_mqa_logits_metadata, deep_gemm.fp8_paged_mqa_logits
        sms = problem.silicon.sm_count
        return lambda: logits(
            q, kv, weights, lens, call.page_table, schedule(lens, 64, sms), call.width, clean_logits=False
        )


class TileLang(Peer):
    """SGLang's default indexer on sm_120."""

    name = "tilelang"
    op = "indexer"
    module = "sglang.kernels.ops.attention.dsa.tilelang_kernel"
    packages = ("tilelang", "sglang")
    install = f"{SGLANG} (it needs tilelang==0.1.12)"
    server = True

    def prepare(self, problem: Any, call: IndexerCall) -> Callable[[], Any]:
        logits = importlib.import_module(self.module).tilelang_fp8_paged_mqa_logits
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous()
        return lambda: logits(q, kv, weights, lens, call.page_table, None, call.width, False)


class TorchSm120(Peer):
    """SGLang's torch fallback on sm_120: what a server ran before it had a kernel for these cards."""

    name = "torch_sm120"
    op = "indexer"
    module = "sglang.srt.layers.attention.dsv4.indexer"
    packages = ("sglang",)
    install = SGLANG
    slow = True
    function: ClassVar[str] = "fp8_paged_mqa_logits_torch_sm120"

    def prepare(self, problem: Any, call: IndexerCall) -> Callable[[], Any]:
        logits = getattr(importlib.import_module(self.module), self.function)
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous()
        return lambda: logits(q, kv, weights, lens, call.page_table, None, call.width, False)


class Torch(TorchSm120):
    """The torch fallback of the other cards."""

    name = "torch"
    function = "fp8_paged_mqa_logits_torch"
