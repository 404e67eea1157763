"""Jobs for the worker tests: each goes wrong in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from dsv4tune.tools.executor import Last, Poisoned, Unusable


def double(n: int) -> int:
    return 2 * n


def note(path: str) -> None:
    with open(path, "a") as file:
        print(os.getpid(), file=file)


def nap(seconds: float) -> None:
    time.sleep(seconds)


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


def last() -> Last:
    return Last(os.getpid())


def only_on(card: str) -> str:
    """Needs the process of one card."""
    if os.environ["CARD"] != card:
        raise Unusable(f"no device in {os.environ['CARD']}")
    return card


def unpicklable() -> object:
    return lambda: None


def hoard() -> None:
    held = []
    while True:
        held.append(b"x" * (32 << 20))


def keep() -> None:
    _kept.append(b"x" * (300 << 20))


_kept: list[bytes] = []
