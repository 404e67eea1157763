"""What is shown while a search runs: on a terminal, in a file, and with --quiet."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from fakes import make_trial
from rich.console import Console
from typer.testing import CliRunner

from dsv4tune.tools import progress, tune
from dsv4tune.tools.cli import app


def problem(trials: int = 10, known: int = 2, deadline: float | None = None) -> progress.Problem:
    return progress.Problem("indexer, 64 rows", trials, known, deadline, lambda: {"compile": 3, "check": 0})


def test_rate_and_time_left_are_of_the_latest_candidates() -> None:
    shown = problem(trials=110)
    assert shown.rate == 0.0 and shown.left_s is None
    # 50 at two a second after a slow start.
    shown.started = 0.0
    shown.ended = [100.0 + n / 2 for n in range(50)]
    assert shown.rate == pytest.approx(2.0) and shown.left_s == pytest.approx(29.0) and shown.done == 52
    shown.deadline = time.monotonic() + 5.0
    assert shown.left_s == pytest.approx(5.0, abs=1.0)
    assert progress.duration(59.6) == "60 s" and progress.duration(600) == "10 min"
    assert progress.duration(4800) == "1 h 20 min"


def test_plain_lines_come_every_few_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said: list[str] = []
    lines = progress.Lines(said.append)
    lines.begin(problem(trials=5, known=2))
    for score in (1.5, 1.2, 1.4):
        now[0] += 3.0
        lines.trial(make_trial(score=score))
    lines.show()
    assert len(said) == 2, "not after 3 s, after 6 s, and at the last"
    assert said[0].startswith("4/5 trials, 0.3/s, 3 s left; best 1.200 of byte floor (dialect=")
    assert said[1].startswith("5/5 trials") and "best 1.200" in said[1]
    lines.end()
    lines.show()
    assert len(said) == 2


def test_an_unusable_candidate_is_counted_and_never_the_best() -> None:
    watch = progress.Watcher()
    watch.begin(problem())
    watch.trial(make_trial(status="wrong", score=None))
    assert watch.problem is not None and watch.problem.best is None and watch.problem.counts == {"wrong": 1}


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_shows_counts_phases_and_the_best(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    with progress.Terminal(Console(file=out, force_terminal=True, width=160)) as terminal:
        terminal.phase("enumerating the space")
        terminal.begin(problem())
        terminal.trial(make_trial())
        terminal.say("a line with [brackets]")
    text = out.getvalue()
    for part in (
        "enumerating the space",
        "indexer, 64 rows",
        "3/10 trials",
        "3 to compile",
        "best 1.500",
        "[brackets]",
    ):
        assert part in text
    assert ("\x1b[3" in text) is colour, "colours of the bar"


def test_quiet_says_only_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def answer(requests: list[tune.Request], watch: progress.Watcher) -> list[Any]:
        watch.say("a line")
        return [{"best": None, "status": "budget"}]

    monkeypatch.setattr(tune, "tune_all", answer)
    command = ["search", "--kernel", "indexer", "--target", "sm_120", "--db", str(tmp_path / "tuned.db"), "--json"]
    result = CliRunner().invoke(app, [*command, "--quiet"])
    assert result.stderr == "" and json.loads(result.stdout)["status"] == "budget"
    result = CliRunner().invoke(app, command)
    assert result.stderr == "a line\n" and json.loads(result.stdout)["status"] == "budget"
