"""SGLang's own serving benchmark with the plugin on and off, in turn: what it brings on the user's own server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Say = Callable[[str], None]
Side = Literal["off", "on"]

#: What runs unless told otherwise; `sglang.bench_serving` is an older name of newer versions' module, and still works.
BENCHMARK = f"{shlex.quote(sys.executable)} -m sglang.bench_serving"
#: What is read from each run: a word for people, the benchmark's field, and whether more is better.
FIGURES = (
    ("output tokens/s", "output_throughput", True),
    ("ms per output token", "median_tpot_ms", False),
    ("ms to first token", "median_ttft_ms", False),
)
#: Seconds that a server gets to stop before it is killed.
STOP_S = 60.0


@dataclass(frozen=True)
class Load:
    """What the benchmark sends: requests of random tokens, so many at a time."""

    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    more: Sequence[str] = ()

    def arguments(self, url: str, output: Path, seed: int) -> list[str]:
        return [
            *("--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids", "--random-range-ratio", "1.0"),
            *("--num-prompts", str(self.requests), "--max-concurrency", str(self.concurrency)),
            *("--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)),
            *("--seed", str(seed), "--flush-cache", "--disable-tqdm", "--output-file", str(output)),
            *self.more,
        ]


@dataclass(frozen=True)
class Request:
    """What the command line asked for: two running servers, or a command that starts one.

    Attributes:
        urls: of the server without and with the plugin; empty where `start` is given.
        start: starts a server; run with the plugin switched off and on in turn.
        rounds: runs of each side.
        startup_s: how long a start may take.
        benchmark: the command of the benchmark, without its arguments.
    """

    load: Load
    rounds: int
    urls: Mapping[Side, str] = field(default_factory=dict)
    start: str = ""
    startup_s: float = 1800.0
    benchmark: str = BENCHMARK
    seed: int = 0


def compare(request: Request, say: Say) -> dict[str, Any]:
    """Run every round; each side goes first in every other one.

    Raises:
        ValueError: a server can't be reached or started, or the benchmark failed.
    """
    runs: dict[Side, list[dict[str, Any]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="dsv4tune-ab-") as folder:
        for number in range(request.rounds):
            order: tuple[Side, Side] = ("off", "on") if number % 2 == 0 else ("on", "off")
            for side in order:
                with _server(request, side, Path(folder), say) as url:
                    output = Path(folder) / f"{side}-{number}.jsonl"
                    run = _run(request, url, output, request.seed + number)
                runs[side].append(run)
                shown = ", ".join(f"{run[name]:.2f} {what}" for what, name, _ in FIGURES if name in run)
                say(f"round {number + 1} of {request.rounds}, plugin {side}: {shown}")
    return {"runs": runs, "figures": summary(runs), "load": request.load.__dict__ | {"more": list(request.load.more)}}


def summary(runs: Mapping[Side, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each figure: both medians and spreads, the gain, and whether it is more than the spread.

    A round's two runs are compared with each other, because a machine drifts: the gain is the median over the rounds
    (positive where the plugin is better), its spread the range over the rounds.
    """
    found = {}
    for what, name, more_is_better in FIGURES:
        pairs = [(off[name], on[name]) for off, on in zip(runs["off"], runs["on"], strict=True) if name in off]
        if not pairs or any(off <= 0 or on <= 0 for off, on in pairs):
            continue
        gains = [(on / off if more_is_better else off / on) - 1.0 for off, on in pairs]
        low, high = min(gains), max(gains)
        found[name] = {
            "what": what,
            "off": _middle([off for off, _ in pairs]),
            "on": _middle([on for _, on in pairs]),
            "gain": round(statistics.median(gains), 5),
            "gain_range": [round(low, 5), round(high, 5)],
            # One round has no spread to be outside of.
            "clear": len(gains) > 1 and (low > 0 or high < 0),
        }
    return found


def _middle(values: Sequence[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {"median": round(median, 4), "spread": round((max(values) - min(values)) / median, 4)}


def lines(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """For people: one line a figure."""
    for one in figures.values():
        off, on, (low, high) = one["off"], one["on"], one["gain_range"]
        verdict = ("better" if one["gain"] > 0 else "worse") if one["clear"] else "no clear difference"
        yield (
            f"{one['what']}: {off['median']:.2f} off (spread {off['spread']:.1%}), {on['median']:.2f} on (spread "
            f"{on['spread']:.1%}); {one['gain']:+.1%} ({low:+.1%} to {high:+.1%} over the rounds): {verdict}"
        )


# -- one run ----------------------------------------------------------------------------------------------------


def _run(request: Request, url: str, output: Path, seed: int) -> dict[str, Any]:
    command = [*shlex.split(request.benchmark), *request.load.arguments(url, output, seed)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"the benchmark can't be run ({error}): install SGLang here, or name it with --bench"
        ) from error
    if done.returncode != 0 or not output.exists():
        said = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        raise ValueError(f"the benchmark failed (status {done.returncode}): {said[-1] if said else 'it said nothing'}")
    result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    completed = result.get("completed", 0)
    if completed < request.load.requests:
        raise ValueError(f"{request.load.requests - completed} of {request.load.requests} requests to {url} failed")
    kept = {name for _, name, _ in FIGURES} | {"completed", "accept_length", "total_output_tokens", "duration"}
    return {name: value for name, value in result.items() if name in kept and value is not None}


# -- servers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(request: Request, side: Side, folder: Path, say: Say) -> Iterator[str]:
    """The address of a server with the plugin on or off, ready to answer."""
    if not request.start:
        url = request.urls[side].rstrip("/")
        if not _answers(url):
            raise ValueError(f"no server answers at {url}: start it, with DSV4TUNE_DISABLE={int(side == 'off')}")
        yield url
        return
    environment, command = _command(request.start)
    environment["DSV4TUNE_DISABLE"] = "1" if side == "off" else "0"
    log = folder / f"server-{side}.log"
    url = address(command)
    if _answers(url):
        raise ValueError(f"a server answers at {url} already: stop it, or name it with --on or --off")
    say(f"starting a server with the plugin {side}")
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"the server can't be started ({error}): check --start") from error
        try:
            _wait(process, url, request.startup_s, log)
            yield url
        finally:
            _stop(process)


def _command(text: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a command line sets before its program, and the rest."""
    try:
        words = [word for word in shlex.split(text) if word.strip()]
    except ValueError as error:
        raise ValueError(f"--start can't be read ({error})") from error
    environment: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.S):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise ValueError('--start takes a command such as "python -m sglang.launch_server --model-path ..."')
    return environment, words


def address(command: Sequence[str]) -> str:
    """Where a server that this command starts will listen; SGLang's port unless it names another."""
    named = {"--host": "127.0.0.1", "--port": "30000"}
    for at, word in enumerate(command):
        option, equals, value = word.partition("=")
        if option in named:
            named[option] = value if equals else command[at + 1] if at + 1 < len(command) else ""
    host = "127.0.0.1" if named["--host"] in ("0.0.0.0", "::", "") else named["--host"]
    return f"http://{host}:{named['--port']}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _wait(process: subprocess.Popen[bytes], url: str, limit_s: float, log: Path) -> None:
    until = time.monotonic() + limit_s
    while not _answers(url):
        if process.poll() is not None:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise ValueError(
                f"the server ended (status {process.returncode}): {said[-1] if said else 'it said nothing'}"
            )
        if time.monotonic() > until:
            raise ValueError(f"the server did not answer at {url} within {limit_s:.0f} s: raise --startup")
        time.sleep(0.5)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and its workers, which are of one process group of their own."""
    for number, limit in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(limit)
            break
        except subprocess.TimeoutExpired:
            continue
    # Workers may outlive the first process by a moment, and hold the GPU's memory.
    until = time.monotonic() + STOP_S
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
