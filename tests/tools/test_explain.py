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
from dsv4tune.codegen.words import ranges
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


def test_many_row_counts_are_told_by_what_they_share() -> None:
    text = run("explain", "--rows", "captured", "--context", "128k", *H200)
    lines = text.splitlines()
    assert len(lines) < 80 and text.count("no entry for c128 layers") == 1 and "refused: " not in text
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0] == "indexer: 37 of 52 row counts have an entry"
    assert heads[3].startswith("mla_decode, 8 heads, c128 layers: 0 of 52 row counts have an entry: no entry for c128")
    assert "  rows 200-368: the server's own kernel stays: no one config is usable at both 192 and 384 rows" in lines
    # JSON stays complete.
    assert len(results("--rows", "captured", "--context", "128k", *H200)) == 52 * 4
    spans = [line.removeprefix("  rows ").partition(":")[0] for line in lines if line.startswith("  rows ")]
    assert "1, 8, 16-40, 56-72, 88, 104-136, 176-192" in spans


def test_scores_apart_are_no_outcomes_apart(tmp_path: Path) -> None:
    db = tmp_path / "tuned.db"
    for rows in range(1, 10):
        serving.write_entry(db, rows=rows, score=1 + rows / 10)
    arguments = ["--kernel", "indexer", "--device", "rtx-pro-6000", "--db", str(db)]
    told = run("explain", "--rows", ",".join(map(str, range(1, 10))), *arguments).splitlines()
    assert (
        told[0] == "indexer: 0 of 9 row counts have an entry: not faster than tilelang by 1% (1.100-1.900 of its time)"
    )
    assert "refused: " in run("explain", "--rows", "1,2,3", *arguments), "few are told in full"


def test_ranges_are_of_what_was_asked_for() -> None:
    every = [1, 2, 4, 8, 16, 24, 32]
    assert ranges([4, 8, 16], every) == "4-16" and ranges([1, 2, 8], every) == "1, 2, 8"
    assert ranges([1, 4, 8, 16, 32], every) == "1, 4-16, 32" and ranges(every, every) == "1-32"


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
