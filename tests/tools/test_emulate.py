"""Which variants `emulate` checks, and what it makes of their answers; the runs themselves need a Hopper GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import RESOURCES
from typer.testing import CliRunner

from dsv4tune.codegen.compile import compile_config
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.tools import cli, emulate
from dsv4tune.tools.emulate import Candidate, Emulated
from dsv4tune.tools.executor import Answer
from dsv4tune.tuned.store import Filter, Store


@pytest.fixture
def candidate(indexer: Indexer, problem: IndexerProblem, card: Device) -> Candidate:
    return Candidate("default", problem, indexer.default(problem, card), 262208)


def test_defaults_at_the_width_of_a_search(indexer: Indexer, card: Device) -> None:
    found = emulate.candidates(indexer, card, [1, 16], None)
    assert [(c.origin, c.problem.rows, c.width) for c in found] == [("default", 1, 262208), ("default", 16, 262208)]


@pytest.mark.parametrize(
    ("kind", "verdict", "status", "error"),
    [
        ("ok", Verdict(1e-7), "ok", 1e-7),
        ("ok", Verdict(0.5, "case 'empty': row 0"), "wrong", 0.5),
        ("ok", Verdict(float("inf"), "row 0"), "wrong", None),
        ("raised", None, "not run", None),
        ("died", None, "wrong", None),
        ("timeout", None, "wrong", None),
    ],
)
def test_answers(candidate: Candidate, kind: str, verdict: Verdict | None, status: str, error: float | None) -> None:
    result = Emulated.of(Answer(candidate, kind, (verdict, None), "" if kind == "ok" else "why"))
    assert (result.status, result.error) == (status, error)
    assert str(result).startswith(f"{status}: ")
    assert str(result).count("\n") == 0
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["config"] == dict(candidate.config)


def test_exit_status_says_whether_all_are_right(monkeypatch: pytest.MonkeyPatch, card: Device) -> None:
    monkeypatch.setattr(emulate, "hopper_here", lambda: card)
    for verdict, status in ((Verdict(1e-7), 0), (Verdict(1.0, "row 0"), 1)):
        answers = lambda wanted, verdict=verdict: (Emulated.of(Answer(c, "ok", (verdict, None))) for c in wanted)  # noqa: E731
        monkeypatch.setattr(emulate, "emulate_all", answers)
        done = CliRunner().invoke(cli.app, ["emulate", "--target", "sm_120", "--rows", "1,64", "--json"])
        assert done.exit_code == status
        assert len(json.loads(done.stdout)["results"]) == 2


def test_what_is_right_is_kept_as_a_prediction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, indexer: Indexer, problem: IndexerProblem, card: Device
) -> None:
    report = compile_config(indexer, problem, indexer.default(problem, card)).report
    verdicts = iter([Verdict(1e-7), Verdict(1.0, "row 0")])
    monkeypatch.setattr(emulate, "hopper_here", lambda: card)
    answers = lambda wanted: (Emulated.of(Answer(c, "ok", (next(verdicts), report))) for c in wanted)  # noqa: E731
    monkeypatch.setattr(emulate, "emulate_all", answers)
    path = tmp_path / "kept.db"
    arguments = ["emulate", "--target", "sm_120", "--rows", "1,64", "--keep", str(path)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 1
    store = Store(path, create=False)
    (key,) = store.problems(Filter("indexer"))
    best = store.best(key)
    assert best is not None and "rows=1 " in key
    assert (best.checked_by, best.provenance, best.error) == ("emulation", "predicted", 1e-7)
    assert best.score is not None and best.score > 1 and set(best.times_us) == set(best.range.lengths)
    store.close()


@pytest.mark.parametrize("arguments", [[], ["--kernel", "nothing"], ["--rows", "x"], ["--db", "/nowhere/at.db"]])
def test_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(cli.app, ["emulate", "--target", "sm_120", *arguments])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert arguments or "needs an sm_90 GPU" in done.stderr


def test_stored_bests_of_the_target(tmp_path: Path, indexer: Indexer, problem: IndexerProblem, card: Device) -> None:
    from dsv4tune.tools.evaluate import environment
    from dsv4tune.tuned.records import DeviceRecord, Range, Trial

    config = indexer.reference_config(problem, card)
    other = indexer.problem(64, card.silicon.__class__("8.9", 128, card.silicon.shared_bytes))
    path = tmp_path / "tuned.db"
    store = Store(path)
    for stored in (problem, other):
        s = stored.silicon
        store.add(
            Trial(
                problem=stored.to_json(),
                problem_key=stored.key,
                device=DeviceRecord(
                    capability=s.capability, sm_count=s.sm_count, shared_bytes=s.shared_bytes, l2_bytes=1, name="x"
                ),
                environment=environment(s.arch, False),
                config=dict(config),
                source_sha="0" * 64,
                status="ok",
                provenance="predicted",
                range=Range(width=2560, lengths=[128], weights=[1.0]),
                score=1.0,
                yardstick="byte floor",
                times_us={128: 1.0},
                error=1e-7,
                checked_by="interpreter",
                resources=RESOURCES,
            )
        )
    store.close()
    found = emulate.candidates(indexer, card, [1], path)
    assert [(c.origin, c.problem.rows, c.width) for c in found] == [("default", 1, 262208), ("stored", 64, 2560)]
    assert found[1].config == config and found[1].problem == problem
