"""A process that compiles variants into Triton's cache: one job a line of stdin, one answer a line of stdout."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

#: From linux/prctl.h: the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Compilers print: stdout is for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from dsv4tune.codegen import ops
    from dsv4tune.codegen.compile import first_line
    from dsv4tune.codegen.space import Config
    from dsv4tune.runtime.compilers import compile_here

    for line in sys.stdin:
        job = json.loads(line)
        try:
            report = compile_here(ops.problem_from_json(job["problem"]), Config(job["config"]))
            answer: dict[str, Any] = {"report": report.to_json()}
        except Exception as error:
            answer = {"failed": first_line(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
