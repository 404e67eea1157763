"""The ``dsv4tune`` command: parse, call one function, print. One module here for each kind of command."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dsv4tune import __version__
from dsv4tune.tools.cli import entries, options, overview, recordings, serving, sharing, tuning

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # which would read "[default: ...]" as markup
    add_completion=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Tune and generate DeepSeek-V4's decode kernels for your own GPU.",
)


def _version(wanted: bool) -> None:
    if wanted:
        options.echo(f"dsv4tune {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A shell may have closed stdout or stderr: a database or a pipe that opens next must not get its number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


for module in (tuning, recordings, entries, sharing, overview, serving):
    for name, command in module.COMMANDS.items():
        app.command(name)(command)
