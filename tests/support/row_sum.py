"""A third kernel, as small as one can be: the worked example of docs/adding-a-kernel.md.

``out[r] = sum(x[r, t] for t < lengths[r])``; NaN may lie past a row's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Argument, Launch, Op, Plan, Verdict, Work
from dsv4tune.codegen.problem import Problem, Profile, Shape, Silicon
from dsv4tune.codegen.space import Config, Parameter, Space

#: Worst relative error that a variant may have.
MAX_ERROR = 1e-5


@dataclass(frozen=True, kw_only=True)
class RowSumProblem(Problem):
    """Nothing but the rows: the width is the range's, as for the indexer."""

    op = "row_sum"


@dataclass(frozen=True)
class RowSumCall:
    """fp32 ``x[rows, width]`` with column stride 1, int32 ``lengths[rows]``, fp32 ``out[rows]``."""

    x: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor


class RowSum(Op[RowSumProblem, RowSumCall]):
    name = "row_sum"
    reference = "forward"
    words = ("dialect", "order", "block_t", "num_warps")

    def problem(self, rows: int, silicon: Silicon, **options: Any) -> RowSumProblem:
        return RowSumProblem(rows=rows, silicon=silicon, **options)

    def problem_from_json(self, data: dict[str, Any]) -> RowSumProblem:
        return RowSumProblem(rows=data["rows"], silicon=Silicon(**data["silicon"]))

    def width(self, max_context: int, draft_tokens: int) -> int:
        return max_context

    def profile(self, problem: RowSumProblem, width: int) -> Profile:
        lengths = tuple(sorted({min(128, width), width}))
        return Profile(width, lengths, (1.0,) * len(lengths))

    # -- space --------------------------------------------------------------------------------------------------

    def space(self, problem: RowSumProblem, device: Device) -> Space:
        parameters = (
            Parameter("dialect", ("triton",), "language of the template"),
            Parameter("order", ("forward", "backward"), "which end of a row comes first"),
            Parameter("block_t", (128, 512, 2048), "values a step"),
            Parameter("num_warps", (1, 4), "warps a program"),
        )

        def refuse(config: Config) -> str | None:
            values = config.int("block_t") // (32 * config.int("num_warps"))
            return f"{values} values a thread: they would fill its registers" if values > 32 else None

        return Space(parameters, refuse)

    def default(self, problem: RowSumProblem, device: Device) -> Config:
        return Config({"dialect": "triton", "order": "forward", "block_t": 512, "num_warps": 4})

    def reference_config(self, problem: RowSumProblem, device: Device) -> Config:
        return self.default(problem, device).with_(block_t=128, num_warps=1)

    # -- render, compile, launch --------------------------------------------------------------------------------

    def template_values(self, problem: RowSumProblem, config: Config) -> dict[str, Any]:
        return {}

    def arguments(self, problem: RowSumProblem, config: Config) -> Mapping[str, Sequence[Argument]]:
        pointers = [Argument("x", "*fp32", True), Argument("lengths", "*i32"), Argument("out", "*fp32")]
        return {"kernel": [*pointers, Argument("x_stride", "i64"), Argument("width", "i32")]}

    def plan(self, problem: RowSumProblem, config: Config, width: int) -> Plan:
        return Plan((Launch("kernel", (problem.rows, 1, 1)),))

    def work(self, problem: RowSumProblem, config: Config, profile: Profile, length: int) -> Work:
        block_t = config.int("block_t")
        tiles = -(-length // block_t)
        # An address, a mask, a load and a sum for each of a thread's values.
        instructions = 20 + 4 * block_t / (32 * config.int("num_warps"))
        return Work(problem.rows, problem.rows * tiles, tiles, 4 * block_t, instructions, 0, 8 * problem.rows)

    def bind(
        self, problem: RowSumProblem, config: Config, call: RowSumCall, scratch: Mapping[str, torch.Tensor]
    ) -> dict[str, list[Any]]:
        if call.x.dtype != torch.float32 or call.x.stride(1) != 1:
            raise ValueError(f"x is {call.x.dtype} with column stride {call.x.stride(1)}, expected fp32 with 1")
        return {"kernel": [call.x, call.lengths, call.out, call.x.stride(0), call.x.shape[1]]}

    def unchecked(self, config: Config) -> str | None:
        return None

    # -- checking and timing ------------------------------------------------------------------------------------

    def small(self, problem: RowSumProblem) -> tuple[RowSumProblem, int]:
        return replace(problem, rows=min(problem.rows, 5)), 1000

    def cases(
        self, problem: RowSumProblem, width: int, lengths: Sequence[int], device: str, seed: int
    ) -> Iterator[tuple[str, RowSumCall]]:
        for length in sorted({0, 1, 127, 128, 129, *lengths}):
            yield f"length {length}", _call(problem.rows, width, [length] * problem.rows, device, seed)
        ragged = [(row * 97) % (width + 1) for row in range(problem.rows)]
        yield "ragged", _call(problem.rows, width, ragged, device, seed)

    def expect(self, problem: RowSumProblem, call: RowSumCall) -> torch.Tensor:
        rows = zip(call.x.double(), call.lengths.tolist(), strict=True)
        return torch.stack([row[:length].sum() for row, length in rows])

    def verify(self, problem: RowSumProblem, call: RowSumCall, expected: torch.Tensor) -> Verdict:
        scale = expected.abs().clamp(min=1.0)
        error = float(((call.out.double() - expected).abs() / scale).max())
        call.out.fill_(float("nan"))
        # What is not a number is not below the limit either.
        return Verdict(error, None if error <= MAX_ERROR else f"error {error:.1e}, more than {MAX_ERROR:.0e}")

    def shape(self, problem: RowSumProblem, profile: Profile, length: int) -> Shape:
        rows = range(problem.rows)
        return Shape(f"{problem.rows}x{length}", "decode", profile.width, (length,) * problem.rows, tuple(rows))

    def bench_shapes(self) -> list[Shape]:
        return [Shape("64x4096", "decode", 4096, (4096,) * 64, tuple(range(64)))]

    def timing_pool(
        self, problem: RowSumProblem, shapes: Sequence[Shape], min_bytes: int, device: str, seed: int
    ) -> torch.Tensor:
        width = max(shape.width for shape in shapes)
        return torch.randn(-(-min_bytes // (4 * width)) + problem.rows, width, device=device)

    def timing_sets(
        self, problem: RowSumProblem, shape: Shape, sets: int, device: str, seed: int, pool: torch.Tensor
    ) -> list[RowSumCall]:
        lengths = torch.tensor(shape.live, dtype=torch.int32, device=device)
        starts = [(n * problem.rows) % (pool.shape[0] - problem.rows + 1) for n in range(sets)]
        out = torch.empty(problem.rows, device=device)
        return [RowSumCall(pool[at : at + problem.rows], lengths, out) for at in starts]

    def bytes_moved(self, problem: RowSumProblem, shape: Shape) -> int:
        return 4 * shape.positions + 8 * shape.rows

    def memory_needed(self, problem: RowSumProblem, profile: Profile, length: int) -> int:
        return 4 * problem.rows * profile.width

    def output(self, call: RowSumCall) -> torch.Tensor:
        return call.out


def _call(rows: int, width: int, lengths: Sequence[int], device: str, seed: int) -> RowSumCall:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    live = torch.tensor(lengths, dtype=torch.int32)
    # Nothing past a row's length may be read.
    x[torch.arange(width) >= live[:, None]] = float("nan")
    return RowSumCall(x.to(device), live.to(device), torch.full((rows,), float("nan"), device=device))
