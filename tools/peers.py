"""Whom a tuned kernel is measured beside, and which of them it must beat on a card."""

from __future__ import annotations

from dsv4tune.codegen.problem import Silicon
from dsv4tune.codegen.words import unknown
from dsv4tune.tools.indexer_peers import DeepGemm, DeepGemmSchedule, TileLang, Torch, TorchSm120
from dsv4tune.tools.mla_decode_peers import FlashInfer, FlashMla, Gather, SglangTorch, SglangTriton
from dsv4tune.tools.peer import Peer

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        *(DeepGemm(), DeepGemmSchedule(), TileLang(), TorchSm120(), Torch()),
        *(FlashMla(), SglangTriton(), SglangTorch(), FlashInfer(), Gather()),
    )
}

#: The kernel that SGLang 0.5.23 runs by default, by op and major capability. It has none of its own for sm_89.
_BASELINES = {
    "indexer": {9: "deep_gemm", 10: "deep_gemm", 12: "tilelang"},
    "mla_decode": {9: "flash_mla", 10: "flash_mla", 12: "flashinfer"},
}


#: Peers that a search reports beside the baseline.
REFERENCES = ("deep_gemm", "tilelang", "torch_sm120", "flash_mla", "sglang_triton")


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
            raise unknown("peer", name, ("all", "none", *known))
    return wanted


def baseline(op: str, silicon: Silicon) -> Peer | None:
    """The peer that a tuned kernel must beat on this silicon, or None where no server kernel is known for it."""
    name = _BASELINES.get(op, {}).get(silicon.arch // 10)
    return None if name is None else PEERS[name]
