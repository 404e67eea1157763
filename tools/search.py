"""The search: propose, evaluate, store, until the trials or the time run out. Nothing here knows a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools.samplers import Sampler


class Ended(Protocol):
    """What a search asks of a finished candidate; lower scores are better."""

    @property
    def status(self) -> str: ...

    @property
    def score(self) -> float | None: ...


#: Chooses one of some configs, or none.
Pick: TypeAlias = "Callable[[Collection[Config]], Config | None]"

E = TypeVar("E", bound=Ended)
E_co = TypeVar("E_co", bound=Ended, covariant=True)


def usable_score(trial: Ended) -> float | None:
    """What a sampler learns: None of an unusable one; of one that fell behind the score of what was measured."""
    return trial.score if trial.status in ("ok", "pruned") else None


class Evaluator(Protocol[E_co]):
    """Turns configs into finished candidates; a fake or a recording may stand in for a GPU.

    Attributes:
        pick: who is measured next, of those that are compiled; None where nobody is to be.
    """

    pick: Pick

    @property
    def capacity(self) -> int:
        """Candidates that may be under way at once."""

    def submit(self, config: Config) -> None: ...

    def collect(self, timeout: float) -> Sequence[tuple[Config, E_co]]:
        """Candidates that ended meanwhile; waits at most `timeout` seconds for one."""


#: Candidates that are compiled for each that is still to be tried, as far as the machine does so at once.
SPARE = 2


class Patience:
    """Lost once so many candidates in a row, of whatever end, brought nothing better by a percent."""

    STEP = 0.01

    def __init__(self, candidates: int | None) -> None:
        self._candidates = candidates
        self._best = float("inf")
        self._since = 0

    def saw(self, trial: Ended) -> None:
        self._since += 1
        if trial.status == "ok" and trial.score is not None and trial.score < self._best * (1 - self.STEP):
            self._best, self._since = trial.score, 0

    def is_lost(self) -> bool:
        return self._candidates is not None and self._since >= self._candidates


@dataclass
class Result:
    """How a search ended: ``complete``, ``budget`` or ``interrupted``."""

    status: str = "complete"
    tried: int = 0
    seconds: float = 0.0


class Proposer:
    """Configs to try, none twice: first the given ones, then the sampler's; those to `avoid` are never proposed.

    Asked twice: for what to compile, and then, knowing more, for what to measure of all that is compiled. The given
    ones may be the last to be compiled, so each has a trial kept for it.
    """

    def __init__(
        self,
        space: Space,
        sampler: Sampler,
        first: Sequence[Config] = (),
        avoid: Callable[[Config], object] = lambda config: None,
    ) -> None:
        self._unseen = dict.fromkeys(config for config in space.valid() if not avoid(config))
        self._valid = frozenset(self._unseen)
        #: Of the given ones, those that nobody has measured yet.
        self.awaited = dict.fromkeys(config for config in first if config in self._valid)
        self._under_way: dict[Config, None] = {}
        #: Those that are being measured.
        self.picked: dict[Config, None] = {}
        self._sampler = sampler

    def learn(self, config: Config, score: float | None) -> None:
        """A finished trial, of this run or an earlier one; None for an unusable candidate."""
        self._unseen.pop(config, None)
        for place in (self.awaited, self._under_way, self.picked):
            place.pop(config, None)
        if config in self._valid:
            self._sampler.learn(config, score)

    def propose(self) -> Config | None:
        """The next config, or None where the space is exhausted."""
        if not self._unseen:
            return None
        config = self._chosen(self._unseen, self._under_way)
        del self._unseen[config]
        self._under_way[config] = None
        return config

    def has_trial(self, config: Config, left: int) -> bool:
        """Whether one of the trials that are left is for this config: the given ones come before all others."""
        return left > (0 if config in self.awaited else len(self.awaited))

    def pick(self, compiled: Collection[Config], left: int) -> Config | None:
        """Of those that were proposed and are compiled, the one to measure next: none where no trial is left for it."""
        compiled = [config for config in compiled if self.has_trial(config, left)]
        if not compiled:
            return None
        config = self._chosen(compiled, self.picked)
        self.picked[config] = None
        self.awaited.pop(config, None)
        return config

    def _chosen(self, among: Collection[Config], under_way: Collection[Config]) -> Config:
        given = next((config for config in self.awaited if config in among), None)
        return given if given is not None else self._sampler.choose(among, under_way)


def search(
    proposer: Proposer,
    evaluator: Evaluator[E],
    finished: Callable[[E], object],
    trials: int,
    deadline: float | None,
    progress: Callable[[int], None] = lambda tried: None,
    enough: Callable[[], bool] = lambda: False,
) -> Result:
    """Evaluate `trials` more candidates, or as many as end before `deadline` (of ``time.monotonic``) or before it is
    `enough`.

    `finished` stores each one the moment it ends. Ctrl-C ends the search with what it has.
    """
    started = time.monotonic()
    result = Result()
    under_way = 0
    exhausted = ending = False

    def left() -> int:
        """Trials that nobody has taken; who is measured has one. At the end there are some for the given ones alone."""
        free = trials - result.tried - len(proposer.picked)
        return min(free, len(proposer.awaited)) if ending else free

    evaluator.pick = lambda compiled: proposer.pick(compiled, left())
    try:
        while result.tried < trials:
            late = deadline is not None and time.monotonic() >= deadline
            # More than are left to try, so that there is a choice of what to measure; what is never picked is dropped.
            most = min(evaluator.capacity, SPARE * (trials - result.tried))
            ending = ending or enough()
            while not late and not exhausted and not ending and under_way < most:
                config = proposer.propose()
                if config is None:
                    exhausted = True
                    break
                evaluator.submit(config)
                under_way += 1
            if late:
                result.status = "budget"
                break
            # What is being measured is waited for, and counts; so are the given ones.
            if under_way == 0 or (ending and not proposer.picked and not proposer.awaited):
                break
            wait = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
            for config, trial in evaluator.collect(wait):
                under_way -= 1
                if config not in proposer.picked and not proposer.has_trial(config, left()):
                    continue  # it was compiled to be chosen from, and no trial is left for it
                finished(trial)
                proposer.learn(config, usable_score(trial))
                result.tried += 1
            progress(result.tried)
    except KeyboardInterrupt:
        result.status = "interrupted"
    result.seconds = time.monotonic() - started
    return result
