"""The MLA decode adapters call what the wheels hold, as a server does.

The signatures were read from the wheels; where a folder with these wheels is named, they are read again."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops import mla_decode_check as check
from dsv4tune.codegen.ops import mla_decode_timing as timing
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeCall, MlaDecodeProblem
from dsv4tune.codegen.problem import Profile
from dsv4tune.tools.peers import PEERS

SM120 = "sglang/kernels/ops/attention/flash_mla_sm120.py"
_POSITIONAL = (
    "q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale, extra_k_cache{}, extra_indices{}, "
    "extra_topk_length{}"
)
#: Wheel, file in it, function: its parameters, "=" for one with a default.
SIGNATURES = {
    ("sgl_flash_mla-1.0.0", "flash_mla/flash_mla_interface.py", "flash_mla_with_kvcache"): (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=, softmax_scale=, "
        "causal=, is_fp8_kvcache=, indices=, attn_sink=, extra_k_cache=, extra_indices_in_kvcache=, topk_length=, "
        "extra_topk_length=, enable_batch_invariant=, use_legacy=, kv_format=, descale_q=, descale_k="
    ),
    (
        "flashinfer_python-0.7.2",
        "flashinfer/mla/_sparse_mla_sm120/_api.py",
        "_sparse_mla_sm120_paged_attention",
    ): (
        "q, kv_cache, indices, output, out_lse, sm_scale, *, d_v=, kv_scale_format=, topk_length=, attn_sink=, "
        "extra_kv_cache=, extra_indices=, extra_topk_length=, mid_out=, mid_lse=, prefill_impl=, extra_fp4=, lse_scale="
    ),
    ("sglang-0.5.23", SM120, "_flash_mla_flashinfer"): _POSITIONAL.format("", "", ""),
    ("sglang-0.5.23", SM120, "_flash_mla_sm120_prefill"): _POSITIONAL.format("", "", ""),
    ("sglang-0.5.23", SM120, "_sm120_sparse_decode_fwd"): _POSITIONAL.format("=", "=", "="),
    ("sglang-0.5.23", SM120.replace("120.py", "120_triton.py"), "flash_mla_sparse_decode_triton"): _POSITIONAL.format(
        "=", "=", "="
    ),
}


def read(wheel: str, path: str) -> ast.Module:
    folder = os.environ.get("DSV4TUNE_PEER_WHEELS")
    found = sorted(Path(folder).rglob(f"{wheel}-*.whl")) if folder else []
    if not found:
        pytest.skip(f"DSV4TUNE_PEER_WHEELS names no folder with {wheel}")
    with zipfile.ZipFile(found[0]) as archive:
        return ast.parse(archive.read(path))


def parameters(tree: ast.Module, function: str) -> str:
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    a = node.args
    without = len(a.args) - len(a.defaults)
    found = [arg.arg + "=" * (i >= without) for i, arg in enumerate(a.args)]
    if a.kwonlyargs:
        found += ["*", *(arg.arg + "=" * (d is not None) for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True))]
    return ", ".join(found)


@pytest.mark.parametrize(("wheel", "path", "function"), SIGNATURES)
def test_signatures_are_those_of_the_wheels(wheel: str, path: str, function: str) -> None:
    assert parameters(read(wheel, path), function) == SIGNATURES[wheel, path, function]


def test_sglang_and_flashinfer_fit_each_other() -> None:
    """What SGLang 0.5.23 passes is what FlashInfer 0.7.2 takes."""
    callee = stub(*next(key for key in SIGNATURES if "flashinfer" in key[0]))
    calls = [
        node
        for node in ast.walk(read("sglang-0.5.23", SM120))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_sparse_mla_sm120_paged_attention"
    ]
    assert len(calls) == 2
    for call in calls:
        callee(*call.args, **{str(word.arg): word.value for word in call.keywords})


def stub(wheel: str, path: str, function: str, answer: Callable[[dict[str, Any]], Any] = dict) -> Callable[..., Any]:
    """A function of that signature; it answers with what `answer` makes of its arguments."""
    head = SIGNATURES[wheel, path, function].replace("=", "=None")
    space: dict[str, Any] = {}
    exec(f"def {function}({head}): return locals()", space)
    return lambda *args, **words: answer(space[function](*args, **words))


def a_call(rows: int, heads: int, **options: Any) -> tuple[MlaDecodeProblem, MlaDecodeCall]:
    problem = MlaDecodeProblem(rows=rows, heads=heads, silicon=devices.DEVICES["h200"].silicon, **options)
    width = problem.extra_width or problem.width
    shape = timing.shape_of(problem, Profile(width, (30,), (1.0,)), 30)
    pool = timing.timing_pool(problem, [shape], 0, "cpu", 0)
    return problem, timing.timing_sets(problem, shape, 1, "cpu", 0, pool)[0]


def expected_of(a: dict[str, Any]) -> torch.Tensor:
    """The reference's output, with one query token a row, of SGLang's arguments."""
    words = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    cache, indices, lengths = (a.get(w, a.get(w.replace("_in_kvcache", ""))) for w in words)
    q = a["q"][:, 0]
    extra: dict[str, Any] = {} if cache is not None else {"extra_width": 0, "extra_page_size": 0}
    problem = MlaDecodeProblem(rows=q.shape[0], heads=q.shape[1], silicon=devices.DEVICES["h200"].silicon, **extra)
    first = (q, a["k_cache"], a["indices"][:, 0], a["topk_length"], cache, None if indices is None else indices[:, 0])
    call = MlaDecodeCall(*first, lengths, a["attn_sink"], a["softmax_scale"], torch.empty_like(q))
    call.validate(problem)
    return check.expect(problem, call).out.bfloat16()[:, None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stubs of the peers' modules; the arguments of the last call."""
    last: dict[str, Any] = {}

    def answer(a: dict[str, Any]) -> tuple[torch.Tensor, None]:
        last.clear()
        last.update(a)
        return expected_of(a), None

    modules: dict[str, ModuleType] = {}
    for wheel, path, function in SIGNATURES:
        name = "flash_mla" if "flash_mla_interface" in path else path[:-3].replace("/", ".")
        modules.setdefault(name, ModuleType(name)).__dict__[function] = stub(wheel, path, function, answer)
    modules["flash_mla"].__dict__["get_mla_metadata"] = lambda: ("schedule", None)
    served = (8, 16, 32, 64, 128)
    modules[SM120[:-3].replace("/", ".")].__dict__["flashinfer_dsv4_decode_supports_num_heads"] = lambda heads, rows: (
        rows <= 64 and heads in served
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return last


@pytest.mark.parametrize("options", [{}, {"extra_width": 0, "extra_page_size": 0}], ids=["both", "alone"])
@pytest.mark.parametrize("heads", [8, 12, 64, 128])
@pytest.mark.parametrize("name", ["flash_mla", "sglang_triton", "sglang_torch", "flashinfer"])
def test_adapters_pass_what_a_server_passes(
    seen: dict[str, Any], name: str, heads: int, options: dict[str, Any]
) -> None:
    problem, call = a_call(3, heads, **options)
    output = PEERS[name].prepare(problem, call)()
    call.out.copy_(output)
    assert check.verify(problem, call, check.expect(problem, call)).ok
    wanted = {"flash_mla": max(64, heads), "flashinfer": 64 if heads == 12 else heads}.get(name, heads)
    assert tuple(seen["q"].shape) == (3, 1, wanted, 512) and tuple(seen["indices"].shape) == (3, 1, 128)
    assert tuple(seen["attn_sink"].shape) == (wanted,) and seen["head_dim_v"] == 512
    if name == "flash_mla":
        assert seen["use_legacy"] and seen["is_fp8_kvcache"] and seen["tile_scheduler_metadata"] == "schedule"


def test_above_64_rows_flashinfer_gets_the_real_heads(seen: dict[str, Any]) -> None:
    problem, call = a_call(65, 12, extra_width=0, extra_page_size=0)
    assert PEERS["flashinfer"].prepare(problem, call)().shape == (65, 12, 512)
    assert seen["q"].shape[2] == 12


def test_flashinfer_is_not_called_where_it_would_fail() -> None:
    assert inspect.signature(type(PEERS["flashinfer"]).missing).return_annotation == "str | None"
    assert PEERS["flashinfer"].missing() is not None or torch.cuda.get_device_capability()[0] == 12
