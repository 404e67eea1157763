"""Start commands by SGLang's own parser, and our reading of them held beside SGLang's own rules."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4tune.codegen import models
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.runtime import wanted
from dsv4tune.tools import like

CARD = DEVICES["rtx-pro-6000"]
START = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash"
PRO = START.replace("Flash", "Pro")
COMMANDS = [
    "--tp 8 --context-length 131072",
    "--tp 8 --context-length 128Ki",
    "--tp 8 --context-length 100k",
    "--tp-size 4 --max-running-requests 64 --mem-fraction-static 0.85",
    "--tensor-parallel-size 8 --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4",
    "--tp 8 --attn-dp-size 4 --chunked-prefill-size 16384",
    "--tp 8 --dp-size 8 --enable-dp-attention",
    "--tp 2 --cuda-graph-max-bs-decode 48",
    "--tp 2 --cuda-graph-bs-decode 1 2 4",
    "--tp 1 --disable-cuda-graph-padding --cuda-graph-max-bs-decode 5",
    '--tp 8 --cuda-graph-config \'{"decode": {"max_bs": 32}}\'',
]


@pytest.mark.parametrize("command", [*(f"{START} {options}" for options in COMMANDS), f"{PRO} --tp 8"])
def test_our_reading_is_that_of_sglangs_parser(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_sglang = like.read(command, CARD)
    assert by_sglang.read_by == "SGLang's own parser"
    assert by_sglang.model == (models.PRO if command.startswith(PRO) else models.FLASH)
    monkeypatch.setattr(like, "_by_sglang", lambda argv: None)
    by_hand = like.read(command, CARD)
    assert by_sglang.passed_over == ()
    assert replace(by_sglang, read_by="", passed_over=()) == replace(by_hand, read_by="", passed_over=())


def test_every_option_that_we_read_is_one_of_sglangs() -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    theirs = {spelling: action.dest for action in parser._actions for spelling in action.option_strings}
    for name, spellings, _ in like.OPTIONS:
        known = [spelling for spelling in spellings if spelling in theirs]
        assert known and {theirs[spelling] for spelling in known} == {name}


def test_a_bad_option_is_told_in_sglangs_words() -> None:
    with pytest.raises(ValueError, match="--like: unrecognized arguments: --no-such-option"):
        like.read(f"{START} --no-such-option", CARD)


@pytest.mark.parametrize("most", [1, 3, 8, 48, 160, 256, 300, 512, 1024])
@pytest.mark.parametrize("speculative", [None, "EAGLE"])
@pytest.mark.parametrize("padding", [True, False])
def test_batches_are_those_that_sglang_generates(most: int, speculative: str | None, padding: bool) -> None:
    hook = importlib.import_module("sglang.srt.arg_groups.cuda_graph_hook")
    args = raw(speculative_algorithm=speculative, disable_cuda_graph_padding=not padding)
    theirs = hook.generate_decode_cuda_graph_batch_sizes(args, most)
    assert wanted.batches(most, speculative is not None, padding) == sorted(set(theirs))


@pytest.mark.parametrize("gigabytes", [16, 24, 32, 48, 80, 96, 141, 180])
@pytest.mark.parametrize("tp", [2, 8])
def test_sizes_by_memory_are_sglangs(gigabytes: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = importlib.import_module("sglang.srt.arg_groups.memory_hook")
    config = importlib.import_module("sglang.srt.model_executor.cuda_graph_config")
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    monkeypatch.setattr(memory, "get_device_memory_capacity", lambda device: gigabytes * 1024)
    args = raw(tp_size=tp, device="cuda", mem_fraction_static=0.8)
    overrides.declare_resolution(args, "test", cuda_graph_config=config.default_cuda_graph_config())
    found: dict[str, Any] = {}

    class Enough(Exception):
        """What follows needs a model."""

    def sizes(_: Any, most: int) -> None:
        found["most"] = most
        raise Enough

    hook = importlib.import_module("sglang.srt.arg_groups.cuda_graph_hook")
    monkeypatch.setattr(hook, "generate_decode_cuda_graph_batch_sizes", sizes)
    with pytest.raises(Enough):
        memory.handle_gpu_memory_settings(args)
    found["chunk"] = overrides.resolving_view(args).chunked_prefill_size
    start = like.read(f"{START} --tp {tp} --max-running-requests 4096", CARD, gigabytes)
    assert (max(start.batches), start.chunk) == (found["most"], found["chunk"])


def raw(**values: Any) -> Any:
    """A record of SGLang's arguments as its command line leaves it, ready for its rules."""
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs(model_path="none", **values)
    server_args._resolved_overrides = []
    server_args._raw_input = SimpleNamespace(**values).__dict__
    return server_args
