"""Trials and evaluators that need no compiler and no GPU."""

from __future__ import annotations

from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES, Device
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.space import Config
from dsv4tune.tools.search import Pick
from dsv4tune.tuned.records import DeviceRecord, Environment, Final, Range, Resources, Trial

RESOURCES = Resources(
    registers=96,
    stack_bytes=0,
    spill_bytes=0,
    shared_bytes=20_000,
    mma="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    native_fp8=True,
    async_copy="cp.async",
    instructions=900,
    seconds=0.5,
    binary="0" * 64,
)


def make_problem(rows: int = 64, device: str | Device = "rtx-pro-6000") -> tuple[Problem, Device]:
    """`device` is a card, or the word for one in the project's table."""
    card = DEVICES[device] if isinstance(device, str) else device
    return ops.get("indexer").problem(rows, card.silicon), card


def make_trial(
    config: Config | None = None, rows: int = 64, device: str | Device = "rtx-pro-6000", **changes: Any
) -> Trial:
    problem, card = make_problem(rows, device)
    config = config or ops.get("indexer").default(problem, card)
    values: dict[str, Any] = {
        "problem": problem.to_json(),
        "problem_key": problem.key,
        "device": DeviceRecord(
            capability=card.silicon.capability,
            sm_count=card.silicon.sm_count,
            shared_bytes=card.silicon.shared_bytes,
            l2_bytes=card.l2_bytes,
            name=card.name,
        ),
        "environment": Environment(dsv4tune="0", triton="3.9.0", ptxas="13.0", torch="2.13.0"),
        "config": dict(config),
        "source_sha": "a" * 64,
        "status": "ok",
        "provenance": "predicted",
        "range": Range(width=262_208, lengths=[128, 262_208], weights=[1.0, 1.0]),
        "score": 1.5,
        "yardstick": "byte floor",
        "times_us": {128: 3.0, 262_208: 1400.5},
        "error": 1e-7,
        "checked_by": "interpreter",
        "resources": RESOURCES,
    }
    return Trial(**{**values, **changes})


def make_final(place: int, **changes: Any) -> Final:
    values: dict[str, Any] = {
        "place": place,
        "won": True,
        "margin": 0.03,
        "spread": 0.002,
        "rounds": 9,
        "finalists": 2,
        "runner_up": {"block_t": 64},
        "runner_up_score": 0.9,
    }
    return Final(**{**values, **changes})


class FakeEvaluator:
    """Answers at once with a score that a function gives."""

    def __init__(self, score: Any, capacity: int = 4) -> None:
        self._score, self._capacity = score, capacity
        self.waiting: list[Config] = []
        self.pick: Pick = lambda compiled: next(iter(compiled))
        self.evaluated: list[Config] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    def submit(self, config: Config) -> None:
        self.waiting.append(config)

    def collect(self, timeout: float) -> list[tuple[Config, Trial]]:
        config = self.pick(self.waiting)
        if config is None:
            return []
        self.waiting.remove(config)
        self.evaluated.append(config)
        score = self._score(config)
        status = "ok" if score is not None else "failed"
        return [(config, make_trial(config, status=status, score=score))]
