"""SGLang's own captured call reaches our kernel: its name is in the graph."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving
import sglang_server as server
import torch

from dsv4tune.codegen import devices, ops
from dsv4tune.runtime import kernels, startup, targets

pytestmark = pytest.mark.gpu

#: SGLang's function for each architecture's default indexer.
HOOKED = {9: targets.DEEP_GEMM, 10: targets.DEEP_GEMM, 12: targets.TILELANG}
LENGTHS = tuple(range(0, 768, 97))


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> devices.Device:
    """The op's default config for the card here, as if it had been measured as faster."""
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("TRITON_INTERPRET is set, so nothing can be compiled: run this file without it")
    card = devices.here()
    assert card is not None
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.delenv("DSV4TUNE_TARGET", raising=False)
    op, rows = ops.get("indexer"), len(LENGTHS)
    config = op.default(op.problem(rows, card.silicon), card)
    resources = serving.any_resources()
    serving.write_entry(tmp_path / "tuned.db", rows=rows, card=card, config=dict(config), resources=resources)
    return card


def test_the_real_indexers_graph_holds_our_kernel(
    entry: devices.Device, hooked: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Captured at length 0 after two eager runs, replayed over live lengths; the selection is float64's."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(startup, "Gpu", server.REAL_GPU)
    monkeypatch.setattr(startup, "silicon_here", server.REAL_SILICON)
    major = entry.silicon.arch // 10
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "1" if major == 12 else "0")
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "0")
    monkeypatch.setenv("SGLANG_OPT_USE_JIT_INDEXER_METADATA", "0")  # DeepGEMM's stand-in makes the schedule
    assert HOOKED[major].path in hooked
    server.capture(serving.model_runner(), (len(LENGTHS),))
    assert ("indexer", len(LENGTHS), 64, serving.WIDTH) in kernels.TABLE.ready, caplog.text
    call = serving.indexer_call(LENGTHS)
    names = ("q", "kv", "weights", "seq_lens", "page_table", "logits")
    held = replace(call, **{name: getattr(call, name).cuda() for name in names})
    step = server.indexer_step(held)
    lengths = held.seq_lens.clone()
    held.seq_lens.zero_()
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    held.seq_lens.copy_(lengths)
    torch.cuda.empty_cache()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    assert "kernel" in [event.name for event in seen.events()]
    got = server.slots(out.cpu())
    for row, want in enumerate(server.expected_slots(call)):
        assert len(got[row] & want) >= 0.99 * len(want)


def test_the_real_attention_entry_is_ours_too(hooked: set[str]) -> None:
    """The function that the backend holds, by a partial that it makes at its start, is the hooked one."""
    module: Any = importlib.import_module(targets.FLASH_MLA_SM120.module)
    assert hasattr(module.flash_mla_with_kvcache_sm120, "__wrapped__")
