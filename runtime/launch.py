"""Binding a compiled variant to a launch plan. Serving and measuring launch through here, so they launch the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from dsv4tune.codegen.op import Op, Plan
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config


def scratch_bytes(plan: Plan) -> int:
    """What a plan's buffers take side by side."""
    return sum(_aligned(buffer.bytes) for buffer in plan.scratch)


def _aligned(size: int) -> int:
    # Buffers start where vector loads and TMA may.
    return -(-size // 256) * 256


class Arena:
    """Scratch memory of many variants, of which one runs at a time: a stream's launches follow one another.

    Held by each variant that has a part of it, so it lives for as long as a graph may replay one of them.
    """

    def __init__(self, device: str, size: int) -> None:
        """`size` bytes, poisoned: a kernel that reads what none has written shows."""
        self._bytes = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)

    def take(self, plan: Plan) -> dict[str, torch.Tensor]:
        """A plan's buffers, from the arena's start."""
        found, at = {}, 0
        for buffer in plan.scratch:
            flat = self._bytes[at : at + buffer.bytes]
            found[buffer.name] = flat.view(getattr(torch, buffer.dtype)).view(buffer.shape)
            at += _aligned(buffer.bytes)
        return found


class Variant:
    """One config of one problem, ready to be called on the current device.

    The machine code is loaded when the variant is made, because a load under graph capture is an error. A call looks
    at shapes and strides only, so it may be captured; the captured launch serves every live length.
    """

    def __init__(
        self,
        op: Op[Any, Any],
        problem: Problem,
        config: Config,
        width: int,
        launchers: Mapping[str, Any],
        device: str = "cuda",
        source_sha: str = "",
        arena: Arena | None = None,
    ) -> None:
        """`launchers[kernel][grid](*arguments)` launches: a `Kernel`'s ``compiled``, or a stand-in of them.

        Scratch memory is the variant's own, or a part of `arena`.
        """
        self.op, self.problem, self.config, self.source_sha = op, problem, config, source_sha
        self.width = width
        self.plan: Plan = op.plan(problem, config, width)
        self.scratch = (arena or Arena(device, scratch_bytes(self.plan))).take(self.plan)
        self._recipes: dict[Any, list[_Recipe]] = {}
        self._runs = [(launch.kernel, launchers[launch.kernel][launch.grid]) for launch in self.plan.launches]

    def __call__(self, call: Any) -> None:
        """Launch on the current stream; not from two streams at once where the plan has scratch memory.

        Raises:
            ValueError: a tensor of the call is not what the kernel takes.
        """
        self.prepared(call)()

    def prepared(self, call: Any) -> Callable[[], None]:
        """The launches alone, their arguments made once: what a captured graph repeats.

        Raises:
            ValueError: a tensor of the call is not what the kernels take.
        """
        arguments = self.op.bind(self.problem, self.config, call, self.scratch)
        bound = [(run, arguments[name]) for name, run in self._runs]

        def launch() -> None:
            for run, taken in bound:
                run(*taken)

        return launch

    def serve(
        self, tensors: tuple[torch.Tensor | None, ...], scalars: Any, call: Callable[..., Any], *made: Any
    ) -> None:
        """Launch for a server: a call that looks like an earlier one is not judged and bound again.

        Args:
            tensors: of the caller, in the order of the call's first fields.
            scalars: what else the arguments depend on.
            call: makes it, from the tensors, scalars and what was made; asked where such a call is new.
            made: the call's fields after those, which follow from the variant and the device.

        Raises:
            ValueError: a tensor of the call is not what the kernels take.
        """
        # All that binding looks at. Alignment of 16 elements is alignment of 16 bytes and more.
        mark = (
            scalars,
            *[
                t if t is None else (t.dtype, t.shape, t.stride(), t.storage_offset() & 15, t.get_device())
                for t in tensors
            ],
        )
        recipes = self._recipes.get(mark)
        if recipes is None:
            recipes = self._learned(mark, call(tensors, scalars, *made))
        fields = tensors + made
        for run, template, places in recipes:
            arguments = template.copy()
            for at, field, descriptor in places:
                tensor = fields[field]
                arguments[at] = tensor if descriptor is None else _moved(descriptor, tensor)
            run(*arguments)

    def _learned(self, mark: Any, call: Any) -> list[_Recipe]:
        """Bind once in full, and note which arguments are the call's tensors."""
        arguments = self.op.bind(self.problem, self.config, call, self.scratch)
        names = self.op.arguments(self.problem, self.config)
        fields = {field.name: number for number, field in enumerate(dataclasses.fields(call))}
        recipes = []
        for kernel, run in self._runs:
            places = []
            for at, (argument, value) in enumerate(zip(names[kernel], arguments[kernel], strict=True)):
                if argument.name in self.scratch or isinstance(value, int | float):
                    continue
                descriptor = None if isinstance(value, torch.Tensor) else value
                places.append((at, fields[argument.name.removesuffix("_desc")], descriptor))
            recipes.append((run, arguments[kernel], places))
        if len(self._recipes) < MOST_RECIPES:
            # The template must not keep a call's tensors alive.
            for _, template, places in recipes:
                for at, _, descriptor in places:
                    template[at] = None
                    if descriptor is not None:
                        descriptor.base = None
            self._recipes[mark] = recipes
        return recipes


#: Launcher, its arguments without the call's tensors, and where those go: place, field, TMA descriptor to move.
_Recipe: TypeAlias = tuple[Callable[..., None], list[Any], list[tuple[int, int, Any]]]
#: Kinds of calls that a variant remembers; a server makes a few.
MOST_RECIPES = 256


def _moved(descriptor: Any, tensor: Any) -> Any:
    """The same descriptor over another tensor, of which a launcher asks for nothing but its address."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__, base=tensor)
    return moved
