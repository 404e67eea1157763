"""Options that several commands share, how their values are read, and how results are printed."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import counted, visible

if TYPE_CHECKING:
    from dsv4tune.codegen.models import Model
    from dsv4tune.tuned.store import Filter


class Sampler(str, Enum):
    guided = "guided"
    tpe = "tpe"
    gp = "gp"
    nsga = "nsga"
    random = "random"
    grid = "grid"


class HowMuch(str, Enum):
    quick = "quick"
    normal = "normal"
    full = "full"


def kernels() -> list[str]:
    from dsv4tune.codegen.ops import OPS

    return list(OPS)


def targets() -> list[str]:
    from dsv4tune.codegen.devices import TARGETS

    return list(TARGETS)


def models() -> list[str]:
    from dsv4tune.codegen.models import MODELS

    return list(MODELS)


def devices() -> list[str]:
    from dsv4tune.codegen.devices import DEVICES

    return list(DEVICES)


Db = Annotated[
    Path | None, typer.Option("--db", help="SQLite database [default: $DSV4TUNE_DB, else the user's data folder]")
]
OneKernel = Annotated[
    str | None,
    typer.Option("--kernel", autocompletion=kernels, help="Only this kernel: indexer or mla_decode."),
]
NamedKernel = Annotated[str, typer.Option("--kernel", autocompletion=kernels, help="Which one: indexer or mla_decode.")]
Target = Annotated[
    str | None,
    typer.Option("--target", autocompletion=targets, help="Compute capability, such as sm_120; needs no GPU."),
]
Card = Annotated[
    str | None, typer.Option("--device", autocompletion=devices, help="Card, such as rtx-pro-6000; needs no GPU.")
]
Rows = Annotated[
    str | None,
    typer.Option("--rows", help="Query rows of a call: 64, a list 1,16,64, or 'captured' for SGLang's graph sizes."),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context", "--max-context", help="Context length of the server in tokens, such as 128k [default: 1M]"
    ),
]
Drafts = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens", min=0, help="Draft tokens of a request when verifying; --rows counts them [default: 0]"
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="COMMAND",
        help="Start command of a server, in quotes: its ranks, context, captured sizes and draft tokens.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory", help="With --like: GB of one GPU, by which SGLang sizes its batches [default: the card's]"
    ),
]
Heads = Annotated[
    int | None, typer.Option("--heads", min=1, help="mla_decode: query heads of a rank [default: by --model and --tp]")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        autocompletion=models,
        help="DeepSeek-V4 of the server: flash (64 query heads, c4 of 512 columns) or pro (128, 1024) [default: flash]",
    ),
]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share the model's query heads [default: 8]")]
OneTp = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="mla_decode: ranks that share the model's query heads, for --heads [default: 8]"),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        autocompletion=lambda: ["c4", "c128", "none"],
        help="mla_decode: compressed cache of the layer: c4, c128 or none [default: c4]",
    ),
]
Budget = Annotated[str | None, typer.Option(help="Stop after this time, such as 90s, 10m or 1h30m.")]
Gpus = Annotated[
    str | None, typer.Option(help="GPUs to measure on, a process each: all, or numbers such as 0,1. [default: 0]")
]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Compiler processes [default: one a core]")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the result and errors.")]
OneTarget = Annotated[
    str | None, typer.Option("--target", autocompletion=targets, help="Only this compute capability, such as sm_120.")
]
OneDevice = Annotated[
    str | None,
    typer.Option(
        "--device", autocompletion=devices, help="Only the silicon of this card, such as rtx-pro-6000, or 'here'."
    ),
]
Words = Annotated[
    str | None,
    typer.Option("--problem", help="Only problems with these words in their key: 'rows=64 heads=8'."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without showing first what would be done.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; everything else goes to stderr.")]


def fail(error: object) -> NoReturn:
    """One line on stderr, exit status 2."""
    say("dsv4tune: " + "; ".join(line.strip() for line in str(error).splitlines()))
    raise typer.Exit(2)


def echo(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print; what others wrote, as in a database or a file's name, moves no cursor and sets no title."""
    lines = (visible(line.expandtabs()) for line in text.split("\n"))
    try:
        typer.echo("\n".join(lines), nl=nl, err=err)  # noqa: TID251
    except OSError as error:
        if err:
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what its buffer holds goes nowhere either
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(1) from error  # whoever read it has enough, as after `| head`
        fail(f"can't write to stdout ({error.strerror})")


def say(text: str) -> None:
    # Whoever read stderr may be gone, as after `| head`: no reason to end a search.
    with contextlib.suppress(OSError):
        echo(text, err=True)


def echo_painted(text: str, colour: str) -> None:
    """Print our own words, without a line's end; coloured where they go to a terminal; https://no-color.org."""
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour), nl=False)  # noqa: TID251


def given_options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def only(
    kernel: str | None, device: str | None, target: str | None, words: str | None, rows: int | None = None
) -> Filter:
    """The problems that the filters of a command line mean.

    Raises:
        ValueError: an unknown kernel, device or target.
    """
    from dsv4tune.codegen import devices, ops
    from dsv4tune.tuned.store import Filter

    if kernel is not None:
        ops.get(kernel)
    if target is not None:
        devices.named(target=target)
    given: dict[str, Any] = {}
    if device is not None:
        card = devices.here() if device == "here" else devices.named(device, target)
        if card is None:
            raise ValueError("--device here: there is no GPU here")
        silicon = card.silicon
        target, given = silicon.target, {"sm_count": silicon.sm_count, "shared_bytes": silicon.shared_bytes}
    return Filter(kernel, rows, target, words=tuple((words or "").split()), **given)


def confirmed(question: str, yes: bool) -> bool:
    """Whether to go on: --yes, or a person at a terminal who says so."""
    if yes:
        return True
    if not sys.stdin.isatty():
        say("nothing was written: --yes does it")
        return False
    return typer.confirm(question, err=True)


def database(db: Path | None) -> Path:
    from dsv4tune.tuned.store import default_path

    return db or default_path()


def reading(read: Any) -> Any:
    from dsv4tune.tuned.store import StoreError

    try:
        return read()
    except (StoreError, ValueError, OSError) as error:
        fail(error)


_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def read_count(text: str, option: str) -> int:
    """A count, with 1024-based k and M as context lengths have them."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if found is None or int(found[1]) == 0:
        example = "64 or 1,16,64" if option == "--rows" else "131072 or 128k"
        raise ValueError(f"{option} takes whole numbers above 0, such as {example}, not '{text}'")
    return int(found[1]) * _UNITS[found[2].lower()]


def read_weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--weights takes numbers, such as 1,2,0.5, not '{text}'") from None


def read_rows(text: str, draft_tokens: int = 0) -> list[int]:
    from dsv4tune.runtime.wanted import captured_rows

    if text == "captured":
        return captured_rows(draft_tokens)
    return list(dict.fromkeys(read_count(part, "--rows") for part in text.split(",")))


def read_memory(text: str | None) -> float | None:
    """GB of a GPU, from 96 or 96G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|gb|gib)?", (text or "").strip().lower())
    if text is not None and (found is None or float(found[1]) <= 0):
        raise ValueError(f"--gpu-memory takes GB such as 96, not '{text}'")
    return float(found[1]) if found is not None else None


def read_context(text: str | None) -> int:
    """Tokens of a server's context, the model's own unless given."""
    tokens = read_count(text or "1M", "--context")
    if tokens > 1 << 20:
        raise ValueError(f"--context {text} is more than DeepSeek-V4's 1M")
    return tokens


def read_model(name: str | None) -> Model | None:
    from dsv4tune.codegen.models import named

    return None if name is None else named(name)


def refuse_memory(text: str | None) -> None:
    if text is not None:
        raise ValueError("--gpu-memory goes with --like: name both")


def served(
    card: Any,
    like: str | None = None,
    gpu_memory: str | None = None,
    context: str | None = None,
    tp: int | None = None,
    draft_tokens: int | None = None,
    rows: str = "captured",
    chunk: str | None = None,
    model: str | None = None,
) -> tuple[Any, int, Model]:
    """The server that these options describe (`dsv4tune.runtime.wanted.Server`), its context in tokens and its model.

    Args:
        card: a function that gives the card that the server runs on; asked where a start command is to be read.

    Raises:
        ValueError: a value that makes no sense, or two options that say the same.
    """
    from dsv4tune.codegen.models import FLASH
    from dsv4tune.runtime import wanted

    counts = None if rows == "captured" else read_rows(rows)
    if like is None:
        refuse_memory(gpu_memory)
        tokens = read_context(context)
        prompt = 0 if chunk in (None, "0") else read_count(str(chunk), "--chunk")
        named = read_model(model) or FLASH
        return wanted.server(tokens, tp or 8, draft_tokens or 0, counts, prompt, named), tokens, named
    start = read_like(
        card, like, read_memory(gpu_memory), context=context, tp=tp, draft_tokens=draft_tokens, chunk=chunk, model=model
    )
    server = start.server
    return (server if counts is None else replace(server, rows=tuple(counts))), start.context, start.model


def read_like(
    card: Any, like: str, memory: float | None, tell: Any = None, model: str | None = None, **others: Any
) -> Any:
    """The facts of a start command (`dsv4tune.tools.like.Start`), told on stderr or to `tell`; `model` for one whose
    files are not here.

    Raises:
        ValueError: it is none, or one of the `others` was given, which it says already.
    """
    from dsv4tune.tools import like as reading_like

    for name in given_options(**others):
        raise ValueError(f"--{name.replace('_', '-')} is said by --like already: leave one of them out")
    start = reading_like.read(like, card(), memory, read_model(model))
    (tell or say)(f"like: {start}")
    return start


def read_duration(text: str, option: str = "--budget") -> float:
    """Seconds, from a time such as 90s, 10m, 1h or 1h30m; a bare number is seconds."""
    words = text.strip()
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]|$)", words)
    if not parts or "".join(number + unit for number, unit in parts) != words:
        raise ValueError(f"{option} takes a time such as 90s, 10m or 1h30m, not '{text}'")
    return sum(float(number) * {"s": 1, "m": 60, "h": 3600}[unit or "s"] for number, unit in parts)


def summary(result: dict[str, Any]) -> str:
    trials, best = result["trials"], result["best"]
    counts = ", ".join(f"{n} {name}" for name, n in trials.items() if n and name != "total")
    lines = [
        f"{result['problem']['key']}",
        f"  {result['status']}: {result['tried']} tried in {result['seconds']:.1f} s, "
        f"{counted(trials['total'], 'trial')} stored{f' ({counts})' if counts else ''}",
    ]
    lines.append(f"  {one_line(best)}" if best else "  nothing usable")
    for name, reference in result["references"].items():
        if "missing" not in reference:
            lines.append(f"  {name} ({reference['version']}): {times_of(reference['times_us'])}")
    lines.append(f"  stored in {result['db']}")
    return "\n".join(lines)


def one_line(best: dict[str, Any]) -> str:
    return f"{figures(best)}\n  {Config(best['config']).brief}"


def figures(best: dict[str, Any]) -> str:
    times = best.get("measured_us") or best["predicted_us"]
    return f"{best['provenance']}: {times_of(times)}; {best['score']:.3f} of {best['yardstick']}"


def final_line(part: dict[str, Any], score: float) -> str:
    second = (
        f"; the next, {Config(part['runner_up']).brief}, {part['runner_up_score']:.3f}" if part["runner_up"] else ""
    )
    verdict = "stands for the server's kernel" if part["won"] else "the server's kernel stays"
    return (
        f"final of {part['finalists']}, {part['rounds']} rounds: {score:.3f}, spread {part['spread']:.1%}, margin "
        f"{part['margin']:.0%}: {verdict}{second}"
    )


def times_of(times: dict[Any, float]) -> str:
    return ", ".join(f"{us:.2f} us at {length}" for length, us in times.items())
