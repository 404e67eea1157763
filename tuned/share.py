"""Tuned entries from one database to another: export, import, merge, diff.

Which of two entries for a problem wins is said once, in `dsv4tune.tuned.records.Entry.standing`: better evidence, then
the faster. An import adds to a database and removes nothing, so both stay in its history.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4tune.tuned import trust
from dsv4tune.tuned.files import FileRefused, Source, opened
from dsv4tune.tuned.records import Entry, Trial, reason_of, triton_version
from dsv4tune.tuned.store import EVERYTHING, Filter, Store, StoreError

# -- out --------------------------------------------------------------------------------------------------------


def exported(store: Store, only: Filter, left_out: list[str]) -> Iterator[Entry]:
    """The best entry of each problem, by key; `left_out` gets a line for each problem without one."""
    for key, best in store.winners(only):
        if best is None:
            left_out.append(f"left out, no usable trial: {key}")
        elif best.baseline is not None and best.score is not None and best.score >= 1.0:
            left_out.append(f"left out, not faster than {best.baseline.name} ({best.score:.3f} of it): {key}")
        elif best.final is not None and not best.final.won:
            left_out.append(f"left out, its final was not won by {best.final.margin:.0%} ({best.score:.3f}): {key}")
        else:
            yield Entry.of(best)


# -- in ---------------------------------------------------------------------------------------------------------


def trusted(source: Source, *, current_source: bool = True) -> Iterator[Entry]:
    """A file's entries, each checked; see `dsv4tune.tuned.trust`.

    Raises:
        FileRefused: at the first fault.
    """
    for number, entry in enumerate(_winners(source.name) if source.is_database else source.entries()):
        try:
            trust.check(entry, current_source=current_source)
        except trust.Distrust as error:
            raise FileRefused(f"{source.name}: entries[{number}].{error}") from error
        yield entry


def _winners(name: str) -> Iterator[Entry]:
    """Of another's database, whose columns may hold anything: by way of the text that a file would have."""
    try:
        with contextlib.closing(Store(Path(name), create=False)) as store:
            for entry in exported(store, EVERYTHING, []):
                yield Entry.model_validate_json(entry.model_dump_json(), strict=True)
    except (StoreError, ValueError, TypeError) as error:
        raise FileRefused(f"{name}: {reason_of(error)}") from error


@dataclass
class Summary:
    """What an import would do, or did.

    Attributes:
        files: names of what was read.
        new: entries for problems that had none.
        better: those that go before the one there was.
        kept: those that the one there was goes before; they are stored all the same.
        known: those that are there already; not stored again.
        changes: a line for each problem whose choice changes.
        notes: what informs and decides nothing, such as another Triton or another product of the same silicon.
    """

    files: list[str] = field(default_factory=list)
    new: int = 0
    better: int = 0
    kept: int = 0
    known: int = 0
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def stored(self) -> int:
        return self.new + self.better + self.kept


#: Lines of a summary's changes that are kept; the counts go on.
_LINES = 50


def survey(sources: Sequence[Source], store: Store | None, only: Filter = EVERYTHING) -> Summary:
    """What importing would do; writes nothing. Without a database everything is new."""
    summary = Summary([source.name for source in sources])
    for _ in _to_store(_chosen(sources, only), store, summary):
        pass
    return summary


def bring_in(sources: Sequence[Source], store: Store, only: Filter = EVERYTHING) -> Summary:
    """Import all of it in one transaction, or nothing.

    Raises:
        FileRefused: something is wrong with a file; the database is as it was.
        StoreError: the database can't be written.
    """
    summary = Summary([source.name for source in sources])

    chosen = _to_store(_chosen(sources, only), store, summary)
    store.add_all(entry.trial(source.shown) for entry, source in chosen)
    return summary


def _chosen(sources: Sequence[Source], only: Filter) -> Iterator[tuple[Entry, Source]]:
    for source in sources:
        for entry in trusted(source):
            if only.matches(entry.problem_key):
                yield entry, source


#: Entries that are looked up in the database at once: of 100 held, the garbage collector costs more than queries save.
_AT_ONCE = 10


def _to_store(
    chosen: Iterable[tuple[Entry, Source]], store: Store | None, summary: Summary
) -> Iterator[tuple[Entry, Source]]:
    """Those that are to be stored, each before those that come after it are looked up for its problem."""
    for part in _parts(chosen):
        best = store.best_of(list(part)) if store is not None else {}
        for key, (entry, source) in part.items():
            if _consider(entry, best.get(key), store, summary):
                yield entry, source


def _parts(chosen: Iterable[tuple[Entry, Source]]) -> Iterator[dict[str, tuple[Entry, Source]]]:
    """In order, by problem; one that comes again, as from another file, begins the next part."""
    part: dict[str, tuple[Entry, Source]] = {}
    for entry, source in chosen:
        if entry.problem_key in part or len(part) == _AT_ONCE:
            yield part
            part = {}
        part[entry.problem_key] = entry, source
    yield part


def _consider(entry: Entry, best: Trial | None, store: Store | None, summary: Summary) -> bool:
    """Whether it is to be stored beside the best of its problem."""
    mine = Entry.of(best) if best is not None else None
    if mine is not None and store is not None and (mine == entry or store.held(entry)):
        summary.known += 1
        return False
    triton = triton_version()
    if best is None or mine is None:
        summary.new += 1
    elif standing(entry, False, triton) < standing(mine, best.here, triton):
        summary.better += 1
    else:
        summary.kept += 1
        return True
    if len(summary.changes) < _LINES:
        was = f", was {_figure(best)}" if best is not None else ""
        summary.changes.append(f"{entry.problem_key}: {_figure(entry)}{was}")
    other = entry.environment.triton
    note = f"some were made with Triton {other}, here is {triton}: ranked after one made with it"
    if other != triton and entry.provenance == "measured" and note not in summary.notes:
        summary.notes.append(note)
    return True


def standing(entry: Entry, here: bool, triton: str) -> tuple[Any, ...]:
    """Orders entries of one problem, the one to go by first; the same order as `Store.best`."""
    return entry.standing(here, entry.environment.triton == triton)


def _figure(one: Trial | Entry) -> str:
    return f"{one.provenance}, {one.score:.3f} of {one.yardstick}"


# -- between files ----------------------------------------------------------------------------------------------


def merged(places: Sequence[str], lost: list[str]) -> list[Entry]:
    """Of all files at all places, the best entry of each problem, by key; `lost` gets a line for each other one."""
    triton = triton_version()
    best: dict[str, Entry] = {}
    for place in places:
        for entry in _all(place):
            known = best.setdefault(entry.problem_key, entry)
            if known == entry:
                continue
            if standing(entry, False, triton) < standing(known, False, triton):
                best[entry.problem_key], entry = entry, known
            kept = best[entry.problem_key]
            wide, narrow = kept.range.width, entry.range.width
            over = f", tried up to {wide} columns instead of {narrow}" if wide != narrow else ""
            lost.append(f"{entry.problem_key}: {_figure(entry)} gives way to {_figure(kept)}{over}")
    return [best[key] for key in sorted(best)]


def difference(a: str, b: str) -> dict[str, list[dict[str, Any]]]:
    """What differs between the best entries of two places: ``only_a``, ``only_b``, and ``changed`` with its fields."""
    first, second = ({entry.problem_key: entry for entry in merged([place], [])} for place in (a, b))
    found: dict[str, list[dict[str, Any]]] = {"only_a": [], "only_b": [], "changed": []}
    for key in sorted(first.keys() | second.keys()):
        if key not in second:
            found["only_a"].append({"problem_key": key, "figure": _figure(first[key])})
        elif key not in first:
            found["only_b"].append({"problem_key": key, "figure": _figure(second[key])})
        elif first[key] != second[key]:
            one, other = (entry.model_dump(mode="json") for entry in (first[key], second[key]))
            fields = {name: [one[name], other[name]] for name in one if one[name] != other[name]}
            figures = [_figure(first[key]), _figure(second[key])]
            found["changed"].append({"problem_key": key, "figures": figures, "fields": fields})
    return found


def _all(place: str) -> Iterator[Entry]:
    with opened(place) as sources:
        for source in sources:
            yield from trusted(source, current_source=False)
