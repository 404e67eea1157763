"""Rendered kernels in Triton's interpreter: on the CPU, in a process with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any


def interpreted(module: ModuleType) -> dict[str, Any]:
    """A rendered module's kernels as launchers."""
    round_as_a_gpu_does()
    call_without_patching()
    # Masked scores are minus infinity and an empty row divides by zero, as on a GPU, which does not warn of it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")

    class Launcher:
        def __init__(self, name: str) -> None:
            self.kernel, self.options = getattr(module, name), module.OPTIONS[name]

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return partial(self.kernel[grid], **self.options)

    return {name: Launcher(name) for name in module.OPTIONS}


@lru_cache(maxsize=1)
def round_as_a_gpu_does() -> None:
    """To nearest even, for the rest of this process.

    The interpreter of Triton 3.6 and 3.9 cuts fp32 off to bf16. What is cut off has one sign and is twice as large:
    3.3e-3 of an output by itself. Its own "rtne" mode is no way out, because it loses the carry into the exponent.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return cut_off(values, source, target, rounding)
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(values))

    interpreter._convert_float = convert


@lru_cache(maxsize=1)
def call_without_patching() -> None:
    """Let one kernel function call another without replacing Triton's language anew, for the rest of this process.

    That takes half a millisecond, most of the time of a kernel that is made of several functions. What a launch has
    replaced stays so until its end; once is enough for Triton's own library, whose functions see the language's core.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__globals__
        if id(module) not in patched and all(value is not tl for value in module.values()):
            interpreter._patch_lang(self.fn)
        patched.add(id(module))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
