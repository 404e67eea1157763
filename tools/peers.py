"""What a server would run instead: thin adapters that call other people's installed kernels as SGLang calls them.

Call shapes were read off SGLang 0.5.23 (srt/layers/attention/dsv4/indexer.py) and its callees' signatures.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar

from dsv4tune.codegen.compile import first_line
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Problem, Silicon

_SGLANG = "pip install --no-deps sglang==0.5.23 (and what its modules import)"


class Peer(ABC):
    """One kernel that is not ours.

    Attributes:
        name: its word in results.
        op: the op that it computes.
        module: what importing it takes.
        packages: whose versions are stored with its figures, by preference.
        install: one line for who hasn't got it.
        slow: works through the whole configured width; timed by single launches.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    module: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    slow: ClassVar[bool] = False

    def missing(self) -> str | None:
        """Why it can't be called here, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # other people's imports fail in every way
            return first_line(error)
        return None

    def version(self) -> str:
        found = []
        for package in self.packages:
            try:
                found.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                continue
        return ", ".join(found) or "unknown"

    @abstractmethod
    def prepare(self, problem: Problem, call: Any) -> Callable[[], Any]:
        """A function that may be captured and returns the output; what a server does once a step is done here."""


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

    def prepare(self, problem: Problem, call: IndexerCall) -> Callable[[], Any]:
        deep_gemm = importlib.import_module("deep_gemm")
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous().view(-1, 1)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, problem.silicon.sm_count)
        logits = deep_gemm.fp8_paged_mqa_logits
        return lambda: logits(q, kv, weights, lens, call.page_table, schedule, call.width, clean_logits=False)


class DeepGemmSchedule(DeepGemm):
    """The same with its schedule made in every call: what it costs where nothing shares a step's schedule."""

    name = "deep_gemm_schedule"

    def prepare(self, problem: Problem, call: IndexerCall) -> Callable[[], Any]:
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
    install = f"pip install tilelang==0.1.12; {_SGLANG}"

    def prepare(self, problem: Problem, call: IndexerCall) -> Callable[[], Any]:
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
    install = _SGLANG
    slow = True
    function: ClassVar[str] = "fp8_paged_mqa_logits_torch_sm120"

    def prepare(self, problem: Problem, call: IndexerCall) -> Callable[[], Any]:
        logits = getattr(importlib.import_module(self.module), self.function)
        q, kv, weights = _sglang_arguments(call)
        lens = call.seq_lens.contiguous()
        return lambda: logits(q, kv, weights, lens, call.page_table, None, call.width, False)


class Torch(TorchSm120):
    """The torch fallback of the other cards."""

    name = "torch"
    function = "fp8_paged_mqa_logits_torch"


PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (DeepGemm(), DeepGemmSchedule(), TileLang(), TorchSm120(), Torch())
}

#: The kernel that SGLang 0.5.23 runs by default, by op and major capability. It has none of its own for sm_89.
_BASELINES = {"indexer": {9: "deep_gemm", 10: "deep_gemm", 12: "tilelang"}}


#: Peers that a search reports beside the baseline.
REFERENCES = ("deep_gemm", "tilelang", "torch_sm120")


def named(op: str, words: str) -> list[str]:
    """The op's peers that ``--peers`` names: all, none, or a list.

    Raises:
        ValueError: a name that is no peer of this op.
    """
    known = [name for name, peer in PEERS.items() if peer.op == op]
    if words in ("all", "none"):
        return known if words == "all" else []
    wanted = words.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown peer '{name}': use all, none or some of {', '.join(known)}")
    return wanted


def baseline(op: str, silicon: Silicon) -> Peer | None:
    """The peer that a tuned kernel must beat on this silicon, or None where no server kernel is known for it."""
    name = _BASELINES[op].get(silicon.arch // 10)
    return None if name is None else PEERS[name]
