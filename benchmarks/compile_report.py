"""What each target's default, and each shipped entry's config on it, takes with the Triton that runs this.

    python benchmarks/compile_report.py > benchmarks/compile/triton_<version>.json

Needs no GPU. One JSON list; `refused` says why a config is no candidate on a target.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import CompileError, compile_config, ptxas_version
from dsv4tune.codegen.space import Config
from dsv4tune.tuned.selector import shipped

ROWS = (1, 16, 64, 4096)


def rows() -> list[dict[str, Any]]:
    found = []
    op = ops.get("indexer")
    entries = {entry.problem["rows"]: Config(entry.config) for entry in shipped()}
    for target, name in devices.TARGETS.items():
        card = devices.DEVICES[name]
        for count in ROWS:
            problem = op.problem(count, card.silicon)
            configs = {"default": op.default(problem, card)}
            if count in entries:
                configs["H200's entry"] = entries[count]
            for label, config in configs.items():
                row: dict[str, Any] = {"target": target, "rows": count, "what": label, "config": dict(config)}
                reason = op.space(problem, card).refuse(config)
                if reason is None:
                    try:
                        report = compile_config(op, problem, config).report
                        row |= report.to_json()
                        del row["seconds"], row["binary"]
                        reason = report.refusal(card.silicon)
                    except CompileError as error:
                        reason = str(error)
                row["refused"] = reason
                row |= {"triton": metadata.version("triton"), "ptxas": ptxas_version(card.silicon.arch)}
                found.append(row)
    return found


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))
