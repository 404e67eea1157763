"""Entries of others, measured here: compile, check and time each again on this GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.tools.evaluate import Evaluation, Pools, default_jobs
from dsv4tune.tools.measure import Setup
from dsv4tune.tools.tune import timed_baseline
from dsv4tune.tuned import files, share, trust
from dsv4tune.tuned.records import Entry, Trial
from dsv4tune.tuned.store import Filter, Store

Say = Callable[[str], None]
#: Measures one problem's configs: setup and entries in, a trial each out.
Measure = Callable[[Setup, Sequence[Entry], Say], Iterator[tuple[Entry, Trial]]]


@dataclass(frozen=True)
class Verified:
    """What became of one entry: ``ok`` and its figures here, or how it failed and why.

    Attributes:
        said, found: score and yardstick of the entry, and those measured here.
    """

    problem_key: str
    status: str
    said: str
    found: str
    reason: str

    def __str__(self) -> str:
        if self.status == "ok":
            return f"{self.problem_key}: measured here, {self.found}; it said {self.said}"
        return f"{self.problem_key}: {self.status}: {self.reason}; it said {self.said}"


def verify(place: str | None, database: Path, only: Filter, say: Say, measure: Measure | None = None) -> list[Verified]:
    """Measure the entries of a file, or the ones that the database would choose, on the GPU here.

    Raises:
        ValueError: there is no GPU here, or nothing for it.
        StoreError: the database can't be used.
    """
    card = devices.here()
    if card is None:
        raise ValueError("verify measures, and there is no GPU here: run it on the machine that serves")
    entries, others = [], 0
    for entry in _entries(place, database):
        if not only.matches(entry.problem_key):
            continue
        if ops.problem_from_json(entry.problem).silicon == card.silicon:
            entries.append(entry)
        else:
            others += 1
    if others:
        say(f"{others} entries are for other silicon than the {card.name} here ({card.silicon}): left out")
    if not entries:
        raise ValueError(f"nothing to verify on the {card.name} here: name a file with entries for it")
    store = Store(database)
    for note in store.notes:
        say(note)
    results = []
    for setup, same in _by_setup(entries, card):
        for entry, trial in (measure or _measured)(setup, same, say):
            store.add(trial)
            if trial.status != "ok":
                store.refute(entry.problem_key, entry.config, trial.status, f"verified here: {trial.reason}")
            results.append(_result(entry, trial))
    store.close()
    return results


def _entries(place: str | None, database: Path) -> Iterator[Entry]:
    if place is None:
        yield from share.exported(Store(database, create=False), Filter(), [])
        return
    with files.opened(place) as sources:
        for source in sources:
            yield from share.trusted(source, current_source=False)


def _by_setup(entries: Sequence[Entry], card: Device) -> Iterator[tuple[Setup, list[Entry]]]:
    """Inputs and the baseline are made once for the entries of one problem and range."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.problem_key, entry.range.model_dump_json()), []).append(entry)
    for same in groups.values():
        yield Setup(ops.problem_from_json(same[0].problem), same[0].range.profile, card, 0), same


def _measured(setup: Setup, entries: Sequence[Entry], say: Say) -> Iterator[tuple[Entry, Trial]]:
    """In worker processes, as a search does it."""
    pools = Pools.of(min(default_jobs(), len(entries)), True)
    try:
        beside, _ = timed_baseline(setup, pools, say)
        evaluation = Evaluation(setup, pools, beside)
        waiting: dict[Any, list[Entry]] = {}
        for entry in entries:
            config = trust.valid_config(entry, setup.problem)
            if config not in waiting:
                evaluation.submit(config)
            waiting.setdefault(config, []).append(entry)
        while waiting:
            for config, trial in evaluation.collect(1.0):
                for entry in waiting.pop(config):
                    yield entry, trial
    finally:
        pools.close()


def _result(entry: Entry, trial: Trial) -> Verified:
    said = f"{entry.provenance}, {entry.score:.3f} of {entry.yardstick}"
    found = f"{trial.score:.3f} of {trial.yardstick}" if trial.score is not None else ""
    return Verified(entry.problem_key, trial.status, said, found, trial.reason)
