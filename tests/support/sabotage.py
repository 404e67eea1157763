"""Jobs in the place of a search's own, in which candidates go wrong as they are told to; no compiler and no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from fakes import RESOURCES

from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.space import Config
from dsv4tune.tools.executor import Poisoned
from dsv4tune.tools.measure import Compiled, Measured, Timed, Timing

_ORDERS = "TEST_ORDERS"
_held: list[bytes] = []


def orders(given: Mapping[Config, str]) -> dict[str, str]:
    """The environment of processes in which these candidates go wrong."""
    return {_ORDERS: json.dumps({config.key: order for config, order in given.items()})}


def order(config: Config) -> str:
    return str(json.loads(os.environ[_ORDERS]).get(config.key, ""))


def import_job() -> None:
    pass


def compile_job(problem: Any, config: Config) -> Compiled:
    match order(config):
        case "hang in compile":
            time.sleep(600)
        case "crash in compile":
            ctypes.string_at(0)
        case "hoard in compile":
            while True:
                _held.append(b"x" * (64 << 20))
    return Compiled("0" * 64, Report(**RESOURCES.model_dump()), config.key)


def session_job(setup: Any) -> None:
    pass


def device_job(setup: Any, config: Config, baseline: str | None, halving: bool = False) -> Measured:
    match order(config):
        case "hang":
            time.sleep(600)
        case "crash":
            ctypes.string_at(0)
        case "poison":
            raise Poisoned("device fault: an illegal memory access was encountered")
        case "raise":
            raise RuntimeError("no kernel image is available")
        case "leak":
            _held.append(b"x" * (128 << 20))
    # Its own process as a warning, so that a test sees who measured what.
    times = {n: Timing(10.0, 0.01) for n in setup.profile.lengths}
    return Measured(Verdict(1e-7), times, (f"process {os.getpid()}",))


def rounds_job(setup: Any, config: Config, baseline: str | None) -> Timed:
    measured = device_job(setup, config, baseline)
    return Timed(measured.verdict, {n: [t.us, t.us] for n, t in measured.timings.items()}, {}, measured.warnings)
