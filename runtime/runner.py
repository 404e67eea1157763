"""Reading a model runner of SGLang: the shapes that it will call with. Nothing here imports SGLang but to ask it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv4tune.codegen.ops.mla_decode_call import HEAD_DIM, TOKEN_BYTES
from dsv4tune.runtime.wanted import CAPTURED, Server, extras


class Ranks(NamedTuple):
    """The ranks that must agree: those that share this model's layers."""

    rank: int
    ranks: tuple[int, ...]
    store: Any


def is_dsv4(runner: Any) -> bool:
    """Whether its attention layers are those of DeepSeek-V4."""
    config = getattr(getattr(runner, "model_config", None), "hf_text_config", None)
    return str(getattr(config, "model_type", "")).startswith("deepseek_v4") or bool(real_heads(runner))


def real_heads(runner: Any) -> tuple[int, ...]:
    """Query heads of a rank, of every attention layer with MLA's head dimension."""
    model: Any = getattr(runner, "model", None)
    layers = model.modules() if hasattr(model, "modules") else ()
    found = {
        int(layer.tp_q_head_num)
        for layer in layers
        if hasattr(layer, "tp_q_head_num") and getattr(layer, "qk_head_dim", getattr(layer, "head_dim", 0)) == HEAD_DIM
    }
    return tuple(sorted(found))


def server_of(runner: Any, capture_bs: Sequence[int] | None = None) -> tuple[Server, list[str]]:
    """What this runner will call, and a line for each fact that had to be assumed.

    Raises:
        ValueError: a fact that can't be assumed is missing or is one that our kernels don't serve.
    """
    notes: list[str] = []
    heads = real_heads(runner)
    if not heads:
        raise ValueError("no attention layer says how many of its heads are real")
    pool = getattr(runner, "token_to_kv_pool", None)
    bytes_of = getattr(pool, "get_swa_key_bytes_per_token", None)
    if bytes_of is not None and bytes_of() != TOKEN_BYTES:
        raise ValueError(f"its cache takes {bytes_of()} bytes a token, and the kernels read {TOKEN_BYTES}")
    # The table spans what a request may hold; see `dsv4tune.runtime.wanted.table_pages`.
    table = -(-int(runner.req_to_token_pool.req_to_token.shape[1]) // 256)
    config = runner.model_config.hf_text_config
    ratios = tuple(dict.fromkeys(getattr(config, "compress_ratios", None) or (0, 4, 128)))
    page_of = getattr(pool, "get_swa_key_page_size", None)
    window = (int(getattr(config, "window_size", 128)), int(page_of()) if page_of is not None else 256)
    rows = _captured_rows(runner, capture_bs, notes)
    return Server(
        table, rows, _chunk(runner), heads, extras(table, int(getattr(config, "index_topk", 512)), ratios), window
    ), notes


def _captured_rows(runner: Any, capture_bs: Sequence[int] | None, notes: list[str]) -> tuple[int, ...]:
    """Rows of every graph: requests, and requests times the tokens that each has in a verify step."""
    each = 1
    try:
        each = int(runner.decode_num_tokens_per_req())
    except Exception as error:
        notes.append(f"tokens of a request in a decode step unknown ({error}): taken as 1")
    sizes: Sequence[int] = capture_bs or ()
    if not sizes:
        try:
            module = importlib.import_module("sglang.srt.model_executor.runner.base_cuda_graph_runner")
            sizes = module.get_batch_sizes_to_capture(runner, each)[0]
        except Exception as error:
            notes.append(f"captured sizes unknown ({type(error).__name__}: {error}): SGLang's default ones assumed")
            sizes = CAPTURED
    return tuple(sorted({size * factor for size in sizes for factor in {1, each}}))


def _chunk(runner: Any) -> tuple[int, ...]:
    size = getattr(getattr(runner, "server_args", None), "chunked_prefill_size", None)
    return (int(size),) if isinstance(size, int) and size > 0 else ()


def ranks_of(runner: Any) -> Ranks | None:
    """The ranks of the runner's tensor-parallel group and the store that they share; None for a rank alone.

    Raises:
        RuntimeError: there are several, and no store to ask.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = getattr(runner, "tp_group", None)
    if group is None:
        try:
            group = importlib.import_module("sglang.srt.runtime_context").get_parallel().tp_group
        except Exception:
            group = None
    ranks = tuple(group.ranks) if group is not None else tuple(range(dist.get_world_size()))
    if len(ranks) == 1:
        return None
    return Ranks(dist.get_rank(), ranks, dist.distributed_c10d._get_default_store())
