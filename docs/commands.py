"""Writes docs/commands.md from the commands' own help: ``make docs``. A test says where the file is behind."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from dsv4tune.tools.cli import app

FILE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

Made by `make docs` from what `dsv4tune COMMAND --help` says. An option means the same wherever it appears.

Results go to stdout, everything else to stderr. With `--json` stdout holds JSON and nothing else. Colours and a bar
only appear on a terminal, and `NO_COLOR` is heeded. Counts may end in k or M (1,024 and 1,048,576): `128k`, `1M`.
Times end in s, m or h: `90s`, `10m`, `1h30m`. `dsv4tune --install-completion` completes words in your shell.
"""


def text() -> str:
    group: Any = typer.main.get_command(app)
    parts = [HEAD]
    for name, command in group.commands.items():
        help_ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
        parts += [f"## {name}\n", help_.strip() + "\n", "| option | what it says |", "|---|---|"]
        parts += [_row(option) for option in command.params if option.name != "help"]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _row(option: Any) -> str:
    spelled = ", ".join(f"`{word}`" for word in option.opts)
    said = (option.help or "").rstrip(". ")
    kind = option.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        said += ": " + ", ".join(str(choice.value) for choice in kind)
    needed = " (needed)" if option.required else ""
    default = option.default
    shown = getattr(default, "value", default)
    told = isinstance(shown, int | str | Path) and shown is not False and shown != "" and "[default:" not in said
    default_text = f" [default: {shown}]" if told and not option.required else ""
    return f"| {spelled} | {said}{default_text}{needed} |"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
