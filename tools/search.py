"""The search: propose, evaluate, store, until the trials or the time run out. Nothing here knows a GPU."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from dsv4tune.codegen.space import Config, Space
from dsv4tune.tuned.records import Trial

#: What an unusable candidate counts as: far behind every usable one, so that the sampler leaves its neighbourhood.
_UNUSABLE = math.log(1e3)


class Evaluator(Protocol):
    """Turns configs into finished trials; a fake or a recorded table may stand in for a GPU."""

    @property
    def capacity(self) -> int:
        """Candidates that may be under way at once."""

    def submit(self, config: Config) -> None: ...

    def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
        """Candidates that ended meanwhile; waits at most `timeout` seconds for one."""


@dataclass
class Result:
    """How a search ended: ``complete``, ``budget`` or ``interrupted``."""

    status: str = "complete"
    tried: int = 0
    seconds: float = 0.0


class Proposer:
    """Configs to try, none twice: first the given ones, then the sampler's; those to `avoid` are never proposed."""

    def __init__(
        self,
        space: Space,
        sampler: str,
        seed: int,
        first: Sequence[Config] = (),
        avoid: Callable[[Config], object] = lambda config: None,
    ) -> None:
        self.space = space
        self._unseen = dict.fromkeys(config for config in space.valid() if not avoid(config))
        self._valid = frozenset(self._unseen)
        self._first = [config for config in first if config in self._valid]
        self._random = random.Random(seed)
        self._distributions: dict[str, BaseDistribution] = {
            p.name: CategoricalDistribution(p.values) for p in space.parameters
        }
        self._study: optuna.Study | None = None
        self.sampler = sampler
        if sampler == "tpe":
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                tpe = optuna.samplers.TPESampler(multivariate=True, seed=seed, n_startup_trials=10)
            self._study = optuna.create_study(sampler=tpe)

    def learn(self, config: Config, score: float | None) -> None:
        """A finished trial, of this run or an earlier one; None for an unusable candidate."""
        self._unseen.pop(config, None)
        if self._study is not None and config in self._valid:
            value = _UNUSABLE if score is None else math.log(max(score, 1e-9))
            self._study.add_trial(create_trial(params=dict(config), distributions=self._distributions, value=value))

    def propose(self) -> Config | None:
        """The next config, or None where the space is exhausted."""
        while self._first:
            config = self._first.pop(0)
            if config in self._unseen:
                del self._unseen[config]
                return config
        if not self._unseen:
            return None
        if self._study is None:
            config = self._random.choice(list(self._unseen)) if self.sampler == "random" else next(iter(self._unseen))
        else:
            asked = self._study.ask(self._distributions)
            # What is evaluated may be a neighbour, so the asked trial is closed and the real one added when it ends.
            self._study.tell(asked, state=TrialState.FAIL)
            wanted = Config({name: asked.params[name] for name in self._distributions})
            config = min(self._unseen, key=lambda c: (self.space.distance(wanted, c), c.key))
        del self._unseen[config]
        return config


def search(
    proposer: Proposer,
    evaluator: Evaluator,
    finished: Callable[[Trial], object],
    trials: int,
    deadline: float | None,
    progress: Callable[[int], None] = lambda tried: None,
) -> Result:
    """Evaluate `trials` more candidates, or as many as end before `deadline` (of ``time.monotonic``).

    `finished` stores each trial the moment it ends. Ctrl-C ends the search with what it has.
    """
    started = time.monotonic()
    result = Result()
    under_way = 0
    exhausted = False
    try:
        while result.tried < trials:
            late = deadline is not None and time.monotonic() >= deadline
            while not late and not exhausted and under_way < evaluator.capacity and result.tried + under_way < trials:
                config = proposer.propose()
                if config is None:
                    exhausted = True
                    break
                evaluator.submit(config)
                under_way += 1
            if late:
                result.status = "budget"
                break
            if under_way == 0:
                break
            wait = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
            for config, trial in evaluator.collect(wait):
                under_way -= 1
                finished(trial)
                proposer.learn(config, trial.score if trial.status == "ok" else None)
                result.tried += 1
            progress(result.tried)
    except KeyboardInterrupt:
        result.status = "interrupted"
    result.seconds = time.monotonic() - started
    return result
