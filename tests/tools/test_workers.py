"""A job that crashes, hangs, raises or poisons its process costs itself alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest

from dsv4tune.tools.workers import Answer, Pool, collect


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool(2, limit_s=20, environment={"SOME": "thing"})
    yield found
    found.close()


def all_of(pool: Pool) -> dict[Any, Answer]:
    found = {}
    until = time.monotonic() + 60
    while pool.pending and time.monotonic() < until:
        for _, answer in collect([pool], 1.0):
            found[answer.tag] = answer
    return found


def test_many_jobs_few_processes(pool: Pool) -> None:
    for n in range(20):
        pool.submit(n, jobs.double, n)
    answers = all_of(pool)
    assert {n: a.value for n, a in answers.items()} == {n: 2 * n for n in range(20)}
    assert all(a.kind == "ok" for a in answers.values())


@pytest.mark.parametrize(
    ("job", "kind", "reason"),
    [
        (jobs.crash, "died", "SIGSEGV"),
        (jobs.leave, "died", "status 3"),
        (jobs.poison, "died", "device fault: illegal memory access"),
    ],
)
def test_a_dead_process_is_replaced(pool: Pool, job: Any, kind: str, reason: str) -> None:
    pool.submit("bad", job)
    for n in range(4):
        pool.submit(n, jobs.double, n)
    answers = all_of(pool)
    assert answers["bad"].kind == kind
    assert reason in answers["bad"].reason
    assert [answers[n].value for n in range(4)] == [0, 2, 4, 6]


def test_an_exception_keeps_the_process(pool: Pool) -> None:
    pool.size = 1
    pool.submit("before", jobs.pid)
    pool.submit("bad", jobs.refuse, "line one\nline two")
    pool.submit("after", jobs.pid)
    answers = all_of(pool)
    assert answers["bad"].kind == "raised"
    assert answers["bad"].reason == "ValueError: line one"
    assert answers["before"].value == answers["after"].value


def test_a_hanging_job_is_killed_at_its_limit(pool: Pool, tmp_path: Path) -> None:
    pool.limit_s = 3.0
    pool.submit("bad", jobs.hang, str(tmp_path / "pid"))
    pool.submit("good", jobs.double, 21)
    answers = all_of(pool)
    assert answers["bad"].kind == "timeout" and "3 s" in answers["bad"].reason
    assert answers["bad"].seconds < 10
    assert answers["good"].value == 42
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_environment_is_set_before_imports(pool: Pool) -> None:
    pool.environment = {**pool.environment, "TRITON_INTERPRET": "1"}
    pool.submit("x", jobs.variable, "TRITON_INTERPRET")
    assert all_of(pool)["x"].value == "1"


def test_workers_keep_stdout_clean(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import jobs\n"
        "from dsv4tune.tools.workers import Pool, collect\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool(1, 20)\n"
        "    pool.submit(0, jobs.shout)\n"
        "    while pool.pending: collect([pool], 1.0)\n"
        "    pool.close()\n"
    )
    paths = os.pathsep.join(["src", str(Path(jobs.__file__).parent)])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0 and done.stdout == "" and "noise on stdout" in done.stderr
