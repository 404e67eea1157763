"""The end of a search: its best candidates and the server's kernel timed again in alternating rounds, and who goes by.

A search times each candidate once, and the best of many such times is partly luck. So the best few are timed in turn on
one GPU, and what is as good as equal is settled by an order that does not depend on times: searches that are repeated
agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools import measure
from dsv4tune.tools.efforts import Effort
from dsv4tune.tools.evaluate import Evaluation
from dsv4tune.tools.progress import in_words
from dsv4tune.tools.timing import middle
from dsv4tune.tuned.records import Final, Range, Trial
from dsv4tune.tuned.store import Store

#: The share of the server's time that a winner must be faster by, and that by which near-ties may differ.
MARGIN, TIE = 0.03, 0.02
#: By how much the default may be slower than the fastest and stay.
STAY = 0.01

#: Microseconds of one launch in each round, by live length.
ByRound = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Finalist:
    """One candidate of a final.

    Attributes:
        score: as a search scores it, from the medians over the rounds.
        part: what is stored of it.
    """

    config: Config
    score: float
    part: Final


def decide(
    profile: Profile,
    times: Mapping[Config, ByRound],
    beside: ByRound,
    order: Callable[[Config], Any],
    baseline: bool,
    margin: float = MARGIN,
    default: Config | None = None,
) -> list[Finalist]:
    """Who goes by, first; the others by their scores.

    Args:
        profile: whose lengths were timed.
        times: of each candidate, as many rounds of each length.
        beside: the yardstick's: the baseline's times in the same rounds, or one figure for all of them.
        order: among near-ties, of those that stand for the baseline if one does, the least goes by; simpler configs
            should be less.
        baseline: whether the yardstick is the server's kernel, which stays where nothing is faster.
        margin: the share of the baseline's time that the first must be faster by, to stand for it.
        default: goes by where it is a near-tie within `STAY`, which is no reason to depart from it. More would make
            searches disagree about one that is slower by a little more than a near-tie.
    """
    scores = {config: _score(profile, by_length, beside) for config, by_length in times.items()}
    best = min(score for score, _ in scores.values())
    equal = [config for config, (score, _) in scores.items() if score <= best * (1 + TIE)]
    won = {config for config, (score, spread) in scores.items() if not baseline or 1 - score > max(margin, spread)}
    equal = [config for config in equal if config in won] or equal
    stays = [config for config in equal if config == default and scores[config][0] <= best * (1 + STAY)]
    winner = min(stays or equal, key=order)
    places = [winner, *sorted((c for c in scores if c != winner), key=lambda c: (scores[c][0], order(c)))]
    second = places[1] if len(places) > 1 else None
    rounds = min(len(one) for by_length in times.values() for one in by_length.values())
    found = []
    for place, config in enumerate(places, 1):
        score, spread = scores[config]
        part = Final(
            place=place,
            won=config in won,
            margin=margin,
            spread=round(spread, 6),
            rounds=rounds,
            finalists=len(places),
            runner_up=None if second is None else dict(second),
            runner_up_score=None if second is None else round(scores[second][0], 6),
        )
        found.append(Finalist(config, score, part))
    return found


def _score(profile: Profile, times: ByRound, beside: ByRound) -> tuple[float, float]:
    """Of the medians, and the interquartile range of the rounds' own scores."""

    def of(take: Callable[[Sequence[float]], float]) -> float:
        yardstick = {n: take(one) if len(one) > 1 else one[0] for n, one in beside.items()}
        return profile.score({n: take(one) for n, one in times.items()}, yardstick)

    rounds = min(map(len, times.values()))
    score = of(statistics.median)
    return score, score * middle([of(itemgetter(number)) for number in range(rounds)])[1]


def hold(
    evaluation: Evaluation,
    space: Space,
    store: Store,
    stored: Sequence[Trial],
    effort: Effort,
    say: Callable[[str], None],
) -> None:
    """Time the best of the stored trials again and store how it went, unless all of them had their final already.

    A final that another compiler's candidates had since then is none of theirs, and would be what a server goes by.
    """
    best: dict[Config, Trial] = {}
    heard = set()
    for trial in stored:
        config = Config(trial.config)
        if trial.status == "ok" and trial.score is not None and not trial.same_as:
            best[config] = min(trial, best.get(config, trial), key=lambda one: one.score or 0.0)
            heard |= {config} if trial.final is not None else set()
    finalists = sorted(best, key=lambda config: (best[config].score, config.key))[: effort.finalists]
    setup, baseline = evaluation.setup, evaluation.baseline
    if not finalists or (heard.issuperset(finalists) and not _overruled(evaluation, store)):
        return
    answer = evaluation.pools.judges.ask(measure.final_job, setup, finalists, evaluation.baseline_name, effort.rounds)
    if answer.kind != "ok":
        say(f"no final: {answer.reason}; what was fastest alone goes by")
        return
    times, beside = answer.value
    yardstick = beside or {length: [us] for length, us in evaluation.floors.items()}
    default = evaluation.op.default(setup.problem, setup.device)
    placed = decide(setup.profile, times, yardstick, space.simplicity, baseline is not None, default=default)
    store.add_final(
        [evaluation.timed_again(best[f.config], f.part, f.score, times[f.config], beside, answer) for f in placed]
    )
    first, part = placed[0], placed[0].part
    second = "" if part.runner_up_score is None else f", the next {part.runner_up_score:.3f}"
    verdict = in_words(best[first.config]).brief
    if baseline is not None and not part.won:
        verdict = f"not faster than {baseline.name} by {part.margin:.0%} and more than its spread: that stays"
    say(f"final of {part.finalists}, {part.rounds} rounds: {first.score:.3f}{second}: {verdict}")


def _overruled(evaluation: Evaluation, store: Store) -> bool:
    """Whether what goes by is from a final that was held with another compiler, beside the same yardstick."""
    setup = evaluation.setup
    last = store.best(setup.problem.key, Range(**setup.profile.to_json()))
    return (
        last is not None
        and last.here
        and last.final is not None
        and last.yardstick == evaluation.yardstick
        and last.environment.triton != evaluation.environment.triton
    )
