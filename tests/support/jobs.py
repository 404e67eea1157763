"""Jobs for the worker tests: each goes wrong in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from dsv4tune.tools.executor import Poisoned


def double(n: int) -> int:
    return 2 * n


def pid() -> int:
    return os.getpid()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def shout() -> None:
    print("noise on stdout", flush=True)


def refuse(text: str) -> None:
    raise ValueError(text)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


def hang(marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(600)


def hang_in_a_child(marker: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(marker).write_text(str(child.pid))
    child.wait()


def poison() -> None:
    raise Poisoned("device fault: illegal memory access")
