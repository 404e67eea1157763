"""Who is tried next: the samplers of a search. They only choose; what is left to choose from is the caller's."""

from __future__ import annotations

import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from dsv4tune.codegen.space import Config, Space

#: How far behind the best one any candidate counts, as a natural logarithm; unusable ones count so. What is farther
#: off says as much, and would stretch the scale on which near ones are told apart.
FAR = 1.5


class Sampler(ABC):
    """Chooses configs of one space."""

    def learn(self, config: Config, score: float | None) -> None:
        """A finished candidate, of this run or an earlier one: lower is better, None is unusable."""
        return

    @abstractmethod
    def choose(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        """One of the unseen, which are never none, while others are under way."""


class Grid(Sampler):
    """In the order of the space."""

    def choose(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        return next(iter(unseen))


class Random(Sampler):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        return self._random.choice(list(unseen))


class Optuna(Sampler):
    """A sampler of Optuna's; of what it asks for, the nearest config that is valid and unseen."""

    def __init__(self, space: Space, sampler: BaseSampler) -> None:
        self._space = space
        self._distributions: dict[str, BaseDistribution] = {
            p.name: CategoricalDistribution(p.values) for p in space.parameters
        }
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(sampler=sampler)
        #: What the sampler noted of the trial for which a config stands, such as its generation.
        self._notes: dict[Config, dict[str, Any]] = {}

    def learn(self, config: Config, score: float | None) -> None:
        value = math.log(1e3) if score is None else math.log(max(score, 1e-9))
        notes = self._notes.pop(config, {})
        self._study.add_trial(
            create_trial(params=dict(config), distributions=self._distributions, value=value, system_attrs=notes)
        )

    def choose(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        asked = self._study.ask(self._distributions)
        # What is evaluated may be a neighbour, so the asked trial is closed and the real one added when it ends.
        closed = self._study.tell(asked, state=TrialState.FAIL)
        wanted = Config({name: asked.params[name] for name in self._distributions})
        config = min(unseen, key=lambda c: (self._space.distance(wanted, c), c.key))
        self._notes[config] = closed.system_attrs
        return config


class Guided(Sampler):
    """Expected improvement by a Gaussian process over the distance between configs.

    Starts with what the cost model holds for the best. After that it goes by measurements alone: the model's
    predictions as the process's mean save candidates where the model is good and cost some where it isn't. Candidates
    under way count as what is expected of them, so that several at once spread. Constants and alternatives were
    compared on recordings: benchmarks/README.md.
    """

    #: The distance at which configs say little of one another, and the share of the variance that no knob explains.
    REACH, NOISE = 4.0, 1e-3

    def __init__(self, space: Space, seed: int, predicted: Callable[[Config], float]) -> None:
        """`predicted` is the logarithm of a config's time by the cost model."""
        self._random = random.Random(seed)
        self._configs = space.valid()
        self._place = {config: number for number, config in enumerate(self._configs)}
        self._values = _places(space, self._configs)
        self._rows: dict[int, NDArray[np.float64]] = {}
        self._predicted = predicted
        self._ranked: list[Config] = []
        self._logs: dict[int, float | None] = {}

    def learn(self, config: Config, score: float | None) -> None:
        if config in self._place:
            self._logs[self._place[config]] = None if score is None else math.log(max(score, 1e-9))

    def choose(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        usable = [log for log in self._logs.values() if log is not None]
        if not usable:
            return self._start(unseen, under_way)
        best = min(usable)
        # What was measured twice counts as its last measurement.
        known = list(self._logs)
        logs = np.array([best + FAR if log is None else min(log, best + FAR) for log in self._logs.values()])
        level = logs.mean()
        waiting = [self._place[config] for config in under_way if config in self._place]
        left = [self._place[config] for config in unseen]
        if waiting:
            expected, _ = self._expect(known, logs - level, waiting)
            known, logs = known + waiting, np.concatenate([logs, level + expected])
        mean, deviation = self._expect(known, logs - level, left)
        short = (best - level - mean) / deviation
        # Equal ones go by the space's order.
        return self._configs[left[int(np.argmax(deviation * (short * _below(short) + _density(short))))]]

    def _start(self, unseen: Collection[Config], under_way: Collection[Config]) -> Config:
        """One of the cost model's better fifth; while that is measured, others of it that are far from those."""
        if not self._ranked:
            self._ranked = sorted(self._configs, key=lambda config: (self._predicted(config), self._place[config]))
        left = [config for config in self._ranked if config in unseen]
        better = left[: max(1, len(left) // 5)]
        if not under_way:
            return self._random.choice(better)
        waiting = [self._place[config] for config in under_way if config in self._place]
        apart = self._between(waiting, [self._place[config] for config in better]).min(axis=0)
        return better[int(np.argmax(apart))]

    def _expect(
        self, known: Sequence[int], logs: NDArray[np.float64], asked: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The process's mean and standard deviation at the asked places."""
        among = self._alike(known, known) + self.NOISE * np.eye(len(known))
        factor = np.linalg.cholesky(among)
        whitened = np.linalg.solve(factor, logs)
        variance = max(float(whitened @ whitened) / len(known), 1e-2)
        across = np.linalg.solve(factor, self._alike(known, asked))
        spread = np.maximum(1.0 - (across**2).sum(axis=0), 1e-9)
        return across.T @ whitened, np.sqrt(spread * variance)

    def _alike(self, these: Sequence[int], those: Sequence[int]) -> NDArray[np.float64]:
        return np.exp(-self._between(these, those) / self.REACH)

    def _between(self, these: Sequence[int], those: Sequence[int]) -> NDArray[np.float64]:
        """Distances, as `Space.distance` has them."""
        for number in these:
            if number not in self._rows:
                far = np.abs(self._values - self._values[number])
                self._rows[number] = np.where(far > 0, 0.5 + 0.5 * far, 0.0).sum(axis=1)
        return np.array([self._rows[number] for number in these])[:, list(those)]


def _places(space: Space, configs: Sequence[Config]) -> NDArray[np.float64]:
    """Each knob's value as its place in the knob's range, 0 to 1."""
    columns = []
    for p in space.parameters:
        at = {value: number / max(1, len(p.values) - 1) for number, value in enumerate(p.values)}
        columns.append([at[config[p.name]] for config in configs])
    return np.array(columns, dtype=np.float64).T


def _below(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution's share below."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in values])


def _density(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-0.5 * values**2) / math.sqrt(2.0 * math.pi)


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(multivariate=True, seed=seed, n_startup_trials=10)


def _gp(seed: int) -> BaseSampler:
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ValueError("sampler 'gp' needs SciPy: pip install scipy, or leave --sampler out") from None
    return optuna.samplers.GPSampler(seed=seed)


def _nsga(seed: int) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(population_size=10, seed=seed)


_OPTUNA: dict[str, Callable[[int], BaseSampler]] = {"tpe": _tpe, "gp": _gp, "nsga": _nsga}
SAMPLERS = ("guided", *_OPTUNA, "random", "grid")


def make(name: str, space: Space, seed: int, predicted: Callable[[Config], float]) -> Sampler:
    """A sampler by its name on the command line.

    Raises:
        ValueError: it is unknown, or what it takes is not installed.
    """
    if name == "guided":
        return Guided(space, seed, predicted)
    if name == "random":
        return Random(seed)
    if name == "grid":
        return Grid()
    if name not in _OPTUNA:
        raise ValueError(f"unknown sampler '{name}': use {', '.join(SAMPLERS)}")
    return Optuna(space, _OPTUNA[name](seed))
