"""What an adapter of somebody else's kernel is."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar

from dsv4tune.codegen.compile import first_line

#: How to get SGLang's own kernels, with what else they import.
SGLANG = "pip install dsv4tune's clone into SGLang's environment and search there"


class Peer(ABC):
    """One kernel that is not ours.

    Attributes:
        name: its word in results.
        op: the op that it computes.
        module: what importing it takes.
        packages: whose versions are stored with its figures, by preference.
        install: one line for who hasn't got it.
        slow: takes so long that single launches are timed.
        server: a kernel that servers run by default somewhere; a tuned one is compared with the best of these.
        computes: leaves an output that can be judged.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    module: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    slow: ClassVar[bool] = False
    server: ClassVar[bool] = False
    computes: ClassVar[bool] = True

    def missing(self) -> str | None:
        """Why it can't be called here, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # other people's imports fail in every way
            return first_line(error)
        return None

    def version(self) -> str:
        found = []
        for package in self.packages:
            try:
                found.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                continue
        return ", ".join(found) or "unknown"

    @abstractmethod
    def prepare(self, problem: Any, call: Any) -> Callable[[], Any]:
        """A function that may be captured and returns the output; what a server does once a step is done here."""
