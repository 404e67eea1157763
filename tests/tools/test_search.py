"""The search loop, with a fake in the GPU's place."""

from __future__ import annotations

import sys
import time

import pytest
from fakes import FakeEvaluator, make_problem, make_trial

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools.samplers import SAMPLERS, make
from dsv4tune.tools.search import Patience, Proposer, search
from dsv4tune.tuned.records import Trial


@pytest.fixture(scope="module")
def space() -> Space:
    problem, card = make_problem()
    return ops.get("indexer").space(problem, card)


def proposer(space: Space, sampler: str, seed: int, *first: Config) -> Proposer:
    # The prediction knows the tile's size and nothing else.
    return Proposer(space, make(sampler, space, seed, lambda c: abs(c.int("block_t") - 128) / 64), first)


def bowl(config: Config) -> float:
    """A smooth score with one optimum."""
    score = 1.0 + abs(config.int("block_t") - 128) / 64 + abs(config.int("num_stages") - 3) * 0.3
    score += {"page_grid": 4.0, "split": 1.0, "persistent": 0.5, "hybrid": 0.0}[str(config["schedule"])]
    return score + (config["load"] != "tma") * 0.4 + (config["operand_order"] != "kq") * 0.2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_config_once_and_all_of_them(space: Space, sampler: str) -> None:
    evaluator = FakeEvaluator(bowl)
    count = {"random": 10_000, "grid": 10_000, "gp": 12}.get(sampler, 40)
    result = search(proposer(space, sampler, 0), evaluator, lambda t: None, count, None)
    assert len(set(evaluator.evaluated)) == len(evaluator.evaluated) == min(count, len(space.valid()))
    assert result.status == "complete" and result.tried == len(evaluator.evaluated)
    assert set(evaluator.evaluated) <= set(space.valid())


def test_same_seed_same_walk(space: Space) -> None:
    walks = []
    for seed in (3, 3, 4):
        evaluator = FakeEvaluator(bowl, capacity=1)
        search(proposer(space, "tpe", seed), evaluator, lambda t: None, 25, None)
        walks.append(evaluator.evaluated)
    assert walks[0] == walks[1] != walks[2]


def test_first_ones_go_first(space: Space) -> None:
    wanted = [space.valid()[17], space.valid()[4]]
    evaluator = FakeEvaluator(bowl, capacity=1)
    search(proposer(space, "random", 0, *wanted), evaluator, lambda t: None, 5, None)
    assert evaluator.evaluated[:2] == wanted


class Late(FakeEvaluator):
    """Compiles some configs only when nothing else is to be measured; such a one may fail at that."""

    def __init__(self, late: list[Config], fails: bool = False) -> None:
        super().__init__(bowl, capacity=8)
        self._late, self._fails = late, fails

    def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
        everything = self.waiting
        self.waiting = [config for config in everything if config not in self._late]
        found = super().collect(timeout) if self.waiting else []
        self.waiting += [config for config in everything if config in self._late]
        if found or not self._fails:
            return found or super().collect(timeout)
        return [(config, make_trial(config, status="failed", score=None)) for config in self._late]


def test_first_ones_are_waited_for(space: Space) -> None:
    """However late they are compiled: their trials are kept, also once nothing improves."""
    wanted = [space.valid()[17], space.valid()[4]]
    for trials, patience in ((12, Patience(None)), (2, Patience(None)), (500, Patience(6))):
        evaluator, walk = Late(wanted), proposer(space, "random", 0, *wanted)
        result = search(walk, evaluator, patience.saw, trials, None, enough=patience.is_lost)
        assert set(wanted) <= set(evaluator.evaluated) and not walk.awaited
        assert result.tried == len(evaluator.evaluated) <= trials


def test_a_late_first_one_that_does_not_compile_is_stored(space: Space) -> None:
    evaluator, stored = Late([space.valid()[17]], fails=True), list[Trial]()
    result = search(proposer(space, "random", 0, space.valid()[17]), evaluator, stored.append, 6, None)
    assert result.tried == 6 == len(stored) and [t.status for t in stored].count("ok") == 5


def test_samplers_beat_chance(space: Space) -> None:
    """On an easy landscape, in the median of seeds: the best of 40 proposed is nearer the optimum than of 40 random."""

    def best(sampler: str, seed: int) -> float:
        evaluator = FakeEvaluator(bowl)
        search(proposer(space, sampler, seed), evaluator, lambda t: None, 40, None)
        return min(map(bowl, evaluator.evaluated))

    seeds = range(5)
    chance = sorted(best("random", s) for s in seeds)[2]
    assert (
        sorted(best("tpe", s) for s in seeds)[2] < chance
        and best("guided", 0) == min(map(bowl, space.valid())) < chance
    )


def test_unusable_candidates_teach_and_never_stop(space: Space) -> None:
    evaluator = FakeEvaluator(lambda c: None if c["load"] == "tma" else bowl(c))
    finished: list[Trial] = []
    result = search(proposer(space, "guided", 0), evaluator, finished.append, 40, None)
    assert result.tried == len(finished) == 40
    assert {t.status for t in finished} == {"ok", "failed"}


def test_the_budget_ends_it(space: Space) -> None:
    class Slow(FakeEvaluator):
        def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
            time.sleep(0.05)
            return super().collect(timeout)

    finished: list[Trial] = []
    result = search(proposer(space, "grid", 0), Slow(bowl), finished.append, 10_000, time.monotonic() + 0.5)
    assert result.status == "budget" and 1 <= len(finished) < 30


def test_ctrl_c_keeps_what_is_finished(space: Space) -> None:
    class Interrupted(FakeEvaluator):
        def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
            if len(self.evaluated) == 5:
                raise KeyboardInterrupt
            return super().collect(timeout)

    finished: list[Trial] = []
    result = search(proposer(space, "grid", 0), Interrupted(bowl), finished.append, 100, None)
    assert result.status == "interrupted" and result.tried == len(finished) == 5


def test_stored_trials_are_not_repeated(space: Space) -> None:
    resumed = proposer(space, "guided", 0, *space.valid()[:3])
    known = space.valid()[:50]
    for config in known:
        resumed.learn(config, bowl(config))
    evaluator = FakeEvaluator(bowl)
    search(resumed, evaluator, lambda t: None, 30, None)
    assert not set(known) & set(evaluator.evaluated)


def test_patience_ends_it_once_nothing_improves(space: Space) -> None:
    """Unusable candidates wear it out too; a gain below a percent is none."""

    def only_tma(config: Config) -> float | None:
        return bowl(config) if config["load"] == "tma" else None

    for score, patience in ((only_tma, Patience(8)), (bowl, Patience(8))):
        evaluator = FakeEvaluator(score, capacity=1)
        result = search(proposer(space, "guided", 0), evaluator, patience.saw, 500, None, enough=patience.is_lost)
        scores = [score(config) for config in evaluator.evaluated]
        last = max(
            n for n, s in enumerate(scores, 1) if s is not None and all(s < 0.99 * (t or 9) for t in scores[: n - 1])
        )
        assert result.status == "complete" and result.tried == last + 8


def test_candidates_under_way_spread_the_sampler(space: Space) -> None:
    """Ten at once are ten different ones, of which none was told yet; told later, the walk goes on from them."""
    guided = proposer(space, "guided", 0)
    first = [guided.propose() for _ in range(10)]
    assert len(set(first)) == 10 and len({c["schedule"] for c in first if c}) > 1
    for config in first:
        assert config is not None
        guided.learn(config, bowl(config))
    again = proposer(space, "guided", 0)
    assert [again.propose() for _ in range(10)] == first


def test_an_unknown_or_missing_sampler_is_one_line(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown sampler 'cma': use guided, tpe"):
        make("cma", space, 0, lambda c: 0.0)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match="pip install scipy"):
        make("gp", space, 0, lambda c: 0.0)
