"""A database of 1,000,000 trials over 10,000 problems: choose, list, export and import, each timed.

    python benchmarks/store_scale.py FOLDER [TRIALS_A_PROBLEM] > benchmarks/store/scale.json

FOLDER takes about 2 GB. Winners are real: valid configs with this version's source hashes, so that they import.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES, KB, Device
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.render import render
from dsv4tune.tools import catalogue
from dsv4tune.tuned.records import Baseline, DeviceRecord, Environment, Range, Resources, Trial
from dsv4tune.tuned.selector import Book, Rules
from dsv4tune.tuned.store import EVERYTHING, Filter, Store

OP = ops.get("indexer")
WIDTH = 262_208
#: Valid for every row count here.
CONFIG = OP.reference_config(OP.problem(64, DEVICES["rtx-pro-6000"].silicon), DEVICES["rtx-pro-6000"])
LENGTHS = [128, 2048, 32768, WIDTH]


def problems() -> list[tuple[Problem, Device]]:
    """1,000 row counts on each of 10 cards that differ in their SMs."""
    cards = [
        Device(f"card {sms}", Silicon("12.0", sms, 99 * KB), 100 * KB, 1 << 27, 1e12, "made up")
        for sms in range(100, 200, 10)
    ]
    return [(OP.problem(rows, card.silicon), card) for card in cards for rows in range(1, 1001)]


def winner(problem: Problem, card: Device, dice: random.Random) -> Trial:
    config = OP.space(problem, card).check(CONFIG)
    beside = {n: 3.0 + n / 5000 for n in LENGTHS}
    times = {n: round(us * dice.uniform(0.7, 0.95), 4) for n, us in beside.items()}
    score = math.exp(sum(math.log(times[n] / beside[n]) for n in LENGTHS) / len(LENGTHS))
    silicon = problem.silicon
    return Trial(
        problem=problem.to_json(),
        problem_key=problem.key,
        device=DeviceRecord(
            capability=silicon.capability,
            sm_count=silicon.sm_count,
            shared_bytes=silicon.shared_bytes,
            l2_bytes=card.l2_bytes,
            name=card.name,
        ),
        environment=Environment(dsv4tune="0.1.0", triton="3.9.0", ptxas="13.0.1", torch="2.13.0"),
        config=dict(config),
        source_sha=render(OP, problem, config).sha,
        status="ok",
        provenance="measured",
        range=Range(width=WIDTH, lengths=LENGTHS, weights=[1.0] * 4),
        score=round(score, 6),
        yardstick="tilelang",
        times_us=times,
        spread={n: 0.01 for n in LENGTHS},
        baseline=Baseline(name="tilelang", version="0.1.12", times_us=beside),
        error=1e-7,
        checked_by="gpu",
        resources=Resources(
            registers=96,
            stack_bytes=0,
            spill_bytes=0,
            shared_bytes=20_000,
            mma="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
            native_fp8=True,
            async_copy="cp.async",
            instructions=900,
            seconds=0.5,
            binary="0" * 64,
        ),
        finished_at="2026-01-01T00:00:00+00:00",
    )


def build(path: Path, each: int) -> None:
    """Winners through the store; the losers are copies of them in SQL, because a million models take minutes."""
    dice = random.Random(0)
    store = Store(path)
    store.add_all(winner(problem, card, dice) for problem, card in problems())
    store.close()
    connection = sqlite3.connect(path)
    configs = OP.space(*problems()[63]).valid()
    columns = "problem_id, device_id, environment_id, source_sha, provenance, yardstick, range, width, lengths, json"
    for number in range(1, each):
        config = json.dumps(dict(configs[number * 5 % len(configs)]), sort_keys=True, separators=(",", ":"))
        status, score = ("ok", f"score + {number / 100}") if number % 4 else ("wrong", "null")
        connection.execute(
            f"insert into trial ({columns}, config, status, score) select {columns}, ?, ?, {score} from trial "
            "where id <= 10000",
            [config, status],
        )
        connection.commit()
    connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()


def timed(function: Callable[[], Any], times: int = 1) -> dict[str, float]:
    """Wall and processor seconds: where others work on the machine, the second says more."""
    spans, busy = [], []
    for _ in range(times):
        started, before = time.perf_counter(), time.process_time()
        function()
        spans.append(time.perf_counter() - started)
        busy.append(time.process_time() - before)
    median, cpu = statistics.median(spans), statistics.median(busy)
    return {"median_s": round(median, 6), "worst_s": round(max(spans), 6), "cpu_s": round(cpu, 6), "times": times}


def forget(path: Path) -> None:
    """Out of the system's page cache, as far as it lets go of it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def choosing(path: Path) -> dict[str, Any]:
    dice = random.Random(1)
    wanted = [dice.choice(problems())[0] for _ in range(200)]
    rules = Rules("measured", {"indexer": "tilelang"}, "3.9.0", "13.0.1")
    keys: Iterator[Problem] = iter(wanted)

    def best() -> None:
        store = Store(path, create=False)
        assert store.best(next(keys).key) is not None
        store.close()

    def serving() -> None:
        problem = next(keys)
        book = Book(problem.silicon, print)
        from dsv4tune.tuned.reader import Stored

        book.stored = Stored(path, print)
        assert book.choose(problem, WIDTH, rules).entry is not None
        book.close()

    def uncached() -> None:
        forget(path)
        best()

    return {
        "best of a problem, new connection": timed(best, 50),
        "the same, file dropped from the page cache": timed(uncached, 20),
        "a server's choice, new connection": timed(serving, 50),
    }


_COMMAND = """
import atexit, runpy, sys
# Not by wait4, which counts the memory of the process that forked.
status = "/proc/self/status"
atexit.register(lambda: sys.stderr.write(next(line.split()[1] for line in open(status) if line.startswith("VmHWM"))))
runpy.run_module("dsv4tune.tools.cli", run_name="__main__")
"""


def command(*arguments: object, stdin: Path | None = None) -> tuple[dict[str, Any], str, str]:
    """`dsv4tune` as a user starts it: its figures, the start of Python among them, stdout and stderr."""
    line = [sys.executable, "-c", _COMMAND, *map(str, arguments)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with (stdin or Path(os.devnull)).open("rb") as handle:
        done = subprocess.run(line, stdin=handle, capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    *said, peak_kb = done.stderr.splitlines()
    figures = {
        "status": done.returncode,
        "seconds": round(seconds, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "peak_mb": int(peak_kb) >> 10,
    }
    return figures, done.stdout, "\n".join(said)


def imported(file: Path, path: Path) -> dict[str, Any]:
    figures, out, _ = command("import", file, "--yes", "--json", "--db", path)
    done = json.loads(out)
    stored = done["new"] + done["better"] + done["kept"]
    return {"stored": stored, "known": done["known"], **figures}


def refused(folder: Path) -> dict[str, Any]:
    """1 GB that says it is an export: as a file, and through a pipe that doesn't tell its size."""
    file = folder / "huge.json"
    with file.open("w") as out:
        out.write('{"entries": [')
        for _ in range(1 << 10):
            out.write('{"a": "' + "x" * ((1 << 20) - 10) + '"},')
    found = {}
    for name, place in (("file", file), ("pipe", "-")):
        figures, _, said = command("import", place, "--yes", "--db", folder / "none.db", stdin=file)
        found[name] = {**figures, "said": said.replace(str(folder), "")}
    file.unlink()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    each = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    path, out, again = folder / "scale.db", folder / "winners.json", folder / "again.json"
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    if not path.exists():
        result["build"] = timed(lambda: build(path, each))
    result["trials"] = Store(path, create=False).total()
    result["database_mb"] = path.stat().st_size >> 20
    result["choose"] = choosing(path)
    one = Filter("indexer", 64, words=("sms=150",))
    result["list"] = {
        "all": timed(lambda: list(catalogue.overview(path, EVERYTHING))),
        "one problem": timed(lambda: list(catalogue.overview(path, one)), 5),
    }
    figures, _, _ = command("export", "-o", out, "--db", path)
    result["export"] = {**figures, "file_mb": round(out.stat().st_size / 1e6, 1)}
    empty = folder / "empty.db"
    empty.unlink(missing_ok=True)
    result["import"] = {"into an empty database": imported(out, empty), "into the same one": imported(out, path)}
    command("export", "-o", again, "--db", empty)
    result["export, import, export"] = {"identical": out.read_bytes() == again.read_bytes()}
    result["1 GB of JSON"] = refused(folder)
    result["losers found"] = {
        "of all": timed(lambda: Store(path, create=False).losers(EVERYTHING, 0)),
        "of one problem": timed(lambda: Store(path, create=False).losers(one, 0)),
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
