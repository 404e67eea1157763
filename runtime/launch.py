"""Binding a compiled variant to a launch plan. Serving and measuring launch through here, so they launch the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4tune.codegen.op import Op, Plan
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config


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
    ) -> None:
        """`launchers[kernel][grid](*arguments)` launches: a `Kernel`'s ``compiled``, or a stand-in of them."""
        self.op, self.problem, self.config = op, problem, config
        self.plan: Plan = op.plan(problem, config, width)
        # Poisoned: a kernel that reads what none has written shows.
        self.scratch = {
            buffer.name: torch.full(buffer.shape, math.nan, dtype=getattr(torch, buffer.dtype), device=device)
            for buffer in self.plan.scratch
        }
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
