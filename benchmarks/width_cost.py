"""What the configured maximum costs: the best stored configs at width 262,208 and at 2,048, for equal live lengths.

    python benchmarks/width_cost.py DATABASE

One JSON object a problem, the two widths timed in turn in one process, on the same tensors.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import compile_config
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools.measure import Session, Setup
from dsv4tune.tuned.store import Filter, Store

LENGTHS = (128, 2048)
WIDTHS = (262_208, 2048)


def narrowed(call: IndexerCall, width: int) -> IndexerCall:
    """The same bytes at the same addresses, seen through a smaller maximum."""
    return replace(call, page_table=call.page_table[:, : width // 64], logits=call.logits[:, :width])


def main(path: Path) -> None:
    device = devices.here()
    assert device is not None, "needs a GPU"
    store = Store(path, create=False)
    for key in store.problems(Filter("indexer")):
        best = store.best(key)
        if best is None or best.provenance != "measured":
            continue
        op, problem, config = ops.get("indexer"), ops.problem_from_json(best.problem), Config(best.config)
        session = Session(Setup(problem, Profile(WIDTHS[0], LENGTHS, (1.0, 1.0)), device, 0))
        found: dict[str, dict[str, float]] = {}
        for length in LENGTHS:
            graphs = []
            for width in WIDTHS:
                variant = Variant(op, problem, config, width, compile_config(op, problem, config).compiled)
                runs = [variant.prepared(narrowed(call, width)) for call in session.sets[length]]
                graphs.append(session.timer.capture(runs, session.launches[length]))
            wide, narrow = (statistics.median(times) for times in session.timer.time(graphs, 61))
            found[str(length)] = {
                "us_262208": round(wide, 3),
                "us_2048": round(narrow, 3),
                "ratio": round(wide / narrow, 4),
            }
        print(json.dumps({"problem": key, "config": dict(config), "live": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
