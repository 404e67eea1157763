"""Reading a start command without SGLang; tests/sglang/test_like.py holds it beside SGLang's own parser and rules."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES, Device
from dsv4tune.codegen.models import FLASH, PRO
from dsv4tune.runtime.wanted import CAPTURED
from dsv4tune.tools import like, tune
from dsv4tune.tools.cli import app

CARD = DEVICES["rtx-pro-6000"]
START = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash --trust-remote-code"


@pytest.fixture(autouse=True)
def without_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sglang" else real(name, *a))


def read(options: str = "", memory: float | None = None) -> like.Start:
    return like.read(f"{START} {options}", CARD, memory)


def test_the_facts_of_a_plain_server() -> None:
    start = read("--tp 8 --context-length 131072")
    assert (start.attention_ranks, start.context, start.draft_tokens) == (8, 131_072, 0)
    # 512 graphs by memory and ranks, of which 256 requests at a time need those up to 256.
    assert start.batches == tuple(size for size in CAPTURED if size <= 256)
    assert start.chunk == 8192 and start.read_by == "dsv4tune"
    server = start.server
    assert server.table_pages == 513 and server.heads == (8,) and server.prefill_rows == (8192,)


@pytest.mark.parametrize(
    ("options", "memory", "largest", "count"),
    [
        ("--tp 2", 96, 256, 36),
        ("--tp 2", 32, 48, 10),
        ("--tp 2", 48, 32, 8),
        ("--tp 2", 16, 8, 4),
        ("--tp 4", 32, 160, 24),
        ("--tp 8 --max-running-requests 512", 141, 512, 52),
        ("--tp 8 --max-running-requests 20", 141, 20, 7),
        ("--tp 8 --max-running-requests 1024 --cuda-graph-max-bs 1024", 141, 1024, 68),
        ("--tp 8 --cuda-graph-bs 1 2 64", 141, 64, 3),
        ("--tp 8 --disable-cuda-graph-padding --max-running-requests 9", 141, 9, 9),
        ('--tp 8 --cuda-graph-config \'{"decode": {"max_bs": 16}}\'', 141, 16, 6),
        ("--tp 8 --speculative-algorithm EAGLE --max-running-requests 64", 141, 64, 27),
    ],
)
def test_captured_batches(options: str, memory: float, largest: int, count: int) -> None:
    batches = read(options, memory).batches
    assert (max(batches), len(batches)) == (largest, count)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ("--speculative-algorithm EAGLE --speculative-num-draft-tokens 3", 3),
        ("--speculative-algorithm EAGLE --speculative-num-steps 5", 6),
        ("--speculative-algorithm EAGLE", 4),
        ("--speculative-algorithm DSPARK --speculative-dspark-block-size 7", 8),
        ("--speculative-num-draft-tokens 3", 0),
    ],
)
def test_draft_tokens(options: str, drafts: int) -> None:
    start = read(f"--tp 8 {options}")
    assert start.draft_tokens == drafts
    assert set(start.rows) == {size * each for size in start.batches for each in (1, max(1, drafts))}


def test_attention_groups_share_requests_and_heads() -> None:
    start = read("--tp 8 --dp 4 --enable-dp-attention")
    assert start.attention_ranks == 2 and max(start.batches) == 64 and start.chunk == 2048
    assert all(size % 2 == 0 for size in start.batches), "padded to the ranks of a group"
    assert start == read("--tp 8 --attn-dp-size 4")
    assert read("--tp 8 --dp 4").attention_ranks == 8, "replicas of the whole model"


def widths(start: like.Start, card: Device) -> set[tuple[int, int, int]]:
    """Heads, page and width of the caches that a search for this server is told of."""
    op = ops.get("mla_decode")
    options = [op.options(given, start.context, start.draft_tokens) for _, given in start.problems(["mla_decode"])]
    problems = [op.problem(1, card.silicon, **one) for one in options]
    return {(problem.heads, problem.extra_page_size, problem.extra_width) for problem in problems}


@pytest.mark.parametrize(
    ("path", "title", "tp", "heads", "topk"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", "DeepSeek-V4-Flash", 8, 8, 512),
        ("deepseek-ai/DeepSeek-V4-Pro", "DeepSeek-V4-Pro", 8, 16, 1024),
        ("/models/deepseek_v4_pro-fp8/snapshot", "DeepSeek-V4-Pro", 16, 8, 1024),
        ("deepseek-ai/DeepSeek-V4-Pro", "DeepSeek-V4-Pro", 1, 128, 1024),
        ("/data/v4-projects/pro", "DeepSeek-V4-Flash", 64, 1, 512),
    ],
)
def test_a_model_that_is_not_here_is_taken_by_its_name(path: str, title: str, tp: int, heads: int, topk: int) -> None:
    start = like.read(f"sglang serve --model-path {path} --tp {tp} --context-length 131072", CARD)
    assert start.server.heads == (heads,)
    none = {(heads, 0, 0)} if topk == 512 else set()  # Pro has no layer without a compressed cache
    assert widths(start, CARD) == {*none, (heads, 64, topk), (heads, 2, 1088)}
    assert {(heads, *extra) for extra in start.server.extras} == widths(start, CARD), "searched is what is served"
    assert f"{tp} ranks share {heads * tp} heads" in str(start)
    assert str(start).endswith(f"; the model is not on this machine: taken for {title}, --model names another)")


def test_draft_layers_have_no_compressed_cache() -> None:
    start = like.read(f"{START.replace('Flash', 'Pro')} --tp 8 --speculative-algorithm EAGLE", CARD)
    assert start.ratios == (0, 4, 128) and start.draft_tokens == 4


def test_a_name_that_says_nothing_is_told_by_model(tmp_path: Path) -> None:
    start = like.read("sglang serve --model-path /data/model --tp 8", CARD, model=PRO)
    assert start.heads == 16 and "taken for" not in str(start)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 128}))
    with pytest.raises(ValueError, match=r"--model is said by the model's config\.json already"):
        like.read(f"sglang serve --model-path {tmp_path} --tp 8", CARD, model=PRO)


def test_counts_are_sglangs_and_what_is_not_read_is_named() -> None:
    for text, count in (("131072", 131_072), ("128Ki", 131_072), ("128k", 128_000), ("1.5k", 1500), ("1Mi", 1 << 20)):
        assert read(f"--tp 8 --context-length {text}").context == count
    start = read("--tp 8 --tp-sise=8 --mem-fraction-static 0.8")
    assert "; passed over: --trust-remote-code --tp-sise --mem-fraction-static)" in str(start)


def test_the_models_own_config_where_it_lies_here(tmp_path: Path) -> None:
    facts = {
        "max_position_embeddings": 65_536, "num_attention_heads": 96, "index_topk": 2048,
        "compress_ratios": [128, 4, 128, 4], "num_hidden_layers": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts))
    start = like.read(f"sglang serve --model-path {tmp_path} --tp 4", CARD)
    assert (start.context, start.heads, start.ratios) == (65_536, 24, (4, 128))
    assert start.model.layers == {"c128": 2, "c4": 1}, "without the draft layer"
    assert widths(start, CARD) == {(24, 2, 576), (24, 64, 2048)} and start.server.extras == ((64, 2048), (2, 576))
    assert "4 ranks share 96 heads" in str(start) and "taken for" not in str(start)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": facts, "vision_config": {}}))
    assert like.read(f"sglang serve --model-path {tmp_path} --tp 4", CARD) == start


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_models_config_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    command = "sglang serve --model-path deepseek-ai/DeepSeek-V4-Pro --tp 8"
    assert "taken for DeepSeek-V4-Pro" in str(like.read(command, CARD))
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    for age, (revision, topk) in enumerate((("new", 2048), ("old", 256))):
        snapshot = hub / "models--deepseek-ai--DeepSeek-V4-Pro" / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"index_topk": topk}))
        os.utime(snapshot / "config.json", (1e9 - age, 1e9 - age))
    start = like.read(command, CARD)
    assert start.model.topk == 2048 and "taken for" not in str(start)
    assert start.heads == 16, "what the file doesn't say is the name's"


@pytest.mark.parametrize(
    "command",
    [
        "CUDA_VISIBLE_DEVICES=0 python3 -m sglang.launch_server --tp=8",
        "sglang serve --tp-size 8",
        "/opt/bin/sglang serve --tensor-parallel-size 8",
        "python -m sglang.launch_server \\\n  --tp 8 \\\n  --host 0.0.0.0",
        "nohup python launch_server.py --tp 8",
    ],
)
def test_start_commands_are_found(command: str) -> None:
    assert like.read(command, CARD).attention_ranks == 8


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m vllm serve x", "--like takes a start command such as"),
        ("python -m sglang.launch_server '", "can't be read (No closing quotation)"),
        (f"{START} --tp eight", "--tensor-parallel-size: takes a count such as 131072 or 128Ki, not 'eight'"),
        (f"{START} --tp 8 --context-length 1.5Ki", "--context-length: takes a count such as"),
        (f"{START} --config server.yaml", "--config needs SGLang's own parser"),
        (f"{START} --tp 6", "--like: 6 ranks in 1 attention groups don't share the model's 64 heads"),
        (f"{START.replace('Flash', 'Pro')} --tp 6", "don't share the model's 128 heads"),
        (f"{START} --tp 8 --cuda-graph-config x", "--cuda-graph-config is no JSON"),
    ],
)
def test_bad_commands_are_one_line(command: str, says: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--device", "h200", "--kernel", "indexer", "--like", command])
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("explain", ["--like", START, "--tp", "8"], "--tp is said by --like already"),
        ("search", ["--like", START, "--context", "1M"], "--context is said by --like already"),
        ("search", ["--like", START, "--model", "por"], "unknown model 'por': did you mean 'pro'?"),
        ("search", ["--like", START, "--heads", "8"], "--heads is said by --like already"),
        ("search", ["--gpu-memory", "96", "--kernel", "indexer"], "--gpu-memory goes with --like"),
        ("doctor", ["--gpu-memory", "96"], "--gpu-memory goes with --like"),
        ("report", ["--like", START, "--gpu-memory", "much"], "--gpu-memory takes GB such as 96"),
        ("search", [], "name a kernel with --kernel, or the server to tune for with --like"),
    ],
)
def test_options_that_contradict(command: str, options: list[str], says: str) -> None:
    device = [] if command == "report" else ["--device", "rtx-pro-6000"]
    result = CliRunner().invoke(app, [command, *device, *options])
    assert result.exit_code == 2 and says in result.stderr


def test_a_search_tunes_what_the_server_captures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tune.Request] = []

    def answer(requests: list[tune.Request], watch: Any) -> list[Any]:
        asked.extend(requests)
        raise ValueError("enough")

    monkeypatch.setattr(tune, "tune_all", answer)
    options = ["--device", "rtx-pro-6000", "--db", str(tmp_path / "tuned.db"), "--like"]
    command = f"{START} --tp 8 --context-length 131072 --max-running-requests 16"
    result = CliRunner().invoke(app, ["search", *options, command])
    assert "like: 8 ranks share 64 heads, context 131072, 6 captured batches up to 16" in result.stderr
    assert "the model is not on this machine: taken for DeepSeek-V4-Flash" in result.stderr
    assert [(r.kernel, r.options) for r in asked] == [
        ("indexer", {}),
        *(("mla_decode", {"heads": 8, "cache": cache, "model": FLASH}) for cache in ("none", "c4", "c128")),
    ]
    # On sm_120 a prompt's chunk goes through the same functions.
    assert all(list(r.rows) == [1, 2, 4, 8, 16, 8192] and r.max_context == 131_072 for r in asked)
    asked.clear()
    CliRunner().invoke(app, ["search", *options, command, "--rows", "captured", "--kernel", "indexer"])
    assert [list(r.rows) for r in asked] == [[1, 2, 4, 8, 12, 16]]
