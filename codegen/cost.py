"""The model that predicts a time from the compile report, the launch plan and the card: for ranking without a GPU.

On top of a fixed start, a launch takes about as long as the slowest of three things: moving its bytes, issuing its
instructions on the busiest SM, and the busiest program's chain of steps. Programs that find no work cost their start.
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
    """Constants of the model; microseconds unless named otherwise.

    Attributes:
        fitted_on: the measurements that the constants were fitted to.
        start: launch, and the loads before a program's first step.
        latency: from asking for a step's bytes to having them.
        program: starting one more program on an SM that holds all it can.
        scan: reading one length of a scan.
        score_ns: an SM's time for one product's share of a step's instructions, nanoseconds.
        heads_as_rows: what a step costs with operand order qk, as a multiple.
        reached: share of the vendor's bandwidth that kernels reach.
    """

    fitted_on: str
    start: float
    latency: float
    program: float
    scan: float
    score_ns: float
    heads_as_rows: float
    reached: float


#: Fitted by least absolute error of the logarithm to 324 trials of benchmarks/h200/indexer_trials.jsonl.gz, all that
#: were measured before 20:30.
MODEL = Model(
    fitted_on="sm_90 (H200), indexer, rows 1, 16 and 64",
    start=3.46,
    latency=2.02,
    program=0.0738,
    scan=0.0101,
    score_ns=0.0644,
    heads_as_rows=2.21,
    reached=0.92,
)


def resident(report: Report | None, warps: int, device: Device) -> int:
    """Programs that one SM holds at a time."""
    threads = 32 * warps
    most_threads = 2048 if device.silicon.capability in ("9.0", "10.0") else 1536
    if report is None:
        return max(1, most_threads // threads)
    by_registers = 65536 // (max(report.registers, 16) * threads)
    by_shared = device.sm_shared_bytes // (report.shared_bytes + KB)
    return max(1, min(by_registers, by_shared, most_threads // threads))


def predict_us(
    op: Op[Any, Any],
    problem: Problem,
    config: Config,
    profile: Profile,
    length: int,
    report: Report | None,
    device: Device,
) -> float:
    """Predicted microseconds of one launch at one live length; without a report, of what was not compiled yet."""
    return launch_us(op.work(problem, config, profile, length), config, report, device, MODEL)


def launch_us(work: Work, config: Config, report: Report | None, device: Device, model: Model) -> float:
    sms = device.silicon.sm_count
    held = resident(report, config.int("num_warps"), device)
    stages = max(1, config.int("num_stages") if "num_stages" in config else 1)

    # Bytes: at the card's rate, or at that of the copies which are under way at once. The second was seen for TMA only.
    rate = device.bandwidth * model.reached * 1e-6
    if config.get("load") == "tma":
        busy = max(1, min(work.programs, sms * held, work.steps))
        rate = min(rate, busy * stages * work.step_bytes / model.latency)
    memory = (work.steps * work.step_bytes + work.fixed_bytes) / rate

    step = work.step_scores * model.score_ns * 1e-3
    if config.get("operand_order") == "qk":
        step *= model.heads_as_rows
    if report is not None and report.spill_bytes:
        step *= 1.5  # not fitted: no trial spilled
    # Programs that are all resident divide the steps evenly, but not the SMs.
    uneven = -(-work.programs // sms) * sms / work.programs if work.programs <= sms * held else 1.0
    issue = max(work.steps / sms * uneven, work.longest) * step
    chain = (work.longest - 1) * max(step, model.latency / stages)

    waves = max(0.0, work.programs / (sms * held) - 1.0)
    starting = waves * held * model.program
    overlapped = math.pow(memory**3 + issue**3 + chain**3, 1 / 3)
    return model.start + work.scanned * model.scan + starting + overlapped
