"""Samplers on recorded spaces: ours, Optuna's and Kernel Tuner's strategies, and whether repeated searches agree.

    pip install kernel_tuner==1.5.0 matplotlib scipy
    python benchmarks/samplers.py benchmarks/h200/recordings/*.jsonl.gz --trials benchmarks/h200/*_trials*.jsonl.gz \\
        -o benchmarks/samplers.json --plot benchmarks/samplers.png

Needs no GPU. Every sampler starts from nothing: no default config, no early end. What is counted is kernels, in the
order in which they are measured; configs of one kernel cost one measurement whoever asks. Ours see a draw of the
recorded noise, Kernel Tuner's the median of all rounds, from which the optimum is told too. The cost model by which
ours starts is fitted for each recording without its problem.
"""

# ruff: noqa: E402

from __future__ import annotations

import os

# There is a process for each core; read where NumPy is loaded.
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[threads] = "1"

import argparse
import contextlib
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dsv4tune.codegen.space import Config
from dsv4tune.tools import fit, recording, replay
from dsv4tune.tools.efforts import EFFORTS
from dsv4tune.tools.kernel_tuner_cache import convert, restriction, write
from dsv4tune.tools.replay import Replay

OURS = "guided"
#: Candidates under way at once: none beside the one that is measured, and as many as a search on 16 cores has.
IN_FLIGHT = (1, 16)
#: A strategy that asked for so many times the configs of a space, most of them again and again, is stuck.
STUCK = 20
#: Where a walk is drawn, in shares of the space.
SHARES = [n / 200 for n in range(1, 41)]
#: Recordings that say something: at most this share of the kernels is within 3 %.
HARD = 0.02

Walk = list[Config]


@cache
def space(path: Path) -> Replay:
    return Replay(recording.read(path))


def called(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def fit_without(paths: list[Path], trials: list[Path], folder: Path) -> dict[str, str]:
    """For each recording a cost model that has seen nothing of its problem, and what it has seen."""
    recordings = [fit.recorded(path) for path in paths]
    searched = [times for path in trials for times in fit.trials(path)]
    told = {}
    for path, one in zip(paths, recordings, strict=True):
        others, apart = fit.unseen(one.problem, recordings, searched)
        seen = [times for other in others for times in other.times] + apart
        told[path.name] = f"{len(others)} other recordings, {len(apart)} trials of other problems"
        if not seen:
            sys.exit(f"error: {path.name} is all there is: name trials of other problems with --trials")
        model_of(path, folder).write_text(json.dumps(fit.fit(seen).to_json()))
    return told


def model_of(path: Path, folder: Path) -> Path:
    return folder / f"{path.name}.cost.json"


# -- Kernel Tuner -------------------------------------------------------------------------------------------------


class Watched:
    """A strategy of Kernel Tuner's, and the kernels that it had measured, in order; ends it once it was near."""

    def __init__(self, name: str, on: Replay, held: dict[str, Any]) -> None:
        self._name, self._on, self._held, self._asked = name, on, held, 0
        self.walked: dict[Config, None] = {}

    def tune(self, searchspace: Any, runner: Any, options: Any) -> Any:
        from kernel_tuner.interface import strategy_map
        from kernel_tuner.util import StopCriterionReached

        measure = runner.run

        def run(configs: Any, given: Any) -> Any:
            if self._enough():
                raise StopCriterionReached
            configs = list(configs)
            self._asked += len(configs)
            results = measure(configs, given)
            for values, result in zip(configs, results, strict=True):
                # None is beyond the budget.
                if result is not None:
                    config = Config(dict(zip(self._held["tune_params_keys"], values, strict=True)))
                    self.walked[self._on.recording.measured(config).config] = None
            return results

        runner.run = run
        options["strategy"] = self._name  # pymoo's look there which one they are
        return strategy_map[self._name].tune(searchspace, runner, options)

    def _enough(self) -> bool:
        near = not self._on.near.isdisjoint(self.walked)
        far = len(self.walked) >= replay.SHARES[-1] * len(self._on.kernels)
        return (near and far) or self._asked >= STUCK * len(self._held["cache"])


@cache
def cached(path: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    file = folder / f"{path.name}.{os.getpid()}.json"
    held = convert(space(path).recording)
    write(file, held)
    return file, held


def strategy_walk(path: Path, name: str, seed: int, folder: Path) -> Walk:
    from constraint import FunctionConstraint
    from kernel_tuner import tune_kernel
    from kernel_tuner.util import StopCriterionReached

    file, held = cached(path, folder)
    watched = Watched(name, space(path), held)
    random.seed(seed)
    np.random.seed(seed)
    with contextlib.suppress(StopCriterionReached), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tune_kernel(
            held["kernel_name"],
            "",
            tuple(held["problem_size"]),
            [],
            held["tune_params"],
            restrictions=[FunctionConstraint(restriction(held))],
            strategy=watched,
            strategy_options={"max_fevals": len(held["cache"])},
            cache=str(file),
            simulation_mode=True,
            quiet=True,
            seed=seed,
        )
    return list(watched.walked)


def strategies() -> list[str]:
    from kernel_tuner.interface import strategy_map

    return [name for name in strategy_map if name != "brute_force"]


# -- all of them --------------------------------------------------------------------------------------------------


def walk(path: Path, sampler: str, in_flight: int, seed: int, folder: Path) -> Walk | str:
    """Or why there is none."""
    os.environ["DSV4TUNE_COST_MODEL"] = str(model_of(path, folder))
    try:
        if sampler.startswith("kt:"):
            return strategy_walk(path, sampler[3:], seed, folder)
        return space(path).walk(sampler, seed, in_flight)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def row(path: Path, sampler: str, in_flight: int, walks: list[Walk | str]) -> dict[str, Any]:
    on = space(path)
    found = {"recording": called(path), "sampler": sampler, "in_flight": in_flight, "seeds": len(walks)}
    failed = [one for one in walks if isinstance(one, str)]
    if failed:
        return {**found, "failed": len(failed), "reason": failed[0]}
    curves = [[on.fraction(one[: max(1, round(share * len(on.kernels)))]) for share in SHARES] for one in walks]
    quartiles = [statistics.quantiles(at, n=4, method="inclusive") for at in zip(*curves, strict=True)]
    low, middle, high = zip(*quartiles, strict=True)
    drawn = {"median": middle, "low": low, "high": high} if sampler == OURS else {"median": middle}
    curve = {name: [round(value, 4) for value in values] for name, values in drawn.items()}
    return {**found, **replay.told(on, [one for one in walks if not isinstance(one, str)]), "curve": curve}


def agreement(path: Path, effort: str, default: bool, searches: int, folder: Path) -> dict[str, Any]:
    os.environ["DSV4TUNE_COST_MODEL"] = str(model_of(path, folder))
    on = space(path)
    found = replay.agreement(on, OURS, EFFORTS[effort], searches, IN_FLIGHT[-1], default)
    return {"recording": called(path), "effort": effort, "default_first": default, "searches": searches, **found}


def summary(rows: list[dict[str, Any]], paths: list[Path]) -> dict[str, Any]:
    """Medians over the seeds, geometric means over the recordings in which at most 2 % of the kernels are near."""
    hard = [called(path) for path in paths if len(space(path).near) <= HARD * len(space(path).kernels)]
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for one in rows:
        if one["recording"] in hard and "failed" not in one:
            name = f"{one['sampler']} {one['in_flight']}"
            by_name.setdefault(name, {})[one["recording"]] = one["evaluations_to_3_percent"]
    means = {
        name: round(statistics.geometric_mean(one["median"] for one in found.values()), 2)
        for name, found in by_name.items()
        if len(found) == len(hard)
    }
    means = dict(sorted(means.items(), key=lambda item: item[1]))
    theirs = next((name for name in means if name.startswith("kt:")), None)
    bars = {}
    for in_flight in IN_FLIGHT:
        name = f"{OURS} {in_flight}"
        bars[name] = {
            "worst_share_of_the_space": max(one["of_the_space"] for one in by_name[name].values()),
            "worst_share_of_chance": max(one["of_chance"] for one in by_name[name].values()),
            "of_kernel_tuners_best": round(means[name] / means[theirs], 3) if theirs else None,
        }
    return {"recordings": hard, "geometric_mean": means, "kernel_tuners_best": theirs, "bars": bars}


def about() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in ("dsv4tune", "optuna", "kernel_tuner", "numpy", "scipy", "scikit-learn", "pymoo", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# -- the plot -----------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MultipleLocator, PercentFormatter

    rows = [one for one in result["samplers"] if "curve" in one and (one["in_flight"] == 1 or one["sampler"] == OURS)]
    names = [one["recording"] for one in result["recordings"]]
    ranked = [name.split()[0] for name in result["summary"]["geometric_mean"] if name.startswith("kt:")]
    colours = {"tpe": "C0", "gp": "C2", "nsga": "C4", "random": "0.3"}
    colours |= dict(zip(ranked, ["C1", "C5"], strict=False))
    across = min(2, len(names))
    down = -(-len(names) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(7 * across, 4.6 * down), squeeze=False, layout="constrained")
    shares = result["shares"]
    for name, axis in itertools.zip_longest(names, axes.flat):
        if name is None:
            axis.axis("off")
            continue
        for one in (one for one in rows if one["recording"] == name):
            sampler, curve = one["sampler"], one["curve"]
            if sampler == OURS:
                style = "-" if one["in_flight"] == 1 else "--"
                label = f"{sampler} (ours), {one['in_flight']} at once"
                axis.plot(shares, curve["median"], style, color="C3", lw=2.4, label=label, zorder=3)
                if one["in_flight"] == 1:
                    axis.fill_between(shares, curve["low"], curve["high"], color="C3", alpha=0.18, lw=0)
            elif sampler in colours:
                label = f"Kernel Tuner {sampler[3:]}" if sampler.startswith("kt:") else sampler
                axis.plot(shares, curve["median"], color=colours[sampler], lw=1.4, label=label)
            else:
                axis.plot(shares, curve["median"], color="0.8", lw=0.8, zorder=0)
        axis.plot([], [], color="0.8", lw=0.8, label="Kernel Tuner's others")
        axis.axhline(1 / (1 + recording.NEAR), color="0.5", lw=0.8, ls=":")
        axis.set(xlim=(0, shares[-1]), ylim=(0.6, 1.005), title=name)
        axis.set(xlabel="share of the space's kernels that were measured", ylabel="fraction of the optimum")
        axis.xaxis.set_major_locator(MultipleLocator(0.05))
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8, loc="lower right")
    figure.suptitle("Best kernel so far: median over seeds, quartiles for ours; dotted: within 3 %", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING")
    parser.add_argument("--trials", type=Path, nargs="*", default=[], help="that the cost model is also fitted to")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--gp-seeds", type=int, default=5, help="of Optuna's GP, which takes half a minute a walk")
    parser.add_argument("--searches", type=int, default=200, help="repeated searches of each effort")
    parser.add_argument("--only", nargs="*", help="these samplers, such as guided or kt:pso")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    ours = [(name, at) for name in ("guided", "tpe", "nsga") for at in IN_FLIGHT] + [("gp", 1), ("random", 1)]
    try:
        theirs = [(f"kt:{name}", 1) for name in strategies()]
    except ImportError as error:
        sys.exit(f"error: {error}: pip install kernel_tuner==1.5.0")
    # The slow ones first.
    tasks = [
        (path, name, at)
        for name, at in sorted(ours + theirs, key=lambda one: one[0] != "gp")
        for path in given.recordings
        if not given.only or name in given.only
    ]
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(given.processes, initializer=os.nice, initargs=(10,)) as pool,
    ):
        folder = Path(temporary)
        fitted = fit_without(given.recordings, given.trials, folder)
        walks = {}
        for path, name, at in tasks:
            seeds = range(min(given.seeds, given.gp_seeds) if name == "gp" else given.seeds)
            walks[path, name, at] = [pool.submit(walk, path, name, at, seed, folder) for seed in seeds]
        repeats = [
            pool.submit(agreement, path, effort, default, given.searches, folder)
            for default in (True, False)
            for path in given.recordings
            for effort in EFFORTS
        ]
        rows = []
        for (path, name, at), futures in walks.items():
            rows.append(row(path, name, at, [future.result() for future in futures]))
            print({k: v for k, v in rows[-1].items() if k != "curve"}, file=sys.stderr, flush=True)
        efforts = [future.result() for future in repeats]
    wanted = [(path, *one) for one in ours + theirs for path in given.recordings]
    rows = [rows[tasks.index(task)] for task in wanted if task in tasks]
    result = {
        "about": {**about(), "seconds": round(time.monotonic() - started)},
        "recordings": [
            {
                "recording": called(path),
                "problem": space(path).recording.name,
                "configs": len(space(path).space.valid()),
                "kernels": len(space(path).kernels),
                "within_3_percent": len(space(path).near),
                "cost_model_fitted_to": fitted[path.name],
            }
            for path in given.recordings
        ],
        "summary": summary(rows, given.recordings),
        "shares": SHARES,
        "efforts": efforts,
        "samplers": rows,
    }
    if given.output:
        given.output.write_text(lines(result))
    if given.plot:
        plot(result, given.plot)
    print(json.dumps(result["summary"], indent=1))
    for one in efforts:
        print(json.dumps(one))


def lines(result: dict[str, Any]) -> str:
    """JSON with a line for each row of a list of objects, so that a change shows where it is."""
    parts = []
    for name, value in result.items():
        if name != "shares" and isinstance(value, list):
            inner = ",\n  ".join(map(json.dumps, value))
            parts.append(f"{json.dumps(name)}: [\n  {inner}\n ]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
