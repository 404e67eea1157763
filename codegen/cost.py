"""The model that predicts a time from the compile report, the launch plan and the card: for ranking without a GPU.

A launch takes as long as the slowest of four things, on top of a fixed start: moving its bytes, issuing its
instructions on the busiest SM, the busiest program's chain of steps, and starting programs that find no work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import KB, Device
from dsv4tune.codegen.op import Op, Work
from dsv4tune.codegen.problem import Problem, Profile
from dsv4tune.codegen.space import Config


@dataclass(frozen=True)
class Model:
    """Constants of the model, microseconds unless named otherwise.

    Attributes:
        fitted_on: where the constants come from; told with every prediction.
        start: launch, and the loads before a program's first step.
        latency: from asking for a step's bytes to having them.
        program: starting one more program on an SM that has room for no more.
        scan: reading one length of a scan.
        score_ns: issuing one product's share of a step's instructions on an SM, nanoseconds.
        step_ns: issuing what a step costs whatever its size, nanoseconds.
        reached: share of the vendor's bandwidth that a copy reaches.
    """

    fitted_on: str
    start: float
    latency: float
    program: float
    scan: float
    score_ns: float
    step_ns: float
    reached: float


MODEL = Model(
    fitted_on="sm_90 (H200)",
    start=2.0,
    latency=0.9,
    program=0.08,
    scan=0.004,
    score_ns=0.03,
    step_ns=40.0,
    reached=0.9,
)


def resident(report: Report, warps: int, device: Device) -> int:
    """Programs that one SM holds at a time."""
    threads = 32 * warps
    most_threads = 2048 if device.silicon.capability in ("9.0", "10.0") else 1536
    by_registers = 65536 // (max(report.registers, 16) * threads)
    by_shared = device.sm_shared_bytes // (report.shared_bytes + KB)
    return max(1, min(by_registers, by_shared, most_threads // threads))


def predict_us(
    op: Op[Any, Any], problem: Problem, config: Config, profile: Profile, length: int, report: Report, device: Device
) -> float:
    """Predicted microseconds of one launch at one live length."""
    work = op.work(problem, config, profile, length)
    return launch_us(work, config, report, device, MODEL)


def launch_us(work: Work, config: Config, report: Report, device: Device, model: Model) -> float:
    sms = device.silicon.sm_count
    held = resident(report, config.int("num_warps"), device)
    stages = max(1, config.int("num_stages"))
    moved = work.steps * work.step_bytes + work.fixed_bytes
    memory = moved / (device.bandwidth * model.reached) * 1e6
    step_us = (work.step_scores * model.score_ns + model.step_ns) * 1e-3
    if report.spill_bytes:
        step_us *= 1.5
    # Steps are spread over SMs only as far as programs are.
    per_sm = max(work.steps / sms, work.longest)
    issue = per_sm * step_us
    # A program alone waits for its bytes unless enough steps are in flight.
    chain = work.longest * max(step_us, model.latency / stages) if work.longest > 1 else 0.0
    # Programs beyond the resident ones start as others end, most of them only to find nothing to do.
    waves = max(0.0, work.programs / (sms * held) - 1.0)
    starting = waves * held * model.program
    return model.start + work.scanned * model.scan / 4 + starting + math.hypot(memory, max(issue, chain))
