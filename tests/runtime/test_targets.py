"""The functions that are hooked are those that SGLang has, by the text of its wheels.

Where a folder with wheels is named in DSV4TUNE_PEER_WHEELS, names and signatures are read from them; each version
that the README says is supported is asked for."""

from __future__ import annotations

import ast
import inspect
import os
import re
import zipfile
from pathlib import Path

import pytest

from dsv4tune.runtime import paged_mqa_logits, sparse_mla_decode, targets
from dsv4tune.runtime.targets import Target
from dsv4tune.tools import peers

README = Path(__file__).parent.parent.parent / "README.md"
#: As the README's table has them.
VERSIONS = re.findall(r"^\| (0\.5\.\d+) \|", README.read_text(), re.M)

_LOGITS = "q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, clean_logits"
PARAMETERS = {
    targets.TILELANG: _LOGITS,
    targets.TORCH_SM120: _LOGITS,
    targets.TORCH: _LOGITS,
    targets.FLASH_MLA_SM120: "**kwargs",
    targets.RUNNER: "self, capture_decode_cuda_graph",
}
#: What the runner is asked, and where.
ASKED = {
    "sglang/srt/model_executor/model_runner.py": "decode_num_tokens_per_req",
    "sglang/srt/model_executor/runner/base_cuda_graph_runner.py": "get_batch_sizes_to_capture",
}


def wheel(version: str) -> zipfile.ZipFile:
    folder = os.environ.get("DSV4TUNE_PEER_WHEELS")
    found = sorted(Path(folder).rglob(f"sglang-{version}-*.whl")) if folder else []
    if not found:
        pytest.skip(f"DSV4TUNE_PEER_WHEELS names no folder with SGLang {version}")
    return zipfile.ZipFile(found[0])


def function(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    return next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name), None)


def test_the_readme_names_the_oldest_and_the_newest() -> None:
    assert VERSIONS[0] == "0.5.16" and "0.5.23" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", PARAMETERS, ids=lambda t: t.attribute)
def test_targets_are_in_the_wheel(version: str, target: Target) -> None:
    archive = wheel(version)
    text = archive.read(target.module.replace(".", "/") + ".py").decode()
    assert targets.has_function(text, target.attribute)
    found = function(ast.parse(text), target.attribute.rpartition(".")[2])
    assert found is not None
    names = [a.arg for a in found.args.args] + ([f"**{found.args.kwarg.arg}"] if found.args.kwarg else [])
    assert ", ".join(names) == PARAMETERS[target]


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_pass_what_our_functions_take(version: str) -> None:
    archive = wheel(version)
    for path, name in ASKED.items():
        assert function(ast.parse(archive.read(path)), name) is not None
    backend = ast.parse(archive.read("sglang/srt/layers/attention/deepseek_v4_backend.py"))
    calls = [
        node
        for node in ast.walk(backend)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("flash_mla_with_kvcache_sm120", "flash_mla_with_kvcache")
    ]
    assert len(calls) == 2
    for call in calls:
        assert not call.args
        inspect.signature(sparse_mla_decode).bind(**{str(word.arg): None for word in call.keywords})
    indexer = ast.parse(archive.read("sglang/srt/layers/attention/dsv4/indexer.py"))
    body = function(indexer, "forward_c4_indexer")
    assert body is not None
    (call,) = (n for n in ast.walk(body) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "fn" and n.args)
    inspect.signature(paged_mqa_logits).bind(*call.args)
    assert len(call.args) == 8


def test_an_older_flash_mla_is_hooked_where_the_newer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {targets.FLASH_MLA, targets.LATER}
    monkeypatch.setattr(Target, "missing", lambda self: "not there" if self in absent else None)
    found, missing = targets.usable([90], ("indexer", "mla_decode"))
    assert targets.OLDER_FLASH_MLA in found and targets.FLASH_MLA not in found and missing == []
    absent = {targets.OLDER_FLASH_MLA}
    found, missing = targets.usable([90], ("indexer", "mla_decode"))
    assert targets.FLASH_MLA in found and targets.OLDER_FLASH_MLA not in found and missing == []


def test_functions_are_found_by_text() -> None:
    text = "class Runner:\n    def init(self): ...\n\ndef top(a,\n    b): ...\nfrom ._C import (\n    compiled,\n)\n"
    assert targets.has_function(text, "Runner.init") and targets.has_function(text, "top")
    assert targets.has_function(text, "compiled")
    assert not targets.has_function(text, "Runner.gone") and not targets.has_function(text, "other")


def test_a_module_that_is_not_there() -> None:
    gone = Target("indexer", "x", "no_such_package.module", "f", (12,))
    assert gone.missing() == "no_such_package.module is not there (No module named 'no_such_package')"
    assert Target("indexer", "x", "json", "no_such", (12,)).missing() == "json has no no_such"
    assert Target("indexer", "x", "json", "dumps", (12,), ("no_such_package",)).missing() is not None
    assert Target("indexer", "x", "json", "dumps", (12,)).missing() is None


@pytest.mark.parametrize("arch", [90, 100, 120, 121])
def test_baselines_are_those_that_searches_time_beside(arch: int) -> None:
    from dsv4tune.codegen.problem import Silicon

    silicon = Silicon(f"{arch // 10}.{arch % 10}", 1, 1)
    for op, name in targets.baselines(arch).items():
        peer = peers.baseline(op, silicon)
        assert peer is not None and peer.name == name


@pytest.mark.parametrize(
    ("arch", "variables", "indexer", "mla_decode"),
    [
        (120, {"SGLANG_OPT_USE_TILELANG_INDEXER": "True"}, "tilelang", "flashinfer"),
        (121, {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "y"}, "torch_sm120", "flashinfer"),
        (120, {}, "deep_gemm", "flashinfer"),
        (120, {"SGLANG_SM120_FLASHMLA_BACKEND": "torch"}, "deep_gemm", "sglang_torch"),
        (90, {}, "deep_gemm", "flash_mla"),
        (90, {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}, "torch", "flash_mla"),
        (100, {"SGLANG_OPT_USE_AITER_INDEXER": "1"}, "aiter", "flash_mla"),
    ],
)
def test_what_a_server_runs(arch: int, variables: dict[str, str], indexer: str, mla_decode: str) -> None:
    assert targets.active(arch, variables) == {"indexer": indexer, "mla_decode": mla_decode}


def test_a_server_on_other_silicon_has_no_known_kernel() -> None:
    assert targets.active(89, {}) == {} and targets.usable([89], ("indexer",)) == ([], [])
