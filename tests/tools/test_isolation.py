"""Candidates that go wrong cost one trial each and a bounded time, whichever card gets them; on a real GPU see
test_gpu_isolation.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

import pytest
import sabotage
from fakes import make_problem

from dsv4tune.codegen import ops
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools import evaluate
from dsv4tune.tools.evaluate import Evaluation, Pools
from dsv4tune.tools.executor import Seat
from dsv4tune.tools.measure import Setup
from dsv4tune.tools.samplers import Grid
from dsv4tune.tools.search import Proposer, search
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.records import Trial

pytestmark = pytest.mark.slow

LIMIT_S = 5.0


@pytest.fixture
def setup() -> Setup:
    problem, card = make_problem(64, "h200")
    return Setup(problem, Profile(8448, (128, 8448), (1.0, 1.0)), card, 0)


@pytest.fixture
def space(setup: Setup) -> Space:
    return ops.get("indexer").space(setup.problem, setup.device)


@pytest.fixture(autouse=True)
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("import_job", "compile_job", "device_job", "session_job"):
        monkeypatch.setattr(evaluate, name, getattr(sabotage, name))


def run(setup: Setup, space: Space, orders: Mapping[Config, str], trials: int) -> list[Trial]:
    """A search by two compilers and two cards."""
    how: dict[str, Any] = {"environment": sabotage.orders(orders), "prepare_s": 60, "memory": 1 << 30}
    judges = Pool(2, LIMIT_S, **how, seats=[Seat(card="card 0"), Seat(card="card 1")])
    pools = Pools(Pool(2, LIMIT_S, **how), judges, on_gpu=True)
    finished: list[Trial] = []
    try:
        pools.warm()
        proposer = Proposer(space, Grid(), list(orders))
        result = search(proposer, Evaluation(setup, pools, None), finished.append, trials, None)
        assert result.status == "complete"
    finally:
        pools.close()
    assert not multiprocessing.active_children()
    return finished


EXPECTED = {
    "hang in compile": ("timeout", "compile: no answer in "),
    "crash in compile": ("failed", "compile: its process ended with signal SIGSEGV"),
    "hoard in compile": ("failed", "compile: took more than 1 GiB of memory"),
    "hang": ("timeout", "no answer in "),
    "crash": ("failed", "its process ended with signal SIGSEGV"),
    "poison": ("failed", "device fault: an illegal memory access"),
    "raise": ("failed", "RuntimeError: no kernel image is available"),
    "leak": ("ok", ""),
}


def test_each_costs_one_trial(setup: Setup, space: Space) -> None:
    orders = dict(zip(space.valid()[40:], EXPECTED, strict=False))
    trials = run(setup, space, orders, 24)
    assert len({Config(t.config) for t in trials}) == len(trials) == 24
    for trial in trials:
        order = orders.get(Config(trial.config), "")
        status, reason = EXPECTED.get(order, ("ok", ""))
        assert (trial.status, trial.reason[: len(reason)]) == (status, reason), (order, trial)
        if trial.status == "timeout":
            assert trial.compile_seconds + trial.judge_seconds < 2 * LIMIT_S
    # Every card measured, and a process saw one card only.
    where = {trial.card for trial in trials if not trial.reason.startswith("compile")}
    assert where == {"card 0", "card 1"}
    cards = {(trial.warnings[0], trial.card) for trial in trials if trial.status == "ok"}
    assert len(cards) == len({process for process, _ in cards})
