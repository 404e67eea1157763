"""Commands that show where things stand: report, doctor, ab."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dsv4tune.tools.cli.options import (
    AsJson,
    Card,
    Context,
    Db,
    Drafts,
    GpuMemory,
    Like,
    ModelName,
    OneKernel,
    Target,
    Tp,
    echo,
    echo_painted,
    fail,
    read_count,
    read_duration,
    reading,
    say,
    served,
)

Benches = Annotated[
    list[Path] | None, typer.Option("--bench", help="File of `bench -o` to show beside it; may be given again.")
]


def report_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("report.html"),
    bench: Benches = None,
    kernel: OneKernel = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    model: ModelName = None,
    tp: Tp = None,
    draft_tokens: Drafts = None,
    device: Card = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers by compressed cache for the time of a decode step: c4=21,c128=20 [default: those of the model]"
        ),
    ] = None,
    db: Db = None,
) -> None:
    """Write one self-contained page of all that was tuned.

    Times beside the byte floor, the search, which knobs matter, what is missing. From the database, the shipped entries
    and bench files. It loads nothing, so it works offline.

    Exit status: 0 written, 2 for bad input or with nothing to show.
    """
    from dsv4tune.codegen import devices
    from dsv4tune.tuned import files

    try:
        from dsv4tune.tools.report import budget, page
    except ModuleNotFoundError as error:
        fail(f"a report needs {error.name}, which is not installed: pip install plotly")

    def render() -> str:
        named = devices.named(device) if device is not None else None
        # Batches follow from the memory: of the GPU here, else of the card that the shipped entries are for.
        card = named or devices.here() or devices.named("h200")
        server, tokens, of = served(lambda: card, like, gpu_memory, context, tp, draft_tokens, model=model)
        counts = of.layers if layers is None else budget.read_layers(layers)
        wanted = page.Request(db, bench or (), kernel, server, tokens, counts, like or "", named)
        return page.render(wanted, say)

    text = reading(render)
    reading(lambda: files.write(str(output), [text]))
    echo(f"wrote {output}: open it in a browser")


_COLOURS = {"ok": "green", "note": "cyan", "gap": "yellow", "broken": "red"}


def doctor_command(
    target: Target = None,
    device: Card = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    model: ModelName = None,
    tp: Tp = None,
    draft_tokens: Drafts = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Say what tuning and serving lack here, and what mends it.

    Exit status: 0 with nothing broken, 1 where something is, 2 for bad input. Sizes without an entry are gaps, not
    faults: there the server's own kernels answer.
    """
    from dsv4tune.codegen import devices
    from dsv4tune.tools import coverage, doctor, explain

    def ask() -> doctor.Request:
        card = devices.named(device, target) if device is not None or target is not None else None
        server, tokens, _ = served(
            lambda: explain.card_for(device, target), like, gpu_memory, context, tp, draft_tokens, model=model
        )
        start = coverage.Like(like, gpu_memory or "", model or "") if like is not None else None
        return doctor.Request(card, server, tokens, db, start)

    request = reading(ask)
    found: list[doctor.Finding] = []

    def tell_fix(following: str = "") -> None:
        """What mends the last finding, unless the one that follows is mended by the same."""
        if not as_json and found and found[-1].fix not in ("", following):
            echo(f"        {found[-1].fix}")

    for finding in doctor.examine(request):
        tell_fix(finding.fix)
        found.append(finding)
        if not as_json:
            echo_painted(f"{finding.status:8}", _COLOURS[finding.status])
            echo(f"{finding.what}: {finding.text}")
    tell_fix()
    if as_json:
        echo(json.dumps({"broken": doctor.broken(found), "findings": [f.to_json() for f in found]}))
    if doctor.broken(found):
        raise typer.Exit(1)


def ab_command(
    off: Annotated[str | None, typer.Option(metavar="URL", help="Server that runs with DSV4TUNE_DISABLE=1.")] = None,
    on: Annotated[str | None, typer.Option(metavar="URL", help="Server that runs with the plugin.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Instead of both: starts a server, here, with the plugin off and on in turn."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side; each goes first in every other one.")] = 3,
    requests: Annotated[str, typer.Option(help="Requests of a run.")] = "64",
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "16",
    input_tokens: Annotated[str, typer.Option(help="Tokens of a prompt, such as 8k.")] = "1k",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer.")] = "256",
    startup: Annotated[str, typer.Option(help="With --start: how long a start may take.")] = "30m",
    bench: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="The benchmark [default: python -m sglang.bench_serving]")
    ] = None,
    bench_args: Annotated[
        str | None, typer.Option(metavar="ARGS", help="More arguments for it, in quotes, such as a --tokenizer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time SGLang's serving benchmark with the plugin off and on.

    Runs each in turn. Prints output tokens a second and the time per output token with their spread over the rounds. A
    difference counts as clear only where every round has it.

    Exit status: 0 measured, whatever came out; 2 for bad input or where a server or the benchmark failed.
    """
    from dsv4tune.tools import ab
    from dsv4tune.tuned.files import write_whole

    def run() -> dict[str, object]:
        if start is None and (off is None or on is None):
            raise ValueError("name two servers with --off and --on, or a command that starts one with --start")
        if start is not None and (off is not None or on is not None):
            raise ValueError("--start takes the place of --off and --on: leave one or the others out")
        load = ab.Load(
            read_count(requests, "--requests"),
            read_count(concurrency, "--concurrency"),
            read_count(input_tokens, "--input-tokens"),
            read_count(output_tokens, "--output-tokens"),
            tuple(shlex.split(bench_args or "")),
        )
        urls: dict[ab.Side, str] = {} if start is not None else {"off": off or "", "on": on or ""}
        limit = read_duration(startup, "--startup")
        result = ab.compare(ab.Request(load, rounds, urls, start or "", limit, bench or ab.BENCHMARK, seed), say)
        if output is not None:
            write_whole(output, [json.dumps(result, indent=1) + "\n"])
        return result

    result = reading(run)
    if as_json:
        echo(json.dumps(result))
        return
    for line in ab.lines(result["figures"]):
        echo(line)


COMMANDS = {"report": report_command, "doctor": doctor_command, "ab": ab_command}
