"""Which entry a problem gets: the user's database first, then the shipped catalogue."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

from dsv4tune.codegen.problem import Problem
from dsv4tune.tuned.records import Catalogue, Entry
from dsv4tune.tuned.store import Store


@lru_cache(maxsize=1)
def shipped() -> tuple[Entry, ...]:
    """Every entry in ``tuned/configs/<device>/<op>.json``."""
    found: list[Entry] = []
    for folder in sorted(resources.files("dsv4tune.tuned").joinpath("configs").iterdir(), key=lambda f: f.name):
        if folder.is_dir():
            for file in sorted(folder.iterdir(), key=lambda f: f.name):
                if file.name.endswith(".json"):
                    found += Catalogue.model_validate_json(file.read_bytes()).entries
    return tuple(found)


def entry_for(problem: Problem, store: Store | None) -> Entry | None:
    """The entry of exactly this problem, or None."""
    best = store.best(problem.key) if store is not None else None
    if best is not None:
        return Entry.of(best)
    return next((entry for entry in shipped() if entry.problem_key == problem.key), None)
