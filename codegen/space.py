"""Typed parameters, configs and the enumerated space of an op."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = int | str


class Config(Mapping[str, Value]):
    """One choice for every parameter: frozen, hashable, and the same words in template, database and JSON."""

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)
        self._key = ""

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.key == other.key

    def __repr__(self) -> str:
        return f"Config({self})"

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._values.items())

    @property
    def brief(self) -> str:
        """For a line of text: without the knobs that this config leaves alone."""
        return " ".join(f"{k}={v}" for k, v in self._values.items() if v not in (0, "auto"))

    @property
    def key(self) -> str:
        """Canonical JSON, whatever the order the values came in."""
        if not self._key:
            self._key = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
        return self._key

    def int(self, name: str) -> int:
        value = self._values[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, not a number")
        return value

    def with_(self, **changes: Value) -> Config:
        return Config({**self._values, **changes})


@dataclass(frozen=True)
class Parameter:
    """One knob.

    Attributes:
        name: its word everywhere.
        values: what it may take, in the order in which neighbours are near.
        help: what it decides.
    """

    name: str
    values: tuple[Value, ...]
    help: str


#: Why a config can't be used for a problem, or None where it can.
Refusal: TypeAlias = str | None


@dataclass(frozen=True)
class Space:
    """All combinations of the parameters that `refuse` lets through.

    Attributes:
        parameters: the knobs.
        refuse: the constraint set.
        branches: parts of the space that hold every usable config, as the values that they narrow some parameters to;
            they keep the enumeration small where a knob matters in one branch only.
    """

    parameters: tuple[Parameter, ...]
    refuse: Callable[[Config], Refusal]
    branches: tuple[Mapping[str, tuple[Value, ...]], ...] = ({},)
    _valid: list[Config] = field(default_factory=list, compare=False, repr=False)

    def combinations(self) -> Iterator[Config]:
        names = [p.name for p in self.parameters]
        for branch in self.branches:
            for values in itertools.product(*(branch.get(p.name, p.values) for p in self.parameters)):
                yield Config(dict(zip(names, values, strict=True)))

    @property
    def size(self) -> int:
        """Of all combinations, usable or not."""
        return sum(math.prod(len(b.get(p.name, p.values)) for p in self.parameters) for b in self.branches)

    def valid(self) -> list[Config]:
        """Every usable config, always in the same order."""
        if not self._valid:
            self._valid.extend(c for c in self.combinations() if self.refuse(c) is None)
        return self._valid

    def check(self, values: Mapping[str, object]) -> Config:
        """`values` as a config of this space.

        Raises:
            ValueError: a word is missing, unknown or out of range, or the combination is refused.
        """
        known = {p.name: p for p in self.parameters}
        for name in values:
            if name not in known:
                raise ValueError(f"unknown config word '{name}': use {', '.join(known)}")
        for name, parameter in known.items():
            if name not in values:
                raise ValueError(f"config word '{name}' is missing")
            # 1 == True, and bools are no values here.
            if isinstance(values[name], bool) or values[name] not in parameter.values:
                raise ValueError(f"{name}={values[name]!r} is not one of {list(parameter.values)}")
        config = Config({name: values[name] for name in known})  # type: ignore[misc]
        reason = self.refuse(config)
        if reason is not None:
            raise ValueError(f"config refused: {reason}")
        return config

    def distance(self, a: Config, b: Config) -> float:
        """How far two configs lie apart: for each parameter, the share of its range between the two values."""
        total = 0.0
        for p in self.parameters:
            if a[p.name] != b[p.name]:
                steps = abs(p.values.index(a[p.name]) - p.values.index(b[p.name]))
                total += 0.5 + 0.5 * steps / max(1, len(p.values) - 1)
        return total

    def simplicity(self, config: Config) -> tuple[int, ...]:
        """Less for simpler ones: those whose knobs stand nearer to the first of their values."""
        places = [p.values.index(config[p.name]) for p in self.parameters]
        return (sum(places), *places)
