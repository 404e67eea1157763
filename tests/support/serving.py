"""A server without SGLang and without a GPU: fake launchers that compute the float64 reference, and a model runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes import RESOURCES, make_trial

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES as DEVICES
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops import indexer_check, mla_decode_check
from dsv4tune.codegen.ops.indexer import IndexerProblem
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.ops.mla_decode import LOG2_E
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeCall, MlaDecodeProblem
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.space import Config
from dsv4tune.runtime import targets
from dsv4tune.runtime.compilers import Job, Outcome
from dsv4tune.tuned.records import Baseline
from dsv4tune.tuned.store import Store

CARD = DEVICES["rtx-pro-6000"]
ROWS, PAGES, HEADS = 3, 12, 8
WIDTH = PAGES * 64
#: What the server's own function leaves.
THEIRS = -7.0


def compute(job: Job, arguments: Sequence[Any]) -> None:
    """What a launch of the job's kernel must leave in its output."""
    op, problem = ops.get(job.problem.op), job.problem
    named: dict[str, Any] = dict(
        zip((a.name for a in op.arguments(problem, job.config)["kernel"]), arguments, strict=True)
    )
    # A kernel gets addresses: whatever shape the caller's tensors have.
    if isinstance(problem, IndexerProblem):
        kv, lens = named["kv"], named["seq_lens"]
        q, pages = named["q"].view(-1, problem.heads, 128), kv.view(kv.shape[0], -1)
        one = IndexerCall(q, pages, named["weights"], lens.flatten(), named["page_table"], named["logits"])
        for row, length in enumerate(one.seq_lens.tolist()):
            if length:
                one.logits[row, :length] = indexer_check.reference(problem, one, row, length)[0].float()
        return
    assert isinstance(problem, MlaDecodeProblem)
    q, indices, extra = named["q"], named["indices"], named.get("extra_indices")
    rows, heads = q.shape[0], q.shape[-2]
    two = MlaDecodeCall(
        q=q.view(rows, heads, 512),
        cache=named["cache"].view(torch.uint8),
        indices=indices.view(rows, -1),
        lengths=named["lengths"],
        extra_cache=named["extra_cache"].view(torch.uint8) if extra is not None else None,
        extra_indices=extra.view(rows, -1) if extra is not None else None,
        extra_lengths=named.get("extra_lengths"),
        sink=named["sink"],
        scale=named["scale"] / LOG2_E,
        out=named["out"].view(rows, heads, 512),
    )
    two.out[:, : problem.heads] = mla_decode_check.expect(problem, two).out.to(torch.bfloat16)


class FakeMachine:
    """In the place of a GPU. `compiled`, `loaded` and `launched` may be replaced by faults."""

    device = "cpu"

    def __init__(self, **faults: Callable[..., Any]) -> None:
        self.compiled: Callable[[Job], Outcome] = lambda job: Report(**RESOURCES.model_dump())
        self.loaded: Callable[[Job], None] = lambda job: None
        self.launched: Callable[[Job, Sequence[Any]], None] = compute
        self.silicon: Silicon | None = CARD.silicon
        vars(self).update(faults)

    def silicon_here(self) -> Silicon | None:
        return self.silicon

    def compile(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        return {job.source.sha: self.compiled(job) for job in jobs}

    def launchers(self, job: Job) -> Mapping[str, Any]:
        self.loaded(job)
        machine = self

        class Launcher:
            def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
                return lambda *arguments: machine.launched(job, arguments)

        return {name: Launcher() for name in ops.get(job.problem.op).arguments(job.problem, job.config)}


# -- what was tuned ---------------------------------------------------------------------------------------------


def problem_of(kernel: str, rows: int = ROWS, card: Device = CARD) -> Problem:
    options = {"heads": HEADS, "extra_page_size": 64, "extra_width": 512} if kernel == "mla_decode" else {}
    return ops.get(kernel).problem(rows, card.silicon, **options)  # type: ignore[no-any-return]


def config_of(kernel: str, rows: int = ROWS, card: Device = CARD) -> Config:
    return ops.get(kernel).reference_config(problem_of(kernel, rows, card), card)


def write_entry(path: Path, kernel: str = "indexer", rows: int = ROWS, card: Device = CARD, **changes: Any) -> None:
    """A trial that a server of this card takes: measured, and faster than the kernel that it would run."""
    problem = problem_of(kernel, rows, card)
    theirs = targets.baselines(card.silicon.arch)[kernel]
    values = {
        "device": card,
        "problem": problem.to_json(),
        "problem_key": problem.key,
        "config": dict(config_of(kernel, rows, card)),
        "provenance": "measured",
        "score": 0.9,
        "yardstick": theirs,
        "baseline": Baseline(name=theirs, version="1", times_us={128: 4.0, 262_208: 1500.0}),
        "checked_by": "gpu",
        **changes,
    }
    store = Store(path)
    store.add(make_trial(**values))
    store.close()


def any_resources() -> Any:
    """A report that no real compile is worse than."""
    return RESOURCES.model_copy(
        update={"native_fp8": False, "async_copy": "", "stack_bytes": 1 << 20, "spill_bytes": 1 << 20}
    )


# -- a model runner ---------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.tp_q_head_num, self.qk_head_dim = heads, 512


def model_runner(**changes: Any) -> Any:
    """What a runner of SGLang 0.5.23 knows before it captures."""
    config = SimpleNamespace(model_type="deepseek_v4", compress_ratios=[4], index_topk=512)
    values = {
        "model": torch.nn.Sequential(Layer()),
        "model_config": SimpleNamespace(hf_text_config=config),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.empty(1, PAGES * 256)),
        "token_to_kv_pool": SimpleNamespace(get_swa_key_bytes_per_token=lambda: 584, get_swa_key_page_size=lambda: 256),
        "server_args": SimpleNamespace(chunked_prefill_size=-1),
        "decode_num_tokens_per_req": lambda: 1,
        "is_draft_worker": False,
        **changes,
    }
    return SimpleNamespace(**values)


# -- calls ------------------------------------------------------------------------------------------------------


def indexer_call(lengths: Sequence[int] = (700, 65, 0), seed: int = 0) -> IndexerCall:
    """Random tensors in the layout of SGLang's pool."""
    problem = ops.get("indexer").problem(len(lengths), CARD.silicon)
    pool = indexer_check.random_pool(problem, 4 * PAGES, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(4 * PAGES, generator=generator)[:PAGES] for _ in lengths]).to(torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    logits = torch.empty(len(lengths), WIDTH)
    return indexer_check._call(problem, pool, lens, table, logits, None, generator)


def indexer_arguments(call: IndexerCall) -> list[Any]:
    """As `forward_c4_indexer` passes them."""
    rows, heads, dim = call.q.shape
    kv = call.kv.view(call.kv.shape[0], 64, 1, dim + 4)
    return [call.q.view(rows, 1, heads, dim), kv, call.weights, call.seq_lens, call.page_table, None, WIDTH, False]


def their_indexer(*arguments: Any, **words: Any) -> torch.Tensor:
    """In the place of the server's own function."""
    return torch.full((ROWS, WIDTH), THEIRS)


def mla_words(padded: int = 64, seed: int = 0) -> dict[str, Any]:
    """As SGLang calls its sparse MLA on sm_120, queries padded with NaN."""
    problem = problem_of("mla_decode")
    call = next(iter(ops.get("mla_decode").cases(problem, 512, (512,), "cpu", seed)))[1]
    q = torch.full((ROWS, 1, padded, 512), float("nan"), dtype=torch.bfloat16)
    q[:, 0, :HEADS] = call.q
    sink = torch.zeros(padded)
    sink[:HEADS] = call.sink
    return {
        "q": q,
        "k_cache": call.cache,
        "head_dim_v": 512,
        "softmax_scale": 512**-0.5,
        "indices": call.indices[:, None],
        "topk_length": call.lengths,
        "attn_sink": sink,
        "extra_k_cache": call.extra_cache,
        "extra_indices_in_kvcache": call.extra_indices[:, None],
        "extra_topk_length": call.extra_lengths,
    }


def their_mla_decode(**words: Any) -> tuple[torch.Tensor, None]:
    return torch.full(words["q"].shape, THEIRS, dtype=torch.bfloat16), None


def clean_words(words: dict[str, Any]) -> dict[str, Any]:
    """The same call without poison: real slots past each row's length, zeros for NaN in unused slots and heads."""
    found = dict(words)
    found["q"] = words["q"].nan_to_num()
    for prefix, cache, length in (("", "k_cache", "topk_length"), ("extra_", "extra_k_cache", "extra_topk_length")):
        name = "indices" if not prefix else "extra_indices_in_kvcache"
        indices, lengths = words[name], words[length]
        slots = words[cache].shape[0] * words[cache].shape[1]
        live = torch.arange(indices.shape[-1])[None, None] < lengths[:, None, None]
        known = live & (indices >= 0) & (indices < slots)
        found[name] = torch.where(known, indices, -1)
        used = torch.zeros(slots, dtype=torch.bool)
        used[indices[known].long()] = True
        found[cache] = mla_decode_check.empty_cache(words[cache].shape[1], words[cache].shape[0], "cpu")
        for there, here in zip(mla_decode_check.parts(words[cache]), mla_decode_check.parts(found[cache]), strict=True):
            here.copy_(torch.where(used.view(*there.shape[:2], 1), there, 0))
        found[length] = lengths.contiguous()
    return found
