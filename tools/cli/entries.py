"""Commands on what is stored: list, show."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dsv4tune.codegen.words import counted
from dsv4tune.tools.cli.options import (
    AsJson,
    Db,
    NamedKernel,
    OneDevice,
    OneKernel,
    OneTarget,
    Words,
    database,
    echo,
    figures,
    final_line,
    one_line,
    only,
    reading,
    say,
)


def list_command(
    kernel: OneKernel = None,
    device: OneDevice = None,
    target: OneTarget = None,
    problem: Words = None,
    rows: Annotated[int | None, typer.Option(help="Only this row count.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """List the problems in the database with the best config of each.

    Exit status: 0 also where it holds nothing usable, 2 without a database or for bad input.
    """
    from dsv4tune.tools import catalogue

    def read() -> list[dict[str, Any]]:
        return list(catalogue.overview(database(db), only(kernel, device, target, problem, rows)))

    found = reading(read)
    if as_json:
        echo(json.dumps(found))
        return
    if not found:
        hint = "`dsv4tune explain --rows captured` tells what the shipped files have"
        say(f"nothing of that kind in {database(db)}; {hint}")
    for row in found:
        best = row["best"]
        over = f"width {row['problem']['range']['width']}"
        echo(f"{row['problem']['key']}, {over}: {counted(sum(row['trials'].values()), 'trial')}")
        echo(f"  {one_line(best)}" if best else "  nothing usable")


def show_command(
    kernel: NamedKernel,
    rows: Annotated[int | None, typer.Option(help="Rows of the problem.")] = None,
    device: OneDevice = None,
    target: OneTarget = None,
    problem: Words = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show the best config of a problem.

    Its words and what they mean, resources, evidence and rendered source.

    Exit status: 0 found, 2 where the database has no such problem, or for bad input.
    """
    from dsv4tune.tools import catalogue

    found = reading(lambda: catalogue.details(database(db), only(kernel, device, target, problem, rows)))
    if as_json:
        echo(json.dumps(found[0] if len(found) == 1 else {"results": found}))
        return
    for one in found:
        echo(f"{one['problem']['key']}, width {one['problem']['range']['width']}")
        echo(f"  {figures(one)}")
        for word, value in one["config"].items():
            if value not in (0, "auto"):
                echo(f"    {word:16} {value:8} {one['words'].get(word, '')}")
        echo(f"  error {one['error']:.1e} against float64, checked by {one['checked_by']}")
        if one["final"]:
            echo(f"  {final_line(one['final'], one['score'])}")
        r = one["resources"]
        echo(
            f"  {r['registers']} registers, {r['spill_bytes']} B spilled, {r['shared_bytes']} B shared, {r['mma']}"
            + (f", {r['async_copy']}" if r["async_copy"] else "")
        )
        e = one["environment"]
        echo(f"  dsv4tune {e['dsv4tune']}, Triton {e['triton']}, ptxas {e['ptxas']}, torch {e['torch']}")
        if one["imported"]:
            echo(f"  imported from {one['imported']}, not measured here")
        note = "" if one["source_is_current"] else " (not the text that was tried: this dsv4tune renders another)"
        for warning in one["warnings"]:
            echo(f"  warning: {warning}")
        nowhere = "not kept: see to the folder of $DSV4TUNE_CACHE" if one["source_is_current"] else "none"
        echo(f"  source {one['source'] or nowhere}{note}")


COMMANDS = {"list": list_command, "show": show_command}
