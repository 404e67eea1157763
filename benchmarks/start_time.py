"""What a server's start takes longer: every captured size of both kernels made ready, with an empty and a full cache.

    python benchmarks/start_time.py > benchmarks/h200/start_time.json

Each start is a process of its own, as a rank is, on the GPU here. The clock runs from the files of entries to the last
checked variant; Python, torch and the CUDA context are the server's own and ready before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any


def start(context: int, tp: int) -> dict[str, Any]:
    """One start, in this process."""
    import torch
    import triton

    from dsv4tune.codegen import devices, ops
    from dsv4tune.runtime import wanted
    from dsv4tune.runtime.startup import prepare

    card = devices.here()
    assert card is not None, "there is no GPU here"
    torch.ones(1, device="cuda").sum().item()
    server = wanted.server(context, tp)
    problems = [one.problem for one in server.wanted(card.silicon, ops.OPS)]
    started = time.monotonic()
    choices = prepare(problems, server.columns)
    took = time.monotonic() - started
    ready = [choice for choice in choices if choice.variant is not None]
    return {
        "device": card.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "sizes": len(server.rows),
        "shapes": dict(Counter(choice.wanted.problem.op for choice in choices)),
        "ready": dict(Counter(choice.wanted.problem.op for choice in ready)),
        "texts": len({choice.variant.source_sha for choice in ready if choice.variant is not None}),
        "seconds": round(took, 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--context", type=int, default=1 << 20)
    options.add_argument("--tp", type=int, default=8)
    options.add_argument("--here", action="store_true", help="one start in this process, with the cache as it is")
    given = options.parse_args()
    if given.here:
        print(json.dumps(start(given.context, given.tp)))
        return
    command = [sys.executable, __file__, "--here", "--context", str(given.context), "--tp", str(given.tp)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DSV4TUNE_CACHE": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        found = {}
        for cache in ("cold", "warm"):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            found[cache] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
