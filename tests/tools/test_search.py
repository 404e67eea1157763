"""The search loop, with a fake in the GPU's place."""

from __future__ import annotations

import time

import pytest
from fakes import FakeEvaluator, make_problem

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools.search import Proposer, search
from dsv4tune.tuned.records import Trial


@pytest.fixture(scope="module")
def space() -> Space:
    problem, card = make_problem()
    return ops.get("indexer").space(problem, card)


def bowl(config: Config) -> float:
    """A smooth score with one optimum."""
    score = 1.0 + abs(config.int("block_t") - 128) / 64 + abs(config.int("num_stages") - 3) * 0.3
    score += {"page_grid": 4.0, "split": 1.0, "persistent": 0.5, "hybrid": 0.0}[str(config["schedule"])]
    return score + (config["load"] != "tma") * 0.4 + (config["operand_order"] != "kq") * 0.2


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_every_config_once_and_all_of_them(space: Space, sampler: str) -> None:
    evaluator = FakeEvaluator(bowl)
    count = 40 if sampler == "tpe" else 10_000
    result = search(Proposer(space, sampler, 0), evaluator, lambda t: None, count, None)
    assert len(set(evaluator.evaluated)) == len(evaluator.evaluated) == min(count, len(space.valid()))
    assert result.status == "complete" and result.tried == len(evaluator.evaluated)
    assert set(evaluator.evaluated) <= set(space.valid())


def test_same_seed_same_walk(space: Space) -> None:
    walks = []
    for seed in (3, 3, 4):
        evaluator = FakeEvaluator(bowl, capacity=1)
        search(Proposer(space, "tpe", seed), evaluator, lambda t: None, 25, None)
        walks.append(evaluator.evaluated)
    assert walks[0] == walks[1] != walks[2]


def test_first_ones_go_first(space: Space) -> None:
    wanted = [space.valid()[17], space.valid()[4]]
    evaluator = FakeEvaluator(bowl, capacity=1)
    search(Proposer(space, "random", 0, wanted), evaluator, lambda t: None, 5, None)
    assert evaluator.evaluated[:2] == wanted


def test_the_sampler_beats_chance(space: Space) -> None:
    """On an easy landscape, in the median of seeds: the best of 40 proposed is nearer the optimum than of 40 random."""

    def best(sampler: str, seed: int) -> float:
        evaluator = FakeEvaluator(bowl)
        search(Proposer(space, sampler, seed), evaluator, lambda t: None, 40, None)
        return min(map(bowl, evaluator.evaluated))

    seeds = range(5)
    assert sorted(best("tpe", s) for s in seeds)[2] < sorted(best("random", s) for s in seeds)[2]


def test_unusable_candidates_teach_and_never_stop(space: Space) -> None:
    evaluator = FakeEvaluator(lambda c: None if c["load"] == "tma" else bowl(c))
    finished: list[Trial] = []
    result = search(Proposer(space, "tpe", 0), evaluator, finished.append, 40, None)
    assert result.tried == len(finished) == 40
    assert {t.status for t in finished} == {"ok", "failed"}


def test_the_budget_ends_it(space: Space) -> None:
    class Slow(FakeEvaluator):
        def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
            time.sleep(0.05)
            return super().collect(timeout)

    finished: list[Trial] = []
    result = search(Proposer(space, "grid", 0), Slow(bowl), finished.append, 10_000, time.monotonic() + 0.5)
    assert result.status == "budget" and 1 <= len(finished) < 30


def test_ctrl_c_keeps_what_is_finished(space: Space) -> None:
    class Interrupted(FakeEvaluator):
        def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
            if len(self.evaluated) == 5:
                raise KeyboardInterrupt
            return super().collect(timeout)

    finished: list[Trial] = []
    result = search(Proposer(space, "grid", 0), Interrupted(bowl), finished.append, 100, None)
    assert result.status == "interrupted" and result.tried == len(finished) == 5


def test_stored_trials_are_not_repeated(space: Space) -> None:
    proposer = Proposer(space, "tpe", 0, space.valid()[:3])
    known = space.valid()[:50]
    for config in known:
        proposer.learn(config, bowl(config))
    evaluator = FakeEvaluator(bowl)
    search(proposer, evaluator, lambda t: None, 30, None)
    assert not set(known) & set(evaluator.evaluated)
