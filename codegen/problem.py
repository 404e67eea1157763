"""What a kernel is tuned for: the silicon, the shapes and the layout, under one canonical key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, order=True)
class Silicon:
    """The part of a GPU that decides whether a tuned entry applies; product names only inform.

    Attributes:
        capability: CUDA compute capability with its minor, ``"12.0"``.
        sm_count: streaming multiprocessors that are enabled.
        shared_bytes: shared memory that one program may opt in to.
    """

    capability: str
    sm_count: int
    shared_bytes: int

    @property
    def arch(self) -> int:
        """The capability as the compiler's number, ``120``."""
        major, minor = self.capability.split(".")
        return int(major) * 10 + int(minor)

    @property
    def target(self) -> str:
        return f"sm_{self.arch}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Base of the ops' problems; every field is part of the key.

    Table widths and live lengths are not here: they are the range that an entry was measured over.
    """

    op: ClassVar[str]
    rows: int
    silicon: Silicon

    @property
    def label(self) -> str:
        """The shapes as one line, without the silicon."""
        return " ".join(f"{name}={value}" for name, value in self._shape().items())

    @property
    def kind(self) -> str:
        """Of call, in the words of a server's owner: what calls of other row counts and contexts share."""
        return self.op

    @property
    def said(self) -> tuple[str, ...]:
        """The shapes without the rows, a phrase for each that a server's owner knows; ops may say more than this."""
        return tuple(f"{name}={value}" for name, value in self._shape().items() if name != "rows")

    @property
    def key(self) -> str:
        s = self.silicon
        return f"{self.op} {self.label} {s.target} sms={s.sm_count} shared={s.shared_bytes}"

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **self._shape(), "silicon": dataclasses.asdict(self.silicon)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The problem that `to_json` wrote.

        Raises:
            ValueError: a field is unknown, missing or of another type, or the kernel does not serve it.
        """
        values = {name: value for name, value in data.items() if name != "op"}
        return cls(**{**_typed(cls, values), "silicon": Silicon(**_typed(Silicon, values.get("silicon")))})

    def _shape(self) -> dict[str, Any]:
        names = sorted(f.name for f in dataclasses.fields(self) if f.name != "silicon")
        return {name: getattr(self, name) for name in names}


def _typed(kind: type[Any], values: object) -> dict[str, Any]:
    """The fields of a dataclass, each of its declared type: 1.5 and true are no row counts."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is {values!r}, not an object")
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    if set(values) != set(types):
        raise ValueError(f"{kind.__name__} has {', '.join(sorted(types))}, not {', '.join(sorted(map(str, values)))}")
    for name, value in values.items():
        if name != "silicon" and type(value).__name__ != types[name]:
            raise ValueError(f"{name} is {value!r}, not of type {types[name]}")
    return dict(values)


@dataclass(frozen=True)
class Profile:
    """The live lengths that one config must serve, and what each counts.

    Attributes:
        width: columns of the call, the configured maximum; a multiple of the page size.
        lengths: live tokens of every row (of the last row where ``causal``).
        weights: one weight a length for the geometric mean.
        causal: rows are consecutive queries of one prompt that ends at the length.
    """

    width: int
    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    causal: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.weights):
            raise ValueError("a profile needs one weight for each of its lengths, and at least one length")
        if not all(0 < w < math.inf for w in self.weights) or sum(self.weights) == math.inf:
            raise ValueError("profile weights must be above 0 and finite")
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError("a live length is named twice: give it twice the weight instead")
        bad = [n for n in self.lengths if not 0 < n <= self.width]
        if bad:
            raise ValueError(f"live length {bad[0]} is outside 1..{self.width}, the width that the context allows")

    def only(self, lengths: Container[int]) -> Profile:
        """With those of its lengths that are named."""
        kept = [(n, w) for n, w in zip(self.lengths, self.weights, strict=True) if n in lengths]
        return dataclasses.replace(self, lengths=tuple(n for n, _ in kept), weights=tuple(w for _, w in kept))

    def score(self, times: Mapping[int, float], against: Mapping[int, float]) -> float:
        """Weighted geometric mean over the lengths of time against the yardstick's."""
        logs = (w * math.log(times[n] / against[n]) for n, w in zip(self.lengths, self.weights, strict=True))
        return math.exp(sum(logs) / sum(self.weights))

    def to_json(self) -> dict[str, Any]:
        """As it is stored; see `dsv4tune.tuned.records.Range`."""
        return {
            "width": self.width,
            "lengths": list(self.lengths),
            "weights": list(self.weights),
            "causal": self.causal,
        }


@dataclass(frozen=True)
class Shape:
    """One call of a bench: what each row has live, and whose pages it reads.

    Attributes:
        name: one word or two.
        kind: ``decode``, ``ragged``, ``verify`` or ``prefill``.
        width: columns of the call.
        live: live tokens of each row.
        owner: the request of each row; rows of one request read the same pages.
        options: of the problem, besides its rows.
        cached: timed on the same inputs again and again, which stay in L2; else on others each time, after a flush.
    """

    name: str
    kind: str
    width: int
    live: tuple[int, ...]
    owner: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("decode", "ragged", "verify", "prefill"):
            raise ValueError(f"shape '{self.name}': kind '{self.kind}' is not decode, ragged, verify or prefill")
        if not self.live or len(self.live) != len(self.owner):
            raise ValueError(f"shape '{self.name}': one owner for each live length, and at least one row")
        if not all(0 <= n <= self.width for n in self.live):
            raise ValueError(f"shape '{self.name}': live lengths must lie in 0..{self.width}, its width")

    @property
    def rows(self) -> int:
        return len(self.live)

    @property
    def positions(self) -> int:
        """Live tokens of all rows."""
        return sum(self.live)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "rows": self.rows,
            "live": max(self.live),
            "width": self.width,
            "positions": self.positions,
        }
