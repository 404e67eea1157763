"""Host time that a hooked call adds to launching the same compiled kernel: no GPU, a launcher that does nothing.

Run as ``python benchmarks/call_overhead.py``; prints microseconds a call, the smallest of several rounds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("src", "tests/support")]
CALLS, ROUNDS = 2000, 15


def smallest(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ.update(DSV4TUNE_DB=str(folder / "tuned.db"), DSV4TUNE_CACHE=str(folder))
    os.environ["SGLANG_OPT_USE_TILELANG_INDEXER"] = "1"
    import serving

    from dsv4tune.runtime import kernels, plugin

    for kernel in ("indexer", "mla_decode"):
        serving.write_entry(folder / "tuned.db", kernel)
    machine = serving.FakeMachine()
    plugin.prepare_runner(serving.model_runner(), [serving.ROWS], machine)
    machine.launched = lambda job, arguments: None
    for kernel in ("indexer", "mla_decode"):
        variant = next(v for key, v in kernels.TABLE.ready.items() if key[0] == kernel)
        problem = serving.problem_of(kernel)
        if kernel == "indexer":
            arguments = serving.indexer_arguments(serving.indexer_call())
            hooked = lambda: plugin.indexer(None, *arguments)  # noqa: B023, E731
            call: Any = serving.indexer_call()
            output = lambda: torch.empty(serving.ROWS, serving.WIDTH)  # noqa: E731
        else:
            words = serving.mla_words()
            hooked = lambda: plugin.mla_decode(None, **words)  # noqa: B023, E731
            call = next(iter(variant.op.cases(problem, 512, (512,), "cpu", 0)))[1]
            output = lambda: torch.empty(serving.ROWS, 1, 64, 512, dtype=torch.bfloat16)  # noqa: E731
        launch = variant.prepared(call)
        alone, made, whole = smallest(launch), smallest(output), smallest(hooked)
        added = whole - alone - made
        print(f"{kernel}: call {whole:.1f} us, launch {alone:.1f}, its output {made:.1f}: {added:.1f} added")


if __name__ == "__main__":
    main()
