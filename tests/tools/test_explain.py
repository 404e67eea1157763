"""`explain` and `warm`: a server's choices and compiles without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import serving
from fakes import RESOURCES
from typer.testing import CliRunner

from dsv4tune.codegen.compile import Report
from dsv4tune.runtime import compilers
from dsv4tune.tools.cli import app

H200 = ["--device", "h200"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def results(*arguments: str) -> list[dict[str, object]]:
    return json.loads(run("explain", *arguments, "--json"))["results"]  # type: ignore[no-any-return]


def test_the_issues_own_example() -> None:
    text = run("explain", "--rows", "64", "--tp", "8", "--context", "1048576", *H200)
    assert "rows=64 sm_90" in text and "262208 columns" in text and "of deep_gemm" in text
    assert "from shipped h200/indexer.json, exact" in text
    assert text.count("mla_decode extra") == 3 and text.count("from shipped h200/mla_decode.json, exact") == 3


def test_rows_between_two_that_were_measured() -> None:
    (found,) = results("--rows", "20", "--kernel", "indexer", *H200)
    assert found["chosen"] is not None and str(found["why"]).startswith("the same config at 16 and 24 rows")
    # Whose times these are.
    text = run("explain", "--rows", "20", "--kernel", "indexer", *H200)
    assert "  measured on NVIDIA H200, 24 rows: " in text


def test_why_not(tmp_path: Path) -> None:
    db = tmp_path / "tuned.db"
    serving.write_entry(db, score=1.2)
    arguments = ["--rows", str(serving.ROWS), "--kernel", "indexer", "--device", "rtx-pro-6000", "--db", str(db)]
    (found,) = results(*arguments)
    assert found["chosen"] is None and "not faster than tilelang" in str(found["why"])
    assert "refused: " in run("explain", *arguments) and "the server's own kernel stays" in run("explain", *arguments)


def test_entries_refused_for_one_reason_are_one_line(tmp_path: Path) -> None:
    db = tmp_path / "tuned.db"
    for splits in (1, 2, 4):
        config = {**serving.config_of("indexer", serving.ROWS), "splits": splits}
        serving.write_entry(db, score=1.2, config=config)
    arguments = ["--rows", str(serving.ROWS), "--kernel", "indexer", "--device", "rtx-pro-6000", "--db", str(db)]
    (found,) = results(*arguments)
    (line,) = [line for line in cast("list[str]", found["refused"]) if line.startswith(str(db))]
    assert line.endswith("; 2 more like it")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "bold"], "unknown policy 'bold': use one of measured"),
        (["--tp", "3"], "--tp 3 doesn't divide"),
        (["--rows", "x"], "--rows takes whole numbers"),
        (["--kernel", "gemm"], "unknown kernel 'gemm'"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--db", "/nowhere/tuned.db"], "no database at /nowhere/tuned.db"),
        (["--rows", "99999999", "--kernel", "indexer"], "no kernel serves a server of these arguments"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    text = run("explain", *(arguments if "--device" in arguments else [*arguments, *H200]), code=2)
    assert says in text and len(text.strip().splitlines()) == 1


def test_without_a_gpu_a_card_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4tune.codegen.devices.here", lambda: None)
    assert "name a card with --device or --target" in run("explain", code=2)


def test_warm_compiles_each_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def compile_all(jobs: list[compilers.Job], processes: int) -> dict[str, compilers.Outcome]:
        asked.append(len(jobs))
        return {job.source.sha: Report(**RESOURCES.model_dump()) for job in jobs}

    monkeypatch.setattr(compilers, "compile_all", compile_all)
    done = json.loads(run("warm", "--kernel", "indexer", *H200, "--json"))
    assert done["shapes"] == 52 and done["with_entry"] == asked[0] >= 12 and done["texts"] < asked[0]
    assert "call shapes have an entry" in run("warm", "--kernel", "indexer", *H200)


def test_warm_names_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4TUNE_CACHE", "/dev/null/cache")
    result = CliRunner().invoke(app, ["warm", "--kernel", "indexer", *H200])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].endswith("/dev/null/cache (Not a directory): name another in $DSV4TUNE_CACHE")


def test_warm_says_what_could_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compilers, "compile_all", lambda jobs, _: {job.source.sha: "CompileError: no such layout" for job in jobs}
    )
    assert "CompileError: no such layout" in run("warm", "--kernel", "indexer", *H200, code=1)
