"""The model that predicts a time, for ranking without a GPU and before anything is compiled: from the launch plan, the
card and, where there is one, the compile report.

On top of its start, a launch takes about as long as the slowest of three things: moving its bytes, issuing its
instructions on the busiest SM, and the busiest program's chain of steps. What those cost (`Constants`) is data. So is
by how much a card was seen to differ from it for a value of a config's word (`Model.effects`), which says nothing of
other silicon. `dsv4tune fit` makes both from measurements; the shipped ones lie in cost_model.json.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import KB, Device
from dsv4tune.codegen.op import Op, Work
from dsv4tune.codegen.problem import Problem, Profile
from dsv4tune.codegen.space import Config

VERSION = 1
SHIPPED = Path(__file__).with_name("cost_model.json")

#: Registers of a thread that is not compiled yet.
USUAL_REGISTERS = 128


class CostModelError(ValueError):
    """A file that is no cost model; one line that says why."""


@dataclass(frozen=True)
class Constants:
    """What things take, in microseconds unless said otherwise.

    Attributes:
        start: a launch.
        latency: one round trip to memory.
        step: a step whatever is in it: its barriers, its loop.
        instruction: from one instruction of a warp to its next.
        issue: one warp's instruction, of an SM that has warps enough.
        byte: a byte of a step on its way into its program.
        program: starting one more program on an SM that holds all it can.
        scan: reading one length of a scan.
        later: a kernel that starts when the one before it has ended.
        reached: share of the vendor's bandwidth that kernels reach.
    """

    start: float
    latency: float
    step: float
    instruction: float
    issue: float
    byte: float
    program: float
    scan: float
    later: float
    reached: float


#: By op, word of the config and its value: logarithm of a time over what the constants say.
Effects = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Source:
    """Measurements of one op on one card that a model was fitted to; rows and configs that they have."""

    target: str
    device: str
    op: str
    rows: tuple[int, ...]
    configs: int


@dataclass(frozen=True)
class Judged:
    """Rank correlations of a recording's scores with those of a fit that has not seen its problem, or None for what
    can't be told.

    Attributes:
        constants: by the constants alone, as on other silicon.
        effects: with the card's effects too.
        uncompiled: likewise, without the compile reports.
    """

    constants: float | None
    effects: float | None
    uncompiled: float | None


@dataclass(frozen=True)
class LeftOut:
    """A recording, judged by fits to the other recordings alone and to the trials of other problems too."""

    recording: str
    target: str
    configs: int
    recordings: Judged
    trials: Judged


@dataclass(frozen=True)
class Model:
    """Constants, effects by compute capability, and where both come from."""

    constants: Constants
    effects: Mapping[str, Effects] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"cost_model": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Model:
        """The model that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is none.
        """
        if not isinstance(data, dict) or data.get("cost_model") != VERSION:
            raise ValueError(f"no object with cost_model {VERSION}")
        names, constants = {f.name for f in fields(Constants)}, data["constants"]
        if set(constants) != names:
            raise ValueError(f"constants are {', '.join(sorted(names))}, not {', '.join(sorted(constants))}")
        for name, value in constants.items():
            if not _number(value) or value <= 0:
                raise ValueError(f"constant {name} is {value!r:.40}, not a number above 0")
        for of_ops in data["effects"].values():
            for words in of_ops.values():
                for word, values in words.items():
                    bad = [v for v, effect in values.items() if not _number(effect) or abs(effect) > 10]
                    if bad:
                        raise ValueError(f"effect of {word}={bad[0]} is no logarithm of a ratio of times")
        sources = tuple(Source(**{**one, "rows": tuple(one["rows"])}) for one in data["sources"])
        left_out = tuple(
            LeftOut(**{**one, "recordings": Judged(**one["recordings"]), "trials": Judged(**one["trials"])})
            for one in data["left_out"]
        )
        for source in sources:
            texts = (source.target, source.device, source.op)
            if not all(isinstance(text, str) for text in texts) or not all(map(_number, source.rows)):
                raise ValueError(f"source {source} names no card, op and rows")
        for one in left_out:
            figures = [*asdict(one.recordings).values(), *asdict(one.trials).values()]
            if not all(figure is None or _number(figure) for figure in figures):
                raise ValueError(f"what {one.recording} was judged by is no rank correlation")
        return cls(Constants(**constants), data["effects"], sources, left_out)

    def factor(self, problem: Problem, config: Config) -> float:
        """By how much a config of this problem takes longer than the constants say, as far as that was seen."""
        effects = self.effects.get(problem.silicon.target, {}).get(problem.op, {})
        return math.exp(sum(values.get(str(config[word]), 0.0) for word, values in effects.items() if word in config))

    def says(self, device: Device) -> str:
        """Where it was fitted, and how well it ranked what it had not seen there, by what it would rank `device` by:
        without the effects where they are another architecture's."""
        cards = dict.fromkeys(f"{one.target} ({one.device.removeprefix('NVIDIA ')})" for one in self.sources)
        own = device.silicon.target in self.effects
        ranked = [(one.recording, one.trials.effects if own else one.trials.constants) for one in self.left_out]
        told = []
        for op in dict.fromkeys(one.op for one in self.sources):
            figures = [figure for name, figure in ranked if figure is not None and name.startswith(op)]
            if figures:
                told.append(f"{op} {min(figures):.2f} to {max(figures):.2f}")
        text = f"fitted on {', '.join(cards)}"
        return f"{text}; rank correlation with what was measured there: {', '.join(told)}" if told else text


def _number(value: object) -> bool:
    # JSON's whole numbers have no bound, and those past a float's make it overflow.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e12


def load() -> Model:
    """The user's own file where DSV4TUNE_COST_MODEL names one, else the shipped one; read once.

    Raises:
        CostModelError: it can't be read, or is no cost model.
    """
    return read(Path(os.environ.get("DSV4TUNE_COST_MODEL") or SHIPPED))


@lru_cache(maxsize=4)
def read(path: Path) -> Model:
    """A file of `dsv4tune fit -o`.

    Raises:
        CostModelError: it can't be read, or is no cost model.
    """
    try:
        return Model.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CostModelError(f"{path} is no cost model of `dsv4tune fit`: {why}") from error


# -- a launch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What a launch asks for, before any constant; numbers, or arrays of them for many launches at once.

    Attributes:
        bytes_us: moving its bytes at the vendor's bandwidth.
        issued: instructions of all warps on the busiest SM.
        longest: steps of the busiest program, each of `instructions` of a warp, `step_bytes` and `exposed` round trips.
        first_trips: round trips before the first step.
        started: programs that an SM starts when others have ended, and of later kernels.
        scanned, later: as in `Work`.
    """

    bytes_us: Any
    issued: Any
    longest: Any
    instructions: Any
    step_bytes: Any
    exposed: Any
    first_trips: Any
    started: Any
    scanned: Any
    later: Any


def resident(report: Report | None, warps: int, device: Device) -> int:
    """Programs that one SM holds at a time; without a report as their warps and usual registers allow."""
    threads = 32 * warps
    most_threads = 2048 if device.silicon.capability in ("9.0", "10.0") else 1536
    by_registers = 65536 // (max(report.registers if report is not None else USUAL_REGISTERS, 16) * threads)
    by_shared = device.sm_shared_bytes // (report.shared_bytes + KB) if report is not None else by_registers
    return max(1, min(by_registers, by_shared, most_threads // threads))


def facts(work: Work, warps: int, report: Report | None, device: Device) -> Facts:
    sms = device.silicon.sm_count
    held = resident(report, warps, device)
    instructions = work.instructions
    if report is not None and report.spill_bytes:
        instructions *= 1.5  # not fitted: next to no trial spilled
    # Programs that are all resident divide the steps evenly, but not the SMs.
    uneven = -(-work.programs // sms) * sms / work.programs if work.programs <= sms * held else 1.0
    waves = max(0.0, work.programs / (sms * held) - 1.0)
    return Facts(
        bytes_us=(work.steps * work.step_bytes + work.fixed_bytes) / device.bandwidth * 1e6,
        issued=max(work.steps / sms * uneven, work.longest) * instructions * warps,
        longest=work.longest,
        instructions=instructions,
        step_bytes=work.step_bytes,
        exposed=work.trips / (1 + work.ahead),
        first_trips=work.first_trips,
        started=waves * held + work.later_programs / sms,
        scanned=work.scanned,
        later=work.later,
    )


def launch_us(f: Facts, c: Constants) -> Any:
    """Microseconds, as an array where the facts are arrays."""
    memory = f.bytes_us / c.reached
    issue = f.issued * c.issue
    step = c.step + f.instructions * c.instruction + f.step_bytes * c.byte + f.exposed * c.latency
    # The slowest of the three, and somewhat more where another is nearly as slow.
    slowest = (memory**3 + issue**3 + (f.longest * step) ** 3) ** (1 / 3)
    before = c.start + f.first_trips * c.latency + f.scanned * c.scan
    return before + f.started * c.program + f.later * c.later + slowest


def predict_us(
    op: Op[Any, Any],
    problem: Problem,
    config: Config,
    profile: Profile,
    length: int,
    report: Report | None,
    device: Device,
    model: Model | None = None,
) -> float:
    """Predicted microseconds of one launch at one live length; without a report, of a config that is not compiled yet.

    Raises:
        CostModelError: the user's cost model is none.
    """
    model = model or load()
    of = facts(op.work(problem, config, profile, length), config.int("num_warps"), report, device)
    return float(launch_us(of, model.constants) * model.factor(problem, config))
