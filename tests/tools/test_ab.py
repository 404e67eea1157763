"""Plugin on and off in turn, against a stand-in server: `support/stand_in.py`, which is no SGLang and says no speed.

tests/sglang/test_ab.py runs SGLang's real benchmark against the same stand-in.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in
from typer.testing import CliRunner

from dsv4tune.tools import ab
from dsv4tune.tools.cli import app

SUPPORT = Path(__file__).parents[1] / "support"
BENCH = f"{shlex.quote(sys.executable)} {shlex.quote(str(SUPPORT / 'fake_benchmark.py'))}"
SERVER = f"{shlex.quote(sys.executable)} {shlex.quote(str(SUPPORT / 'stand_in.py'))}"
SMALL = ["--requests", "2", "--output-tokens", "8", "--bench", BENCH]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["ab", *arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Options that name a slow server without the plugin and a fast one with it."""
    made = {side: stand_in.serve(0, "stand-in", off=side == "off") for side in ("off", "on")}
    for server in made.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [part for side, s in made.items() for part in (f"--{side}", f"http://127.0.0.1:{s.server_address[1]}")]
    for server in made.values():
        server.shutdown()
        server.server_close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_servers_in_turn(servers: list[str], tmp_path: Path) -> None:
    out = tmp_path / "ab.json"
    result = run(*servers, *SMALL, "--rounds", "3", "-o", str(out), "--json")
    told = json.loads(result.stdout)
    assert told == json.loads(out.read_text())
    order = [line.split("plugin ")[1].split(":")[0] for line in result.stderr.splitlines()]
    assert order == ["off", "on", "on", "off", "off", "on"]
    figure = told["figures"]["output_throughput"]
    assert figure["clear"] and figure["gain"] > 0.3 and figure["on"]["median"] > figure["off"]["median"]
    assert told["figures"]["median_tpot_ms"]["gain"] > 0.3, "less time is a gain"
    assert "median_ttft_ms" not in told["figures"], "what the benchmark did not tell"
    assert len(told["runs"]["on"]) == 3 and "not_kept" not in told["runs"]["on"][0]


def test_one_start_command_is_started_both_ways(tmp_path: Path) -> None:
    port = free_port()
    result = run("--start", f"SOME=variable {SERVER} --port {port}", *SMALL, "--rounds", "2")
    assert [line for line in result.stderr.splitlines() if line.startswith("starting")] == [
        f"starting a server with the plugin {side}" for side in ("off", "on", "on", "off")
    ]
    lines = result.stdout.splitlines()
    assert lines[0].startswith("output tokens/s: ") and lines[0].endswith(": better") and "spread" in lines[0]
    with pytest.raises(ConnectionRefusedError):  # nothing was left running
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name two servers with --off and --on, or a command that starts one with --start"),
        (["--off", "http://127.0.0.1:1"], "name two servers"),
        (["--off", "x", "--on", "y", "--start", "z"], "--start takes the place of --off and --on"),
        (
            ["--off", "http://127.0.0.1:1", "--on", "http://127.0.0.1:1"],
            "no server answers at http://127.0.0.1:1: start",
        ),
        (["--start", "'"], "--start can't be read"),
        (["--start", "A=1"], "--start takes a command such as"),
        (["--start", "/nowhere/python --port 1"], "the server can't be started"),
        (["--start", f"{SERVER} --port 1 --fail"], "the server ended (status 1): out of memory, say"),
        (["--requests", "many", "--start", "x"], "--requests takes whole numbers"),
        (["--startup", "soon", "--start", "x"], "--startup takes a time"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    result = run(*arguments, code=2)
    assert says in result.stderr.splitlines()[-1] and result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("bench", "more", "says"),
    [
        ("/nowhere/bench", "", "the benchmark can't be run"),
        (
            f"{shlex.quote(sys.executable)} -c 'raise SystemExit(\"no tokenizer\")'",
            "",
            "failed (status 1): no tokenizer",
        ),
        (BENCH, "--lose-one", "1 of 2 requests to http://127.0.0.1"),
    ],
)
def test_a_benchmark_that_fails_is_told(servers: list[str], bench: str, more: str, says: str) -> None:
    result = run(*servers, *SMALL[:-1], bench, "--bench-args", more, code=2)
    assert says in result.stderr and result.stdout == ""


def test_differences_within_the_spread_are_not_clear() -> None:
    runs: dict[ab.Side, list[dict[str, float]]] = {
        "off": [{"output_throughput": 100.0}, {"output_throughput": 104.0}],
        "on": [{"output_throughput": 102.0}, {"output_throughput": 103.0}],
    }
    (figure,) = ab.summary(runs).values()
    assert not figure["clear"] and figure["gain_range"] == [-0.00962, 0.02]
    assert next(ab.lines(ab.summary(runs))).endswith("no clear difference")


def test_where_a_server_will_listen() -> None:
    assert ab.address(["python", "-m", "sglang.launch_server"]) == "http://127.0.0.1:30000"
    assert ab.address(["x", "--host", "0.0.0.0", "--port=80"]) == "http://127.0.0.1:80"
    assert ab.address(["x", "--host", "10.0.0.7", "--port", "81"]) == "http://10.0.0.7:81"
