"""Fitting the cost model to measurements, and how well it ranks what a fit has not seen.

Two stages. Constants of all ops and cards together, by robust least squares of the logarithm of a time; then, for each
card's architecture and op, by how much each value of each word of a config is off beyond that, as a ridge. What one fit
is judged on is never in it, nor is anything else of the same problem.
"""

from __future__ import annotations

import gzip
import math
import statistics
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from dsv4tune.codegen import cost, devices, ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.cost import Constants, Facts, Judged, LeftOut, Model, Source
from dsv4tune.codegen.devices import KB, Device
from dsv4tune.codegen.problem import Problem, Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tools import recording
from dsv4tune.tools.recording import Recording
from dsv4tune.tuned.records import Trial

#: What the constants are about on any GPU of these years. Where measurements don't tell, they stay near it.
START = Constants(
    start=2.0,
    latency=0.6,
    step=0.2,
    instruction=1.5e-3,
    issue=3e-4,
    byte=1.7e-5,
    program=0.05,
    scan=0.01,
    later=2.0,
    reached=0.9,
)
#: How much a logarithm that is off START by 1 counts beside a time whose logarithm is off by 1.
HELD = 0.03
#: Logarithms of a time that are off by more are taken for faults of the model's form: they count less than squared.
USUAL = 0.2
#: Of the ridge: measured times that speak for a word as loudly as the assumption that it does not matter.
RIDGE = 30.0


class FitError(ValueError):
    """Nothing to fit to; one line that says why."""


@dataclass(frozen=True)
class Times:
    """A measured config: microseconds by live length."""

    problem: Problem
    profile: Profile
    device: Device
    config: Config
    report: Report | None
    us: dict[int, float]

    def predicted(self, model: Model, compiled: bool = True) -> dict[int, float]:
        """As `cost.predict_us`, with the compile report or as if there were none."""
        of, factor = self.facts if compiled else self._facts(None), model.factor(self.problem, self.config)
        return {n: float(cost.launch_us(one, model.constants) * factor) for n, one in of.items()}

    @cached_property
    def facts(self) -> dict[int, Facts]:
        """By live length; asked for by several fits."""
        return self._facts(self.report)

    def _facts(self, report: Report | None) -> dict[int, Facts]:
        op, warps = ops.get(self.problem.op), self.config.int("num_warps")
        work = {n: op.work(self.problem, self.config, self.profile, n) for n in self.us}
        return {n: cost.facts(of, warps, report, self.device) for n, of in work.items()}


@dataclass(frozen=True)
class Recorded:
    """A recording by the name of its file, with the score of each of its configs."""

    name: str
    problem: Problem
    times: list[Times]
    scores: list[float]

    def correlation(self, model: Model, compiled: bool = True) -> float | None:
        # Any yardstick: it is the same for all.
        same = dict.fromkeys(self.times[0].profile.lengths, 1.0)
        predicted = [one.profile.score(one.predicted(model, compiled), same) for one in self.times]
        found = float(spearmanr(predicted, self.scores).statistic)
        return round(found, 3) if math.isfinite(found) else None


# -- measurements -----------------------------------------------------------------------------------------------


def recorded(path: Path) -> Recorded:
    """A recording, called as its file.

    Raises:
        RecordingError, OSError: as `recording.read`.
        FitError: it has no times.
    """
    held = recording.read(path)
    scores = held.scores()
    if len(scores) < 2:
        raise FitError(f"{path} has times of {len(scores)} configs: too few to rank")
    times = [_of_recording(held, config) for config in scores]
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Recorded(name, held.header.problem, times, [*scores.values()])


def _of_recording(held: Recording, config: Config) -> Times:
    header, record = held.header, held.measured(config)
    us = {n: statistics.median(us for times in passes for us in times) for n, passes in record.us.items()}
    return Times(header.problem, header.profile, header.device, config, record.report, us)


def trials(path: Path) -> list[Times]:
    """Measured trials, one JSON object a line as `dsv4tune.tuned.records.Trial`; gzipped where the name says so.

    Raises:
        OSError: it can't be read.
        FitError: a line is no trial, or its card is not known.
    """
    found: list[Times] = []
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                number += 1
                trial = Trial.model_validate_json(line)
                # One of an older space lacks words of this one's.
                if trial.status == "ok" and trial.provenance == "measured" and _words(trial) <= set(trial.config):
                    found.append(_of_trial(trial))
    except ValidationError as error:
        raise FitError(f"{path}, line {number}, is no trial: {error.errors()[0]['msg']}") from error
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise FitError(f"{path}, line {number}: {error}") from error
    return found


def _words(trial: Trial) -> set[str]:
    return set(ops.get(str(trial.problem["op"])).words)


def _of_trial(trial: Trial) -> Times:
    problem, name = ops.problem_from_json(trial.problem), trial.device.name
    bandwidth = devices.bandwidth(problem.silicon, name)
    if bandwidth is None:
        raise ValueError(f"the bandwidth of {name} is not known: add a row to codegen/devices.py")
    silicon = problem.silicon
    card = Device(name, silicon, silicon.shared_bytes + KB, trial.device.l2_bytes, bandwidth, "its record")
    report = Report(**trial.resources.model_dump()) if trial.resources is not None else None
    return Times(problem, trial.range.profile, card, Config(trial.config), report, dict(trial.times_us))


# -- the fit ----------------------------------------------------------------------------------------------------


def fit(measured: Sequence[Times]) -> Model:
    """Constants and effects of all that was measured."""
    seen = [(one, n) for one in measured for n in one.us]
    logs = np.log([one.us[n] for one, n in seen])
    constants = fit_constants(stacked(one.facts[n] for one, n in seen), logs)
    plain = Model(constants)
    left = logs - np.log([us for one in measured for us in one.predicted(plain).values()])
    effects: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    parts = [(one.problem.silicon.target, one.problem.op) for one, _ in seen]
    for target, name in sorted(set(parts)):
        at = [i for i, part in enumerate(parts) if part == (target, name)]
        effects.setdefault(target, {})[name] = _effects([seen[i] for i in at], left[at])
    return Model(constants, effects, _sources(measured))


def stacked(many: Iterable[Facts]) -> Facts:
    """The facts of many launches as arrays."""
    rows = [[getattr(one, f.name) for f in fields(Facts)] for one in many]
    return Facts(*np.array(rows, dtype=float).T)


def fit_constants(facts: Facts, logs: Any) -> Constants:
    """Those that are the least off: from the facts of launches, and the logarithms of their microseconds."""
    start = np.log([getattr(START, f.name) for f in fields(Constants)])
    held = HELD * math.sqrt(len(logs))

    def off(x: Any) -> Any:
        return np.concatenate([np.log(cost.launch_us(facts, Constants(*np.exp(x)))) - logs, held * (x - start)])

    # No kernel reaches more than the vendor's bandwidth.
    most = [0.0 if f.name == "reached" else np.inf for f in fields(Constants)]
    found = least_squares(off, start, bounds=(-np.inf, most), loss="soft_l1", f_scale=USUAL)
    return Constants(*(float(f"{value:.4g}") for value in np.exp(found.x)))


def _effects(seen: Sequence[tuple[Times, int]], left: Any) -> dict[str, dict[str, float]]:
    """What each value of each word adds to a time's logarithm, beside other configs at the same problem and length."""
    words = ops.get(seen[0][0].problem.op).words
    columns: dict[tuple[str, str], int] = {}
    for one, _ in seen:
        for word in words:
            columns.setdefault((word, str(one.config[word])), len(columns))
    has = np.zeros((len(seen), len(columns)))
    for row, (one, _) in enumerate(seen):
        has[row, [columns[word, str(one.config[word])] for word in words]] = 1.0
    among: dict[Any, int] = {}
    group = np.array([among.setdefault((one.problem.key, one.profile, n), len(among)) for one, n in seen])
    beside, off = _centred(has, group), _centred(left[:, None], group)[:, 0]
    found = np.linalg.solve(beside.T @ beside + RIDGE * np.eye(len(columns)), beside.T @ off)
    effects: dict[str, dict[str, float]] = {}
    for word in words:
        at = {value: column for (of, value), column in columns.items() if of == word}
        # So that a usual config is as fast as the constants say.
        share = has[:, list(at.values())].mean(axis=0)
        usual = float(share @ found[list(at.values())])
        effects[word] = {value: round(float(found[column]) - usual, 4) for value, column in at.items()}
    return effects


def _centred(values: Any, group: Any) -> Any:
    """Less their mean in each group."""
    sums = np.zeros((group.max() + 1, values.shape[1]))
    np.add.at(sums, group, values)
    return values - (sums / np.bincount(group)[:, None])[group]


def _sources(measured: Sequence[Times]) -> tuple[Source, ...]:
    found: dict[tuple[str, str, str], list[Times]] = {}
    for one in measured:
        found.setdefault((one.problem.silicon.target, one.device.name, one.problem.op), []).append(one)
    return tuple(Source(*key, tuple(sorted({one.problem.rows for one in of})), len(of)) for key, of in found.items())


# -- how well it ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The fit to everything, and for each recording what the fits that left it out had seen."""

    model: Model
    seen: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {
            "left_out": [
                {**asdict(one), "seen": seen} for one, seen in zip(self.model.left_out, self.seen, strict=True)
            ],
            "model": self.model.to_json(),
        }


def fit_all(recordings: Sequence[Recorded], searched: Sequence[Times]) -> Result:
    """Fit each recording's rest, then everything.

    Raises:
        FitError: there is nothing to fit to.
    """
    if not recordings:
        raise FitError("no recording is named: there is nothing to judge a fit by")
    left_out, seen = [], []
    for one in recordings:
        others, apart = unseen(one.problem, recordings, searched)
        from_others = [times for other in others for times in other.times]
        judged = [_judged(one, data) for data in (from_others, from_others + apart)]
        left_out.append(LeftOut(one.name, one.problem.silicon.target, len(one.times), *judged))
        problems = {times.problem.key for times in apart}
        seen.append({"recordings": [o.name for o in others], "trials": len(apart), "problems": len(problems)})
    model = fit([*(times for one in recordings for times in one.times), *searched])
    return Result(Model(model.constants, model.effects, model.sources, tuple(left_out)), seen)


def unseen(
    problem: Problem, recordings: Sequence[Recorded], searched: Sequence[Times]
) -> tuple[list[Recorded], list[Times]]:
    """What tells nothing of a problem but by way of a fit: recordings and trials of others."""
    others = [other for other in recordings if other.problem.key != problem.key]
    return others, [times for times in searched if times.problem.key != problem.key]


def _judged(one: Recorded, data: Sequence[Times]) -> Judged:
    if not data:
        return Judged(None, None, None)
    model = fit(data)
    target, name = one.problem.silicon.target, one.problem.op
    known = name in model.effects.get(target, {})
    return Judged(
        constants=one.correlation(Model(model.constants)),
        effects=one.correlation(model) if known else None,
        uncompiled=one.correlation(model, compiled=False),
    )


def table(result: Result) -> Iterator[str]:
    """Lines for people."""

    def figure(value: float | None) -> str:
        return f"{value:6.3f}" if value is not None else "     -"

    yield "Spearman correlation of predicted and measured score; no fit has seen the problem that it is judged on"
    width = max(len(one.recording) for one in result.model.left_out)
    yield f"{'':{width}}  configs  fitted to  constants  with effects  uncompiled"
    for one, seen in zip(result.model.left_out, result.seen, strict=True):
        for label, judged in (("recordings", one.recordings), ("and trials", one.trials)):
            row = f"{one.recording if label == 'recordings' else '':{width}}  {one.configs:7}  {label:10}"
            yield f"{row}  {figure(judged.constants)}     {figure(judged.effects)}        {figure(judged.uncompiled)}"
        others = ", ".join(seen["recordings"]) or "no other recording"
        trials_too = f"{seen['trials']} trials of {seen['problems']} other problems"
        yield f"  {one.recording}: judged by fits to {others}; and to {trials_too} too"
    for source in result.model.sources:
        rows = ", ".join(map(str, source.rows))
        yield f"fitted to {source.configs} configs of {source.op}, rows {rows}, on {source.device} ({source.target})"
