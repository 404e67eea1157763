"""What a server loads. Importing this package loads neither the kernels' code nor anything that only tuning needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4tune.runtime.kernels import NotReadyError, UnservedCallError, paged_mqa_logits, sparse_mla_decode
    from dsv4tune.runtime.startup import prepare

#: Name: the module that has it.
_LAZY = {
    "NotReadyError": "kernels",
    "UnservedCallError": "kernels",
    "paged_mqa_logits": "kernels",
    "sparse_mla_decode": "kernels",
    "prepare": "startup",
}
__all__ = ["NotReadyError", "UnservedCallError", "paged_mqa_logits", "prepare", "sparse_mla_decode"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4tune.runtime' has no attribute '{name}'")
    import importlib

    found = getattr(importlib.import_module(f"dsv4tune.runtime.{_LAZY[name]}"), name)
    globals()[name] = found
    return found
