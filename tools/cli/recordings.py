"""Commands around recordings of whole spaces: record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4tune.tools.cli.options import (
    AsJson,
    Budget,
    Cache,
    Context,
    Drafts,
    Gpus,
    Heads,
    Jobs,
    NamedKernel,
    OneTp,
    Quiet,
    devices,
    fail,
    given_options,
    read_count,
    read_duration,
    say,
    targets,
)


def record_command(
    kernel: NamedKernel,
    rows: Annotated[int, typer.Option(help="Query rows of a call.")] = 64,
    target: Annotated[
        str | None,
        typer.Option(autocompletion=targets, help="Compute capability that the GPU here must have, such as sm_90."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(autocompletion=devices, help="Card that the GPU here must be, such as h200.")
    ] = None,
    context: Context = None,
    draft_tokens: Drafts = None,
    heads: Heads = None,
    tp: OneTp = None,
    cache: Cache = None,
    passes: Annotated[int, typer.Option(min=1, help="How often each usable config is measured.")] = 2,
    budget: Budget = None,
    jobs: Jobs = None,
    gpus: Gpus = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write or to go on with [default: named after the problem]"),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure every valid config of one problem on the GPU here into one file.

    The file holds all rounds of every config and of the server's kernel beside it, and needs no GPU to be read.
    Configs of one machine code and launch plan are measured once. Each config is kept when it ends: after --budget,
    Ctrl-C or a crash, the same command goes on from there. A second pass measures all again in reverse order.

    Exit status: 0 with a best config, also when --budget or Ctrl-C ended it; 1 where no config is usable; 2 without
    such a GPU, for a file of something else, or for bad input.
    """
    from dsv4tune.codegen import ops
    from dsv4tune.tools import progress, record, tune
    from dsv4tune.tools.sites import Local

    try:
        if rows < 1:
            raise ValueError(f"--rows must be at least 1, not {rows}")
        site = Local(gpus)
        card, on_gpu = tune.choose_device(device, target, site)
        request = record.Request(
            kernel=ops.get(kernel).name,
            rows=rows,
            max_context=read_count(context or "1M", "--context"),
            draft_tokens=draft_tokens or 0,
            options=given_options(heads=heads, tp=tp, cache=cache),
            device=card,
            on_gpu=on_gpu,
            passes=passes,
            budget_s=None if budget is None else read_duration(budget, "--budget"),
            jobs=jobs,
            file=output,
            site=site,
        )
        with progress.watching(quiet, say) as watch:
            result = record.record(request, watch)
    except (ValueError, OSError) as error:
        fail(error)
    typer.echo(json.dumps(result) if as_json else record.in_words(result))
    if result["best"] is None:
        raise typer.Exit(1)


COMMANDS = {"record": record_command}
