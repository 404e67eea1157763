"""The measuring code on a machine without a GPU: CUDA's calls do nothing, its tensors lie on the CPU, kernels run in
Triton's interpreter. Times are made up; everything else is real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.problem import Profile, Shape
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tools import bench, measure, peers, timing
from dsv4tune.tools.executor import Last
from dsv4tune.tools.interpreter import interpreted
from dsv4tune.tools.measure import Measured, PeerTimes, Setup, Timed
from dsv4tune.tools.peer import Peer

#: With a cache so small that no time goes into flushing it.
CARD = replace(devices.DEVICES["rtx-pro-6000"], l2_bytes=1 << 16)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **kwargs)


class _Interpreted:
    """What `compile_config` gives, launched by the interpreter."""

    def __init__(self, op: Any, problem: Any, config: Any) -> None:
        self.compiled = interpreted(render(op, problem, config).load())


class _Reference(Peer):
    """A peer that answers with the float64 reference."""

    name, op, module, packages, install = "deep_gemm", "indexer", "torch", ("torch",), "pip install torch"

    def prepare(self, problem: Any, call: Any) -> Any:
        expected = ops.get("indexer").expect(problem, call)

        def run() -> Any:
            logits = torch.zeros_like(call.logits)
            for group in expected.rows:
                for i, row in enumerate(group.index.tolist()):
                    live = expected.lengths[row]
                    logits[row, :live] = group.want[i, :live].float()
            return logits

        return run


@contextlib.contextmanager
def gpu() -> Iterator[Any]:
    """Its clock moves by `step` milliseconds from one event to the next."""
    nothing = SimpleNamespace(wait_stream=lambda other: None)
    clock = SimpleNamespace(now=0.0, step=0.25)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            clock.now += clock.step
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    fakes: dict[str, Any] = {
        "Stream": lambda: nothing,
        "current_stream": lambda: nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph: contextlib.nullcontext(),
        "Event": Event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (1 << 36, 1 << 37),
        "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
    }
    generator = torch.Generator
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(torch, "Generator", lambda device="cpu": generator("cpu")))
        for module in (measure, bench):
            stack.enter_context(patch.object(module, "compile_config", _Interpreted))
        stack.enter_context(patch.dict(peers.PEERS, {"deep_gemm": _Reference()}))
        # One call of each set, because the interpreter takes its time.
        stack.enter_context(patch.object(timing, "MOST_LAUNCHES", 2))
        stack.enter_context(patch.object(timing, "FEWEST_LAUNCHES", 2))
        stack.enter_context(patch.object(bench, "copy_gb_per_s", lambda: 1000.0))
        stack.enter_context(_OnCpu())
        yield clock


def measured(rows: int, config: Config) -> tuple[PeerTimes, Measured, Timed]:
    """The jobs for one candidate: the baseline alone, then the candidate in turn with it, as a search has it and as a
    recording has it."""
    problem = ops.get("indexer").problem(rows, CARD.silicon)
    setup = Setup(problem, Profile(320, (64, 320), (1.0, 1.0)), CARD, 0)
    with gpu():
        assert measure.memory_job() == 1 << 36
        peer, candidate = measure.peer_job(setup, "deep_gemm"), measure.device_job(setup, config, "deep_gemm")
        rounds = measure.rounds_job(setup, config, "deep_gemm")
    assert isinstance(candidate, Measured) and isinstance(rounds, Timed)
    return peer, candidate, rounds


def raced(rows: int, configs: Sequence[Config]) -> tuple[list[Timed], tuple[dict[Config, Any], Any]]:
    """Candidates of which each is slower than the one before, with halving; then a final of all of them."""
    problem = ops.get("indexer").problem(rows, CARD.silicon)
    setup = Setup(problem, Profile(320, (64, 320), (1.0, 1.0)), CARD, 0)
    found = []
    with gpu() as clock, patch.object(timing, "WARM_S", 0.0):
        for number, config in enumerate(configs, 1):
            clock.step = 0.25 * number
            timed = measure.rounds_job(setup, config, None, halving=True)
            assert isinstance(timed, Timed)
            found.append(timed)
        return found, measure.final_job(setup, configs, "deep_gemm", 5)


def rounds_job(setup: Setup, config: Config, baseline: str | None) -> Timed | Last:
    with gpu():
        return measure.rounds_job(setup, config, baseline)


def benched(op: str, shape: Shape, configs: dict[str, Config], wanted: tuple[str, ...]) -> dict[str, Any]:
    with gpu():
        return bench.shape_job(bench.Job(op, CARD, shape, configs, wanted, 1000.0))
