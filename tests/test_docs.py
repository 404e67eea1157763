"""The documents: short enough, linked right, complete, and with examples that run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dsv4tune.tools.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md", ROOT / "CHANGELOG.md"])
#: What an example's comment says where this machine can't run it: it is only parsed.
#: Its examples take other people's files, URLs and cards: they are parsed (tests/tuned/test_share.py runs such).
ELSEWHERE = "sharing.md"
NEEDS = ("on a GPU", "takes minutes", "beside SGLang", "two servers", "optional")


def examples(page: Path) -> Iterator[tuple[str, str]]:
    """Command lines of a page's console blocks that call dsv4tune, and the comment behind each."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M):
        for line in block.splitlines():
            found = re.match(r" *\$ (dsv4tune .*)", line)
            if found:
                command, _, comment = found[1].partition("  #")
                yield command.strip(), comment.strip()


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_command_and_option_is_documented() -> None:
    spec = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text(encoding="utf-8") == module.text(), "docs/commands.md is behind: run `make docs`"
    readme = (ROOT / "README.md").read_text()
    for command in app.registered_commands:
        assert f"| `{command.name}`" in readme, f"README.md's table lacks {command.name}"


def test_every_environment_variable_is_documented() -> None:
    told = set(re.findall(r"`(DSV4TUNE_[A-Z_]+)", (ROOT / "docs/environment.md").read_text()))
    rooms = ("codegen", "runtime", "tools", "tuned")
    read = {
        name
        for room in rooms
        for file in (ROOT / room).rglob("*.py")
        for name in re.findall(r"\bDSV4TUNE_[A-Z_]+\b", file.read_text(encoding="utf-8"))
    }
    assert told == read


def test_every_command_documents_its_exit_status() -> None:
    for command in app.registered_commands:
        assert command.callback is not None and "Exit status:" in (command.callback.__doc__ or ""), command.name


def test_an_option_means_the_same_everywhere() -> None:
    """Its help may name what it is left to by default; what it says before that is one text."""
    meant: dict[str, set[str]] = {}
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        for option in command.params:
            said = re.sub(r"\s*\[default:.*", "", option.help or "").rstrip(".")
            meant.setdefault(option.opts[0], set()).add(said)
    # Where one command takes one kernel or row count and another several, the words differ and the meaning doesn't.
    different = {name for name, texts in meant.items() if len(texts) > 1}
    assert different <= {
        *("--device", "--kernel", "--rows", "--tp", "--db", "--target", "--seed", "--bench", "--effort", "-o")
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(examples(page))], ids=named)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in an empty folder, with 2 trials; those that need what a test machine lacks are parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "user.db"))
    group: Any = typer.main.get_command(app)
    for command, comment in examples(page):
        words = shlex.split(re.sub(r"--trials \d+", "--trials 2", command))[1:]
        assert words[0] in group.commands, command
        if page.name == ELSEWHERE or "..." in command or any(need in comment for need in NEEDS):
            group.commands[words[0]].make_context(words[0], words[1:], resilient_parsing=False)
            continue
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}\n{result.output}"
