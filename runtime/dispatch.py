"""The table that a call is served from: what exactly a call looks like -> a variant that is ready to launch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from dsv4tune.runtime.launch import Variant

#: Kernel, rows, real heads, and what else fixes a launch: columns of an indexer's logits, or window and extra width
#: with their page sizes of an MLA decode.
Key: TypeAlias = tuple[str, int, int, Any]


class Table:
    """Variants by key: only ever extended, because a captured graph keeps its variant's scratch memory.

    `find` is the one dictionary access of a call. A key that two models mean differently is served to neither from
    then on; its variants stay held for the graphs that have them.
    """

    def __init__(self) -> None:
        self._ready: dict[Key, Variant] = {}
        self._held: list[Variant] = []
        self._retired: set[Key] = set()
        self._lock = threading.Lock()
        self.find = self._ready.get

    def extend(self, found: Mapping[Key, Variant]) -> list[Key]:
        """Add variants; those that are there stay. Returns the keys that are served no more, being ambiguous."""
        ambiguous = []
        with self._lock:
            for key, variant in found.items():
                self._held.append(variant)
                old = self._ready.get(key)
                if old is not None and old.problem != variant.problem:
                    del self._ready[key]
                    self._retired.add(key)
                    ambiguous.append(key)
                elif old is None and key not in self._retired:
                    self._ready[key] = variant
        return ambiguous

    @property
    def ready(self) -> Mapping[Key, Variant]:
        """Read-only."""
        return MappingProxyType(self._ready)

    def __len__(self) -> int:
        return len(self._ready)


def digest(found: Mapping[Key, Variant]) -> str:
    """What ranks compare: the same for the same choices, whatever order and process they were made in."""
    lines = sorted(f"{key} {v.problem.key} {v.config.key} {v.source_sha}" for key, v in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
