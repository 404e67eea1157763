"""The database under stress: many processes, kill -9, full disks, and files that are not as they should be.

    python benchmarks/store_stress.py FOLDER > benchmarks/store/stress.json

A folder on a real disk; the full form takes about five minutes, --short a few seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from exports import measured

from dsv4tune.tuned.database import migrations
from dsv4tune.tuned.reader import Stored
from dsv4tune.tuned.selector import family
from dsv4tune.tuned.store import Store, StoreError

_FORK = multiprocessing.get_context("fork")
TRIAL = measured(64)


def in_processes(
    function: Callable[..., None], arguments: list[tuple[Any, ...]], limit: float = 300
) -> list[int | None]:
    """Exit codes of one process for each tuple of arguments, all let go at once."""
    gate = _FORK.Barrier(len(arguments))

    def run(*given: Any) -> None:
        gate.wait()
        function(*given)

    processes = [_FORK.Process(target=run, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit)
    return [process.exitcode for process in processes]


def sound(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return bool(connection.execute("pragma integrity_check").fetchone() == ("ok",))
    finally:
        connection.close()


def old(path: Path, trials: int) -> None:
    """A database of the first schema, with data."""
    from sqlite_utils import Database

    db = Database(path)
    migrations.apply(db, stop_before="m002_sharing")
    data = TRIAL.model_dump(mode="json")
    rest = {n: data[n] for n in ("times_us", "spread", "baseline", "error", "checked_by", "resources", "finished_at")}
    db.table("device").insert({"capability": "12.0", "json": json.dumps(data["device"])})
    db.table("environment").insert({"json": json.dumps(data["environment"])})
    problem = json.dumps(data["problem"], sort_keys=True, separators=(",", ":"))
    db.table("problem").insert({"key": data["problem_key"], "op": "indexer", "rows": 64, "json": problem})
    row = {
        **{n: data[n] for n in ("source_sha", "status", "provenance", "yardstick")},
        **{"problem_id": 1, "device_id": 1, "environment_id": 1, "width": TRIAL.range.width},
        **{"config": json.dumps(data["config"]), "range": json.dumps(data["range"]), "json": json.dumps(rest)},
    }
    db.table("trial").insert_all({**row, "score": 0.5 + i / 1000} for i in range(trials))
    db.close()


# -- at once ----------------------------------------------------------------------------------------------------


def _create(path: Path) -> None:
    store = Store(path)
    store.add(TRIAL)
    store.close()


def creators(folder: Path, rounds: int, first_schema: bool) -> dict[str, Any]:
    """Eight processes create, or migrate, the same database at once, and each stores a trial."""
    failed = lost = 0
    for number in range(rounds):
        path = folder / f"created-{first_schema}-{number}.db"
        if first_schema:
            old(path, 50)
        codes = in_processes(_create, [(path,)] * 8)
        failed += sum(code != 0 for code in codes)
        store = Store(path, create=False)
        lost += 8 + 50 * first_schema - store.total()
        store.close()
    return {"rounds": rounds, "processes": 8 * rounds, "failed": failed, "lost": lost}


def _write(path: Path, number: int, until: float, told: Any) -> None:
    store = Store(path)
    count = 0
    while time.monotonic() < until:
        store.add(TRIAL.model_copy(update={"seed": number * 1_000_000 + count}))
        count += 1
    told.put(("written", number, count))


def _read(path: Path, number: int, until: float, told: Any) -> None:
    faults: list[str] = []
    count = seen = 0
    of = family(_problem())
    while time.monotonic() < until:
        store = Store(path, create=False)
        best, total = store.best(TRIAL.problem_key), store.total()
        store.close()
        stored = Stored(path, faults.append)
        found = list(stored.entries(of, 64, 0, "3.9.0", "13.0"))
        stored.close()
        if best is None or not found or total < seen:
            faults.append(f"{total} after {seen}")
        seen = total
        count += 1
    told.put(("read", number, count if not faults else faults[0]))


def _problem() -> Any:
    from dsv4tune.codegen import ops

    return ops.problem_from_json(TRIAL.problem)


def readers_and_writers(folder: Path, seconds: float) -> dict[str, Any]:
    path = folder / "shared.db"
    _create(path)
    told = _FORK.Queue()
    until = time.monotonic() + seconds
    jobs = [(_write, n) for n in range(4)] + [(_read, n) for n in range(8)]

    def work(function: Any, number: int) -> None:
        function(path, number, until, told)
        told.close()
        told.join_thread()

    codes = in_processes(work, jobs, seconds + 120)
    answers = [told.get(timeout=10) for _ in range(sum(code == 0 for code in codes))]
    written = sum(count for kind, _, count in answers if kind == "written")
    reads = [count for kind, _, count in answers if kind == "read"]
    store = Store(path, create=False)
    seeds = {trial.seed for trial in store.trials()}
    store.close()
    return {
        "seconds": seconds,
        "failed": sum(code != 0 for code in codes),
        "trials told as written": written,
        "lost": written - (len(seeds) - 1 if 0 in seeds and written < len(seeds) else len(seeds)),
        "reads": sum(count for count in reads if isinstance(count, int)),
        "reads that were wrong": [count for count in reads if not isinstance(count, int)],
        "sound": sound(path),
    }


# -- ended in the middle ----------------------------------------------------------------------------------------


def _write_and_tell(path: Path, told: Any) -> None:
    store = Store(path)
    for i in range(1_000_000):
        store.add(TRIAL.model_copy(update={"seed": i}))
        told.send(i)


def kills(folder: Path, times: int) -> dict[str, Any]:
    """kill -9 of a writer at random points; every trial that it told of must be there."""
    path = folder / "killed.db"
    dice = random.Random(0)
    bad = told = held = 0
    for _ in range(times):
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=_write_and_tell, args=(path, theirs))
        process.start()
        theirs.close()
        until = time.monotonic() + dice.uniform(0.0, 0.4)
        now = 0
        while time.monotonic() < until:
            if ours.poll(0.002):
                ours.recv()
                now += 1
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        try:
            while ours.poll():
                ours.recv()
                now += 1
        except EOFError:
            pass
        told += now
        if not path.exists():
            continue
        store = Store(path)  # as the next search would
        total = store.total()
        bad += not (held + now <= total <= held + now + 1) or bool(store.notes) or not sound(path)
        held = total
        store.close()
    return {"kills": times, "told": told, "held": held, "runs with a lost or damaged trial": bad}


# -- no room, no right, no database -----------------------------------------------------------------------------


def _fill(path: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store(path)
    store.add(TRIAL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        for _ in range(100_000):
            store.add(TRIAL)
    except StoreError as error:
        assert "can't write" in str(error) and "what it holds is kept" in str(error), error
        os._exit(7)


def disk_full(folder: Path) -> dict[str, Any]:
    """No more room in the middle of a search: one line, and everything that was stored is there afterwards."""
    found = {}
    for limit in (200_000, 1_000_000, 3_000_000):
        path = folder / f"full-{limit}.db"
        (code,) = in_processes(_fill, [(path, limit)])
        before = sqlite3.connect(path).execute("select count(*) from trial").fetchone()[0]
        store = Store(path)
        store.add(TRIAL)
        found[str(limit)] = {
            "one line": code == 7,
            "held": before,
            "goes on": store.total() == before + 1,
            "sound": sound(path),
        }
        store.close()
    return found


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except StoreError as error:
        return str(error)
    return "not refused"


def states(folder: Path) -> dict[str, Any]:
    """What is said of files that can't be used; `kept` where the file is as it was."""
    found: dict[str, Any] = {}
    newer = folder / "newer.db"
    _create(newer)
    connection = sqlite3.connect(newer)
    connection.execute("insert into _sqlite_migrations (migration_set, name) values ('dsv4tune', 'm999_later')")
    connection.commit()
    connection.close()
    before = newer.read_bytes()
    found["newer schema"] = {"said": refused(lambda: Store(newer)), "kept": newer.read_bytes() == before}
    whole = folder / "whole.db"
    store = Store(whole)
    store.add_all([TRIAL] * 300)
    store.close()
    data = whole.read_bytes()
    dice = random.Random(0)
    broken = {"truncated": data[: len(data) // 2], "garbage": b"x" * 5000, "header only": data[:100]}
    for i in range(20):
        spoilt = bytearray(data)
        for _ in range(200):
            spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
        broken[f"spoilt {i}"] = bytes(spoilt)
    kept = searched = served = 0
    told: list[str] = []
    for name, text in broken.items():
        path = folder / f"{name}.db"
        path.write_bytes(text)
        lines: list[str] = []
        stored = Stored(path, lines.append)
        list(stored.entries(family(_problem()), 64, 0, "3.9.0", "13.0"))
        stored.close()
        served += len(lines) <= 1
        try:
            store = Store(path)
            store.add(TRIAL)
            aside = Path(f"{path}.bad-1")
            searched += store.total() >= 1
            kept += not store.notes or aside.read_bytes() == text
            store.close()
        except StoreError as error:
            told.append(str(error).replace(str(folder), ""))
    found["corrupt"] = {
        "refused with a line": told,
        "files": len(broken),
        "set aside whole": kept,
        "search goes on": searched,
        "server goes on": served,
    }
    return found


def main() -> None:
    short = "--short" in sys.argv
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as name:
        folder = Path(name)
        result = {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "eight create": creators(folder, 1 if short else 20, False),
            "eight migrate": creators(folder, 1 if short else 20, True),
            "8 readers, 4 writers": readers_and_writers(folder, 2 if short else 60),
            "kill -9": kills(folder, 5 if short else 100),
            "disk full": disk_full(folder),
            "states": states(folder),
        }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
