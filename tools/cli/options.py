"""Options that several commands share, how their values are read, and how results are printed."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dsv4tune.codegen.space import Config

if TYPE_CHECKING:
    from dsv4tune.tuned.store import Filter

Db = Annotated[
    Path | None, typer.Option("--db", help="SQLite database [default: $DSV4TUNE_DB, else the user's data folder]")
]
Heads = Annotated[int | None, typer.Option(min=1, help="mla_decode: query heads of a rank [default: 8]")]
Tp = Annotated[int | None, typer.Option(min=1, help="mla_decode: the same, as ranks that share the model's 64 heads.")]
Cache = Annotated[
    str | None, typer.Option(help="mla_decode: compressed cache of the layer: c4, c4-pro, c128 or none [default: c4]")
]
OneKernel = Annotated[str | None, typer.Option("--kernel", help="Only this kernel: indexer or mla_decode.")]
OneTarget = Annotated[str | None, typer.Option("--target", help="Only this compute capability, such as sm_120.")]
OneDevice = Annotated[
    str | None, typer.Option("--device", help="Only the silicon of this card, such as rtx-pro-6000, or 'here'.")
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


def say(text: str) -> None:
    # Whoever read stderr may be gone, as after `| head`: no reason to end a search.
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


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
        raise ValueError(f"{option} takes whole numbers above 0, such as 131072 or 128k, not '{text}'")
    return int(found[1]) * _UNITS[found[2].lower()]


def read_weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--weights takes numbers, such as 1,2,0.5, not '{text}'") from None


def read_rows(text: str, draft_tokens: int = 0) -> list[int]:
    from dsv4tune.runtime.wanted import CAPTURED, CAPTURED_DRAFTS

    if text == "captured":
        return [size * draft_tokens for size in CAPTURED_DRAFTS] if draft_tokens > 1 else list(CAPTURED)
    return list(dict.fromkeys(read_count(part, "--rows") for part in text.split(",")))


def read_duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if found is None:
        raise ValueError(f"--budget takes a time such as 90s, 10m or 1h, not '{text}'")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def summary(result: dict[str, Any]) -> str:
    trials, best = result["trials"], result["best"]
    counts = ", ".join(f"{n} {name}" for name, n in trials.items() if n and name != "total")
    lines = [
        f"{result['problem']['key']}",
        f"  {result['status']}: {result['tried']} tried in {result['seconds']:.1f} s, "
        f"{trials['total']} trials stored{f' ({counts})' if counts else ''}",
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


def times_of(times: dict[Any, float]) -> str:
    return ", ".join(f"{us:.2f} us at {length}" for length, us in times.items())
