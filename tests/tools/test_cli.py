"""The command line: what it prints, what it refuses, and that nothing finished is lost."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from exports import measured
from fakes import make_final, make_trial
from typer.testing import CliRunner

from dsv4tune.codegen.space import Config
from dsv4tune.tools.cli import app, entries, overview, recordings, serving, sharing, tuning
from dsv4tune.tuned.records import Baseline, Catalogue
from dsv4tune.tuned.store import Store

SEARCH = ["search", "--kernel", "indexer", "--target", "sm_120", "--rows", "64", "--context", "1M"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dsv4tune.tools.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


@pytest.fixture
def filled(db: Path) -> Path:
    store = Store(db)
    store.add(make_trial())
    store.add(make_trial(rows=1, score=2.5))
    store.close()
    return db


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--kernel": "indexr"}, "unknown kernel 'indexr': did you mean 'indexer'? Known are indexer, mla_decode"),
        ({"--target": "sm_70"}, "unknown target 'sm_70': did you mean 'sm_90'? Known are sm_89"),
        ({"--device": "rtx-9999"}, "unknown device 'rtx-9999': did you mean 'rtx-5090'? Known are rtx-pro-6000"),
        ({"--device": "h200"}, "device 'h200' is sm_90, not sm_120"),
        ({"--trials": "0"}, "--trials must be at least 1, not 0"),
        ({"--rows": "0"}, "--rows takes whole numbers above 0, such as 64 or 1,16,64, not '0'"),
        ({"--rows": "many"}, "--rows takes whole numbers above 0"),
        ({"--context": "1G"}, "--context takes whole numbers above 0"),
        ({"--budget": "10x"}, "--budget takes a time such as 90s"),
        ({"--budget": "soon"}, "--budget takes a time such as 90s"),
        ({"--lengths": "128,9999999"}, "live length 9999999 is outside 1..262208"),
        ({"--lengths": "128", "--weights": "x"}, "--weights takes numbers"),
        ({"--lengths": "128", "--weights": "1,2"}, "one weight for each of its lengths"),
        ({"--weights": "1,2"}, "--weights goes with --lengths"),
        ({"--lengths": "128", "--weights": "nan"}, "weights must be above 0 and finite"),
        ({"--lengths": "128,128"}, "a live length is named twice"),
        ({"--rows": "10000000000"}, "rows must be 1 to 262144"),
        ({"--context": str(10**18)}, "is more than DeepSeek-V4's 1M"),
        ({"--db": "/nowhere/tuned.db"}, "folder /nowhere does not exist: create it"),
        ({"--db": "/proc"}, "/proc is a folder: name a file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(db: Path, change: dict[str, str], message: str) -> None:
    options = dict(zip(SEARCH[1::2], SEARCH[2::2], strict=True)) | {"--trials": "2", "--db": str(db)} | change
    result = run("search", *[part for option in options.items() for part in option])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.startswith("dsv4tune: ")
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_an_unwritable_database_loses_nothing(filled: Path) -> None:
    filled.chmod(0o400)
    before = filled.read_bytes()
    if os.geteuid() == 0:
        pytest.skip("root writes read-only files")
    result = run(*SEARCH, "--trials", 2, "--db", filled)
    assert result.exit_code == 2 and "can't write" in result.stderr
    assert filled.read_bytes() == before


def test_reading_commands_say_what_is_missing(db: Path, filled: Path) -> None:
    for command in (["list"], ["show", "--kernel", "indexer", "--rows", 64], ["export"]):
        result = run(*command, "--db", db.with_name("none.db"))
        assert result.exit_code == 2 and "run a search first" in result.stderr
    result = run("show", "--db", filled, "--kernel", "indexer", "--rows", 7)
    assert result.exit_code == 2 and "no usable trial of indexer rows=7" in result.stderr
    assert "which holds indexer of 1, 64 rows: run a search" in result.stderr
    result = run("export", "--db", filled, "-o", "/nowhere/best.json")
    assert result.exit_code == 2 and "can't write /nowhere/best.json" in result.stderr


# -- reading ----------------------------------------------------------------------------------------------------


def test_list_and_show(filled: Path) -> None:
    rows = json.loads(run("list", "--db", filled, "--json").stdout)
    assert [row["problem"]["rows"] for row in rows] == [1, 64]
    assert rows[1]["trials"] == {"ok": 1} and rows[1]["best"]["provenance"] == "predicted"
    assert "predicted: 3.00 us at 128" in run("list", "--db", filled).stdout
    none = run("list", "--db", filled, "--device", "h200")
    assert none.exit_code == 0 and not none.stdout and "nothing of that kind in" in none.stderr

    found = json.loads(run("show", "--db", filled, "--kernel", "indexer", "--rows", 64, "--json").stdout)
    assert found["config"]["schedule"] == "hybrid" and found["resources"]["shared_bytes"] == 20_000
    source = Path(found["source"])
    assert "@triton.jit" in source.read_text()
    text = run("show", "--db", filled, "--kernel", "indexer", "--rows", 64).stdout
    assert "checked by interpreter" in text and str(source) in text


def test_show_tells_how_the_final_went(db: Path) -> None:
    store = Store(db)
    store.add_final([make_trial(score=0.9, final=make_final(1, runner_up={"block_t": 64}, runner_up_score=0.93))])
    store.add_final(
        [make_trial(rows=2, score=0.99, final=make_final(1, won=False, runner_up=None, runner_up_score=None))]
    )
    store.close()
    text = run("show", "--db", db, "--kernel", "indexer", "--rows", 64).stdout
    won = "stands for the server's kernel; the next, block_t=64, 0.930"
    assert f"final of 2, 9 rounds: 0.900, spread 0.2%, margin 3%: {won}" in text
    assert (
        "margin 3%: the server's kernel stays\n" in run("show", "--db", db, "--kernel", "indexer", "--rows", 2).stdout
    )
    found = json.loads(run("show", "--db", db, "--kernel", "indexer", "--rows", 64, "--json").stdout)
    assert found["final"]["runner_up"] == {"block_t": 64} and found["final"]["won"] is True


def test_export_is_the_same_for_the_same_database(filled: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        result = run("export", "--db", filled, "-o", file)
        assert result.exit_code == 0 and result.stderr == f"wrote {file}: 2 entries\n"
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run("export", "--db", filled).stdout == files[0].read_text()
    catalogue = Catalogue.model_validate_json(files[0].read_text())
    assert [entry.problem["rows"] for entry in catalogue.entries] == [1, 64]
    assert catalogue.schema_version == 2 and catalogue.entries[0].provenance == "predicted"


def test_what_is_slower_than_the_server_is_not_exported(db: Path) -> None:
    store = Store(db)
    beside = Baseline(name="tilelang", version="0.1.12", times_us={128: 2.0, 262_208: 1000.0})
    measured: dict[str, Any] = {"provenance": "measured", "yardstick": "tilelang", "baseline": beside}
    store.add(make_trial(score=1.01, **measured))
    store.add(make_trial(rows=1, score=0.9, **measured))
    store.add_final([make_trial(rows=2, score=0.985, final=make_final(1, won=False), **measured)])
    result = run("export", "--db", db)
    assert "left out, its final was not won by 3% (0.985): indexer" in result.stderr
    assert "left out, not faster than tilelang (1.010 of it)" in result.stderr
    assert [entry["problem"]["rows"] for entry in json.loads(result.stdout)["entries"]] == [1]


def test_export_writes_into_a_device_and_through_a_link(filled: Path, tmp_path: Path) -> None:
    text = run("export", "--db", filled).stdout
    pipe, link = tmp_path / "pipe", tmp_path / "link.json"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert run("export", "--db", filled, "-o", pipe).exit_code == 0
    assert reader.communicate(timeout=20)[0] == text and pipe.is_fifo()
    link.symlink_to(tmp_path / "best.json")
    assert run("export", "--db", filled, "-o", link).exit_code == 0
    assert link.is_symlink() and (tmp_path / "best.json").read_text() == text


def test_show_survives_other_words_and_an_unwritable_cache(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(db)
    store.add(make_trial(Config({"dialect": "triton", "block": 64})))
    store.add(make_trial(rows=1))
    store.add(measured(8))
    result = run("show", "--db", db, "--kernel", "indexer", "--rows", 64)
    assert result.exit_code == 0 and "not the text that was tried" in result.stdout
    monkeypatch.setenv("DSV4TUNE_CACHE", "/proc/nowhere")
    for rows, says in (
        (1, "source none (not the text"),
        (8, "source not kept: see to the folder of $DSV4TUNE_CACHE\n"),
    ):
        result = run("show", "--db", db, "--kernel", "indexer", "--rows", rows)
        assert result.exit_code == 0 and says in result.stdout


def test_every_command_and_option_is_explained() -> None:
    rooms = (tuning, recordings, entries, sharing, overview, serving)
    commands = tuple(name for room in rooms for name in room.COMMANDS)
    assert {c.name for c in app.registered_commands} == set(commands)
    for command in commands:
        result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0 and "Exit status:" in result.stdout, command
    assert run("--version").stdout.startswith("dsv4tune ")


def test_the_list_of_commands_cuts_no_sentence_off() -> None:
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout.partition("Commands:")[2]
    assert listed.count("\n  ") == len(app.registered_commands) and "..." not in listed


# -- the real thing, without a GPU ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_starts_with_what_was_best_for_other_rows(db: Path) -> None:
    config = make_trial().config | {"schedule": "split", "splits": 16, "programs_per_sm": 0}
    store = Store(db)
    store.add(make_trial(Config(config), rows=48))
    store.close()
    result = run(*SEARCH, "--trials", 3, "--lengths", "128", "--db", db, "--json")
    assert result.exit_code == 0, result.stderr
    tried = [trial.config for trial in Store(db).trials() if trial.problem["rows"] == 64]
    assert len(tried) == 3 and config in tried


def test_search_without_a_gpu_end_to_end(db: Path) -> None:
    done = process(*SEARCH, "--trials", 6, "--seed", 0, "--db", db, "--json")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert out.count("\n") == 1, "one JSON object on stdout and nothing else"
    result = json.loads(out)
    assert result["status"] == "complete" and result["baseline"] is None and result["db"] == str(db)
    assert result["problem"]["range"]["lengths"] == [128, 2048, 32768, 262_208]
    assert list(result["trials"]) == ["total", "ok", "pruned", "refused", "wrong", "unchecked", "failed", "timeout"]
    assert result["trials"]["total"] == result["trials"]["ok"] == 6
    best = result["best"]
    assert best["provenance"] == "predicted" and best["checked_by"] == "interpreter" and best["error"] < 1e-5
    assert list(best["predicted_us"]) == ["128", "2048", "32768", "262208"]
    resources = best["resources"]
    assert resources["shared_bytes"] <= 101_376 and resources["spill_bytes"] == 0 and "e4m3" in resources["mma"]
    assert "predicting for rtx-pro-6000 (sm_120): no such GPU here" in err and "6/6 trials" in err

    shown = json.loads(run("show", "--db", db, "--kernel", "indexer", "--rows", 64, "--json").stdout)
    assert shown["source_is_current"] and shown["config"] == best["config"]
    # The same again has nothing left to do; a different seed reuses what is there.
    done = process(*SEARCH, "--trials", 6, "--seed", 1, "--db", db, "--json")
    assert json.loads(done.communicate(timeout=300)[0])["tried"] == 0


@pytest.mark.slow
def test_kill_9_in_mid_search_loses_and_repeats_nothing(db: Path) -> None:
    first = process(*SEARCH, "--trials", 30, "--db", db, "--json", start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        time.sleep(0.2)
        if db.exists() and _trials(db) >= 2:
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    held = _configs(db)
    assert 2 <= len(held) < 30
    done = process(*SEARCH, "--trials", len(held) + 2, "--db", db, "--json")
    result = json.loads(done.communicate(timeout=300)[0])
    after = _configs(db)
    assert after[: len(held)] == held and len(after) == len(set(after)) == len(held) + 2
    assert result["tried"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_gives_the_best_so_far(db: Path, number: signal.Signals) -> None:
    search = process(*SEARCH, "--trials", 200, "--db", db, "--json")
    until = time.monotonic() + 120
    while time.monotonic() < until and not (db.exists() and _trials(db) >= 1):
        time.sleep(0.2)
    search.send_signal(number)
    out, err = search.communicate(timeout=60)
    result = json.loads(out)
    assert search.returncode == 0, err
    assert result["status"] == "interrupted" and result["best"] is not None
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_budget_ends_a_search(db: Path) -> None:
    done = process(*SEARCH, "--trials", 500, "--budget", "15s", "--db", db, "--json")
    out, err = done.communicate(timeout=120)
    assert json.loads(out)["status"] == "budget", err


def _trials(db: Path) -> int:
    try:
        return int(sqlite3.connect(f"file:{db}?mode=ro", uri=True).execute("select count(*) from trial").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def _configs(db: Path) -> list[str]:
    return [row[0] for row in sqlite3.connect(db).execute("select config from trial order by id")]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("command", ["list", "show", "export", "import"])
def test_a_stdout_that_takes_nothing_is_no_fault_of_ours(command: str, full: bool, db: Path) -> None:
    """After `| head`, or on a full disk: a line or nothing, and what was to be stored is."""
    store = Store(db)
    store.add_all(measured(rows) for rows in (8, 16))
    store.close()
    other = db.with_name("other.db")
    arguments = [str(db), "--yes", "--db", str(other)] if command == "import" else ["--db", str(db)]
    arguments += ["--kernel", "indexer"] if command == "show" else []
    reading, pipe = os.pipe()
    os.close(reading)
    with open(pipe, "w") as nobody, open("/dev/full", "w") as disk:
        done = subprocess.run(
            [sys.executable, "-m", "dsv4tune.tools.cli", command, *arguments],
            stdout=disk if full else nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    said = "dsv4tune: can't write to stdout (No space left on device)\n" if full else ""
    assert (done.returncode, done.stderr) == (2 if full else 1, said)
    assert command != "import" or Store(other, create=False).total() == 2


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "2>&1 >/dev/null | true"])
def test_closed_streams_cost_no_trial(db: Path, closed: str) -> None:
    command = [sys.executable, "-m", "dsv4tune.tools.cli", *SEARCH, "--trials", "1", "--jobs", "1", "--db", str(db)]
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], timeout=120, stdout=subprocess.DEVNULL)
    assert [t.status for t in Store(db, create=False).trials()] == ["ok"]


@pytest.mark.slow
def test_a_compiler_that_cannot_start_is_no_failed_trial(db: Path) -> None:
    nowhere = {**os.environ, "TRITON_CACHE_DIR": "/proc/nowhere"}
    search = process(*SEARCH, "--trials", 2, "--jobs", 1, "--db", db, env=nowhere)
    out, err = search.communicate(timeout=120)
    last = err.splitlines()[-1]
    assert search.returncode == 2 and out == ""
    assert last.startswith("dsv4tune: the compiler can't be used here") and "$TRITON_CACHE_DIR" in last
    assert list(Store(db, create=False).trials()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_costs_nothing(db: Path, number: signal.Signals) -> None:
    search = process(*SEARCH, "--trials", 40, "--jobs", 1, "--db", db, "--json", start_new_session=True)
    assert search.stderr is not None
    while "valid configs" not in search.stderr.readline():
        assert search.poll() is None
    for _ in range(2):
        os.killpg(search.pid, number)
        time.sleep(0.01)
    out, err = search.communicate(timeout=60)
    assert json.loads(out)["status"] == "interrupted"
    assert "Traceback" not in err, err
