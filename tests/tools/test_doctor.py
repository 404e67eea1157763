"""The doctor: each fault is found, named and comes with what mends it; without a GPU nothing is broken."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import RESOURCES, make_final, make_trial
from pages import write_searches
from typer.testing import CliRunner

from dsv4tune.codegen import compile as compile_module
from dsv4tune.codegen import devices, models, ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.problem import Problem
from dsv4tune.runtime import compilers, targets, wanted
from dsv4tune.tools import coverage, gpu, tune
from dsv4tune.tools.cli import app
from dsv4tune.tuned.records import Baseline
from dsv4tune.tuned.selector import Decision
from dsv4tune.tuned.store import Store


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One without a GPU, without SGLang and without a database, whose compiler answers at once."""
    report = Report(**RESOURCES.model_dump())
    monkeypatch.setattr(compilers, "compile_all", lambda jobs, _: {job.source.sha: report for job in jobs})
    monkeypatch.setattr(devices, "here", lambda index=0: None)
    monkeypatch.setattr(gpu, "state", lambda: gpu.State())
    # Other tests have had other tools in this process.
    compile_module._ptxas_version.cache_clear()
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("SGLANG_PLUGINS", "DSV4TUNE_DISABLE", "DSV4TUNE_POLICY"):
        monkeypatch.delenv(name, raising=False)


def doctor(*arguments: object, code: int = 0) -> dict[str, list[dict[str, str]]]:
    """Findings by what they are about."""
    result = CliRunner().invoke(app, ["doctor", "--json", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    assert told["broken"] is (code == 1)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in told["findings"]:
        found.setdefault(finding["what"], []).append(finding)
        assert finding["fix"] or finding["status"] in ("ok", "note"), "every fault comes with what mends it"
    return found


def with_sglang(monkeypatch: pytest.MonkeyPatch, version: str, plugins: tuple[str, ...] = ("dsv4tune",)) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "sglang" else real(name))
    points = [metadata.EntryPoint(name, "module:register", "sglang.srt.plugins") for name in plugins]
    monkeypatch.setattr(metadata, "entry_points", lambda **_: points)


def test_a_machine_without_a_gpu_is_not_broken() -> None:
    found = doctor()
    assert found["GPU"][0]["status"] == "note" and "--device" in found["card"][0]["fix"]
    assert found["database"][0]["status"] == "note" and found["SGLang"][0]["status"] == "note"
    assert found["torch"][0]["text"] == metadata.version("torch")


def test_sizes_without_an_entry_come_with_the_search_that_fills_them(tmp_path: Path) -> None:
    write_searches(tmp_path / "tuned.db", trials=3)
    found = doctor("--device", "rtx-pro-6000", "--tp", 4)
    indexer = found["entries of indexer"][0]
    assert indexer["status"] == "gap" and indexer["text"].startswith("12 of 52 captured sizes have a measured entry")
    assert indexer["text"].endswith("; the others keep the server's own kernel"), "which is no fault"
    assert indexer["fix"] == "dsv4tune search --kernel indexer --rows 72,144,288,512 --context 1M"
    decode = found["entries of mla_decode, 16 heads, c128 layers"][0]
    assert "--heads 16 --cache c128" in decode["fix"] and decode["text"].startswith("0 of 52")
    assert found["database"][0]["text"].endswith("2 problems, 6 trials")


def searched(monkeypatch: pytest.MonkeyPatch, command: str) -> list[tune.Request]:
    """What a printed command would search."""
    asked: list[tune.Request] = []

    def answer(requests: list[tune.Request], watch: Any) -> list[Any]:
        asked.extend(requests)
        raise ValueError("enough")

    monkeypatch.setattr(tune, "tune_all", answer)
    CliRunner().invoke(app, [*shlex.split(command)[1:], "--device", "rtx-pro-6000"])
    return asked


def problems(request: tune.Request) -> list[Problem]:
    return [problem for problem, _ in tune._problems(request)]


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_the_searches_are_of_the_calls_that_lack_an_entry(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    found = doctor("--device", "rtx-pro-6000", "--tp", 2, "--context", "128k", "--model", model)
    fixes = [one[0]["fix"] for what, one in found.items() if what.startswith("entries of")]
    assert len(fixes) == (4 if model == "flash" else 3) and all(fixes)
    named = {p for fix in fixes for request in searched(monkeypatch, fix) for p in problems(request)}
    server = wanted.server(1 << 17, 2, model=models.named(model))
    calls = {one.problem for one in server.wanted(DEVICES["rtx-pro-6000"].silicon, ops.OPS)}
    assert named <= calls and {problem.rows for problem in named} >= {1, 512}
    assert {family(problem) for problem in named} == {family(problem) for problem in calls}


def family(problem: Problem) -> Problem:
    return replace(problem, rows=1)


def test_one_search_fills_the_gaps_of_a_start_command(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Pro --tp 8 --max-running-requests 64"
    options = ["--device", "rtx-pro-6000", "--gpu-memory", "80", "--like", start]
    found = doctor(*options)
    entries = {what: one[0] for what, one in found.items() if what.startswith("entries of")}
    (fix,) = {finding["fix"] for finding in entries.values()}
    assert fix == f"dsv4tune search --like '{start}' --gpu-memory 80"
    # A prompt's rows, which it searches too, are not captured.
    assert all(one["text"].startswith("0 of 12 captured sizes have a measured entry") for one in entries.values())
    rows = {problem.rows for request in searched(monkeypatch, fix) for problem in problems(request)}
    assert rows == {1, 2, 4, 8, 16, 32, 64, 8192}
    other = {one[0]["fix"] for what, one in doctor(*options, "--model", "pro").items() if what.startswith("entries of")}
    assert other == {f"{fix} --model pro"}
    printed = CliRunner().invoke(app, ["doctor", *options]).stdout
    assert printed.count(fix) == 1 and printed.index(fix) > printed.index("entries of mla_decode")


@pytest.mark.parametrize(
    ("missing", "added"),
    [
        ({"indexer": {12, 16}, "mla_decode": {16, 24, 48, 64}}, " --rows 12,24,48,64"),
        ({"indexer": {12, 16}, "mla_decode": set()}, " --kernel indexer --rows 12,16"),
        ({"indexer": set(range(99)), "mla_decode": set()}, " --kernel indexer"),
    ],
)
def test_that_search_leaves_out_what_is_there(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, set[int]], added: str
) -> None:
    def cell(decision: Decision, _: Decision) -> coverage.Cell:
        rows, op = decision.problem.rows, decision.problem.op
        return coverage.Cell(rows, "predicted" if rows in missing[op] else "exact", "")

    monkeypatch.setattr(coverage, "_cell", cell)
    start = "sglang serve --model-path deepseek-ai/DeepSeek-V4-Flash --tp 8 --max-running-requests 64"
    found = [one[0] for what, one in doctor("--device", "h200", "--like", start).items() if "entries of" in what]
    assert {one["fix"] for one in found if one["status"] == "gap"} == {f"dsv4tune search --like '{start}'{added}"}
    assert all(one["fix"] == "" for one in found if one["status"] == "ok")


def test_what_a_search_here_left_to_the_server_is_no_gap(tmp_path: Path) -> None:
    """Searching for it again would find the same."""
    (before,) = doctor("--device", "h200")["entries of indexer"]
    first = int(before["fix"].split("--rows ")[1].split(",")[0])
    beside: dict[str, Any] = {"provenance": "measured", "yardstick": "deep_gemm", "checked_by": "gpu"}
    beside["baseline"] = Baseline(name="deep_gemm", version="0.1.2", times_us={128: 3.0, 262_208: 1400.5})
    store = Store(tmp_path / "tuned.db")
    store.add_final([make_trial(None, first, "h200", score=0.99, final=make_final(1, won=False), **beside)])
    store.close()
    (after,) = doctor("--device", "h200")["entries of indexer"]
    assert after["text"].endswith("keep the server's own kernel, at 1 because a search here found it as fast")
    assert after["status"] == "gap" and f"--rows {first}," not in after["fix"]


def test_a_gpu_is_told_by_its_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "here", lambda index=0: DEVICES["h200"])
    monkeypatch.setattr(gpu, "state", lambda: gpu.State(driver="580.1"))
    found = doctor()
    assert found["GPU"][0]["text"] == "h200, sm_90, 132 SMs, 227 KB of shared memory a program, driver 580.1"
    assert "can't time beside it" in found["baseline of indexer"][0]["text"]
    assert "pip install" in found["baseline of indexer"][0]["fix"]


def test_a_driver_that_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "state", lambda: gpu.State(driver="470.1"))
    assert f"torch {torch.__version__} sees no GPU" in doctor(code=1)["GPU"][0]["text"]


def test_a_gpu_without_fp8_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(index: int = 0) -> None:
        raise ValueError("A100 is compute capability 8.0: its tensor cores have no fp8")

    monkeypatch.setattr(devices, "here", old)
    assert "no fp8" in doctor(code=1)["GPU"][0]["text"]


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        ("CompileError: bad", 1, "does not compile: CompileError: bad"),
        (RESOURCES.model_copy(update={"native_fp8": False, "mma": "mma.f16"}), 0, "not the card's fp8 instruction"),
        (RESOURCES.model_copy(update={"shared_bytes": 200_000}), 1, "200000"),
    ],
)
def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, outcome: Any, code: int, says: str) -> None:
    answer = outcome if isinstance(outcome, str) else Report(**outcome.model_dump())
    monkeypatch.setattr(compilers, "compile_all", lambda jobs, _: {job.source.sha: answer for job in jobs})
    assert says in doctor("--target", "sm_120", code=code)["indexer for sm_120"][0]["text"]


@pytest.mark.slow
def test_the_real_compiler_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "e4m3" in doctor("--device", "rtx-pro-6000")["indexer for sm_120"][0]["text"]


def test_faults_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSV4TUNE_POLICY", "bold")
    assert "DSV4TUNE_POLICY=bold" in doctor(code=1)["environment"][0]["text"]
    monkeypatch.setenv("DSV4TUNE_POLICY", "measured")
    monkeypatch.setenv("DSV4TUNE_DISABLE", "1")
    assert "switched off" in doctor()["environment"][0]["text"]
    monkeypatch.setenv("DSV4TUNE_CACHE", "/proc/nowhere")
    assert "DSV4TUNE_CACHE" in doctor(code=1)["cache"][0]["fix"]


def test_a_database_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "tuned.db").write_bytes(b"not a database" * 100)
    assert doctor(code=1)["database"][0]["status"] == "broken"
    assert "none at /nowhere/tuned.db" in doctor("--db", "/nowhere/tuned.db", code=1)["database"][0]["text"]
    assert "File name too long" in doctor("--db", "x" * 300, code=1)["database"][0]["text"]
    (tmp_path / "tuned.db").unlink()
    store = Store(tmp_path / "tuned.db")
    store.add(make_trial())
    store.close()
    assert doctor()["database"][0]["status"] == "ok"


def test_the_plugin_and_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sglang(monkeypatch, "0.5.23")
    every = [target for target in targets.TARGETS if 12 in target.majors]
    monkeypatch.setattr(targets, "usable", lambda arches, kernels: (every, []))
    found = doctor("--target", "sm_120")
    assert found["SGLang"][0] == {"what": "SGLang", "status": "ok", "text": "0.5.23", "fix": ""}
    assert found["plugin"][0]["status"] == "ok" and "indexer, mla_decode" in found["hooks"][0]["text"]
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "leaves it out" in doctor("--target", "sm_120", code=1)["plugin"][0]["text"]
    monkeypatch.delenv("SGLANG_PLUGINS")
    with_sglang(monkeypatch, "0.4.0", plugins=())
    monkeypatch.setattr(targets, "usable", lambda arches, kernels: ([], ["x.y: x is not there"]))
    found = doctor("--target", "sm_120", code=1)
    assert found["SGLang"][0]["status"] == "note" and found["plugin"][0]["status"] == "broken"
    assert found["hook"][0]["text"].endswith("x.y: x is not there") and found["hooks"][0]["status"] == "broken"


def test_colours_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == 0 and "\x1b" not in plain.stdout
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in CliRunner().invoke(app, ["doctor"], color=True).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in CliRunner().invoke(app, ["doctor"], color=True).stdout
