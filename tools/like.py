"""Reading an SGLang start command: the facts that a server's call shapes follow from.

Where SGLang is installed its own argument parser reads the command; elsewhere the few options below are read, as SGLang
0.5.23 spells them. What SGLang then derives from them (its defaults by GPU memory, the sizes that it captures) is
derived here, because doing it with SGLang's own code takes the model and a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.models import RATIOS, Model, by_path
from dsv4tune.runtime.wanted import Server, batches, extras, table_pages

#: SGLang's default of requests at a time for DeepSeek-V4.
RUNNING = 256
#: Below so many GiB: tokens of a prefill chunk, and the largest captured batch with fewer than 4 ranks and with more.
_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
#: Tokens of a request in a verify step where the command names an algorithm and no number.
DRAFT_TOKENS = 4
#: Compressed caches of the model's layers by their compression ratio.
_CACHES = {ratio: name for name, ratio in RATIOS.items()}

#: What is read where SGLang is not installed: its field, the spellings, and the type.
OPTIONS: tuple[tuple[str, tuple[str, ...], type], ...] = (
    ("model_path", ("--model-path", "--model"), str),
    ("tp_size", ("--tp-size", "--tp", "--tensor-parallel-size"), int),
    ("dp_size", ("--dp-size", "--dp", "--data-parallel-size"), int),
    ("attn_dp_size", ("--attn-dp-size", "--attention-data-parallel-size"), int),
    ("attn_cp_size", ("--attn-cp-size", "--attention-context-parallel-size"), int),
    ("enable_dp_attention", ("--enable-dp-attention",), bool),
    ("context_length", ("--context-length",), int),
    ("max_running_requests", ("--max-running-requests",), int),
    ("chunked_prefill_size", ("--chunked-prefill-size",), int),
    ("speculative_algorithm", ("--speculative-algorithm",), str),
    ("speculative_num_steps", ("--speculative-num-steps",), int),
    ("speculative_num_draft_tokens", ("--speculative-num-draft-tokens",), int),
    ("speculative_dspark_block_size", ("--speculative-dspark-block-size",), int),
    ("cuda_graph_max_bs_decode", ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"), int),
    ("cuda_graph_bs_decode", ("--cuda-graph-bs-decode", "--cuda-graph-bs"), list),
    ("cuda_graph_config", ("--cuda-graph-config",), str),
    ("disable_cuda_graph_padding", ("--disable-cuda-graph-padding",), bool),
)


@dataclass(frozen=True)
class Start:
    """What a start command says.

    Attributes:
        attention_ranks: ranks that share the query heads.
        context: tokens.
        draft_tokens: tokens of a request in a verify step; 0 without speculative decoding.
        batches: requests of each captured graph.
        chunk: rows of a prefill chunk.
        model: that of `MODELS` by its name, with what its files say where they are here.
        read_by: who read the command.
        assumed: whether the name alone decided about the model, because its files are not here.
        passed_over: options that are not read.
    """

    attention_ranks: int
    context: int
    draft_tokens: int
    batches: tuple[int, ...]
    chunk: int
    model: Model
    read_by: str
    assumed: bool = False
    passed_over: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Of the captured calls: a row for each request, and in a verify step one for each of its draft tokens."""
        each = max(1, self.draft_tokens)
        return tuple(sorted({size * factor for size in self.batches for factor in (1, each)}))

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.model.heads_of(self.attention_ranks)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios of its layers."""
        return self.model.ratios(self.draft_tokens > 0)

    @property
    def server(self) -> Server:
        table = table_pages(self.context, self.draft_tokens)
        prompts = (self.chunk,) if self.chunk > 0 else ()
        return Server(table, self.rows, prompts, (self.heads,), extras(table, self.model.topk, self.ratios))

    def problems(self, kernels: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Kernel and options of each kind of call, as a search is told them."""
        found: list[tuple[str, dict[str, Any]]] = []
        for kernel in kernels:
            if kernel == "indexer":
                found.append((kernel, {}))
                continue
            caches = [_CACHES[ratio] for ratio in self.ratios]
            found += [(kernel, {"heads": self.heads, "cache": cache, "model": self.model}) for cache in caches]
        return found

    def rows_to_search(self, card: Device) -> list[int]:
        """Few of the captured row counts, which enclose the others; on sm_120 prompts take the same functions."""
        prompts = [self.chunk] if self.chunk > 0 and card.silicon.arch // 10 == 12 else []
        return [*spread(self.rows), *prompts]

    def __str__(self) -> str:
        drafts = f", {self.draft_tokens} draft tokens" if self.draft_tokens else ""
        model = ""
        if self.assumed:
            model = f"; the model is not on this machine: taken for {self.model.title}, --model names another"
        passed = f"; passed over: {' '.join(self.passed_over)}" if self.passed_over else ""
        return (
            f"{self.attention_ranks} ranks share {self.model.heads} heads, context {self.context}{drafts}, "
            f"{len(self.batches)} captured batches up to {max(self.batches)} (read by {self.read_by}{model}{passed})"
        )


def read(command: str, card: Device, memory_gb: float | None = None, model: Model | None = None) -> Start:
    """The facts of a start command, for servers on this card.

    Args:
        memory_gb: of one GPU, in GiB; the card's by its table row unless given.
        model: which it is, where its files are not here.

    Raises:
        ValueError: the text is no start command, or one that the kernels don't serve.
    """
    argv = arguments(command)
    parsed = _by_sglang(argv) if importlib.util.find_spec("sglang") is not None else None
    values, read_by = (parsed, "SGLang's own parser") if parsed is not None else (_by_hand(argv), "dsv4tune")
    tp, memory = int(values.get("tp_size") or 1), memory_gb or card.memory_gb
    if not memory:
        raise ValueError(f"the memory of {card.name} is not known: name it in GB with --gpu-memory")
    groups = int(values.get("attn_dp_size") or 1)
    if values.get("enable_dp_attention") and groups == 1:
        groups = int(values.get("dp_size") or 1)
    split = groups * int(values.get("attn_cp_size") or 1)
    config = _model_config(values.get("model_path"))
    if model is not None and config:
        raise ValueError("--model is said by the model's config.json already: leave it out")
    named = model is not None
    model = _model(model or by_path(values.get("model_path")), config)
    if tp % split or model.heads % (tp // split):
        raise ValueError(f"--like: {tp} ranks in {split} attention groups don't share the model's {model.heads} heads")
    drafts = _draft_tokens(values)
    chunk = values.get("chunked_prefill_size")
    if chunk is None:
        chunk = next(tokens for below, tokens, *_ in _BY_MEMORY if memory < below)
    return Start(
        attention_ranks=tp // split,
        context=int(values.get("context_length") or config.get("max_position_embeddings") or 1 << 20),
        draft_tokens=drafts,
        batches=tuple(_captured(values, tp, groups, tp // split, bool(drafts), memory)),
        chunk=max(0, int(chunk)) // groups,
        model=model,
        read_by=read_by,
        assumed=not config and not named,
        passed_over=tuple(values.get("passed_over") or ()),
    )


def arguments(command: str) -> list[str]:
    """A start command's options: what follows ``sglang.launch_server`` or ``sglang serve``.

    Raises:
        ValueError: it starts no server.
    """
    try:
        words = [word for word in shlex.split(command) if word != "\\\n" and word.strip()]
    except ValueError as error:
        raise ValueError(f"--like takes a start command, and this one can't be read ({error})") from error
    for at, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("launch_server.py"):
            return words[at + 1 :]
        if word == "serve" and at and words[at - 1].split("/")[-1] == "sglang":
            return words[at + 1 :]
    raise ValueError('--like takes a start command such as "python -m sglang.launch_server --model-path ... --tp 8"')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--like: {message}")


def _by_sglang(argv: list[str]) -> dict[str, Any] | None:
    """By SGLang's own parser, or None where it can't be imported here."""
    try:
        server_args = importlib.import_module("sglang.srt.server_args")
        parser = _Parser(prog="sglang", add_help=False)
        server_args.ServerArgs.add_cli_args(parser)
        if "--config" in argv:
            merger = importlib.import_module("sglang.srt.utils.server_args_config_parser")
            argv = merger.ConfigArgumentMerger(parser).merge_config_with_args(argv)
    except ImportError:
        return None
    values = vars(parser.parse_args(argv))
    # Older versions have one option for both phases.
    for name in ("cuda_graph_max_bs", "cuda_graph_bs"):
        values.setdefault(f"{name}_decode", values.get(name))
    return values


def _by_hand(argv: list[str]) -> dict[str, Any]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, spellings, kind in OPTIONS:
        if kind is bool:
            parser.add_argument(*spellings, dest=name, action="store_true")
        elif kind is list:
            parser.add_argument(*spellings, dest=name, type=int, nargs="+")
        else:
            parser.add_argument(*spellings, dest=name, type=_count if kind is int else kind)
    known, rest = parser.parse_known_args(argv)
    passed = [word.split("=")[0] for word in rest if word.startswith("--")]
    if "--config" in passed:
        raise ValueError("--like: --config needs SGLang's own parser: run this beside SGLang, or name its options here")
    return {**vars(known), "passed_over": passed}


#: Factors of a count's suffix, as SGLang takes them.
_FACTORS: dict[str, int] = {
    "": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4,
    "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4,
}  # fmt: skip


def _count(text: str) -> int:
    """131072 or 128Ki; 131k is 131,000."""
    found = re.fullmatch(r"(\d+(?:\.\d+(?!.*i))?)(|k|[KMGT]i|[MGT])", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"takes a count such as 131072 or 128Ki, not '{text}'")
    return round(float(found[1]) * _FACTORS[found[2]])


# -- what SGLang derives ----------------------------------------------------------------------------------------


def _draft_tokens(values: Mapping[str, Any]) -> int:
    if not values.get("speculative_algorithm"):
        return 0
    if values.get("speculative_num_draft_tokens"):
        return int(values["speculative_num_draft_tokens"])
    if values.get("speculative_dspark_block_size"):
        return int(values["speculative_dspark_block_size"]) + 1
    steps = values.get("speculative_num_steps")
    return int(steps) + 1 if steps else DRAFT_TOKENS


def _captured(
    values: Mapping[str, Any], tp: int, groups: int, ranks: int, speculative: bool, memory: float
) -> list[int]:
    """Requests of the graphs, as SGLang 0.5.23 picks them."""
    decode = _decode_config(values.get("cuda_graph_config"))
    most = decode.get("max_bs") or values.get("cuda_graph_max_bs_decode")
    sizes = decode.get("bs") or values.get("cuda_graph_bs_decode")
    running = values.get("max_running_requests")
    if most is None:
        most = next(row[2 if tp < 4 else 3] for row in _BY_MEMORY if memory < row[0])
        most = min(int(most), int(running)) if running else most
    padding = not values.get("disable_cuda_graph_padding")
    sizes = sorted(int(size) for size in sizes) if sizes else batches(int(most), speculative, padding)
    # Attention groups pad their batches to a multiple of their ranks.
    multiple = ranks if groups > 1 else 1
    room = -(-max(1, int(running or RUNNING) // groups) // multiple) * multiple
    if sizes[-1] > room:
        sizes = [*sizes, room]
    kept = sorted({size for size in sizes if size <= room and size % multiple == 0})
    if not kept:
        raise ValueError(f"--like: no captured batch fits {room} requests at a time in multiples of {multiple}")
    return kept


def _decode_config(given: Any) -> dict[str, Any]:
    """The decode phase of ``--cuda-graph-config``, a JSON text or what SGLang's parser made of it."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"--like: --cuda-graph-config is no JSON ({error})") from error
    if isinstance(given, Mapping):
        phase = given.get("decode")
        return dict(phase) if isinstance(phase, Mapping) else {}
    phase = getattr(given, "decode", None)
    return {name: getattr(phase, name, None) for name in ("max_bs", "bs")} if phase is not None else {}


def _model(model: Model, config: Mapping[str, Any]) -> Model:
    """With what its files say, where they are here."""
    # Draft layers follow those that are counted.
    ratios = Counter((config.get("compress_ratios") or ())[: config.get("num_hidden_layers")])
    return replace(
        model,
        heads=int(config.get("num_attention_heads") or model.heads),
        topk=int(config.get("index_topk") or model.topk),
        layers={_CACHES[ratio]: count for ratio, count in ratios.items() if ratio in _CACHES} or model.layers,
    )


def _model_config(path: Any) -> dict[str, Any]:
    """The model's ``config.json`` from its folder or the hub's cache; {} where it is in neither."""
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    cached = (hub.expanduser() / f"models--{str(path).replace('/', '--')}" / "snapshots").glob("*/config.json")
    for file in (Path(str(path)) / "config.json", *sorted(cached, key=_modified, reverse=True)):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                # A model that also sees keeps what is asked for in a part of its own.
                text = found.get("text_config")
                return {**text, **found} if isinstance(text, dict) else found
    return {}


def _modified(file: Path) -> float:
    return file.lstat().st_mtime


def spread(rows: Sequence[int]) -> list[int]:
    """The first and last row count and about every doubling between: one config is used between two that share it."""
    chosen = [min(rows)]
    for count in sorted(rows):
        if count >= 2 * chosen[-1]:
            chosen.append(count)
    return [*chosen, max(rows)] if chosen[-1] != max(rows) else chosen
