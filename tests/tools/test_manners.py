"""Manners of the command line: completion, near misses, sizes and durations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dsv4tune.tools.cli import app
from dsv4tune.tools.cli.options import read_count, read_duration, read_memory

COMPLETE = "import sys; sys.argv = ['dsv4tune']; from dsv4tune.tools.cli import app; app()"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dsv4tune do", ["doctor"]),
        ("dsv4tune search --kernel ", ["indexer", "mla_decode"]),
        ("dsv4tune explain --policy s", ["strict"]),
        ("dsv4tune warm --model p", ["pro"]),
    ],
)
def test_shells_complete_words(typed: str, offered: list[str]) -> None:
    # What the script that --install-completion writes asks.
    asked = {"_DSV4TUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run([sys.executable, "-c", COMPLETE], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == offered, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serch"], "Did you mean 'search'"),
        (["search", "--kernl", "indexer"], "--kernel"),
        (["search", "--kernel", "mla_decoder", "--target", "sm_120"], "did you mean 'mla_decode'?"),
        (["explain", "--target", "sm120"], "did you mean 'sm_120'?"),
        (["explain", "--device", "RTX-Pro-600"], "did you mean 'rtx-pro-6000'?"),
        (["explain", "--device", "h200", "--context", "2M"], "--context 2M is more than DeepSeek-V4's 1M"),
        (["explain", "--device", "h200", "--policy", "mesured"], "did you mean 'measured'?"),
        (["explain", "--device", "h200", "--model", "Flsh"], "did you mean 'flash'?"),
        (["search", "--device", "h200", "--kernel", "mla_decode", "--model", "prp"], "did you mean 'pro'?"),
        (["record", "--device", "h200", "--kernel", "mla_decode", "--model", "prp"], "did you mean 'pro'?"),
        (["emulate", "--target", "sm_120", "--kernel", "mla_decode", "--model", "prp"], "did you mean 'pro'?"),
    ],
)
def test_a_near_miss_names_what_was_meant(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and says in result.stderr and result.stdout == ""


def test_sizes_and_durations() -> None:
    assert [read_count(text, "--x") for text in ("7", "128k", "1M", "8K")] == [7, 131_072, 1_048_576, 8192]
    seconds = [read_duration(text, "--x") for text in ("90", "90s", "10m", "1.5h", "1h30m", "1m30s")]
    assert seconds == [90, 90, 600, 5400, 5400, 90]
    for text in ("", "h", "1x", "1h 30", "m10", "-1s"):
        with pytest.raises(ValueError, match="--x takes a time"):
            read_duration(text, "--x")
    assert [read_memory(text) for text in (None, "96", "95.6G", "141 GB")] == [None, 96.0, 95.6, 141.0]
