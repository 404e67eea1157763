"""Binding a compiled variant to a launch plan. Serving and measuring launch through here, so they launch the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4tune.codegen.op import Op, Plan
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config


class Variant:
    """One config of one problem, ready to be called on the current device.

    The machine code is loaded when the variant is made, because a load under graph capture is an error. A call looks
    at shapes and strides only, so it may be captured; the captured launch serves every live length.
    """

    def __init__(self, op: Op[Any, Any], problem: Problem, config: Config, width: int, launcher: Any) -> None:
        """`launcher[grid](*arguments)` launches: a `Kernel`'s ``compiled``, or a test's stand-in."""
        self.op, self.problem, self.config = op, problem, config
        self.plan: Plan = op.plan(problem, config, width)
        self._run = launcher[self.plan.grid]

    def __call__(self, call: Any) -> None:
        """Launch on the current stream.

        Raises:
            ValueError: a tensor of the call is not what the kernel takes.
        """
        self._run(*self.op.bind(self.problem, self.config, call))

    def prepared(self, call: Any) -> Callable[[], None]:
        """The launch alone, its arguments made once: what a captured graph repeats."""
        arguments = self.op.bind(self.problem, self.config, call)
        return lambda: self._run(*arguments)
