"""Candidates that go wrong on a real GPU cost one trial each and a bounded time; about 45 s on one H200."""

from __future__ import annotations

import re
import time

import gpu_jobs
import pytest
import sabotage

from dsv4tune.codegen import devices
from dsv4tune.codegen.compile import cache_environment
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tools import evaluate, gpu
from dsv4tune.tools.evaluate import Evaluation, Pools, default_jobs
from dsv4tune.tools.executor import Seat
from dsv4tune.tools.measure import Setup
from dsv4tune.tools.samplers import Grid
from dsv4tune.tools.search import Proposer, search
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.records import Trial

pytestmark = pytest.mark.gpu

EXPECTED = {
    "hang in compile": ("timeout", "compile: no answer in 10 s"),
    "crash in compile": ("failed", "compile: its process ended with signal SIGSEGV"),
    "fault": ("failed", "device fault: "),
    "hang": ("timeout", "no answer in 5 s"),
    "poison": ("failed", "device fault: "),
    "crash": ("failed", "its process ended with signal SIGSEGV"),
    "leak": ("ok", ""),
    "leak and raise": ("failed", r"RuntimeError: a candidate that failed; 1[23]\d\d MiB of GPU memory were left"),
}


def test_each_costs_one_trial(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    here = devices.here()
    assert here is not None
    problem = indexer.problem(4, here.silicon)
    setup = Setup(problem, Profile(8448, (128, 8448), (1.0, 1.0)), here, 0)
    monkeypatch.setattr(evaluate, "compile_job", gpu_jobs.compile_job)
    monkeypatch.setattr(evaluate, "device_job", gpu_jobs.device_job)
    space = indexer.space(problem, here)
    # Small ones, which no card refuses.
    small = [c for c in space.valid() if c.int("num_stages") == 2 and c.int("block_t") == 64]
    orders = dict(zip(small, EXPECTED, strict=False))
    environment = {**cache_environment(), **sabotage.orders(orders)}
    cards = [card for card in gpu.cards("all") if card.device.silicon == here.silicon]
    seats = [Seat(card=card.uuid, environment={"CUDA_VISIBLE_DEVICES": card.visible}) for card in cards]
    pools = Pools(
        Pool(default_jobs(), 10, environment, prepare_s=60),
        Pool(1, 5, environment, prepare_s=60, seats=seats),
        on_gpu=True,
    )
    trials: list[Trial] = []
    started = time.monotonic()
    try:
        pools.warm()
        # A good one goes between every two, and in the end: what is left behind would show.
        first = [config for pair in zip(orders, small[len(orders) :], strict=False) for config in pair]
        result = search(Proposer(space, Grid(), first), Evaluation(setup, pools, None), trials.append, 16, None)
    finally:
        pools.close()
    took = time.monotonic() - started
    assert result.status == "complete" and len({Config(t.config) for t in trials}) == len(trials) == 16
    for trial in trials:
        status, reason = EXPECTED.get(orders.get(Config(trial.config), ""), ("ok", ""))
        assert trial.status == status and re.match(reason, trial.reason), trial
    assert {trial.card for trial in trials if trial.card} == {card.uuid for card in cards}
    print(f"\n16 trials, 8 of them bad, on {len(cards)} GPU(s): {took:.1f} s")
