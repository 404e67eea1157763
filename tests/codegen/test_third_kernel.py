"""docs/adding-a-kernel.md's worked example: a third op goes the way of the other two with no change to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from fakes import RESOURCES
from row_sum import RowSum
from typer.testing import CliRunner

from dsv4tune.codegen import ops, render
from dsv4tune.codegen.compile import Report, compile_config
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.space import Config
from dsv4tune.runtime import compilers
from dsv4tune.tools import peers, samplers
from dsv4tune.tools.cli import app
from dsv4tune.tools.evaluate import predicted_us
from dsv4tune.tools.measure import Setup, floors_us
from dsv4tune.tools.search import Proposer, search

SUPPORT = Path(__file__).parents[1] / "support"
CARD = DEVICES["rtx-pro-6000"]
#: What a worker process does, with this op registered in it.
CHECK = """
import sys; sys.path.insert(0, {support!r})
import jinja2, row_sum
from dsv4tune.codegen import ops, render
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.tools.measure import interpret_job
ops.OPS["row_sum"] = op = row_sum.RowSum()
loader = render.environment().loader
render.environment().loader = jinja2.ChoiceLoader([loader, jinja2.FileSystemLoader({support!r} + "/templates")])
card = DEVICES["rtx-pro-6000"]
problem = op.problem(64, card.silicon)
for config in op.space(problem, card).valid():
    verdict = interpret_job(problem, config)
    assert verdict.ok, (str(config), verdict)
    print(config, verdict.error)
"""


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[RowSum]:
    """Registered, with its template found."""
    found = RowSum()
    monkeypatch.setitem(ops.OPS, found.name, found)
    environment = render.environment()
    own = jinja2.FileSystemLoader(SUPPORT / "templates")
    assert environment.loader is not None
    monkeypatch.setattr(environment, "loader", jinja2.ChoiceLoader([environment.loader, own]))
    yield found


def test_every_config_is_right_by_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    code = CHECK.format(support=str(SUPPORT))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10, "12 combinations, of which 2 fill the registers"


def test_it_compiles_for_a_card_that_is_not_here_and_is_ranked(op: RowSum) -> None:
    problem = op.problem(64, CARD.silicon)
    setup = Setup(problem, op.profile(problem, 4096), CARD, 0)
    floors = floors_us(problem, setup.profile, CARD.bandwidth)
    found = {}
    for config in op.space(problem, CARD).valid():
        report = compile_config(op, problem, config).report
        assert report.refusal(CARD.silicon) is None and report.spill_bytes == 0
        found[config] = setup.profile.score(predicted_us(setup, config, report), floors)
    assert len(found) == 10 and len(set(found.values())) > 1
    assert all(value > 1.0 for value in found.values()), "nothing beats the byte floor"


def test_the_search_takes_it(op: RowSum) -> None:
    from fakes import FakeEvaluator

    space = op.space(op.problem(64, CARD.silicon), CARD)
    evaluator = FakeEvaluator(lambda config: 1.0 + (config["block_t"] != 2048) + (config["order"] == "backward"))
    best: dict[float, Config] = {}
    result = search(
        Proposer(space, samplers.Guided(space, 0, lambda config: 0.0)),
        evaluator,
        lambda trial: best.setdefault(trial.score or 9.0, Config(trial.config)),
        10,
        None,
    )
    assert result.tried == 10 and best[min(best)]["block_t"] == 2048 and best[min(best)]["order"] == "forward"


def test_no_server_calls_it(op: RowSum, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op whose calls runtime/wanted.py doesn't tell has none, least of all those of another."""
    explained = CliRunner().invoke(app, ["explain", "--kernel", op.name, "--device", "h200"])
    assert (
        explained.exit_code == 2
        and explained.output == f"dsv4tune: no server calls {op.name}: use one of indexer, mla_decode\n"
    )
    report = Report(**RESOURCES.model_dump())
    monkeypatch.setattr(compilers, "compile_all", lambda jobs, _: {job.source.sha: report for job in jobs})
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--device", "h200", "--json"]).stdout)["findings"]
    named = [one["what"] for one in findings if one["what"].startswith("entries of")]
    assert len(named) == len(set(named)) == 4 and not any(op.name in name for name in named)


def test_no_server_kernel_is_known_for_it(op: RowSum) -> None:
    assert peers.baseline(op.name, CARD.silicon) is None
