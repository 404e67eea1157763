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
        self._known: list[_Known] = []
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
        given = [t for t in tensors if t is not None]
        for known in self._known:
            if known.fits(tensors, given, scalars):
                recipes = known.recipes
                break
        else:
            recipes = self._learned(tensors, given, scalars, call(tensors, scalars, *made))
        fields = tensors + made
        for run, template, places in recipes:
            arguments = template.copy()
            for at, field, descriptor in places:
                tensor = fields[field]
                arguments[at] = tensor if descriptor is None else descriptor.over(tensor)
            run(*arguments)

    def _learned(
        self, tensors: tuple[torch.Tensor | None, ...], given: list[torch.Tensor], scalars: Any, call: Any
    ) -> list[_Recipe]:
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
                field = fields[argument.name.removesuffix("_desc")]
                places.append((at, field, None if isinstance(value, torch.Tensor) else _Moving(value)))
            recipes.append((run, arguments[kernel], places))
        if len(self._known) < MOST_KNOWN:
            # The template must not keep a call's tensors alive.
            for _, template, places in recipes:
                for at, _, _ in places:
                    template[at] = None
            self._known.append(_Known(tensors, given, scalars, recipes))
        return recipes


#: Launcher, its arguments without the call's tensors, and where those go: place, field, TMA descriptor to move.
_Recipe: TypeAlias = tuple[Callable[..., None], list[Any], list[tuple[int, int, "_Moving | None"]]]
#: Kinds of calls that a variant remembers; a server makes a few. Those past it are bound each time.
MOST_KNOWN = 16


class _Known:
    """One kind of call, by all that binding looks at, and what was bound for it."""

    def __init__(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        given: list[torch.Tensor],
        scalars: Any,
        recipes: list[_Recipe],
    ) -> None:
        self.recipes = recipes
        self._scalars = scalars
        self._missing = [t is None for t in tensors]
        # What was aligned may have been bound as such.
        self._aligned = [number for number, t in enumerate(given) if t.data_ptr() % 16 == 0]
        self._alike = _alike(given)

    def fits(self, tensors: tuple[torch.Tensor | None, ...], given: list[torch.Tensor], scalars: Any) -> bool:
        addresses = 0
        if scalars != self._scalars or [t is None for t in tensors] != self._missing:
            return False
        for number in self._aligned:
            addresses |= given[number].data_ptr()
        return addresses % 16 == 0 and self._alike(*given)


def _alike(given: list[torch.Tensor]) -> Callable[..., bool]:
    """Whether tensors have the same dtypes, devices, shapes and strides as these."""
    try:
        # torch.compile's own check: all tensors in one call, in a microsecond instead of one for each.
        from torch._C._dynamo.guards import TensorGuards

        shapes: list[Any] = [list(t.shape) for t in given]
        strides: list[Any] = [list(t.stride()) for t in given]
        guards = TensorGuards(*given, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        if guards.check(*given):
            return guards.check
    except Exception:  # it is no public name
        pass
    first = [_looks(t) for t in given]
    return lambda *tensors: [_looks(t) for t in tensors] == first


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class _Moving:
    """A TMA descriptor without its tensor."""

    def __init__(self, descriptor: Any) -> None:
        self._type = type(descriptor)
        self._fields = {**descriptor.__dict__, "base": None}

    def over(self, tensor: Any) -> Any:
        """The same descriptor over this tensor, of which a launcher asks for nothing but its address."""
        moved = object.__new__(self._type)
        moved.__dict__ = {**self._fields, "base": tensor}
        return moved
