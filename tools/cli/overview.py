"""Commands that show where things stand: report, doctor."""

from __future__ import annotations

import json
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
    Kernel,
    Like,
    Target,
    Tp,
    fail,
    paint,
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
    kernel: Kernel = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    tp: Tp = None,
    draft_tokens: Drafts = None,
    layers: Annotated[
        str, typer.Option(help="Layers of the model by their compressed cache, for the time of a decode step.")
    ] = "none=2,c4=21,c128=20",
    db: Db = None,
) -> None:
    """Write one self-contained page: times beside the byte floor, the search, which knobs matter, what is missing.

    From the database, the shipped entries and bench files. It loads nothing, so it works offline.

    Exit status: 0 written, 2 for bad input or with nothing to show.
    """
    from dsv4tune.codegen import devices
    from dsv4tune.tools.catalogue import write_whole

    try:
        from dsv4tune.tools.report import budget, page
    except ModuleNotFoundError as error:
        fail(f"a report needs {error.name}, which is not installed: pip install plotly")

    def render() -> str:
        # Batches follow from the memory: of the GPU here, else of the card that the shipped entries are for.
        server, tokens = served(
            lambda: devices.here() or devices.named("h200"), like, gpu_memory, context, tp, draft_tokens
        )
        named = budget.read_layers(layers)
        wanted = page.Request(db, bench or (), kernel, server, tokens, server.heads[0], named, like or "")
        return page.render(wanted, say)

    text = reading(render)
    try:
        write_whole(output, text)
    except OSError as error:
        fail(f"can't write {output} ({error.strerror or error}): choose another file with -o")
    typer.echo(f"wrote {output}: open it in a browser")


_COLOURS = {"ok": "green", "note": "cyan", "gap": "yellow", "broken": "red"}


def doctor_command(
    target: Target = None,
    device: Card = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    tp: Tp = None,
    draft_tokens: Drafts = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Look at everything that tuning and serving need, and say what is broken or missing, and what mends it.

    Exit status: 0 with nothing broken, 1 where something is, 2 for bad input. Sizes without an entry are gaps, not
    faults: there the server's own kernels answer.
    """
    from dsv4tune.codegen import devices
    from dsv4tune.tools import doctor, explain

    def ask() -> doctor.Request:
        card = devices.named(device, target) if device is not None or target is not None else None
        server, tokens = served(lambda: explain.card_for(device, target), like, gpu_memory, context, tp, draft_tokens)
        return doctor.Request(card, server, tokens, db)

    request = reading(ask)
    found = []
    for finding in doctor.examine(request):
        found.append(finding)
        if not as_json:
            typer.echo(f"{paint(f'{finding.status:8}', _COLOURS[finding.status])}{finding.what}: {finding.text}")
            if finding.fix:
                typer.echo(f"        {finding.fix}")
    if as_json:
        typer.echo(json.dumps({"broken": doctor.broken(found), "findings": [f.to_json() for f in found]}))
    if doctor.broken(found):
        raise typer.Exit(1)


COMMANDS = {"report": report_command, "doctor": doctor_command}
