"""Other constants and forms of our own sampler on recorded spaces: evaluations to within 3 % of the optimum.

    python benchmarks/guided_variants.py benchmarks/h200/recordings/*.jsonl.gz \\
        --trials benchmarks/h200/*_trials*.jsonl.gz > benchmarks/guided_variants.txt

Needs no GPU. Each with three cost models, none of which has seen the problem: of a card that was measured, of a card
that was not (the fitted constants alone), and one that says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import samplers as comparison

from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools import replay, samplers
from dsv4tune.tools.replay import Replay
from dsv4tune.tools.samplers import Guided

MODELS = ("measured card", "other card", "noise")


class Leaning(Guided):
    """Expects what the cost model predicts, times a slope that is learned with the rest."""

    #: Mean and variance of the slope before anything is measured, the latter as a share of the process's.
    MEAN, SLOPE = 1.0, 0.25

    @cached_property
    def _logs_predicted(self) -> Any:
        logs = np.array([self._predicted(config) for config in self._configs])
        return logs - logs.mean()

    def _alike(self, these: Sequence[int], those: Sequence[int]) -> Any:
        p = self._logs_predicted
        return super()._alike(these, those) + self.SLOPE * np.outer(p[list(these)], p[list(those)])

    def _expect(self, known: Sequence[int], logs: Any, asked: Sequence[int]) -> Any:
        # As the sampler's own, but for the mean, and for a variance that isn't the same everywhere.
        p = self._logs_predicted
        factor = np.linalg.cholesky(self._alike(known, known) + self.NOISE * np.eye(len(known)))
        whitened = np.linalg.solve(factor, logs - self.MEAN * p[list(known)])
        variance = max(float(whitened @ whitened) / len(known), 1e-2)
        across = np.linalg.solve(factor, self._alike(known, asked))
        spread = np.maximum(1.0 + self.SLOPE * p[list(asked)] ** 2 - (across**2).sum(axis=0), 1e-9)
        return across.T @ whitened + self.MEAN * p[list(asked)], np.sqrt(spread * variance)


class Believing(Leaning):
    MEAN, SLOPE = 1.0, 0.0


class Hoping(Leaning):
    MEAN, SLOPE = 0.5, 0.5


class Anywhere(Guided):
    """Starts at random."""

    def __init__(self, space: Space, seed: int, predicted: Callable[[Config], float]) -> None:
        dice = random.Random(seed)
        drawn = {config: dice.random() for config in space.valid()}
        super().__init__(space, seed, drawn.__getitem__)


#: What differs from how it is: constants of the class, of the module, or another class.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "reach 2": {"REACH": 2.0},
    "reach 8": {"REACH": 8.0},
    "noise 1e-2": {"NOISE": 1e-2},
    "far 0.75": {"FAR": 0.75},
    "far 3": {"FAR": 3.0},
    "starts at random": {"class": Anywhere},
    "predictions as the mean": {"class": Believing},
    "the same, slope 1, variance 1/4": {"class": Leaning},
    "the same, slope 1/2, variance 1/2": {"class": Hoping},
}


def needed(path: Path, variant: str, model: str, in_flight: int, seed: int, folder: Path) -> int:
    os.environ["DSV4TUNE_COST_MODEL"] = str(folder / f"{path.name}.{model}.json")
    on = Replay(comparison.space(path).recording)
    if model == "noise":
        dice = random.Random(seed)
        on._expected = {config: dice.gauss(0.0, 0.4) for config in on.space.valid()}.__getitem__
    changed = VARIANTS[variant]
    constants = {name: changed.get(name, getattr(Guided, name)) for name in ("REACH", "NOISE")}
    with (
        patch.multiple(Guided, **constants),
        patch.object(samplers, "FAR", changed.get("FAR", samplers.FAR)),
        patch.object(samplers, "Guided", changed.get("class", Guided)),
        patch.object(replay, "SHARES", (0.0,)),  # no further than until it is near
    ):
        walk = on.walk("guided", seed, in_flight)
    return 1 + next(number for number, config in enumerate(walk) if config in on.near)


def fit_models(paths: list[Path], trials: list[Path], folder: Path) -> None:
    comparison.fit_without(paths, trials, folder)
    for path in paths:
        model = json.loads(comparison.model_of(path, folder).read_text())
        for name in MODELS:
            changed = model if name == "measured card" else {**model, "effects": {}}
            (folder / f"{path.name}.{name}.json").write_text(json.dumps(changed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING")
    parser.add_argument("--trials", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(initializer=os.nice, initargs=(10,)) as pool,
    ):
        folder = Path(temporary)
        fit_models(given.recordings, given.trials, folder)
        print(f"medians over {given.seeds} seeds (quartiles; worst) of {', '.join(p.name for p in given.recordings)}")
        for model in MODELS:
            for at in comparison.IN_FLIGHT:
                print(f"\ncost model: {model}; {at} under way at once", flush=True)
                for variant in given.only:
                    medians, told = [], []
                    for path in given.recordings:
                        tasks = [pool.submit(needed, path, variant, model, at, s, folder) for s in range(given.seeds)]
                        found = [task.result() for task in tasks]
                        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
                        medians.append(middle)
                        told.append(f"{middle:g} ({low:g} to {high:g}; {max(found)})")
                    print(f"  {variant:34} {statistics.geometric_mean(medians):6.2f}   {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
