"""Commands on what a server would do: explain, warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4tune.codegen.space import Config
from dsv4tune.tools.cli.options import (
    AsJson,
    Card,
    Context,
    Db,
    Drafts,
    Kernel,
    Rows,
    Target,
    Tp,
    read_count,
    reading,
    say,
    times_of,
)

Chunk = Annotated[str, typer.Option(help="Rows of a prefill chunk such as 8k, 0 for none.")]
TopK = Annotated[int, typer.Option(help="Entries that the indexer selects: 512 (Flash) or 1024 (Pro).")]
Policy = Annotated[
    str,
    typer.Option(
        autocompletion=lambda: ["measured", "strict", "predicted"],
        help="Evidence that an entry needs: measured, strict or predicted.",
    ),
]


def explain_command(
    rows: Rows = "64",
    tp: Tp = 8,
    context: Context = "1M",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = "0",
    kernel: Kernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Say which entry a server of these arguments would choose for each call, and why; needs no server.

    Exit status: 0 also where the server's own kernels would stay, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (rows, tp, context, draft_tokens, topk, chunk, kernel, target, device, policy, db)
    found = reading(lambda: explain.explain(_served(*given), say))
    if as_json:
        typer.echo(json.dumps({"results": found}))
        return
    for one in found:
        chosen = one["chosen"]
        typer.echo(f"{one['problem']['key']}, {one['width'] or 'any'} columns")
        if chosen is None:
            typer.echo(f"  the server's own kernel stays: {one['why']}")
        else:
            score = f"{chosen['score']:.3f} of {chosen['yardstick']}"
            typer.echo(f"  {Config(chosen['config']).brief}")
            typer.echo(f"  {chosen['provenance']}: {times_of(chosen['times_us'])}; {score}")
            typer.echo(f"  from {chosen['origin']}, {one['why']}")
        for line in one["refused"]:
            typer.echo(f"  refused: {line}")


def warm_command(
    rows: Rows = "captured",
    tp: Tp = 8,
    context: Context = "1M",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = "0",
    kernel: Kernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    jobs: Annotated[int, typer.Option(min=0, help="Compiler processes, 0 for one a core.")] = 0,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Compile everything that a server of these arguments would choose, so that it starts without compiling.

    Exit status: 0 all compiled, 1 where something could not be, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (rows, tp, context, draft_tokens, topk, chunk, kernel, target, device, policy, db)
    done = reading(lambda: explain.warm(_served(*given), jobs, say))
    if as_json:
        typer.echo(json.dumps(done))
    else:
        for name, why in done["failed"].items():
            say(f"{name}: {why}")
        compiled = done["texts"] - done["known"] - len(done["failed"])
        typer.echo(
            f"{done['with_entry']} of {done['shapes']} call shapes have an entry; of {done['texts']} texts {compiled} "
            f"compiled now and {done['known']} before, in {done['seconds']} s, into {done['cache']}"
        )
    if done["failed"]:
        raise typer.Exit(1)


def _served(
    rows: str,
    tp: int,
    context: str,
    draft_tokens: int,
    topk: int,
    chunk: str,
    kernel: str | None,
    target: str | None,
    device: str | None,
    policy: str,
    db: Path | None,
) -> Any:
    from dsv4tune.codegen import ops
    from dsv4tune.codegen.words import unknown
    from dsv4tune.runtime import wanted
    from dsv4tune.tools import explain
    from dsv4tune.tuned.selector import POLICIES

    if policy not in POLICIES:
        raise unknown("policy", policy, POLICIES)
    kernels = list(ops.OPS) if kernel is None else [ops.get(kernel).name]
    counts = None if rows == "captured" else [read_count(part, "--rows") for part in rows.split(",")]
    prompt = 0 if chunk == "0" else read_count(chunk, "--chunk")
    server = wanted.server(read_count(context, "--context"), tp, draft_tokens, counts, prompt, topk)
    return explain.Request(server, kernels, explain.card_for(device, target), policy, db)


COMMANDS = {"explain": explain_command, "warm": warm_command}
