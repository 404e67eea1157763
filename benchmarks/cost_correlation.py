"""How well the cost model ranks: Spearman correlation of its score with the measured one, by row count.

    python benchmarks/cost_correlation.py benchmarks/h200/indexer_trials.jsonl.gz

Needs no GPU.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from pathlib import Path

from dsv4tune.codegen import cost, devices, ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tuned.records import Trial


def ranks(values: list[float]) -> list[float]:
    """Equal values share the middle of their ranks."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def main(path: Path) -> None:
    device = devices.DEVICES["h200"]
    found: dict[int, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            trial = Trial.model_validate_json(line)
            if trial.status != "ok" or trial.resources is None:
                continue
            problem, config = ops.problem_from_json(trial.problem), Config(trial.config)
            over = trial.range
            profile = Profile(over.width, tuple(over.lengths), tuple(over.weights), over.causal)
            report = Report(**trial.resources.model_dump())
            op = ops.get(str(trial.problem["op"]))
            logs = [math.log(us) for us in trial.times_us.values()]
            predicted = [
                math.log(cost.predict_us(op, problem, config, profile, n, report, device)) for n in trial.times_us
            ]
            found.setdefault(problem.rows, []).append((sum(predicted), sum(logs)))
    for rows, pairs in sorted(found.items()):
        predicted, measured = (ranks(list(side)) for side in zip(*pairs, strict=True))
        print(
            json.dumps(
                {"rows": rows, "trials": len(pairs), "spearman": round(statistics.correlation(predicted, measured), 3)}
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
