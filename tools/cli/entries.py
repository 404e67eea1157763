"""Commands on what is stored: list, show, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4tune.tools.cli.options import (
    AsJson,
    Db,
    Kernel,
    OneKernel,
    Target,
    database,
    fail,
    figures,
    one_line,
    reading,
    say,
)


def list_command(
    kernel: Kernel = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """List the problems in the database with the best config of each.

    Exit status: 0 also where it holds nothing usable, 2 without a database or for bad input.
    """
    from dsv4tune.tools import catalogue

    rows = reading(lambda: catalogue.overview(database(db), kernel))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        best = row["best"]
        over = f"width {row['problem']['range']['width']}"
        typer.echo(f"{row['problem']['key']}, {over}: {sum(row['trials'].values())} trials")
        typer.echo(f"  {one_line(best)}" if best else "  nothing usable")


def show_command(
    kernel: OneKernel,
    rows: Annotated[int, typer.Option(help="Rows of the problem.")],
    target: Target = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show the best config of a problem: its words, resources, evidence and rendered source.

    Exit status: 0 found, 2 where the database has no such problem, or for bad input.
    """
    from dsv4tune.tools import catalogue

    found = reading(lambda: catalogue.details(database(db), kernel, rows, target))
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else {"results": found}))
        return
    for one in found:
        typer.echo(f"{one['problem']['key']}, width {one['problem']['range']['width']}")
        typer.echo(f"  {figures(one)}")
        for word, value in one["config"].items():
            if value not in (0, "auto"):
                typer.echo(f"    {word:16} {value:8} {one['words'].get(word, '')}")
        typer.echo(f"  error {one['error']:.1e} against float64, checked by {one['checked_by']}")
        r = one["resources"]
        typer.echo(
            f"  {r['registers']} registers, {r['spill_bytes']} B spilled, {r['shared_bytes']} B shared, {r['mma']}"
            + (f", {r['async_copy']}" if r["async_copy"] else "")
        )
        e = one["environment"]
        typer.echo(f"  dsv4tune {e['dsv4tune']}, Triton {e['triton']}, ptxas {e['ptxas']}, torch {e['torch']}")
        note = "" if one["source_is_current"] else " (not the text that was tried: this dsv4tune renders another)"
        for warning in one["warnings"]:
            typer.echo(f"  warning: {warning}")
        typer.echo(f"  source {one['source']}{note}")


def export_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write [default: stdout]")] = None,
    kernel: Kernel = None,
    db: Db = None,
) -> None:
    """Write the best entries as reviewable JSON; the same database gives the same bytes.

    Exit status: 0 written, also where entries were left out; 2 without a database or for bad input.
    """
    from dsv4tune.tools import catalogue

    text, left_out = reading(lambda: catalogue.export(database(db), kernel))
    for line in left_out:
        say(line)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        catalogue.write_whole(output, text)
    except OSError as error:
        fail(f"can't write {output} ({error.strerror or error}): choose another file with -o")


COMMANDS = {"list": list_command, "show": show_command, "export": export_command}
