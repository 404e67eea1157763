"""A job that crashes, hangs, raises or poisons its process costs itself alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest

from dsv4tune.tools.executor import Answer, collect
from dsv4tune.tools.workers import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool(2, limit_s=20, environment={"SOME": "thing"}, prepare_s=60)
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
    pool.seats = pool.seats[:1]
    pool.submit("before", jobs.pid)
    pool.submit("bad", jobs.refuse, "line one\nline two")
    pool.submit("after", jobs.pid)
    answers = all_of(pool)
    assert answers["bad"].kind == "raised"
    assert answers["bad"].reason == "ValueError: line one"
    assert answers["before"].value == answers["after"].value


def test_a_hanging_job_is_killed_at_its_limit(pool: Pool, tmp_path: Path) -> None:
    pool.ask_each(jobs.pid)
    pool.limit_s = 3.0
    pool.submit("bad", jobs.hang, str(tmp_path / "pid"))
    pool.submit("good", jobs.double, 21)
    answers = all_of(pool)
    assert answers["bad"].kind == "timeout" and "3 s" in answers["bad"].reason
    assert answers["bad"].seconds < 10
    assert answers["good"].value == 42
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def _runs(pid: int) -> bool:
    """Whether a process is more than an entry that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ends(pid: int) -> bool:
    until = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not _runs(pid)


def test_an_answer_that_came_in_time_counts_however_late_it_is_read(pool: Pool) -> None:
    """The search was stopped, or busy, for longer than the limit."""
    pool.ask_each(jobs.pid)
    pool.limit_s = 1.0
    pool.submit("good", jobs.double, 21)
    time.sleep(2.0)
    assert pool.ready([]) == []  # what it reads first is that the job was taken up
    assert [answer.value for answer in pool.ready([])] == [42]


def test_what_a_hanging_job_started_is_killed_with_it(pool: Pool, tmp_path: Path) -> None:
    """A compiler that hangs is as often its assembler."""
    pool.ask_each(jobs.pid)
    pool.limit_s = 3.0
    pool.submit("bad", jobs.hang_in_a_child, str(tmp_path / "pid"))
    assert all_of(pool)["bad"].kind == "timeout"
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_process_that_died_idle_is_no_fault_of_the_next_job(pool: Pool) -> None:
    pool.seats = pool.seats[:1]
    pool.submit("before", jobs.pid)
    before = all_of(pool)["before"].value
    os.kill(before, signal.SIGKILL)
    assert _ends(before)
    pool.submit("after", jobs.double, 21)
    assert all_of(pool)["after"].value == 42


def test_a_process_that_dies_before_it_takes_a_job_up_leaves_it_to_another(pool: Pool) -> None:
    pool.seats = pool.seats[:1]
    pool.submit("before", jobs.pid)
    before = all_of(pool)["before"].value
    os.kill(before, signal.SIGSTOP)
    pool.submit("after", jobs.double, 21)
    os.kill(before, signal.SIGKILL)
    assert all_of(pool)["after"].value == 42


def _main(tmp_path: Path, body: str, **options: Any) -> subprocess.Popen[str]:
    """A script that owns a pool."""
    script = tmp_path / "main.py"
    script.write_text(
        "import jobs\n"
        "from dsv4tune.tools.executor import collect\n"
        "from dsv4tune.tools.workers import Pool\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool(1, 60)\n" + "".join(f"    {line}\n" for line in [*body.splitlines(), "pool.close()"])
    )
    paths = os.pathsep.join(["src", str(Path(jobs.__file__).parent)])
    return subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, **options)


def test_a_hanging_job_ends_with_a_killed_search(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    main = _main(tmp_path, f"pool.submit(0, jobs.hang, {str(marker)!r})\nwhile True: collect([pool], 1.0)")
    until = time.monotonic() + 20
    while not (marker.exists() and marker.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    main.kill()
    main.wait()
    assert _ends(int(marker.read_text()))


def test_environment_is_set_before_imports(pool: Pool) -> None:
    pool.environment = {**pool.environment, "TRITON_INTERPRET": "1"}
    pool.submit("x", jobs.variable, "TRITON_INTERPRET")
    assert all_of(pool)["x"].value == "1"


def test_workers_keep_stdout_clean(tmp_path: Path) -> None:
    body = "pool.submit(0, jobs.shout)\nwhile pool.pending: collect([pool], 1.0)"
    done = _main(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0 and out == "" and "noise on stdout" in err
