"""Binding a compiled variant to a launch plan. Serving and measuring launch through here, so they launch the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        self.plan: Plan = op.plan(problem, config, width)
        self.scratch = (arena or Arena(device, scratch_bytes(self.plan))).take(self.plan)
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
