"""What is stored and shared, validated: strict types, no unknown fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "refused", "wrong", "unchecked", "failed", "timeout"]
Provenance = Literal["measured", "predicted"]
#: Microseconds, or another figure, by live length.
ByLength = dict[int, float]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DeviceRecord(Record):
    """The GPU that a trial is for. Capability, SM count and shared memory decide a match; the rest informs."""

    capability: str
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    name: str


class Environment(Record):
    """What compiled and timed a trial; empty where there was none."""

    dsv4tune: str
    triton: str
    ptxas: str
    torch: str
    driver: str = ""
    clocks: str = ""


class Baseline(Record):
    """The kernel that the server would run on this card, timed in the same rounds."""

    name: str
    version: str
    times_us: ByLength


class Range(Record):
    """What a trial was scored over: the call's columns, and live lengths with their weights."""

    width: int
    lengths: list[int]
    weights: list[float]
    causal: bool = False


class Resources(Record):
    """The compile report; see `dsv4tune.codegen.compile.Report`."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    mma: str
    native_fp8: bool
    async_copy: str
    instructions: int
    seconds: float
    binary: str


class Trial(Record):
    """One finished candidate.

    Attributes:
        status: ``ok`` may win; ``wrong`` failed its check, ``unchecked`` could be checked nowhere, ``refused`` needs
            more than the card has, ``failed`` and ``timeout`` never gave a result.
        provenance: whether its times were measured on this silicon or come from the cost model.
        score: weighted geometric mean over the range of time against the baseline's, or against the byte floor
            (``yardstick`` says which); lower is better.
        error: worst relative error of its check.
        card: UUID of the GPU that judged it, "" for none; times of different cards are never held against each other.
        checked_by: ``gpu``, ``interpreter``, ``emulation`` (its machine code, reassembled, on another GPU) or "".
        compile_seconds, judge_seconds: what its compile job, and its check and timing, took.
    """

    problem: dict[str, Any]
    problem_key: str
    device: DeviceRecord
    environment: Environment
    config: dict[str, int | str]
    source_sha: str
    status: Status
    provenance: Provenance
    range: Range
    score: float | None = None
    yardstick: str = ""
    times_us: ByLength = Field(default_factory=dict)
    spread: ByLength = Field(default_factory=dict)
    baseline: Baseline | None = None
    error: float | None = None
    checked_by: str = ""
    reason: str = ""
    card: str = ""
    resources: Resources | None = None
    warnings: list[str] = Field(default_factory=list)
    seed: int = 0
    compile_seconds: float = 0.0
    judge_seconds: float = 0.0
    finished_at: str = ""


class Entry(Record):
    """The best config of one problem on one silicon, as it is exported and shipped."""

    problem: dict[str, Any]
    problem_key: str
    device: DeviceRecord
    environment: Environment
    config: dict[str, int | str]
    provenance: Provenance
    range: Range
    score: float
    yardstick: str
    times_us: ByLength
    baseline: Baseline | None
    error: float
    checked_by: str
    resources: Resources
    source_sha: str

    @classmethod
    def of(cls, trial: Trial) -> Entry:
        fields = trial.model_dump()
        return cls(**{name: fields[name] for name in cls.model_fields})


class Catalogue(Record):
    """An exported file; a reader refuses another schema version."""

    schema_version: Literal[1] = 1
    entries: list[Entry]
