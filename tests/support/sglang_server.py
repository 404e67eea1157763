"""A server of SGLang's real modules on a CPU: fake pools and model runner, our kernels through Triton's interpreter."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import serving
import torch
from serving import CARD, ROWS

from dsv4tune.codegen import ops
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Silicon
from dsv4tune.runtime import startup, targets
from dsv4tune.runtime.compilers import Job
from dsv4tune.tools.interpreter import interpreted

TOP_K = 512
LENGTHS = (700, 600, 0)


class Interpreter(serving.FakeMachine):
    """In the place of a GPU: compiles nothing, runs rendered kernels in the interpreter and counts their launches."""

    launches = 0

    def __init__(self, processes: int = 0) -> None:
        super().__init__()

    def launchers(self, job: Job) -> Mapping[str, Any]:
        def counted(kernel: Any) -> Any:
            def launcher(grid: tuple[int, int, int]) -> Any:
                run = kernel[grid]

                def launch(*arguments: Any) -> None:
                    Interpreter.launches += 1
                    run(*arguments)

                return launch

            return type("Launcher", (), {"__getitem__": lambda _, grid: launcher(grid)})()

        return {name: counted(kernel) for name, kernel in interpreted(job.source.load()).items()}


REAL_GPU, REAL_SILICON = startup.Gpu, startup.silicon_here


def pretend_gpu() -> None:
    """For the rest of this process."""

    def silicon() -> Silicon:
        return CARD.silicon

    startup.Gpu = Interpreter  # type: ignore[misc, assignment]
    startup.silicon_here = silicon


def capture(runner: Any, sizes: Sequence[int] = (ROWS,)) -> Any:
    """SGLang's real `init_cuda_graphs`, hooked as it is by now; the capture itself is a stand-in, which answers what
    the runner is left with."""
    module: Any = importlib.import_module("sglang.srt.model_executor.model_runner")
    base: Any = importlib.import_module("sglang.srt.model_executor.runner.base_cuda_graph_runner")
    moe = SimpleNamespace(is_ep_scale_joiner=False)
    part = SimpleNamespace(runner=None)
    captured = SimpleNamespace(eager_runner="eager", prefill=part, decode=part, memory_usage=None, time_usage=None)
    fakes: dict[tuple[Any, str], Any] = {
        (module, "get_exec"): lambda: SimpleNamespace(moe=moe),
        (module, "capture_cuda_graphs"): lambda **_: captured,
        (module, "prebuild_deepep_v2_buffer"): lambda **_: None,
        (base, "get_batch_sizes_to_capture"): lambda *_: (list(sizes), []),
    }
    kept = {(where, name): getattr(where, name) for where, name in fakes}
    try:
        for (where, name), fake in fakes.items():
            setattr(where, name, fake)
        module.ModelRunner.init_cuda_graphs(runner)
    finally:
        for (where, name), value in kept.items():
            setattr(where, name, value)
    return runner.eager_runner


def forward_c4_indexer(call: IndexerCall) -> torch.Tensor:
    """SGLang's real function over fake pools; the slots that it selects, int32 ``[rows, 512]``."""
    return indexer_step(call)()


def indexer_step(call: IndexerCall) -> Callable[[], torch.Tensor]:
    """The same as a function that may be captured: what a server makes once a step is made here."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
    from sglang.srt.layers.attention.dsv4.indexer import C4IndexerBackendMixin
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows, device = call.q.shape[0], call.q.device

    class Backend(C4IndexerBackendMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dsa_topk_backend = DSATopKBackend.TORCH
            self.hisparse_coordinator = None
            self.token_to_kv_pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: call.kv)
            self.forward_metadata = SimpleNamespace(
                indexer_metadata=PagedIndexerMetadata(256, 64, call.page_table, call.seq_lens, use_topk_v2=False),
                core_metadata=SimpleNamespace(
                    positions=torch.arange(rows, device=device),
                    c4_sparse_page_indices=torch.full((rows, TOP_K), -1, dtype=torch.int32, device=device),
                    c4_sparse_raw_indices=None,
                ),
            )

        def _forward_prepare_normal(self, **_: Any) -> Any:
            return call.q, call.weights[:, :, None]

    backend = Backend()
    layer = SimpleNamespace(use_fp4_indexer=False, layer_id=0, index_topk=TOP_K)
    x, batch = torch.empty(rows, 1, device=device), SimpleNamespace(forward_mode=ForwardMode.DECODE)

    def step() -> torch.Tensor:
        backend.forward_c4_indexer(x, x, layer, batch)
        selected: torch.Tensor = backend.forward_metadata.core_metadata.c4_sparse_page_indices
        return selected

    return step


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


class Lines(logging.Handler):
    """What the plugin said."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[tuple[str, str]] = []
        logging.getLogger("dsv4tune").addHandler(self)
        logging.getLogger("dsv4tune").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def their_tilelang(*arguments: Any, **words: Any) -> torch.Tensor:
    """SGLang's torch reference, in the place of its TileLang kernel, which takes nvcc and a GPU."""
    module: Any = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    reference = module.fp8_paged_mqa_logits_torch_sm120
    found: torch.Tensor = getattr(reference, "__wrapped__", reference)(*arguments, **words)
    return found


def boot() -> set[str]:
    """What every process of a server does first; the hooked targets."""
    pretend_gpu()
    tilelang: Any = importlib.import_module(targets.TILELANG.module)
    tilelang.tilelang_fp8_paged_mqa_logits = their_tilelang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    return set(HookRegistry._patched)


def worker(pipe: Any) -> None:
    """A spawned process: a scheduler's life in short. Sends its hooks, and whether our kernel chose the right slots."""
    hooked = boot()
    capture(serving.model_runner())
    call = serving.indexer_call(LENGTHS, seed=1)
    right = slots(forward_c4_indexer(call)) == expected_slots(call)
    pipe.send((hooked, right, Interpreter.launches))
