"""The database: nothing finished is lost, nothing bad is followed, many processes at once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import make_final, make_trial
from pydantic import ValidationError
from sqlite_utils import Database

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config
from dsv4tune.tuned import database, reader
from dsv4tune.tuned import store as store_module
from dsv4tune.tuned.reader import Stored
from dsv4tune.tuned.records import Baseline, Entry, Range, Trial, Tried, triton_version
from dsv4tune.tuned.selector import family
from dsv4tune.tuned.share import standing
from dsv4tune.tuned.store import Store, StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


def test_a_trial_comes_back_as_it_went(path: Path) -> None:
    trial = make_trial(
        provenance="measured",
        baseline=Baseline(name="tilelang", version="0.1.12", times_us={128: 2.5, 262_208: 1500.25}),
        warnings=["clocks held down by power cap"],
        reason="of a path that is no UTF-8: \udcff",
    )
    store = Store(path)
    store.add(trial)
    store.close()
    assert list(Store(path, create=False).trials(trial.problem_key)) == [trial]


def test_what_was_given_up_leaves_nothing_behind(path: Path) -> None:
    def broken() -> Iterator[Trial]:
        yield make_trial()
        raise ValueError("a bad file")

    store = Store(path)
    with pytest.raises(ValueError, match="a bad file"):
        store.add_all(broken())
    store.add(make_trial())
    assert list(store.trials()) == [make_trial()]


def test_devices_environments_and_problems_are_stored_once(path: Path) -> None:
    store = Store(path)
    for _ in range(3):
        store.add(make_trial())
    counts = {t: store.db.table(t).count for t in ("device", "environment", "problem", "trial")}
    assert counts == {"device": 1, "environment": 1, "problem": 1, "trial": 3}


def test_the_best_is_the_one_with_the_best_evidence(path: Path) -> None:
    store = Store(path)
    default = Config(make_trial().config)
    assert store.best(make_trial().problem_key) is None
    steps: list[tuple[dict[str, Any], bool]] = [
        ({"score": 0.1, "status": "wrong"}, False),
        ({"score": 0.1, "status": "unchecked"}, False),
        ({"score": 1.5}, True),
        ({"score": 1.4, "config": dict(default.with_(num_stages=3))}, True),
        ({"score": 1.45}, False),
        # Measured goes before predicted, timed beside the server's kernel before not.
        ({"score": 9.0, "provenance": "measured"}, True),
        ({"score": 9.5, "provenance": "measured", "yardstick": "tilelang"}, True),
        ({"score": 0.5, "provenance": "predicted"}, False),
        # A narrower range does not replace a wider one, however good.
        (
            {
                "score": 0.5,
                "provenance": "measured",
                "yardstick": "tilelang",
                "range": Range(width=8448, lengths=[128, 8448], weights=[1.0, 1.0]),
            },
            False,
        ),
        ({"score": 0.9, "provenance": "measured", "yardstick": "tilelang"}, True),
    ]
    for changes, wins in steps:
        trial = make_trial(**changes)
        store.add(trial)
        best = store.best(trial.problem_key)
        assert (best == trial) is wins, changes


def test_what_was_tried_says_the_same_as_the_trials(path: Path) -> None:
    store = Store(path)
    wide, narrow = make_trial().range, make_trial().range.model_copy(update={"width": 4096})
    some = [make_trial(), make_trial(status="failed", score=None), make_trial(range=narrow), make_trial(rows=2)]
    store.add_all(some)
    for over, expected in ((wide, some[:2]), (narrow, some[2:3])):
        found = list(store.tried(some[0].problem_key, over))
        same = set(Tried.model_fields) - {"timed"}
        assert [t.model_dump(include=same) for t in found] == [t.model_dump(include=same) for t in expected]
        assert [t.timed for t in found] == [tuple(t.times_us) for t in expected]
    store.db.execute("update trial set config = '[]'")
    with pytest.raises(StoreError, match="can't read"):
        list(store.tried(some[0].problem_key, wide))


def test_equal_scores_go_to_the_same_config_in_any_order(tmp_path: Path) -> None:
    default = Config(make_trial().config)
    trials = [make_trial(default.with_(num_stages=n)) for n in (2, 3, 4)]
    winners = set()
    for number, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 2, 0])):
        store = Store(tmp_path / f"{number}.db")
        for i in order:
            store.add(trials[i])
        best = store.best(trials[0].problem_key)
        assert best is not None
        winners.add(Config(best.config).key)
    assert len(winners) == 1


def test_records_refuse_what_they_do_not_know() -> None:
    good = make_trial().model_dump()
    for change in ({"extra": 1}, {"status": "fine"}, {"score": float("nan")}, {"config": {"block_t": [1]}}):
        with pytest.raises(ValidationError):
            Trial(**{**good, **change})


# -- files that are not as they should be -----------------------------------------------------------------------


def test_missing_and_unusable_places_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no database at .*run a search first"):
        Store(tmp_path / "none.db", create=False)
    with pytest.raises(StoreError, match=r"folder .* does not exist: create it"):
        Store(tmp_path / "none" / "tuned.db")
    with pytest.raises(StoreError, match=r"is a folder: name a file"):
        Store(tmp_path)
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database, " * 100)
    with pytest.raises(StoreError, match=r"can't read"):
        Store(garbage, create=False)
    assert garbage.read_bytes().startswith(b"not a database")


def test_reading_changes_nothing(path: Path) -> None:
    store = Store(path)
    store.add(make_trial())
    store.close()
    path.chmod(stat.S_IRUSR)
    before = path.read_bytes()
    assert len(list(Store(path, create=False).trials())) == 1
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a user that may not write")
def test_a_database_is_read_where_nothing_can_be_written(path: Path) -> None:
    """SQLite's log would want an index beside the file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shared = Path(folder) / "tuned.db"
        store = Store(shared)
        store.add(make_trial())
        store.close()
        os.chmod(folder, 0o755)
        os.seteuid(65534)
        try:
            assert len(list(Store(shared, create=False).trials())) == 1
        finally:
            os.seteuid(0)


def test_only_a_regular_file_becomes_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="no regular file"):
        Store(tmp_path / "pipe")
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
    # SQLite's word for a database that is gone with the process.
    monkeypatch.chdir(tmp_path)
    Store(":memory:").add(make_trial())
    assert (tmp_path / ":memory:").is_file()


@pytest.mark.parametrize("how", ["garbage", "truncated", "empty"])
def test_a_bad_file_is_set_aside_with_a_message(path: Path, how: str) -> None:
    store = Store(path)
    for _ in range(200):
        store.add(make_trial())
    store.close()
    data = path.read_bytes()
    path.write_bytes({"garbage": b"x" * 5000, "truncated": data[: len(data) // 2], "empty": b""}[how])
    bad = path.read_bytes()
    again = Store(path)
    again.add(make_trial())
    assert len(list(again.trials())) == 1
    if how != "empty":
        assert "set aside as" in again.notes[0]
        assert Path(f"{path}.bad-1").read_bytes() == bad


@pytest.mark.parametrize("seed", range(12))
def test_spoilt_bytes_stop_neither_a_search_nor_a_server(path: Path, seed: int) -> None:
    """Whatever they hit: a server says one line at most, a search goes on, with a new file where it has to."""
    store = Store(path)
    store.add_all([make_trial()] * 100)
    store.close()
    dice, data = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(dice.choice([5, 50, 200])):
        data[dice.randrange(len(data))] = dice.randrange(256)
    path.write_bytes(bytes(data))
    lines: list[str] = []
    with contextlib.closing(Stored(path, lines.append)) as stored:
        list(stored.entries(family(ops.problem_from_json(make_trial().problem)), 64, 0, "3.9.0", "13.0"))
    assert len(lines) <= 1 and all(len(line) < 400 and "\n" not in line for line in lines)
    again = Store(path)
    again.add(make_trial())
    assert again.total() >= 1 and (not again.notes or Path(f"{path}.bad-1").read_bytes() == bytes(data))
    again.close()


def test_text_that_is_no_text_is_a_spoilt_file(path: Path) -> None:
    """SQLite tells it as it tells of a lock, of which a search would not go on."""
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("update _sqlite_migrations set applied_at = cast(x'32ff36' as text)")
    connection.commit()
    connection.close()
    store = Store(path)
    assert "set aside as" in store.notes[0] and "decode" in store.notes[0]
    store.close()


def test_a_newer_schema_is_refused_and_kept(path: Path) -> None:
    store = Store(path)
    store.add(make_trial())
    store.db.table("_sqlite_migrations").insert(
        {"migration_set": "dsv4tune", "name": "m999_from_the_future", "applied_at": "2030"}
    )
    store.close()
    for create in (True, False):
        with pytest.raises(StoreError, match=r"newer dsv4tune .m999_from_the_future.: upgrade"):
            Store(path, create=create)
    assert sqlite3.connect(path).execute("select count(*) from trial").fetchone() == (1,)


def test_a_trial_of_other_making_is_one_clear_line(path: Path) -> None:
    store = Store(path)
    store.add(make_trial())
    for text in ('{"unknown": 1}', "[]", "no JSON"):
        store.db.execute("update trial set json = ?", [text])
        with pytest.raises(StoreError, match="holds a trial that this dsv4tune can't read"):
            store.best(make_trial().problem_key)


def test_default_path_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "mine.db"))
    assert store_module.default_path() == tmp_path / "mine.db"
    monkeypatch.delenv("DSV4TUNE_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Store(store_module.default_path()).add(make_trial())
    assert (tmp_path / "data" / "dsv4tune" / "tuned.db").is_file()


# -- many processes ---------------------------------------------------------------------------------------------


def _write(path: Path, number: int, count: int, gate: Any) -> None:
    gate.wait()
    store = Store(path)
    for i in range(count):
        store.add(make_trial(seed=number * 1000 + i))


@pytest.mark.slow
def test_eight_processes_create_and_write_at_once(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(8)
    processes = [context.Process(target=_write, args=(path, n, 25, gate)) for n in range(8)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0] * 8
    seeds = sorted(t.seed for t in Store(path, create=False).trials())
    assert seeds == sorted(n * 1000 + i for n in range(8) for i in range(25))


def _write_and_tell(path: Path, told: Any) -> None:
    store = Store(path)
    for i in range(10_000):
        store.add(make_trial(seed=i))
        told.send(i)


@pytest.mark.slow
def test_kill_9_loses_no_finished_trial(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    dice = random.Random(0)
    finished = 0
    for _ in range(10):
        ours, theirs = context.Pipe()
        process = context.Process(target=_write_and_tell, args=(path, theirs))
        process.start()
        theirs.close()
        ours.recv()
        told = 1
        until = time.monotonic() + dice.uniform(0.0, 0.2)
        while time.monotonic() < until:
            if ours.poll(0.01):
                ours.recv()
                told += 1
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        try:
            while ours.poll():
                ours.recv()
                told += 1
        except EOFError:
            pass
        finished += told
        held = len(list(Store(path, create=False).trials()))
        # One more may have been committed and not told.
        assert finished <= held <= finished + 1
        finished = held
    assert sqlite3.connect(path).execute("pragma integrity_check").fetchone() == ("ok",)


# -- a disk that is full, a schema that is older ------------------------------------------------------------------


def _fill(path: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store(path)
    store.add(make_trial())
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        while True:
            store.add(make_trial())
    except StoreError as error:
        os._exit(7 if "can't write" in str(error) and "what it holds is kept" in str(error) else 1)


def test_a_full_disk_is_one_line_and_loses_nothing(path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_fill, args=(path, 300_000))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    held = sqlite3.connect(path).execute("select count(*) from trial").fetchone()[0]
    store = Store(path)
    store.add(make_trial())
    assert store.notes == [] and store.total() == held + 1 > 2
    assert sqlite3.connect(path).execute("pragma integrity_check").fetchone() == ("ok",)


def _first_schema(path: Path) -> Trial:
    """A database as the first schema had it; its one trial."""
    trial = make_trial()
    data = trial.model_dump(mode="json")
    db = Database(path)
    database.migrations.apply(db, stop_before="m002_sharing")
    db.table("device").insert({"capability": "12.0", "json": json.dumps(data["device"])})
    db.table("environment").insert({"json": json.dumps(data["environment"])})
    problem = json.dumps(data["problem"], sort_keys=True, separators=(",", ":"))
    db.table("problem").insert({"key": trial.problem_key, "op": "indexer", "rows": 64, "json": problem})
    rest = ("times_us", "spread", "baseline", "error", "checked_by", "resources", "seed", "finished_at")
    db.table("trial").insert(
        {
            **{name: data[name] for name in ("source_sha", "status", "provenance", "score", "yardstick")},
            **{"problem_id": 1, "device_id": 1, "environment_id": 1, "width": trial.range.width},
            "config": json.dumps(data["config"]),
            "range": json.dumps(data["range"]),
            "json": json.dumps({name: data[name] for name in rest}),
        }
    )
    db.close()
    return trial


def test_an_older_schema_is_read_by_a_server_and_migrated_by_a_search(path: Path) -> None:
    trial = _first_schema(path)
    before = path.read_bytes()
    of = family(ops.problem_from_json(trial.problem))

    def served() -> list[tuple[Entry, bool]]:
        with contextlib.closing(Stored(path, pytest.fail)) as stored:
            assert stored.rows(of, True) == [64] and stored.rows(of, False) == []
            assert stored.nearest(of, 65, -1, True) == [64] and stored.nearest(of, 64, 1, True) == []
            return list(stored.entries(of, 64, 0, "3.9.0", "13.0"))

    assert served() == [(Entry.of(trial), False)] and path.read_bytes() == before
    with pytest.raises(StoreError, match=r"older schema.*prune"):
        Store(path, create=False)
    store = Store(path)
    assert store.best(trial.problem_key) == trial and list(store.trials()) == [trial]
    assert served() == [(Entry.of(trial), False)]


@pytest.mark.parametrize("name", [one.name for one in database.migrations._migrations[1:]])
def test_a_migration_happens_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    trial = _first_schema(path)
    known = database.migrations._migrations
    number = [one.name for one in known].index(name)
    with monkeypatch.context() as earlier:
        earlier.setattr(database.migrations, "_migrations", known[:number])
        Store(path).close()

    def schema() -> list[Any]:
        return sqlite3.connect(path).execute("select sql from sqlite_master order by name").fetchall()

    before = schema()
    last = known[number]
    migrate = last.fn

    def fails(db: Any) -> None:
        migrate(db)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(last, "fn", fails)
    with pytest.raises(StoreError, match="can't write"):
        Store(path)
    assert schema() == before
    monkeypatch.setattr(last, "fn", migrate)
    assert list(Store(path).trials()) == [trial]


def test_the_winners_are_the_best_of_each(path: Path) -> None:
    """Among evidence of every kind, and the same as a file of all of them would give."""
    dice = random.Random(4)
    store = Store(path)
    trials = []
    for _ in range(120):
        trial = make_trial(rows=dice.choice([1, 8, 64]), score=dice.choice([0.8, 0.9, 1.5]))
        trial = trial.model_copy(
            update={
                "config": {**trial.config, "num_stages": dice.choice([2, 3, 4])},
                "provenance": dice.choice(["measured", "predicted"]),
                "yardstick": dice.choice(["tilelang", "byte floor"]),
                "imported": dice.choice(["", "theirs.json"]),
                "environment": trial.environment.model_copy(update={"triton": dice.choice(["1.0", triton_version()])}),
                "range": trial.range.model_copy(update={"width": dice.choice([262_208, 262_272])}),
                "final": dice.choice([None, None, make_final(1), make_final(2)]),
            }
        )
        trials.append(trial)
    store.add_all([*trials, make_trial(rows=2, status="wrong", score=None)])

    def place(trial: Trial) -> tuple[Any, ...]:
        return standing(Entry.of(trial), trial.here, triton_version())

    winners = dict(store.winners())
    assert list(winners) == sorted(store.problems()) and len(winners) == 4
    for key, winner in winners.items():
        assert winner == store.best(key)
        of_this = [place(trial) for trial in trials if trial.problem_key == key]
        assert (winner is None) == (not of_this) and (winner is None or place(winner) == min(of_this))


def test_neighbours_are_the_nearest_rows_of_the_same_problem(path: Path) -> None:
    store = Store(path)
    for rows, score in ((1, 0.9), (8, 0.8), (8, 0.7), (32, 0.6), (64, 0.5), (16, 0.1)):
        store.add(make_trial(rows=rows, score=score))
    store.add(make_trial(rows=12, device="h200"))
    store.add(make_trial(rows=24, status="wrong", score=None))

    def near(rows: int) -> list[tuple[int, float | None]]:
        return [(t.problem["rows"], t.score) for t in store.neighbours(make_trial(rows=rows).problem)]

    assert near(16) == [(8, 0.7), (32, 0.6)]
    assert near(20) == [(16, 0.1), (32, 0.6)] and near(1) == [(8, 0.7)] and near(512) == [(64, 0.5)]
    store.close()


def test_a_later_final_takes_the_place_of_an_earlier_one(path: Path) -> None:
    """What was timed alone may have had luck: it does not stand before what a final went by; the last final counts."""
    store = Store(path)
    alone = make_trial(score=0.5)
    first, other, last = (
        alone.model_copy(update={"score": s, "final": make_final(n)}) for s, n in ((0.7, 1), (0.6, 2), (0.9, 1))
    )
    store.add(alone)
    store.add_final([first, other])
    assert store.best(alone.problem_key) == first
    elsewhere = make_trial(rows=3, final=make_final(1))
    store.add_final([elsewhere])
    store.add_final([last])
    assert store.best(alone.problem_key) == last and store.best(elsewhere.problem_key) == elsewhere
    assert [trial.final for trial in store.trials(alone.problem_key)] == [
        None,
        make_final(1),
        make_final(2),
        make_final(1),
    ]
    # What was timed again is no candidate of the search.
    assert store.counts(alone.problem_key, alone.range) == {"ok": 1}
    assert [tally.counts for tally in store.tallies()] == [{"ok": 1}, {"ok": 1}]
    store.close()


# -- a million trials -------------------------------------------------------------------------------------------


def _plan(path: Path, query: str, values: dict[str, Any]) -> str:
    connection = sqlite3.connect(path)
    return "\n".join(row[3] for row in connection.execute(f"explain query plan {query}", values))


def test_what_is_asked_often_goes_through_an_index(path: Path) -> None:
    store = Store(path)
    store.add_all(make_trial(rows=rows) for rows in range(1, 40))
    best = store._best_query(False)
    store.close()
    plan = _plan(path, best, {"keys": json.dumps([make_trial().problem_key]), "range": None})
    # The losers are ranked by the index alone, and the winner is found by its place there.
    assert "SEARCH trial USING COVERING INDEX trial_best (problem_id=?)" in plan
    assert "SCAN trial" not in plan and "SEARCH t USING INDEX trial_best (problem_id=? AND" in plan
    plan = _plan(path, store_module.TALLIES, {"keys": "[]"})
    assert "SEARCH t USING COVERING INDEX trial_range (problem_id=?)" in plan
    plan = _plan(path, store_module.COUNTS, {"key": "", "range": ""})
    assert "USING COVERING INDEX trial_range (problem_id=? AND range=?)" in plan
    plan = _plan(path, store_module.TRIED, {"key": "", "range": ""})
    assert "USING INDEX trial_range (problem_id=? AND range=?)" in plan
    columns = {"family": "p.family", "imported": "t.imported", "lengths": "t.lengths", "final": "t.final"}
    ranked = reader.RANKED.format(rank=reader.BEST_RANK.format(same="1", wide="width < 5, width"), **columns)
    plan = _plan(path, ranked, {"family": "", "rows": 8})
    assert "SEARCH p USING COVERING INDEX problem_family (family=? AND rows=?)" in plan
    assert "SEARCH t USING COVERING INDEX trial_best (problem_id=?)" in plan
    nearest = reader.NEAREST.format(family="p.family", beyond="< :rows", usable=reader.USABLE[False], order="desc")
    plan = _plan(path, nearest, {"family": "", "rows": 8})
    assert "SEARCH p USING COVERING INDEX problem_family (family=? AND rows<?)" in plan and "TEMP B-TREE" not in plan


def _reads_and_writes(path: Path, writes: bool, until: float) -> None:
    seen = 0
    while time.monotonic() < until:
        if writes:
            store = Store(path)
            store.add(make_trial())
        else:
            store = Store(path, create=False)
            total = store.total()
            assert store.best(make_trial().problem_key) is not None and total >= seen
            seen = total
        store.close()


@pytest.mark.slow
def test_eight_readers_and_four_writers(path: Path) -> None:
    """For a minute in benchmarks/store_stress.py."""
    Store(path).add(make_trial())
    until = time.monotonic() + 2
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_reads_and_writes, args=(path, n < 4, until)) for n in range(12)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 12
    assert sqlite3.connect(path).execute("pragma integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
def test_the_stress_run_still_runs(tmp_path: Path) -> None:
    """Its full form is in benchmarks/store."""
    script = Path(__file__).parents[2] / "benchmarks" / "store_stress.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(script).parents[1] / "src")}
    command = [sys.executable, str(script), str(tmp_path), "--short"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kill -9"]["runs with a lost or damaged trial"] == found["eight create"]["failed"] == 0
    corrupt = found["states"]["corrupt"]
    assert corrupt["files"] == corrupt["set aside whole"] == corrupt["search goes on"] == corrupt["server goes on"]
