"""Commands on what a server would do: explain, warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4tune.codegen.space import Config
from dsv4tune.tools.cli.options import AsJson, Db, OneKernel, read_count, reading, say, times_of

Context = Annotated[str, typer.Option(help="Context length of the server, in tokens.")]
Drafts = Annotated[int, typer.Option(min=0, help="Draft tokens of a request when verifying; --rows counts them.")]
ServedRows = Annotated[
    str, typer.Option(help="Query rows of a call: 64, a list 1,16,64, or 'captured' for SGLang's graph sizes.")
]
ServedTp = Annotated[int, typer.Option(min=1, help="Ranks that share the model's 64 query heads.")]
Chunk = Annotated[int, typer.Option(min=0, help="Rows of a prefill chunk, 0 for none.")]
TopK = Annotated[int, typer.Option(help="Entries that the indexer selects: 512 (Flash) or 1024 (Pro).")]
Policy = Annotated[str, typer.Option(help="Evidence that an entry needs: measured, strict or predicted.")]
Target = Annotated[str | None, typer.Option(help="Compute capability, such as sm_120; needs no GPU.")]
Card = Annotated[str | None, typer.Option(help="Card, such as rtx-pro-6000; needs no GPU.")]


def explain_command(
    rows: ServedRows = "64",
    tp: ServedTp = 8,
    context: Context = "1048576",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = 0,
    kernel: OneKernel = None,
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
    rows: ServedRows = "captured",
    tp: ServedTp = 8,
    context: Context = "1048576",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = 0,
    kernel: OneKernel = None,
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
    chunk: int,
    kernel: str | None,
    target: str | None,
    device: str | None,
    policy: str,
    db: Path | None,
) -> Any:
    from dsv4tune.codegen import ops
    from dsv4tune.runtime import wanted
    from dsv4tune.tools import explain
    from dsv4tune.tuned.selector import POLICIES

    if policy not in POLICIES:
        raise ValueError(f"--policy takes {', '.join(POLICIES)}, not '{policy}'")
    kernels = list(ops.OPS) if kernel is None else [ops.get(kernel).name]
    counts = None if rows == "captured" else [read_count(part, "--rows") for part in rows.split(",")]
    server = wanted.server(read_count(context, "--context"), tp, draft_tokens, counts, chunk, topk)
    return explain.Request(server, kernels, explain.card_for(device, target), policy, db)


COMMANDS = {"explain": explain_command, "warm": warm_command}
