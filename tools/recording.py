"""Recorded spaces: every valid config of a problem with all that was measured of it, in one file that needs no GPU.

A file is JSON lines, gzipped: a header, then a line for each config in the order in which they were measured. A line
cut off by a crash costs that config alone.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.problem import Problem, Profile, Silicon
from dsv4tune.codegen.space import Config
from dsv4tune.tools.measure import floors_us

VERSION = 1
#: By how much a config may be slower than the best one and count as good.
NEAR = 0.03

#: Microseconds of one launch in each round of each pass, by live length.
Rounds = dict[int, list[list[float]]]


class RecordingError(ValueError):
    """A file that is no recording; one line that says why."""


@dataclass(frozen=True)
class Record:
    """One config.

    Attributes:
        status: ``ok``, or why it has no times, in the words of `dsv4tune.tuned.records.Trial`.
        reason: of a status that is not ok.
        error: of its check.
        report: None where the compiler refused it.
        code: SHA-256 of its machine code without what only debuggers read.
        same_as: the config whose machine code and launch plan it has; it was not measured itself.
        us, baseline_us: of the config, and of the baseline in turn with it.
        seconds: that its compile job, and its check and timing, took.
    """

    config: Config
    status: str
    reason: str = ""
    error: float | None = None
    report: Report | None = None
    code: str = ""
    same_as: Config | None = None
    us: Rounds = field(default_factory=dict)
    baseline_us: Rounds = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def passes(self) -> int:
        return min(map(len, self.us.values()), default=0)

    def with_pass(self, us: Mapping[int, list[float]], baseline_us: Mapping[int, list[float]]) -> Record:
        """Measured once more."""
        return replace(self, us=_added(self.us, us), baseline_us=_added(self.baseline_us, baseline_us))


def _added(rounds: Rounds, more: Mapping[int, list[float]]) -> Rounds:
    return {length: [*rounds.get(length, []), times] for length, times in more.items()}


@dataclass(frozen=True)
class Header:
    """What all configs of a recording share.

    Attributes:
        words: of the configs, in the order in which the lines hold their values.
        baseline: name and version of the server's own kernel, or None.
        valid: configs of the space; the file holds `wanted` of them when it is whole.
    """

    problem: Problem
    profile: Profile
    device: Device
    seed: int
    environment: Mapping[str, str]
    baseline: tuple[str, str] | None
    valid: int
    wanted: int
    warnings: tuple[str, ...]
    words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "recording": VERSION,
            "problem": self.problem.to_json(),
            "range": self.profile.to_json(),
            "device": asdict(self.device),
            "seed": self.seed,
            "environment": dict(self.environment),
            "baseline": self.baseline,
            "valid": self.valid,
            "wanted": self.wanted,
            "warnings": self.warnings,
            "words": self.words,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Header:
        if data.get("recording") != VERSION:
            raise ValueError(f"recording is {data.get('recording')!r}, not {VERSION}")
        over, device = data["range"], data["device"]
        for name in ("sm_shared_bytes", "l2_bytes", "bandwidth"):
            if not 0 < device[name] < math.inf:
                raise ValueError(f"the device's {name} is {device[name]}")
        return cls(
            problem=ops.problem_from_json(data["problem"]),
            profile=Profile(over["width"], tuple(over["lengths"]), tuple(over["weights"]), over["causal"]),
            device=Device(**{**device, "silicon": Silicon(**device["silicon"])}),
            seed=data["seed"],
            environment=data["environment"],
            baseline=None if data["baseline"] is None else tuple(data["baseline"]),
            valid=data["valid"],
            wanted=data["wanted"],
            warnings=tuple(data["warnings"]),
            words=tuple(data["words"]),
        )


@dataclass
class Recording:
    """A whole space, or as much of it as was measured."""

    header: Header
    records: dict[Config, Record]

    #: Decimals of a microsecond that are kept: a clock's tick is some nanoseconds.
    DECIMALS: ClassVar[int] = 3

    @property
    def name(self) -> str:
        problem = self.header.problem
        return f"{problem.op} {problem.label}"

    def measured(self, config: Config) -> Record:
        """The record that holds a config's times: its own, or that of the same machine code."""
        record = self.records[config]
        return record if record.same_as is None else self.records[record.same_as]

    def score(self, config: Config, take: Sequence[int] | None = None) -> float | None:
        """As a search scores it, from the medians over all its rounds, or over some passes; None without times."""
        record = self.measured(config)
        if record.status != "ok" or not record.us:
            return None
        us, beside = _medians(record.us, take), _medians(record.baseline_us, take)
        return self.header.profile.score(us, beside or self.floors)

    @property
    def floors(self) -> dict[int, float]:
        return floors_us(self.header.problem, self.header.profile, self.header.device.bandwidth)

    def scores(self) -> dict[Config, float]:
        """Of every config that has one."""
        found = {config: self.score(config) for config in self.records}
        return {config: score for config, score in found.items() if score is not None}


def _medians(rounds: Rounds, take: Sequence[int] | None) -> dict[int, float]:
    def of(passes: list[list[float]]) -> list[float]:
        chosen = passes if take is None else [passes[number] for number in take]
        return [us for times in chosen for us in times]

    return {length: statistics.median(of(passes)) for length, passes in rounds.items()}


# -- the file ---------------------------------------------------------------------------------------------------


#: What a file of something else raises where it is read as a recording.
_SPOILT = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),
    *(zlib.error, gzip.BadGzipFile),
)


def read(path: Path) -> Recording:
    """A recording, without a last line that was cut off.

    Raises:
        RecordingError: the file is none.
        OSError: it can't be read.
    """
    try:
        lines = _lines(path)
        header = Header.from_json(json.loads(next(lines, "{}")))
        records: dict[Config, Record] = {}
        for line in lines:
            record = _record(header, json.loads(line))
            records[record.config] = record
    except _SPOILT as error:
        raise RecordingError(f"{path} is no recording of `dsv4tune record` ({_first(error)})") from error
    lost = [r for r in records.values() if r.same_as is not None and r.same_as not in records]
    if lost:
        raise RecordingError(f"{path} is no whole recording: the times of {lost[0].config.brief} are missing")
    return Recording(header, records)


def _lines(path: Path) -> Iterator[str]:
    # Whole lines, as far as the file goes: gzip's members are appended one by one, and the last may be cut off
    # anywhere, in its head too.
    with gzip.open(path, "rt", encoding="utf-8") as handle, contextlib.suppress(EOFError):
        try:
            for line in handle:
                if not line.endswith("\n"):
                    return
                yield line
        except gzip.BadGzipFile as error:
            # No head is a head cut off; a wrong checksum is spoilt figures.
            if not str(error).startswith("Not a gzipped file"):
                raise


def _first(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def write(path: Path, recording: Recording) -> None:
    """The whole file, in place of an older one.

    Raises:
        OSError: it can't be written.
    """
    whole = path.with_name(f".{path.name}.part")
    # No time and no name inside, so that equal recordings are equal files.
    with whole.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as handle:
        handle.write(_line(recording.header.to_json()))
        for record in recording.records.values():
            handle.write(_line(_to_json(record)))
    whole.replace(path)


def append(path: Path, record: Record) -> None:
    """One more line; a later line of a config stands for an earlier one."""
    with path.open("ab") as handle:
        handle.write(gzip.compress(_line(_to_json(record)), mtime=0))


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _to_json(record: Record) -> dict[str, Any]:
    data: dict[str, Any] = {"config": list(record.config.values()), "status": record.status}
    if record.reason:
        data["reason"] = record.reason
    if record.error is not None:
        data["error"] = record.error
    if record.report is not None:
        data["report"] = {**record.report.to_json(), "code": record.code}
    if record.same_as is not None:
        data["same_as"] = list(record.same_as.values())
    for name, rounds in (("us", record.us), ("baseline_us", record.baseline_us)):
        if rounds:
            data[name] = {
                str(n): [[round(us, Recording.DECIMALS) for us in times] for times in passes]
                for n, passes in rounds.items()
            }
    return {**data, "seconds": list(record.seconds)}


def _record(header: Header, data: Mapping[str, Any]) -> Record:
    def config(values: Sequence[Any]) -> Config:
        return Config(dict(zip(header.words, values, strict=True)))

    def rounds(name: str) -> Rounds:
        found = {int(length): passes for length, passes in data.get(name, {}).items()}
        if found and set(found) != set(header.profile.lengths):
            raise ValueError(f"{name} of other lengths than {list(header.profile.lengths)}")
        for passes in found.values():
            if not passes or not all(times and all(0 < us < math.inf for us in times) for times in passes):
                raise ValueError(f"{name} that are no times")
        return found

    report = dict(data["report"]) if "report" in data else None
    code = report.pop("code") if report is not None else ""
    return Record(
        config=config(data["config"]),
        status=data["status"],
        reason=data.get("reason", ""),
        error=data.get("error"),
        report=Report(**report) if report is not None else None,
        code=code,
        same_as=config(data["same_as"]) if "same_as" in data else None,
        us=rounds("us"),
        baseline_us=rounds("baseline_us"),
        seconds=tuple(data["seconds"]),
    )
