"""The wheel holds what git holds, and works where the clone is not."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("codegen", "templates", "tuned", "runtime", "tools")


@pytest.mark.slow
def test_the_wheel_holds_what_git_holds(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *ROOMS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    clone = tmp_path / "clone"
    # A copy: what a build leaves behind would end up in the next wheel.
    subprocess.run(
        ["cp", "-r", "--no-dereference", *ROOMS, "src", "pyproject.toml", "README.md", "LICENSE", "-t", _made(clone)],
        cwd=ROOT,
        check=True,
    )
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clone)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dsv4tune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        archive.extractall(tmp_path / "site")
    wanted = {f"dsv4tune/{name}" for name in listed.stdout.split() if "__pycache__" not in name}
    assert held == wanted | {"dsv4tune/__init__.py", "dsv4tune/py.typed"}

    code = (
        "import dsv4tune; from dsv4tune.codegen import devices, ops; from dsv4tune.codegen.render import render\n"
        "from dsv4tune.tuned.selector import shipped; from dsv4tune.codegen import cost; assert cost.load().sources\n"
        "op, card = ops.get('indexer'), devices.DEVICES['h200']; problem = op.problem(1, card.silicon)\n"
        "assert 'site' in dsv4tune.__file__ and shipped() and render(op, problem, op.default(problem, card)).text\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "DSV4TUNE_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_runtime_is_light() -> None:
    """A server loads it: no optuna, no typer, no database tools."""
    code = (
        "import sys, dsv4tune.runtime.launch\n"
        "heavy = {'optuna', 'typer', 'pandas', 'sqlite_utils', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
