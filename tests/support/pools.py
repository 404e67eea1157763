"""Jobs of a pool, waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4tune.tools.executor import Answer, collect
from dsv4tune.tools.workers import Pool


def answers(pool: Pool, jobs: Mapping[Any, tuple[Any, ...]] | None = None) -> dict[Any, Answer]:
    """Submit functions with their arguments by tag, and wait for these and whatever else the pool has to do."""
    for tag, job in (jobs or {}).items():
        pool.submit(tag, *job)
    found = {}
    while pool.pending:
        found.update({answer.tag: answer for _, answer in collect([pool], 1.0)})
    return found
