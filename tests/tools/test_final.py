"""The end of a search: who goes by, and what it takes to stand for the server's kernel."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import RESOURCES, make_problem

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tools import final, measure
from dsv4tune.tools.efforts import EFFORTS
from dsv4tune.tools.evaluate import Evaluation
from dsv4tune.tools.executor import Answer, Seat
from dsv4tune.tools.final import decide
from dsv4tune.tools.halving import Halving, stages
from dsv4tune.tools.measure import Compiled, Measured, Setup, Timing
from dsv4tune.tuned.records import Baseline, Environment, Trial
from dsv4tune.tuned.store import Store

PROFILE = Profile(4096, (128, 2048), (1.0, 1.0))
A, B, C = (Config({"n": n}) for n in (1, 2, 3))


def rounds(us: float, noise: float = 0.0, seed: int = 0) -> dict[int, list[float]]:
    dice = random.Random(seed)
    return {n: [us * (1 + dice.uniform(-noise, noise)) for _ in range(21)] for n in PROFILE.lengths}


def order(config: Config) -> int:
    return config.int("n")


def test_the_fastest_goes_by_and_the_runner_up_is_named() -> None:
    placed = decide(PROFILE, {A: rounds(9.5), B: rounds(8.0), C: rounds(9.0)}, rounds(10.0), order, True)
    assert [one.config for one in placed] == [B, C, A]
    first = placed[0]
    assert first.score == pytest.approx(0.8) and first.part.won and first.part.place == 1
    assert first.part.runner_up == {"n": 3} and first.part.runner_up_score == pytest.approx(0.9)
    assert (first.part.rounds, first.part.finalists, first.part.margin) == (21, 3, 0.03)


def test_near_ties_go_to_the_simpler_whatever_the_noise() -> None:
    """Within 2 %: repeated searches agree though each finds another one fastest."""
    for seed in range(20):
        times = {B: rounds(8.0, 0.01, seed), A: rounds(8.05, 0.01, seed + 100), C: rounds(9.0)}
        assert decide(PROFILE, times, rounds(10.0), order, True)[0].config == A
    assert decide(PROFILE, {B: rounds(8.0), A: rounds(8.2)}, rounds(10.0), order, True)[0].config == B


def test_a_near_tie_does_not_lose_to_the_server_what_the_fastest_wins() -> None:
    placed = decide(PROFILE, {A: rounds(9.75), B: rounds(9.6), C: rounds(9.65)}, rounds(10.0), order, True)
    assert [one.config for one in placed] == [B, C, A] and [one.part.won for one in placed] == [True, True, False]


def test_the_default_stays_where_it_is_as_good_as_the_fastest() -> None:
    for us, winner in ((8.0, B), (8.07, B), (8.12, A), (8.3, A)):
        times = {A: rounds(8.05), B: rounds(us), C: rounds(8.0)}
        assert decide(PROFILE, times, rounds(10.0), order, True, default=B)[0].config == winner
    # One that was not timed again, or does not stand for the server's kernel, changes nothing.
    assert decide(PROFILE, {C: rounds(8.0)}, rounds(10.0), order, True, default=B)[0].config == C
    times = {A: rounds(9.65), B: rounds(9.71), C: rounds(9.65)}
    assert decide(PROFILE, times, rounds(10.0), order, True, default=B)[0].config == A


@pytest.mark.parametrize(
    ("us", "noise", "won"), [(9.6, 0.0, True), (9.8, 0.0, False), (9.6, 0.2, False), (10.5, 0, False)]
)
def test_the_servers_kernel_stays_unless_the_margin_lies_outside_the_spread(us: float, noise: float, won: bool) -> None:
    placed = decide(PROFILE, {A: rounds(us, noise), B: rounds(us * 1.1)}, rounds(10.0), order, True)
    assert placed[0].config == A and placed[0].part.won is won
    # Nobody to stay where there is none.
    assert decide(PROFILE, {A: rounds(us)}, {n: [1.0] for n in PROFILE.lengths}, order, False)[0].part.won


def test_a_drifting_clock_is_the_baselines_too() -> None:
    """Rounds are held against the baseline's own, so that what slows both is no spread."""
    drift = [1 + 0.01 * number for number in range(21)]
    slow = {n: [9.0 * d for d in drift] for n in PROFILE.lengths}
    found = decide(PROFILE, {A: slow}, {n: [10.0 * d for d in drift] for n in PROFILE.lengths}, order, True)[0]
    assert found.part.won and found.part.spread < 1e-6 and found.score == pytest.approx(0.9)


# -- halving ----------------------------------------------------------------------------------------------------


def test_stages_are_few_rounds_of_every_length_then_the_rest() -> None:
    assert stages((2048, 128), 9) == [(128, 3), (2048, 3), (128, 9), (2048, 9)]
    assert stages((128,), 2) == [(128, 2), (128, 2)]


def test_who_is_far_behind_stops_and_the_best_never_does() -> None:
    dice, halving = random.Random(0), Halving()
    best, stopped, taken = 9e9, 0, 0
    for _ in range(60):
        true, candidate = dice.uniform(0.5, 3.0), halving.candidate()
        for _ in stages((1, 2, 3, 4), 9):
            taken += 1
            if candidate.falls_behind(true):
                assert true > best
                stopped += 1
                break
        candidate.ends(true)
        best = min(best, true)
    assert stopped > 30 and taken < 0.6 * 60 * 8


# -- in a search ------------------------------------------------------------------------------------------------


class Seats:
    """Compilers and one judge in this process; the judge's times are those of a table, the final's of another."""

    size = 1

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Any, tuple[Any, ...]]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.final: dict[Config, float] = {}

    pending = property(lambda self: len(self.jobs))

    def prepare(self, *job: Any) -> None: ...

    def submit(self, tag: Any, function: Any, *arguments: Any, near: str = "") -> None:
        self.jobs.append((tag, function, arguments))

    def ask(self, function: Any, setup: Setup, configs: Any, name: str, count: int) -> Answer:
        assert function is measure.final_job and name == "tilelang"
        self.asked.append(tuple(configs))
        lengths = setup.profile.lengths
        times = {c: {n: [self.final.get(c, 9.0)] * count for n in lengths} for c in configs}
        return Answer(None, "ok", (times, {n: [10.0] * count for n in lengths}), seat=Seat(card="GPU-1"))


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    problem, card = make_problem(64, "h200")
    pools = SimpleNamespace(compilers=Seats(), judges=Seats(), on_gpu=True, prepare=lambda setup: None)
    baseline = Baseline(name="tilelang", version="1", times_us={128: 10.0, 2048: 10.0})
    monkeypatch.setattr("dsv4tune.tools.evaluate.environment", lambda arch, on_gpu: make_environment())
    found = Evaluation(Setup(problem, PROFILE, card, 0), pools, baseline, halving=True)  # type: ignore[arg-type]
    answers: list[Any] = []

    def collect(seats: Any, timeout: float) -> list[Any]:
        answers.clear()
        for which in seats:
            for tag, function, arguments in which.jobs:
                answers.append((which, Answer(tag, "ok", found.answer(function, arguments))))  # type: ignore[attr-defined]
            which.jobs.clear()
        return answers

    monkeypatch.setattr("dsv4tune.tools.evaluate.collect", collect)
    return found


def make_environment() -> Environment:
    return Environment(dsv4tune="0", triton="3.9.0", ptxas="13.0", torch="2.13.0")


def measured(us: float, pruned: str = "") -> Measured:
    return Measured(
        Verdict(1e-7), {n: Timing(us, 0.01, 10.0) for n in PROFILE.lengths[: 1 if pruned else 2]}, (), pruned
    )


def test_equal_machine_code_is_measured_once(evaluation: Evaluation) -> None:
    """Configs of one code and one launch plan share one measurement; another plan with the same code does not."""
    problem, card = evaluation.setup.problem, evaluation.setup.device
    space = ops.get("indexer").space(problem, card).valid()
    first = next(c for c in space if c["schedule"] == "split" and c["num_stages"] == 3)
    twin = first.with_(num_stages=4)
    other = next(
        c for c in space if c["schedule"] == "split" and c["num_stages"] == 3 and c["splits"] != first["splits"]
    )
    late = first.with_(num_stages=2)
    judged: list[Config] = []

    def answer(function: Any, arguments: Any) -> Any:
        if function is measure.compile_job:
            return Compiled("0" * 64, Report(**RESOURCES.model_dump()), "c" * 64)
        judged.append(arguments[1])
        return measured(9.0)

    evaluation.answer = answer  # type: ignore[attr-defined]
    for config in (first, twin, other):
        evaluation.submit(config)
    done: dict[Config, Trial] = {}
    for _ in range(4):
        done |= dict(evaluation.collect(0.0))
    evaluation.submit(late)
    done |= dict(evaluation.collect(0.0))
    assert sorted(judged, key=str) == sorted([first, other], key=str)
    assert done[twin].same_as == done[late].same_as == dict(first) and not done[first].same_as
    assert done[twin].score == done[first].score == pytest.approx(0.9) and done[twin].status == "ok"
    # Who waits for another's figures is offered too, and chosen by having that one measured.
    for known in (evaluation._first, evaluation._twins, evaluation._ended):
        known.clear()
    judged.clear()
    offered: list[set[Config]] = []

    def pick(compiled: Collection[Config]) -> Config | None:
        offered.append(set(compiled))
        return twin if twin in compiled else None

    evaluation.pick = pick
    for config in (first, twin):
        evaluation.submit(config)
    done = {}
    for _ in range(3):
        done |= dict(evaluation.collect(0.0))
    assert {first, twin} in offered and judged == [first] and done[twin].same_as == dict(first)
    # Known from an earlier run too.
    for known in (evaluation._first, evaluation._twins, evaluation._ended):
        known.clear()
    evaluation.knows(done[first])
    evaluation.submit(twin)
    (found,) = evaluation.collect(0.0)
    assert found[1].same_as == dict(first) and judged == [first]


def test_what_an_earlier_search_left_behind_is_nobodys(evaluation: Evaluation) -> None:
    """Searches share their processes: what one compiled to choose from may end while the next one collects."""
    config = ops.get("indexer").default(evaluation.setup.problem, evaluation.setup.device)
    evaluation.answer = lambda function, arguments: Compiled(  # type: ignore[attr-defined]
        "0" * 64, Report(**RESOURCES.model_dump()), "c" * 64
    )
    evaluation.submit(config)
    later = Evaluation(evaluation.setup, evaluation.pools, evaluation.baseline)
    assert later.collect(0.0) == [] and not later._ready and not evaluation.pools.judges.pending


def test_what_fell_behind_is_no_candidate_for_the_best(evaluation: Evaluation) -> None:
    config = ops.get("indexer").default(evaluation.setup.problem, evaluation.setup.device)

    def answer(function: Any, arguments: Any) -> Any:
        if function is measure.compile_job:
            return Compiled("0" * 64, Report(**RESOURCES.model_dump()), "c" * 64)
        assert arguments[-1] is True  # halving was asked for
        return measured(5.0, "behind after 3 of 18 rounds")

    evaluation.answer = answer  # type: ignore[attr-defined]
    evaluation.submit(config)
    (_, trial), *_ = [*evaluation.collect(0.0), *evaluation.collect(0.0)]
    assert trial.status == "pruned" and trial.score == 0.5 and trial.reason == "behind after 3 of 18 rounds"
    assert set(trial.times_us) == {128}


#: What a trial that was measured has besides its score.
WHOLE: dict[str, Any] = {
    "yardstick": "tilelang", "times_us": dict.fromkeys(PROFILE.lengths, 7.0), "error": 1e-7, "checked_by": "gpu",
}  # fmt: skip


def compiled_trial(evaluation: Evaluation, config: Config, status: str, **result: Any) -> Trial:
    """As a search would have stored it."""
    evaluation._built[config] = Compiled("0" * 64, Report(**RESOURCES.model_dump()), "c" * 64), 0.1
    return evaluation._trial(config, status, **WHOLE, **result)


def test_the_final_is_stored_and_held_once(evaluation: Evaluation, tmp_path: Path) -> None:
    op, setup = ops.get("indexer"), evaluation.setup
    space = op.space(setup.problem, setup.device)
    configs = space.valid()[:6]
    said: list[str] = []
    store = Store(tmp_path / "tuned.db")
    stored = [compiled_trial(evaluation, c, "ok", score=0.7 + 0.01 * n) for n, c in enumerate(configs)]
    stored.append(compiled_trial(evaluation, space.valid()[7], "pruned", score=0.1))
    stored.append(compiled_trial(evaluation, space.valid()[8], "ok", score=0.1, same_as=dict(configs[0])))
    store.add_all(stored)
    judges: Any = evaluation.pools.judges
    judges.final = {configs[1]: 8.0, configs[2]: 8.8}

    def hold() -> None:
        trials = list(store.trials(setup.problem.key))
        final.hold(evaluation, space, store, trials, EFFORTS["normal"], said.append)

    hold()
    assert judges.asked == [tuple(configs[:4])]
    best = store.best(setup.problem.key)
    assert best is not None and Config(best.config) == configs[1] and best.score == 0.8 and best.card == "GPU-1"
    assert best.final is not None and best.final.won and best.final.runner_up == dict(configs[2])
    assert said == [f"final of 4, 27 rounds: 0.800, the next 0.880: {configs[1].brief}"]
    hold()
    assert len(judges.asked) == 1  # nobody new
    store.add(compiled_trial(evaluation, space.valid()[9], "ok", score=0.2))
    judges.final = {}
    judges.final[space.valid()[9]] = 9.9
    hold()
    assert judges.asked[1][0] == space.valid()[9] and configs[1] in judges.asked[1]
    best = store.best(setup.problem.key)
    assert best is not None and best.score == 0.9  # all but the newcomer took 9 us this time
    store.close()


def test_a_final_is_held_anew_after_one_with_another_compiler(evaluation: Evaluation, tmp_path: Path) -> None:
    """What another Triton's candidates came to is no last word on this one's."""
    setup, said = evaluation.setup, list[str]()
    space = ops.get("indexer").space(setup.problem, setup.device)
    store = Store(tmp_path / "tuned.db")
    judges: Any = evaluation.pools.judges
    mine, other = evaluation.environment, evaluation.environment.model_copy(update={"triton": "3.6.0"})

    def hold(environment: Environment, us: float) -> None:
        evaluation.environment = environment
        judges.final = dict.fromkeys(space.valid()[:1], us)
        trials = [t for t in store.trials(setup.problem.key) if t.environment == environment]
        final.hold(evaluation, space, store, trials, EFFORTS["quick"], said.append)

    for environment in (mine, other):
        evaluation.environment = environment
        store.add(compiled_trial(evaluation, space.valid()[0], "ok", score=0.7))
    for environment, us, finals in ((mine, 8.0, 1), (mine, 8.0, 1), (other, 12.0, 2), (other, 12.0, 2), (mine, 8.0, 3)):
        hold(environment, us)
        assert len(judges.asked) == finals
    best = store.best(setup.problem.key)
    assert best is not None and best.final is not None and best.final.won and best.environment == mine
    store.close()


def test_a_final_that_fails_costs_nothing(evaluation: Evaluation, tmp_path: Path) -> None:
    said: list[str] = []
    setup = evaluation.setup
    space = ops.get("indexer").space(setup.problem, setup.device)
    store = Store(tmp_path / "tuned.db")
    trial = compiled_trial(evaluation, space.valid()[0], "ok", score=0.7)
    store.add(trial)
    evaluation.pools.judges.ask = lambda *job: Answer(None, "timeout", reason="took longer than 30 s")  # type: ignore[method-assign]
    final.hold(evaluation, space, store, [trial], EFFORTS["quick"], said.append)
    assert store.best(setup.problem.key) == trial
    assert said == ["no final: took longer than 30 s; what was fastest alone goes by"]
    store.close()
