"""What is stored and shared, validated: strict types, no unknown fields."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dsv4tune.codegen.devices import KB, Device
from dsv4tune.codegen.problem import Profile, Silicon
from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import visible

# Names and versions are shown, compared and never run: no quotes, brackets of code, slashes or line ends.
_TEXT = r"^[A-Za-z0-9 ._+,:@\[\]-]*$"
Text = Annotated[str, Field(max_length=100, pattern=_TEXT)]
Word = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z][a-z0-9_]*$")]
#: Of a config, such as ``1x128``; the space knows which there are.
Value = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Length = Annotated[int, Field(ge=1, le=1 << 30)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Share = Annotated[float, Field(ge=0, le=1e6)]


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Of the Triton that runs here; looking it up takes as long as reading an entry."""
    return metadata.version("triton")


def reason_of(error: Exception) -> str:
    """Why a record can't be one, on one line: the path of the first value at fault, and what is wrong with it."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{visible(part[:60])}" for part in first["loc"])
        return f"{path.lstrip('.')}{': ' if path else ''}{first['msg']}"
    return visible((str(error) or type(error).__name__).splitlines()[0])


def plain(text: str) -> str:
    """What a driver or a package says of itself, in the letters that records hold."""
    return re.sub(r"[^A-Za-z0-9 ._+,:@\[\]-]", "_", text)[:100]


Status = Literal["ok", "pruned", "refused", "wrong", "unchecked", "failed", "timeout"]
#: In the order in which counts of them are shown.
STATUSES: tuple[Status, ...] = get_args(Status)
Provenance = Literal["measured", "predicted"]
#: Microseconds, or another figure, by live length.
ByLength = dict[int, float]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DeviceRecord(Record):
    """The GPU that a trial is for. Capability, SM count and shared memory decide a match; the rest informs."""

    capability: Annotated[str, Field(pattern=r"^[1-9][0-9]?\.[0-9]$")]
    sm_count: Annotated[int, Field(ge=1, le=4096)]
    shared_bytes: Annotated[int, Field(ge=1, le=1 << 24)]
    l2_bytes: Count
    name: Text

    @classmethod
    def of(cls, device: Device) -> DeviceRecord:
        return cls(**asdict(device.silicon), l2_bytes=device.l2_bytes, name=plain(device.name))

    @property
    def silicon(self) -> Silicon:
        return Silicon(self.capability, self.sm_count, self.shared_bytes)

    def card(self, silicon: Silicon | None = None) -> Device:
        """The device, as far as a space asks for it; of this silicon where a foreign record may say another."""
        known = silicon or self.silicon
        # An SM has 1 KB beside what one program may take.
        return Device(self.name, known, known.shared_bytes + KB, self.l2_bytes, 1.0, "its record")


class Environment(Record):
    """What compiled and timed a trial; empty where there was none."""

    dsv4tune: Text
    triton: Text
    ptxas: Text
    torch: Text
    driver: Text = ""
    clocks: Text = ""


class Baseline(Record):
    """The kernel that the server would run on this card, timed in the same rounds."""

    name: Word
    version: Text
    times_us: ByLength


class Range(Record):
    """What a trial was scored over: the call's columns, and live lengths with their weights."""

    width: int
    lengths: list[int]
    weights: list[float]
    causal: bool = False

    @property
    def profile(self) -> Profile:
        """What it was made from.

        Raises:
            ValueError: it is no such thing, as in a foreign file.
        """
        return Profile(self.width, tuple(self.lengths), tuple(self.weights), self.causal)


class Final(Record):
    """The end of a search: its best candidates and the server's kernel timed again, in alternating rounds.

    Attributes:
        place: of this candidate; 1 goes by.
        won: whether it is faster than the server's kernel by `margin` and by more than `spread`; unless the first is,
            the server's kernel stays.
        margin: the share of the server's time that it had to be faster by.
        spread: interquartile range of its score over the rounds.
        rounds: of each candidate and length.
        finalists: how many there were.
        runner_up: the next one's config, and its score; None where it was alone.
    """

    place: Annotated[int, Field(ge=1, le=1000)]
    won: bool
    margin: Annotated[float, Field(ge=0, le=1)]
    spread: Annotated[float, Field(ge=0, le=1e6)]
    rounds: Annotated[int, Field(ge=1, le=1 << 20)]
    finalists: Annotated[int, Field(ge=1, le=1000)]
    runner_up: (
        Annotated[dict[Word, Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | Value], Field(max_length=32)] | None
    )
    runner_up_score: Positive | None


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
        status: ``ok`` may win; ``pruned`` fell so far behind that it was not measured to the end, and its score is
            that of what was; ``wrong`` failed its check, ``unchecked`` could be checked nowhere, ``refused`` needs more
            than the card has, ``failed`` and ``timeout`` never gave a result.
        provenance: whether its times were measured on this silicon or come from the cost model.
        score: weighted geometric mean over the range of time against the baseline's, or against the byte floor
            (``yardstick`` says which); lower is better.
        error: worst relative error of its check.
        card: UUID of the GPU that judged it, "" for none; times of different cards are never held against each other.
        checked_by: ``gpu``, ``interpreter``, ``emulation`` (its machine code, reassembled, on another GPU) or "".
        compile_seconds, judge_seconds: what its compile job, and its check and timing, took.
        imported: the file that it came in, "" for one that was found here.
        final: its part in the end of a search, where it had one.
        code: SHA-256 of its machine code without what only debuggers read, "" where it was not kept.
        same_as: the config whose machine code and launch it has, and whose times these are; empty for one of its own.
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
    imported: str = ""
    final: Final | None = None
    code: str = ""
    same_as: dict[str, int | str] = Field(default_factory=dict)

    @property
    def here(self) -> bool:
        """Whether it was measured by this database's own searches."""
        return self.provenance == "measured" and not self.imported

    def answers(self, source_sha: str, over: Range, triton: str) -> bool:
        """Whether it is of this kernel's text over this range, by this Triton: what trying its config would tell."""
        mine = self.source_sha, self.range.model_dump(), self.environment.triton
        return mine == (source_sha, over.model_dump(), triton)


class Tried(Record):
    """What a trial says of its config alone, for readers of very many; fields as in `Trial`, `timed` its lengths."""

    config: dict[str, int | str]
    status: Status
    provenance: Provenance
    yardstick: str
    score: float | None
    timed: tuple[int, ...] = ()


def _spelled_once(length: object) -> object:
    """128, and not 0128 or +128 too, by which one length could stand there twice."""
    if not isinstance(length, str):
        return length
    if not re.fullmatch("[1-9][0-9]{0,9}", length):
        raise ValueError("no length as it is written")
    return int(length)


#: A length as a key of JSON, where it is a string.
LengthKey = Annotated[Length, BeforeValidator(_spelled_once)]
Times = Annotated[dict[LengthKey, Positive], Field(min_length=1, max_length=64)]


class EntryBaseline(Baseline):
    times_us: Times


class EntryRange(Range):
    width: Length
    lengths: Annotated[list[Length], Field(min_length=1, max_length=64)]
    weights: Annotated[list[Positive], Field(min_length=1, max_length=64)]


class EntryResources(Resources):
    registers: Count
    stack_bytes: Count
    spill_bytes: Count
    shared_bytes: Count
    mma: Text
    async_copy: Text
    instructions: Count
    seconds: Share
    binary: Sha


class Entry(Record):
    """The best config of one problem on one silicon, as it is exported and shipped; every value has bounds.

    Attributes:
        spread: interquartile range over the median, by live length (since version 2).
        finished_at: when its trial ended (since version 2).
        final: how it won, where its search had a final (since version 2).
    """

    problem: Annotated[dict[Word, bool | int | Text | dict[Word, int | Text]], Field(max_length=32)]
    problem_key: Annotated[str, Field(max_length=400, pattern=r"^[A-Za-z0-9 ._=-]+$")]
    device: DeviceRecord
    environment: Environment
    config: Annotated[dict[Word, Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | Value], Field(max_length=32)]
    provenance: Provenance
    range: EntryRange
    score: Positive
    yardstick: Text
    times_us: Times
    baseline: EntryBaseline | None
    error: Annotated[float, Field(ge=0, le=0.01)]
    checked_by: Literal["gpu", "interpreter", "emulation"]
    resources: EntryResources
    source_sha: Sha
    spread: Annotated[dict[LengthKey, Share], Field(max_length=64)] = Field(default_factory=dict)
    finished_at: Annotated[str, Field(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.+]{8,24})?$")] = ""
    final: Final | None = None

    @classmethod
    def of(cls, trial: Trial) -> Entry:
        return cls.model_validate(trial, from_attributes=True)

    def standing(self, here: bool, same_compiler: bool, width: int | None = None) -> tuple[Any, ...]:
        """Orders entries of one problem, the one to go by first: better evidence, then one beside the server's kernel
        before one without, a wider range before a narrower, one that a final went by, then the lowest score. SQL says
        the same in `dsv4tune.tuned.reader.BEST_RANK`.

        Args:
            here: measured by this machine's own searches.
            same_compiler: made with the compiler that runs here.
            width: of a call; then the narrowest range that holds it goes first, which was tried at lengths like its.
        """
        range_ = (-self.range.width,) if width is None else (self.range.width < width, self.range.width)
        return (
            evidence(self.provenance, here, same_compiler),
            self.yardstick == "byte floor",
            *range_,
            -len(self.range.lengths),
            self.final is None or self.final.place > 1,
            self.score,
            Config(self.config).key,
        )

    def trial(self, imported: str) -> Trial:
        """As it is kept in a database that it came to from elsewhere."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return Trial(**fields, status="ok", imported=imported)


class Catalogue(Record):
    """An exported file, of the newest version; see `dsv4tune.tuned.files` for reading any."""

    schema_version: Literal[2] = 2
    entries: list[Entry]


def evidence(provenance: str, here: bool, same_compiler: bool) -> int:
    """What stands behind a figure, the least first: measured here, on the same silicon with the running compiler, with
    another one, predicted."""
    if provenance != "measured":
        return 3
    return 0 if here else 1 if same_compiler else 2
