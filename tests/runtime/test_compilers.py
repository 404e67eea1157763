"""Compiling before capture: in processes of their own, each text once a machine, with a limit."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import serving

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.runtime import compilers
from dsv4tune.runtime.compilers import Job, compile_all, known_report


@pytest.fixture
def job() -> Job:
    return Job.of(serving.problem_of("indexer"), serving.config_of("indexer"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSV4TUNE_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    return tmp_path


@pytest.mark.slow
def test_rows_that_share_a_text_are_compiled_once(empty_cache: Path) -> None:
    op, card = ops.get("indexer"), DEVICES["h200"]
    jobs = []
    for rows in (33, 40, 64):
        problem = op.problem(rows, card.silicon)
        jobs.append(Job.of(problem, op.default(problem, card)))
    found = compile_all(jobs, processes=2)
    assert len(found) == len({job.source.sha for job in jobs}) == 1
    report = found[jobs[0].source.sha]
    assert isinstance(report, Report) and report.native_fp8
    assert known_report(jobs[0]) == report
    # A second start compiles nothing, whatever has become of the compiler.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilers, "_start", lambda: pytest.fail("a process was started"))
        assert compile_all(jobs) == found
    # Who clears Triton's cache is not told that all is there, or the server's own process would compile.
    shutil.rmtree(empty_cache / "triton")
    assert known_report(jobs[0]) is None
    again = compile_all(jobs)[jobs[0].source.sha]
    assert isinstance(again, Report) and again.binary == report.binary and known_report(jobs[0]) == again


@pytest.mark.slow
def test_eight_ranks_compile_a_text_once(empty_cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start at once; whoever is second waits for the first and reads its report."""
    compiled: list[str] = []
    real = compilers.compile_config  # type: ignore[attr-defined]

    def counted(*arguments: object) -> object:
        compiled.append("once")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compilers, "compile_config", counted)
    reports: list[Report] = []
    threads = [
        threading.Thread(target=lambda: reports.append(compilers.compile_here(job.problem, job.config)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(reports) == 8 and len(set(reports)) == 1


def test_a_text_that_the_compiler_refuses(empty_cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(
        monkeypatch,
        """
        for line in sys.stdin:
            print(json.dumps({"failed": "CompileError: no such layout"}), flush=True)
        """,
    )
    assert compile_all([job]) == {job.source.sha: "CompileError: no such layout"}


def test_a_compiler_that_crashes_costs_one_text(empty_cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "sys.stdin.readline(); os.abort()")
    found = compile_all([job, Job.of(serving.problem_of("mla_decode"), serving.config_of("mla_decode"))], 1)
    assert len(found) == 2 and all("ended with status -6" in str(why) for why in found.values())


def test_a_compiler_that_hangs_is_ended(empty_cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "subprocess.run(['sleep', '3600'])")
    found = compile_all([job], limit_s=0.5)
    assert found == {job.source.sha: "TimeoutError: the compiler gave no answer in 0.5 s"}


def test_what_a_compiler_prints_is_no_answer(empty_cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "print('hello', flush=True); sys.stdin.readline()")
    assert "JSONDecodeError" in str(compile_all([job])[job.source.sha])


def test_a_half_written_report_is_none(empty_cache: Path, job: Job) -> None:
    record = compilers._record(job)
    record.parent.mkdir(parents=True)
    record.write_text('{"registers": 3')
    assert known_report(job) is None
    record.write_text('{"registers": 3}')
    assert known_report(job) is None


def worker(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Another program in the place of the compiler's."""
    text = "import json, os, subprocess, sys\n" + textwrap.dedent(body)
    real = compilers.subprocess.Popen  # type: ignore[attr-defined]

    def start(command: list[str], **words: object) -> object:
        return real([sys.executable, "-c", text], **words)

    monkeypatch.setattr(compilers.subprocess, "Popen", start)  # type: ignore[attr-defined]
