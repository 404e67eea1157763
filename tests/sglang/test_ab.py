"""SGLang's real serving benchmark, driven by `dsv4tune ab`, against the stand-in server (no SGLang, no speed)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_in
from typer.testing import CliRunner

from dsv4tune.tools.cli import app


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of a few words, as a model's folder has it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({word: n for n, word in enumerate(["[UNK]", *(f"w{n}" for n in range(200)), "a"])}, "[UNK]")
    )
    words.pre_tokenizer = Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def servers(tokenizer: Path) -> Iterator[list[str]]:
    made = {side: stand_in.serve(0, str(tokenizer), off=side == "off") for side in ("off", "on")}
    for server in made.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [part for side, s in made.items() for part in (f"--{side}", f"http://127.0.0.1:{s.server_address[1]}")]
    for server in made.values():
        server.shutdown()
        server.server_close()


def test_sglangs_own_benchmark_tells_both_sides_apart(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Its processes are not this test's interpreter: they find the stubs by the path, and don't interpret kernels.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = [
        "--rounds",
        "1",
        "--requests",
        "4",
        "--concurrency",
        "2",
        "--input-tokens",
        "16",
        "--output-tokens",
        "12",
    ]
    result = CliRunner().invoke(app, ["ab", *servers, *options, "--json"], env=dict(os.environ))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["runs"]["on"][0]["completed"] == 4 and set(told["figures"]) >= {"output_throughput", "median_tpot_ms"}
    assert told["figures"]["median_tpot_ms"]["off"]["median"] > told["figures"]["median_tpot_ms"]["on"]["median"]
