"""The seam between an op and everything else: what an op tells, so that no other room knows its shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.later import torch
from dsv4tune.codegen.problem import Problem, Profile, Shape, Silicon
from dsv4tune.codegen.space import Config, Space

P = TypeVar("P", bound=Problem)
#: The tensors of one call.
C = TypeVar("C")


@dataclass(frozen=True)
class Launch:
    """One kernel of a variant.

    Attributes:
        kernel: its function in the rendered module.
        grid: programs; what grows with rows is in the first dimension, because the others end at 65,535.
    """

    kernel: str
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Buffer:
    """Scratch memory that a variant's kernels hand to one another; `dtype` is torch's word."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Plan:
    """How a variant is launched: from shapes only, never from lengths.

    Attributes:
        launches: in order.
        scratch: made once and held for as long as the variant, because a captured graph keeps the address.
    """

    launches: tuple[Launch, ...]
    scratch: tuple[Buffer, ...] = ()

    @property
    def programs(self) -> int:
        """Of the first launch, which does the work."""
        return math.prod(self.launches[0].grid)


@dataclass(frozen=True)
class Argument:
    """One kernel argument as the compiler sees it; ``aligned`` promises a multiple of 16."""

    name: str
    type: str
    aligned: bool = False


@dataclass(frozen=True)
class Work:
    """What one launch makes the card do, for the cost model.

    Attributes:
        programs: the grid.
        steps: all steps of all programs.
        longest: steps of the busiest program.
        step_bytes: bytes that a step loads.
        instructions: that a warp issues for a step, about.
        scanned: lengths that every program reads before it knows its share.
        fixed_bytes: bytes besides those of the steps.
        trips: round trips to memory of a step, one after another.
        ahead: steps whose bytes are under way while one is worked on.
        first_trips: round trips to the first step's bytes, such as a length, an index and the bytes that it names.
        later: kernels behind the first: 1 for each that starts as the one before ends, less where its start is hidden.
        later_programs: of those kernels.
    """

    programs: int
    steps: int
    longest: int
    step_bytes: int
    instructions: float
    scanned: int
    fixed_bytes: int
    trips: int = 1
    ahead: int = 0
    first_trips: int = 1
    later: float = 0.0
    later_programs: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a check found: the worst error, and the first thing that was wrong, if any."""

    error: float
    fault: str | None = None

    @property
    def ok(self) -> bool:
        return self.fault is None


class Op(ABC, Generic[P, C]):
    """One kernel: its problem, space, templates, launch plan, inputs and float64 reference."""

    name: ClassVar[str]
    #: Config words in the order in which people read them; a config may come from anywhere in any order.
    words: ClassVar[tuple[str, ...]]
    #: What `reference_config` is called in results.
    reference: ClassVar[str]
    #: Config words that only the launch plan reads: variants that differ in them alone share a binary.
    plan_words: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def problem(self, rows: int, silicon: Silicon, **options: Any) -> P:
        """The problem of a call; options are its fields.

        Raises:
            ValueError: the kernel does not serve it.
        """

    def options(self, given: Mapping[str, Any], max_context: int, draft_tokens: int) -> dict[str, Any]:
        """Fields of this op's problems, from the options that a command line gave besides rows.

        Raises:
            ValueError: one that says nothing to this op.
        """
        for name in given:
            raise ValueError(f"--{name} says nothing to kernel '{self.name}': leave it out")
        return {}

    @abstractmethod
    def problem_from_json(self, data: dict[str, Any]) -> P: ...

    @abstractmethod
    def width(self, max_context: int, draft_tokens: int) -> int:
        """Columns of a call on a server of this context length."""

    @abstractmethod
    def profile(self, problem: P, width: int) -> Profile:
        """The live lengths that an entry is scored over unless the user says otherwise."""

    @abstractmethod
    def space(self, problem: P, device: Device) -> Space: ...

    @abstractmethod
    def default(self, problem: P, device: Device) -> Config:
        """A sound config where nothing was tuned."""

    @abstractmethod
    def reference_config(self, problem: P, device: Device) -> Config:
        """The design that the project starts from: the second candidate of a search, and a column of a bench."""

    def template(self, config: Config) -> str:
        """The template's file that renders a config."""
        return f"{self.name}.{config['dialect']}.py.j2"

    @abstractmethod
    def template_values(self, problem: P, config: Config) -> dict[str, Any]:
        """What the template needs besides the problem and the config."""

    @abstractmethod
    def arguments(self, problem: P, config: Config) -> Mapping[str, Sequence[Argument]]:
        """What each kernel of the rendered module takes, by the kernel's name."""

    @abstractmethod
    def plan(self, problem: P, config: Config, width: int) -> Plan: ...

    @abstractmethod
    def work(self, problem: P, config: Config, profile: Profile, length: int) -> Work: ...

    @abstractmethod
    def bind(self, problem: P, config: Config, call: C, scratch: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
        """Each kernel's arguments for one call, without a device-to-host copy.

        Raises:
            ValueError: a tensor's shape, dtype, stride or alignment is not one that the kernel takes.
        """

    @abstractmethod
    def unchecked(self, config: Config) -> str | None:
        """Why a variant can't be executed away from its own silicon, or None where it can."""

    def agreement(self, call: C, expected: Any) -> float | None:
        """For ops whose output is only selected from: the share of the selection that is right, in the worst row."""
        return None

    # -- checking and timing ------------------------------------------------------------------------------------

    @abstractmethod
    def small(self, problem: P) -> tuple[P, int]:
        """A problem and width that the interpreter gets through, for the same rendered source."""

    @abstractmethod
    def cases(self, problem: P, width: int, lengths: Sequence[int], device: str, seed: int) -> Iterator[tuple[str, C]]:
        """Named calls that hold the contract's edge cases, every `lengths` among them, outputs poisoned."""

    @abstractmethod
    def expect(self, problem: P, call: C) -> Any:
        """The float64 reference of a call, computed from the same bytes."""

    @abstractmethod
    def verify(self, problem: P, call: C, expected: Any) -> Verdict:
        """Compare what a kernel left in the call's output with `expect`'s answer; poisons the output again."""

    @abstractmethod
    def shape(self, problem: P, profile: Profile, length: int) -> Shape:
        """The call that a profile means at one of its lengths."""

    @abstractmethod
    def bench_shapes(self) -> list[Shape]:
        """What `bench` times unless told otherwise."""

    def describe(self, shape: Shape) -> dict[str, Any]:
        """A bench's shape as its result names it."""
        return shape.to_json()

    @abstractmethod
    def timing_pool(self, problem: P, shapes: Sequence[Shape], min_bytes: int, device: str, seed: int) -> Any:
        """What the calls of these shapes read, and no less than `min_bytes` of it."""

    @abstractmethod
    def timing_sets(self, problem: P, shape: Shape, sets: int, device: str, seed: int, pool: Any) -> list[C]:
        """Calls on different bytes of `pool`."""

    @abstractmethod
    def bytes_moved(self, problem: P, shape: Shape) -> int:
        """Bytes that any kernel must move once: the byte floor of one call."""

    @abstractmethod
    def memory_needed(self, problem: P, profile: Profile, length: int) -> int:
        """Device bytes that measuring this length takes."""

    @abstractmethod
    def output(self, call: C) -> torch.Tensor: ...
