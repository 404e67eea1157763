"""(op, problem, config) -> a readable Triton module, saved under its content hash and imported from there."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import platformdirs

from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.space import Config, Value


def cache_folder() -> Path:
    """Where rendered sources lie: ``$DSV4TUNE_CACHE``, else the user's cache folder."""
    return Path(os.environ.get("DSV4TUNE_CACHE") or platformdirs.user_cache_path("dsv4tune"))


def try_writing(folder: Path, variable: str) -> None:
    """See that a cache folder can be written, before a search whose every candidate would fail on it.

    Raises:
        OSError: it can't; names the environment variable that moves it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"can't write the cache folder {folder} ({error.strerror}): name another in ${variable}"
        ) from error


@dataclass(frozen=True)
class Source:
    """One rendered variant.

    Attributes:
        name: module name, the op and the start of the hash.
        text: the module.
        sha: SHA-256 of the text; a variant's identity wherever it goes.
    """

    name: str
    text: str
    sha: str

    @property
    def path(self) -> Path:
        return cache_folder() / "source" / f"{self.name}.py"

    def save(self) -> Path:
        """Write the module unless it is there as it should be; other processes see all of it or nothing.

        Raises:
            OSError: the cache folder can't be written.
        """
        path = self.path
        # The name promises the text: a truncated or edited file would be tuned as something that it is not.
        if not path.is_file() or path.read_bytes() != self.text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(self.text)
            os.replace(temporary, path)
        return path

    def load(self) -> ModuleType:
        """The imported module; Triton reads a kernel's source from its file."""
        name = f"dsv4tune_rendered.{self.name}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.save())
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
        return sys.modules[name]


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dsv4tune", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(op: Op[Any, Any], problem: Problem, config: Config) -> Source:
    """Knobs that only change the launch plan leave the text, and so the binary, as it is."""
    # What a template may tell apart: of the rows and the SMs only what the op says of them.
    shown = replace(problem, rows=1, silicon=Silicon(problem.silicon.capability, sm_count=1, shared_bytes=0))
    structure = tuple((name, config[name]) for name in op.words if name not in op.plan_words)
    values = json.dumps(op.template_values(problem, config))
    return _rendered(op.name, op.template(config), shown, structure, values)


# An import checks thousands of entries against the text of their kernels, which are few.
@lru_cache(maxsize=256)
def _rendered(
    op: str, template: str, problem: Problem, structure: tuple[tuple[str, Value], ...], values: str
) -> Source:
    words = dict(structure)
    known = json.loads(values)
    text = environment().get_template(template).render(problem=problem, config=words, structure=words, **known)
    sha = hashlib.sha256(text.encode()).hexdigest()
    return Source(f"{op}_{sha[:16]}", text, sha)
