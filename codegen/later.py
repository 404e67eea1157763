"""torch, loaded when something is first asked of it.

Loading takes longer than importing 10,000 entries, and four times the memory; what only reads, checks and writes
entries needs no tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class _Later:
    def __getattr__(self, name: str) -> Any:
        import torch

        # From now on its own names are found without this method.
        self.__dict__ = torch.__dict__
        return getattr(torch, name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Later()
