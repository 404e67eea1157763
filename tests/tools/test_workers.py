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

from dsv4tune.tools import workers
from dsv4tune.tools.executor import Answer, NoSeatsLeft, Seat, collect
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


# -- seats ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cards() -> Iterator[Pool]:
    seats = [Seat(card=card, environment={"CARD": card}) for card in ("a", "b", "c")]
    found = Pool(0, 20, prepare_s=60, seats=seats)
    yield found
    found.close()


def test_a_process_for_each_card(cards: Pool) -> None:
    assert [answer.value for answer in cards.ask_each(jobs.variable, "CARD")] == ["a", "b", "c"]
    first = cards.ask(jobs.pid)
    assert first.seat.card == "a" and cards.ask(jobs.pid).value == first.value
    # What is asked one after another stays on one card, also where that took its process.
    assert cards.ask(jobs.crash).kind == "died"
    assert cards.ask(jobs.variable, "CARD").value == "a"


def test_jobs_spread_over_the_cards_and_say_where_they_ran(cards: Pool) -> None:
    for n in range(9):
        cards.submit(n, jobs.nap, 0.2)
    answers = all_of(cards)
    assert {answer.seat.card for answer in answers.values()} == {"a", "b", "c"}


def test_a_card_that_fails_is_given_up_and_its_jobs_go_to_another(cards: Pool) -> None:
    said: list[str] = []
    cards.say = said.append
    for n in range(6):
        cards.submit(n, jobs.only_on, "b")
    answers = all_of(cards)
    assert {n: answer.value for n, answer in answers.items()} == dict.fromkeys(range(6), "b")
    assert all(answer.seat.card == "b" for answer in answers.values())
    assert cards.size >= 1 and all("no device in" in line for line in said)


def test_without_any_card_left_the_search_ends_and_blames_no_candidate(cards: Pool) -> None:
    for n in range(2):
        cards.submit(n, jobs.only_on, "elsewhere")
    with pytest.raises(NoSeatsLeft, match="a process can't be used here: no device in "):
        assert all_of(cards) == {}


def test_a_job_that_no_card_can_run_is_to_blame_where_others_run(cards: Pool) -> None:
    cards.submit("bad", jobs.only_on, "elsewhere")
    for n in range(20):
        cards.submit(n, jobs.nap, 0.2)
    answers = all_of(cards)
    assert answers["bad"].kind == "died" and "no device in" in answers["bad"].reason
    assert all(answers[n].kind == "ok" for n in range(20))


def test_a_card_that_cannot_be_prepared_is_given_up(cards: Pool) -> None:
    cards.prepare(jobs.only_on, "c")
    for n in range(4):
        cards.submit(n, jobs.variable, "CARD")
    all_of(cards)
    assert cards.size == 1 and cards.ask(jobs.variable, "CARD").value == "c"


def test_a_process_that_cannot_be_ended_costs_its_card_alone(cards: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the driver: no signal reaches it."""
    cards.ask_each(jobs.pid)
    stuck = cards._workers[0].process
    monkeypatch.setattr(workers, "_END_S", 1.0)
    os.kill(stuck.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(stuck, "kill", lambda: None)
        cards._discard(0)
    for n in range(6):
        cards.submit(n, jobs.nap, 0.3)
    answers = all_of(cards)
    assert {answer.seat.card for answer in answers.values()} == {"b", "c"} and cards.size == 2
    os.kill(stuck.pid, signal.SIGKILL)


def test_every_process_is_prepared_first(pool: Pool, tmp_path: Path) -> None:
    """Which may take long, without a candidate that hangs in a new process taking as long."""
    pool.seats = pool.seats[:1]
    pool.limit_s = 2.0
    pool.prepare(jobs.note, str(tmp_path / "notes"))
    for n in range(3):
        pool.submit(n, jobs.hang, str(tmp_path / "pid"))
    pool.submit("good", jobs.pid)
    answers = all_of(pool)
    assert [answers[n].reason for n in range(3)] == ["no answer in 2 s"] * 3
    notes = (tmp_path / "notes").read_text().split()
    assert len(set(notes)) == len(notes) == 4 and notes[-1] == str(answers["good"].value)


# -- what a job leaves behind -----------------------------------------------------------------------------------


def test_a_process_that_must_not_be_used_again_gives_its_value_first(pool: Pool) -> None:
    first = pool.ask(jobs.last)
    assert first.kind == "ok" and pool.ask(jobs.pid).value != first.value


def test_an_answer_that_cannot_be_sent_is_the_jobs_own_fault(pool: Pool) -> None:
    before = pool.ask(jobs.pid).value
    answer = pool.ask(jobs.unpicklable)
    assert answer.kind == "raised" and "pickle" in answer.reason
    assert pool.ask(jobs.pid).value == before


def test_memory_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.memory = 256 << 20
    answer = pool.ask(jobs.hoard)
    assert answer.kind == "died" and answer.reason == "took more than 0.25 GiB of memory"
    # What was no job's own is asked for when one has ended.
    monkeypatch.setattr(workers, "_LOOK_S", 1000.0)
    before = pool.ask(jobs.pid).value
    assert pool.ask(jobs.keep).kind == "ok" and pool.ask(jobs.pid).value != before


def test_the_system_takes_a_worker_before_the_search(pool: Pool) -> None:
    worker = pool.ask(jobs.pid).value
    assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"


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
