"""A recorded space as a cache of Kernel Tuner 1.5, so that its strategies can be simulated on the same data.

    python -m dsv4tune.tools.kernel_tuner_cache RECORDING -o cache.json

Kernel Tuner itself isn't needed. Its `tune_cache` leaves configs that failed out of the space; give `tune_kernel` the
function of `restriction` instead: `benchmarks/samplers.py` shows how.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config, Value
from dsv4tune.tools import recording
from dsv4tune.tools.recording import Record, Recording, RecordingError
from dsv4tune.tuned.files import write_whole


def convert(recorded: Recording) -> dict[str, Any]:
    """What Kernel Tuner reads: every recorded config, with our score as its ``time``, twins with their kernel's.

    Knobs keep the order of their values and lose those that no recorded config has. The milliseconds of compiling and
    benchmarking are there for budgets in seconds; a twin costs only its compilation.
    """
    header = recorded.header
    space = ops.get(header.problem.op).space(header.problem, header.device)
    used = {p.name: {config[p.name] for config in recorded.records} for p in space.parameters}
    knobs = {p.name: [value for value in p.values if value in used[p.name]] for p in space.parameters}
    return {
        "device_name": header.device.name,
        "kernel_name": header.problem.op,
        "problem_size": [header.problem.rows],
        "tune_params_keys": list(knobs),
        "tune_params": knobs,
        "objective": ["time"],
        "cache": {key(config, knobs): _entry(recorded, config, list(knobs)) for config in recorded.records},
    }


def key(config: Mapping[str, Value], knobs: Mapping[str, object]) -> str:
    """Of a config, as Kernel Tuner spells it."""
    return ",".join(str(config[name]) for name in knobs)


def _entry(recorded: Recording, config: Config, knobs: list[str]) -> dict[str, Any]:
    own = recorded.records[config]
    score = recorded.score(config)
    compiled, judged = own.seconds
    return {
        **{name: config[name] for name in knobs},
        **({"__error__": _error(recorded.measured(config))} if score is None else {"time": score}),
        "compile_time": compiled * 1e3,
        "verification_time": 0.0,
        "benchmark_time": judged * 1e3,
    }


def _error(record: Record) -> str:
    return "CompilationFailedConfig" if record.report is None else "RuntimeFailedConfig"


def restriction(cache: Mapping[str, Any]) -> Callable[..., bool]:
    """Whether a config, by its values in the order of the knobs, was recorded, whether it works or not."""
    names = cache["tune_params_keys"]
    known = {tuple(entry[name] for name in names) for entry in cache["cache"].values()}
    return lambda *values: values in known


def write(path: Path, cache: Mapping[str, Any]) -> None:
    """With a line for each config. Ends as Kernel Tuner looks for, to know that the file is whole.

    Raises:
        OSError: it can't be written.
    """
    head = json.dumps({name: value for name, value in cache.items() if name != "cache"})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in cache["cache"].items())
    write_whole(path, [f'{head[:-1]}, "cache": {{\n{lines}}}\n}}'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    try:
        write(given.output, convert(recording.read(given.recording)))
    except (OSError, RecordingError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
