"""Commands on what a server would do: explain, warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import counted
from dsv4tune.tools.cli.options import (
    AsJson,
    Card,
    Context,
    Db,
    Drafts,
    GpuMemory,
    Jobs,
    Like,
    ModelName,
    OneKernel,
    Rows,
    Target,
    Tp,
    echo,
    reading,
    say,
    served,
    times_of,
)

Chunk = Annotated[str | None, typer.Option(help="Rows of a prefill chunk such as 8k, 0 for none [default: 0]")]
Policy = Annotated[
    str,
    typer.Option(
        autocompletion=lambda: ["measured", "strict", "predicted"],
        help="Evidence that an entry needs: measured, strict or predicted.",
    ),
]


def explain_command(
    rows: Rows = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    model: ModelName = None,
    tp: Tp = None,
    context: Context = None,
    draft_tokens: Drafts = None,
    chunk: Chunk = None,
    kernel: OneKernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Say which entry a server would choose for each call, and why.

    Needs no server. Of more than 8 row counts it tells in a block which fare alike, of fewer the times and what was
    refused too.

    Exit status: 0 also where the server's own kernels would stay, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (
        rows or ("64" if like is None else "captured"),
        like,
        gpu_memory,
        model,
        tp,
        context,
        draft_tokens,
        chunk,
        kernel,
        target,
        device,
        policy,
        db,
    )
    found = reading(lambda: explain.explain(_served(*given), say))
    if as_json:
        echo(json.dumps({"results": found}))
        return
    if len({one["problem"]["rows"] for one in found}) > explain.FEW:
        for line in explain.summary(found):
            echo(line)
        say(f"times, and what was refused, are told of up to {explain.FEW} row counts, such as with --rows 64")
        return
    for one in found:
        chosen = one["chosen"]
        echo(f"{one['problem']['key']}, {one['width'] or 'any'} columns")
        if chosen is None:
            echo(f"  the server's own kernel stays: {one['why']}")
        else:
            score = f"{chosen['score']:.3f} of {chosen['yardstick']}"
            echo(f"  {Config(chosen['config']).brief}")
            where = f"{chosen['provenance']} on {chosen['device']}, {counted(chosen['rows'], 'row')}"
            echo(f"  {where}: {times_of(chosen['times_us'])}; {score}")
            echo(f"  from {chosen['origin']}, {one['why']}")
        for line in one["refused"]:
            echo(f"  refused: {line}")


def warm_command(
    rows: Rows = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    model: ModelName = None,
    tp: Tp = None,
    context: Context = None,
    draft_tokens: Drafts = None,
    chunk: Chunk = None,
    kernel: OneKernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    jobs: Jobs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Compile beforehand what a server would choose.

    A server of these arguments then starts without compiling.

    Exit status: 0 all compiled, 1 where something could not be, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (
        rows or "captured",
        like,
        gpu_memory,
        model,
        tp,
        context,
        draft_tokens,
        chunk,
        kernel,
        target,
        device,
        policy,
        db,
    )
    done = reading(lambda: explain.warm(_served(*given), jobs or 0, say))
    if as_json:
        echo(json.dumps(done))
    else:
        for name, why in done["failed"].items():
            say(f"{name}: {why}")
        compiled = done["texts"] - done["known"] - len(done["failed"])
        echo(
            f"{done['with_entry']} of {done['shapes']} call shapes have an entry; of {done['texts']} texts {compiled} "
            f"compiled now and {done['known']} before, in {done['seconds']} s, into {done['cache']}"
        )
        if done["with_entry"] < done["shapes"]:
            say("the others keep the server's own kernel: `dsv4tune explain` with the same options says why")
    if done["failed"]:
        raise typer.Exit(1)


def _served(
    rows: str,
    like: str | None,
    gpu_memory: str | None,
    model: str | None,
    tp: int | None,
    context: str | None,
    draft_tokens: int | None,
    chunk: str | None,
    kernel: str | None,
    target: str | None,
    device: str | None,
    policy: str,
    db: Path | None,
) -> Any:
    from dsv4tune.codegen import ops
    from dsv4tune.codegen.words import unknown
    from dsv4tune.tools import explain
    from dsv4tune.tuned.selector import POLICIES

    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    kernels = list(ops.OPS) if kernel is None else [ops.get(kernel).name]
    card = explain.card_for(device, target)
    server, *_ = served(lambda: card, like, gpu_memory, context, tp, draft_tokens, rows, chunk, model)
    return explain.Request(server, kernels, card, policy, db)


COMMANDS = {"explain": explain_command, "warm": warm_command}
