"""A server of SGLang's real modules on a CPU: fake pools and model runner, our kernels through Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes import RESOURCES, make_trial

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Silicon
from dsv4tune.runtime import startup
from dsv4tune.runtime.compilers import Job, Outcome
from dsv4tune.tools.interpreter import interpreted
from dsv4tune.tuned.records import Baseline
from dsv4tune.tuned.store import Store

CARD = DEVICES["rtx-pro-6000"]
ROWS = 3
PAGES = 12  # of the table; more entries than the top-k takes
WIDTH = PAGES * 64
TOP_K = 512


class Interpreter:
    """In the place of a GPU: compiles nothing, runs rendered kernels in the interpreter."""

    device = "cpu"

    def __init__(self, processes: int = 0) -> None:
        self.launched: list[str] = []

    def compile(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        return {job.source.sha: Report(**RESOURCES.model_dump()) for job in jobs}

    def launchers(self, job: Job) -> Mapping[str, Any]:
        return interpreted(job.source.load())


def pretend_gpu() -> None:
    """For the rest of this process."""

    def silicon() -> Silicon:
        return CARD.silicon

    startup.Gpu = Interpreter  # type: ignore[misc, assignment]
    startup.silicon_here = silicon


def write_database(path: Path, rows: int = ROWS, **changes: Any) -> None:
    """One measured entry for the indexer, faster than SGLang's kernel."""
    op = ops.get("indexer")
    problem = op.problem(rows, CARD.silicon)
    baseline = Baseline(name="tilelang", version="tilelang 0.1.12", times_us={128: 4.0, 262_208: 1500.0})
    values = {
        "provenance": "measured",
        "score": 0.9,
        "yardstick": "tilelang",
        "baseline": baseline,
        "checked_by": "gpu",
        **changes,
    }
    Store(path).add(make_trial(op.default(problem, CARD), rows=rows, **values))


class Layer(torch.nn.Module):
    tp_q_head_num, qk_head_dim = 8, 512


def model_runner() -> Any:
    """What a runner of SGLang 0.5.23 knows before it captures."""
    config = SimpleNamespace(model_type="deepseek_v4", compress_ratios=[0, 4, 128], index_topk=TOP_K)
    return SimpleNamespace(
        model=torch.nn.Sequential(Layer()),
        model_config=SimpleNamespace(hf_text_config=config),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(1, PAGES * 256)),
        token_to_kv_pool=SimpleNamespace(get_swa_key_bytes_per_token=lambda: 584, get_swa_key_page_size=lambda: 256),
        server_args=SimpleNamespace(chunked_prefill_size=-1),
        decode_num_tokens_per_req=lambda: 1,
        is_draft_worker=False,
    )


def capture(runner: Any, sizes: Sequence[int] = (ROWS,)) -> None:
    """SGLang's real `init_cuda_graphs`, hooked as it is by now, which captures nothing here."""
    from sglang.srt.model_executor import model_runner as module

    moe = SimpleNamespace(is_ep_scale_joiner=False)
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=list(sizes))))
    part = SimpleNamespace(runner=None)
    captured = SimpleNamespace(eager_runner=None, prefill=part, decode=part, memory_usage=None, time_usage=None)
    kept = {name: getattr(module, name) for name in ("get_exec", "capture_cuda_graphs", "prebuild_deepep_v2_buffer")}
    module.get_exec = lambda: SimpleNamespace(moe=moe, graph=graph)
    module.capture_cuda_graphs = lambda **_: captured
    module.prebuild_deepep_v2_buffer = lambda **_: None
    base: Any = importlib.import_module("sglang.srt.model_executor.runner.base_cuda_graph_runner")
    kept_sizes = base.get_batch_sizes_to_capture
    base.get_batch_sizes_to_capture = lambda *_: (list(sizes), [])
    try:
        module.ModelRunner.init_cuda_graphs(runner)
    finally:
        base.get_batch_sizes_to_capture = kept_sizes
        for name, value in kept.items():
            setattr(module, name, value)


def indexer_call(lengths: Sequence[int] = (700, 600, 0), seed: int = 0) -> IndexerCall:
    """Random tensors in the layout of SGLang's pool."""
    problem = ops.get("indexer").problem(len(lengths), CARD.silicon)
    pool = indexer_check.random_pool(problem, 4 * PAGES, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(4 * PAGES, generator=generator)[:PAGES] for _ in lengths]).to(torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    logits = torch.empty(len(lengths), WIDTH)
    return indexer_check._call(problem, pool, lens, table, logits, None, generator)


def forward_c4_indexer(call: IndexerCall) -> torch.Tensor:
    """SGLang's real function over fake pools; the slots that it selects, int32 ``[rows, 512]``."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows = call.q.shape[0]

    class Backend(C4IndexerBackendMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dsa_topk_backend = DSATopKBackend.TORCH
            self.hisparse_coordinator = None
            self.token_to_kv_pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: call.kv)
            self.forward_metadata = SimpleNamespace(
                indexer_metadata=PagedIndexerMetadata(256, 64, call.page_table, call.seq_lens, use_topk_v2=False),
                core_metadata=SimpleNamespace(
                    positions=torch.arange(rows),
                    c4_sparse_page_indices=torch.full((rows, TOP_K), -1, dtype=torch.int32),
                    c4_sparse_raw_indices=None,
                ),
            )

        def _forward_prepare_normal(self, **_: Any) -> Any:
            return call.q, call.weights[:, :, None]

    backend = Backend()
    layer = SimpleNamespace(use_fp4_indexer=False, layer_id=0, index_topk=TOP_K)
    x = torch.empty(rows, 1)
    backend.forward_c4_indexer(x, x, layer, SimpleNamespace(forward_mode=ForwardMode.DECODE))
    selected: torch.Tensor = backend.forward_metadata.core_metadata.c4_sparse_page_indices
    return selected


def expected_slots(call: IndexerCall) -> list[set[int]]:
    """Slots of the 512 best scores of each row, by the float64 reference."""
    problem = ops.get("indexer").problem(call.q.shape[0], CARD.silicon)
    found = []
    for row, length in enumerate(call.seq_lens.tolist()):
        best = torch.arange(length)
        if length > TOP_K:
            best = indexer_check.reference(problem, call, row, length)[0].topk(TOP_K).indices
        found.append({int(call.page_table[row, t // 64]) * 64 + t % 64 for t in best.tolist()})
    return found


def slots(selected: torch.Tensor) -> list[set[int]]:
    return [{slot for slot in row if slot >= 0} for row in selected.tolist()]
