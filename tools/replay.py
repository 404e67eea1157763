"""Searches on a recording: how soon a sampler gets to the best configs, and whether repeated searches agree. No GPU.

A candidate's figures are drawn from its recorded rounds, pass and rounds at random, so that repeats differ as searches
on a GPU do; how good it truly is, is told by all of its rounds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools import final, samplers
from dsv4tune.tools.efforts import Effort
from dsv4tune.tools.evaluate import expected
from dsv4tune.tools.halving import Halving, stages
from dsv4tune.tools.measure import Rounds, Setup, partial_score
from dsv4tune.tools.recording import NEAR, Record, Recording
from dsv4tune.tools.search import Patience, Pick, Proposer, search
from dsv4tune.tools.timing import ROUNDS

#: The shares of the space at which a walk is looked at.
SHARES = (0.01, 0.05, 0.10, 0.20)
#: By how much the winners of two searches may differ and still agree.
AGREE = 0.02


@dataclass(frozen=True)
class Ended:
    """A replayed candidate, as a search sees it, with the config whose kernel it is."""

    status: str
    score: float | None
    config: Config


class Replayed:
    """Answers a search from a recording; see `dsv4tune.tools.search.Evaluator`.

    Attributes:
        walked: the configs that were measured, in order; one that is another's twin costs nothing.
        launches_us: what the timed graphs took, the baseline's with them.
    """

    def __init__(self, recording: Recording, seed: int, capacity: int = 1, halving: bool = False) -> None:
        self._recording, self.capacity = recording, capacity
        self._random = random.Random(seed)
        self._halving = Halving() if halving else None
        self._waiting: dict[Config, None] = {}
        self.pick: Pick = lambda compiled: next(iter(compiled))
        self._ended: dict[Config, Ended] = {}
        self.walked: list[Config] = []
        self.launches_us = 0.0

    def submit(self, config: Config) -> None:
        self._waiting[config] = None

    def collect(self, timeout: float) -> list[tuple[Config, Ended]]:
        config = self.pick(self._waiting)
        if config is None:
            return []
        del self._waiting[config]
        record = self._recording.measured(config)
        if record.config not in self._ended:
            self.walked.append(record.config)
            self._ended[record.config] = self._measured(record)
        return [(config, self._ended[record.config])]

    def _measured(self, record: Record) -> Ended:
        if record.status != "ok" or not record.us:
            return Ended(record.status, None, record.config)
        which = self._random.randrange(record.passes)
        lengths = self._recording.header.profile.lengths
        us: Rounds = {n: [] for n in lengths}
        beside: Rounds = {n: [] for n in lengths if record.baseline_us}
        candidate = self._halving.candidate() if self._halving is not None else None
        status = "ok"
        for length, rounds in stages(lengths, ROUNDS, candidate is not None):
            for _ in range(rounds - len(us[length])):
                number = self._random.randrange(len(record.us[length][which]))
                for taken, told in ((us, record.us), (beside, record.baseline_us)):
                    if told:
                        taken[length].append(told[length][which][number])
                        self.launches_us += told[length][which][number]
            if candidate is not None and candidate.falls_behind(self._score(us, beside)):
                status = "pruned"
                break
        score = self._score(us, beside)
        if candidate is not None:
            candidate.ends(score)
        return Ended(status, score, record.config)

    def _score(self, us: Rounds, beside: Rounds) -> float:
        return partial_score(self._recording.header.profile, us, beside, self._recording.floors)

    def again(self, configs: Sequence[Config], rounds: int) -> tuple[dict[Config, Rounds], Rounds]:
        """A final: rounds of each config, and of the baseline beside the first."""
        times: dict[Config, Rounds] = {}
        beside: Rounds = {}
        for config in configs:
            record = self._recording.measured(config)
            which = self._random.randrange(record.passes)
            times[config] = {n: self._random.choices(passes[which], k=rounds) for n, passes in record.us.items()}
            if not beside:
                beside = {n: self._random.choices(p[which], k=rounds) for n, p in record.baseline_us.items()}
            self.launches_us += sum(sum(t) for t in times[config].values())
        self.launches_us += sum(sum(t) for t in beside.values())
        return times, beside


@dataclass(frozen=True)
class Searched:
    """How a replayed search ended.

    Attributes:
        winner: the config that it went by.
        over: its true score over the best one's.
        won: whether it stands for the server's kernel.
        kernels: that were measured.
        launches_us: what all timed graphs took, the final's too.
    """

    winner: Config
    over: float
    won: bool
    kernels: int
    launches_us: float


class Replay:
    """One recording and what is known of it."""

    def __init__(self, recording: Recording) -> None:
        """Raises:
        ValueError: configs of the space are missing from the recording, or none has times.
        """
        header = recording.header
        self.recording = recording
        self.op = ops.get(header.problem.op)
        self.space: Space = self.op.space(header.problem, header.device)
        lost = [config for config in self.space.valid() if config not in recording.records]
        if lost:
            raise ValueError(
                f"{recording.name}: {len(lost)} configs of the space were not recorded, such as {lost[0].brief}: "
                "record them with `dsv4tune record` into the same file"
            )
        self.scores = recording.scores()
        #: Each kernel once: configs of the same machine code and launch plan are one.
        self.kernels = {recording.measured(config).config for config in self.space.valid()}
        if not self.scores:
            raise ValueError(f"{recording.name}: no config has times: there is nothing to find")
        self.best = min(self.scores.values())
        self.near = {config for config in self.kernels if self.scores.get(config, 9e9) <= self.best * (1 + NEAR)}
        self._expected = expected(Setup(header.problem, header.profile, header.device, header.seed))

    def _proposer(self, sampler: str, seed: int, first: Sequence[Config] = ()) -> Proposer:
        return Proposer(self.space, samplers.make(sampler, self.space, seed, self._expected), first)

    def walk(self, sampler: str, seed: int, in_flight: int) -> list[Config]:
        """Kernels in the order in which a sampler measures them, for a fifth of the space and until it was near.

        Nothing is given to it: no default config, no early end.
        """
        evaluator = Replayed(self.recording, seed, in_flight)
        least = round(SHARES[-1] * len(self.kernels))

        def enough() -> bool:
            return len(evaluator.walked) >= least and not self.near.isdisjoint(evaluator.walked)

        search(self._proposer(sampler, seed), evaluator, lambda ended: None, 1 << 30, None, enough=enough)
        return evaluator.walked

    def fraction(self, walk: Sequence[Config]) -> float:
        """Of the optimum, by the best of some kernels; 0 where none of them works."""
        return self.best / min((self.scores.get(config, math.inf) for config in walk), default=math.inf)

    def search(self, sampler: str, effort: Effort, seed: int, in_flight: int, default: bool = True) -> Searched:
        """A whole search as `dsv4tune search` has it: the default first, halving, patience and the final.

        Without the default it is as on a card for which nobody has chosen one.

        Raises:
            ValueError: it found nothing usable.
        """
        header = self.recording.header
        usual = self.op.default(header.problem, header.device)
        first = [usual] if default else []
        if effort.references:
            first.append(self.op.reference_config(header.problem, header.device))
        evaluator = Replayed(self.recording, seed, in_flight, effort.halving)
        patience = Patience(effort.patience)
        found: dict[Config, float] = {}

        def finished(ended: Ended) -> None:
            patience.saw(ended)
            if ended.status == "ok" and ended.score is not None:
                found[ended.config] = ended.score

        proposer = self._proposer(sampler, seed, first)
        search(proposer, evaluator, finished, effort.trials, None, enough=patience.is_lost)
        if not found:
            raise ValueError(
                f"{self.recording.name}: a search of {len(evaluator.walked)} kernels found none that is usable"
            )
        finalists = sorted(found, key=lambda config: (found[config], config.key))[: effort.finalists]
        times, beside = evaluator.again(finalists, effort.rounds)
        yardstick = beside or {length: [us] for length, us in self.recording.floors.items()}
        placed = final.decide(header.profile, times, yardstick, self.space.simplicity, bool(beside), default=usual)
        winner = placed[0].config
        over = self.scores[winner] / self.best
        return Searched(winner, over, placed[0].part.won, len(evaluator.walked), evaluator.launches_us)


def figures(replay: Replay, sampler: str, repeats: int, in_flight: int = 1) -> dict[str, Any]:
    """How soon a sampler gets to the best configs, over seeds 0, 1, …: medians with quartiles."""
    walks = [replay.walk(sampler, seed, in_flight) for seed in range(repeats)]
    return {
        "recording": replay.recording.name,
        "configs": len(replay.space.valid()),
        "kernels": len(replay.kernels),
        "within_3_percent": round(len(replay.near) / len(replay.kernels), 5),
        "sampler": sampler,
        "repeats": repeats,
        "in_flight": in_flight,
        **told(replay, walks),
    }


def told(replay: Replay, walks: Sequence[Sequence[Config]]) -> dict[str, Any]:
    """What walks say of who walked; one that never got near counts as the whole space.

    Random's expectation needs no repeats: of n kernels with m near ones in any order.
    """
    count = len(replay.kernels)
    needed = [next((n for n, config in enumerate(walk, 1) if config in replay.near), None) for walk in walks]
    counted = [count if n is None else n for n in needed]
    reached = {}
    for share in SHARES:
        after = max(1, round(share * count))
        reached[f"{share:.0%}"] = _quartiles([replay.fraction(walk[:after]) for walk in walks])
    chance = _median_of_chance(count, len(replay.near))
    return {
        "fraction_of_optimum_after": reached,
        "evaluations_to_3_percent": {
            **_quartiles(counted),
            "never": needed.count(None),
            "of_the_space": round(statistics.median(counted) / count, 4),
            "by_chance": chance,
            "of_chance": round(statistics.median(counted) / chance, 4),
        },
    }


def agreement(
    replay: Replay, sampler: str, effort: Effort, repeats: int, in_flight: int = 1, default: bool = True
) -> dict[str, Any]:
    """Whether repeated searches end with the most frequent winner or within 2 % of it; what they took and got."""
    ends = [replay.search(sampler, effort, seed, in_flight, default) for seed in range(repeats)]
    common, times = Counter(end.winner for end in ends).most_common(1)[0]
    reference = replay.scores[common] / replay.best
    alike = [end.winner == common or abs(end.over / reference - 1) <= AGREE for end in ends]
    return {
        "winner": dict(common),
        "same_winner": round(times / repeats, 4),
        "same_or_within_2_percent": round(sum(alike) / repeats, 4),
        "stands_for_the_servers": round(sum(end.won for end in ends) / repeats, 4),
        "over_the_optimum": _quartiles([end.over for end in ends]),
        "kernels": _quartiles([end.kernels for end in ends]),
        "timed_ms": _quartiles([end.launches_us / 1e3 for end in ends]),
    }


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle_, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    named = {"median": middle_, "low": low, "high": high, "worst": max(values, key=abs)}
    return {name: round(value, 4) for name, value in named.items()}


def _median_of_chance(count: int, near: int) -> int:
    """Draws without replacement until one of the near ones came, in the median."""
    left = 1.0
    for drawn in range(1, count + 1):
        left *= (count - near - drawn + 1) / (count - drawn + 1)
        if left <= 0.5:
            return drawn
    return count


def in_words(result: Mapping[str, Any]) -> str:
    """What `figures` and `agreement` found, as lines for people."""
    needed, reached = result["evaluations_to_3_percent"], result["fraction_of_optimum_after"]
    lines = [
        result["recording"],
        f"  {result['configs']} configs, {result['kernels']} different kernels, "
        f"{result['within_3_percent']:.2%} of them within 3 % of the best",
        f"  {result['sampler']}, {result['repeats']} searches, {result['in_flight']} under way at once: "
        f"within 3 % after {needed['median']:g} ({needed['low']:g} to {needed['high']:g}) evaluations, "
        f"{needed['of_the_space']:.1%} of the space, {needed['of_chance']:.2f} of what chance takes",
        "  of the optimum: " + ", ".join(f"{f['median']:.3f} after {share}" for share, f in reached.items()),
    ]
    if "searches" in result:
        found = result["searches"]
        over = found["over_the_optimum"]
        lines += [
            f"  effort {found['effort']}: {found['kernels']['median']:g} kernels and "
            f"{found['timed_ms']['median']:.0f} ms of timed launches; "
            f"{over['median']:.3f} of the best time, at worst {over['worst']:.3f}",
            f"  {found['same_or_within_2_percent']:.0%} end with the most frequent winner or within 2 % of it: "
            f"{Config(found['winner']).brief}",
        ]
    return "\n".join(lines)
