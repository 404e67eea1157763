"""Candidates a second on the first GPU and on all of them: the same trials, compiled beforehand.

    python benchmarks/two_gpus.py --trials 200 > benchmarks/h200/two_gpus.json

The clock runs from the first submitted candidate to the last finished trial, with every process started and every
problem's inputs made. That leaves what a search adds with each GPU: checking, timing, and one coordinator for all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config
from dsv4tune.tools import gpu
from dsv4tune.tools.evaluate import Evaluation, Pools, default_jobs
from dsv4tune.tools.executor import collect
from dsv4tune.tools.gpu import Card
from dsv4tune.tools.measure import Setup, compile_job, session_job
from dsv4tune.tools.samplers import Grid
from dsv4tune.tools.search import Proposer, search
from dsv4tune.tuned.records import Trial


def compile_all(setup: Setup, configs: list[Config]) -> list[Config]:
    """Into the cache; those that a GPU can launch."""
    pools = Pools.of(default_jobs(), True)
    for config in configs:
        pools.compilers.submit(config, compile_job, setup.problem, config)
    found = []
    while pools.compilers.pending:
        for _, answer in collect([pools.compilers], 1.0):
            if answer.kind == "ok" and answer.value.report.refusal(setup.problem.silicon) is None:
                found.append(answer.tag)
    pools.close()
    return sorted(found, key=configs.index)


def measure(setup: Setup, configs: list[Config], cards: list[Card]) -> dict[str, Any]:
    pools = Pools.of(default_jobs(), True, cards)
    trials: list[Trial] = []
    try:
        started = time.monotonic()
        pools.warm()
        failed = [answer.reason for answer in pools.judges.ask_each(session_job, setup) if answer.kind != "ok"]
        assert not failed, failed
        while pools.compilers.pending:
            collect([pools.compilers], 1.0)
        ready = time.monotonic()
        space = ops.get(setup.problem.op).space(setup.problem, setup.device)
        evaluation = Evaluation(setup, pools, None)
        search(Proposer(space, Grid(), configs), evaluation, trials.append, len(configs), None)
        took = time.monotonic() - ready
    finally:
        pools.close()
    return {
        "gpus": len(cards),
        "trials": len(trials),
        "status": Counter(trial.status for trial in trials),
        "by card": Counter(trial.card for trial in trials),
        "start_s": round(ready - started, 2),
        "seconds": round(took, 2),
        "per_second": round(len(trials) / took, 2),
        "judge_seconds": round(sum(trial.judge_seconds for trial in trials), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="indexer")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-context", type=int, default=1 << 20)
    parser.add_argument("--trials", type=int, default=200)
    given = parser.parse_args()
    found = gpu.cards("all")
    cards = [card for card in found if card.device.silicon == found[0].device.silicon]
    if len(cards) < 2:
        sys.exit(f"two GPUs of one silicon are needed, {len(cards)} found")
    op, device = ops.get(given.kernel), cards[0].device
    problem = op.problem(given.rows, device.silicon, **op.options({}, given.max_context, 0))
    setup = Setup(problem, op.profile(problem, op.width(given.max_context, 0)), device, 0)
    configs = list(op.space(problem, device).valid())
    random.Random(0).shuffle(configs)
    started = time.monotonic()
    configs = compile_all(setup, configs[: given.trials])
    print(f"{len(configs)} candidates compiled in {time.monotonic() - started:.1f} s", file=sys.stderr)
    runs = []
    for some in (cards[:1], cards):
        runs.append(measure(setup, configs, some))
        print(runs[-1], file=sys.stderr)
    speed = runs[1]["per_second"] / runs[0]["per_second"]
    print(
        json.dumps({"problem": problem.key, "device": device.name, "runs": runs, "speedup": round(speed, 3)}, indent=1)
    )
    print(f"{len(cards)} GPUs over one: {speed:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
