"""The SQLite database of trials: what is written to it, and what is asked of it. Tables: `dsv4tune.tuned.database`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from dsv4tune.tuned.database import StoreError as StoreError
from dsv4tune.tuned.database import open_for_reading, open_for_writing
from dsv4tune.tuned.reader import BEST_RANK, NEAREST, UNREADABLE, USABLE
from dsv4tune.tuned.reader import default_path as default_path
from dsv4tune.tuned.records import Entry, Range, Trial, Tried, reason_of, triton_version

# Columns of their own tables; the rest of a trial is one JSON text.
_PLAIN = ("source_sha", "status", "provenance", "score", "yardstick", "imported")
_TEXTS = ("config", "range")
_ELSEWHERE = {"problem", "problem_key", "device", "environment", *_PLAIN, *_TEXTS}


@dataclass(frozen=True)
class Filter:
    """Which problems are meant; None and () say nothing.

    Attributes:
        op: kernel.
        rows: of the problem.
        target: compute capability such as ``sm_120``.
        sm_count, shared_bytes: of the silicon.
        words: words that stand in the problem's key, such as ``heads=8``.
    """

    op: str | None = None
    rows: int | None = None
    target: str | None = None
    sm_count: int | None = None
    shared_bytes: int | None = None
    words: tuple[str, ...] = ()

    @property
    def in_key(self) -> list[str]:
        """All of it but the op, as words of the key."""
        named = (("rows=", self.rows), ("", self.target), ("sms=", self.sm_count), ("shared=", self.shared_bytes))
        return [*self.words, *(f"{name}{value}" for name, value in named if value is not None)]

    def matches(self, key: str) -> bool:
        words = key.split(" ")
        return (self.op is None or words[0] == self.op) and all(word in words[1:] for word in self.in_key)


EVERYTHING = Filter()


class Tally(NamedTuple):
    """How many trials of a problem there are over one range, by status; without what finals timed again."""

    key: str
    problem: dict[str, Any]
    over: Range
    counts: dict[str, int]


class Store:
    """Trials by problem. Every `add` is on disk when it returns."""

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        """Open, and create or migrate where `create` allows.

        Raises:
            StoreError: the file or its folder is missing or not writable, of a newer dsv4tune, or no database.
        """
        self.path = Path(path)
        #: What happened while opening that a user should know.
        self.notes: list[str] = []
        self._same_compiler: str | None = None
        #: Of devices, environments and problems that the transaction under way has met.
        self._ids: dict[tuple[str, str], int] = {}
        self.db = open_for_writing(self.path, self.notes) if create else open_for_reading(self.path)

    def close(self) -> None:
        self.db.close()

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, trial: Trial) -> int:
        """Store a finished trial and return its number."""
        with self._writing():
            return self._insert(trial)

    def add_all(self, trials: Iterable[Trial]) -> int:
        """Store all of them or, where anything is wrong with one, none; their number."""
        with self._writing():
            return sum(1 for trial in trials if self._insert(trial))

    def add_final(self, trials: Sequence[Trial]) -> None:
        """Store a search's final, all of it or nothing; what an earlier one over the same range went by is a trial like
        others."""
        first = min(trials, key=lambda trial: trial.final.place if trial.final is not None else len(trials))
        here = "imported = '' and range = ? and problem_id = (select id from problem where key = ?)"
        values = [_text(first.range.model_dump(mode="json")), first.problem_key]
        with self._writing():
            self.db.conn.execute(f"update trial set final = 0 where final = 1 and {here}", values)
            # Each candidate of the search counts once.
            timed_alone = f"update trial set final = -1 where config = ? and final = 0 and status = 'ok' and {here}"
            self.db.conn.execute(timed_alone, [_text(first.config), *values])
            for trial in trials:
                self._insert(trial)

    def _insert(self, trial: Trial) -> int:
        data = trial.model_dump(mode="json")
        rest = {name: value for name, value in data.items() if name not in _ELSEWHERE}
        device = {name: data["device"][name] for name in ("capability", "sm_count", "shared_bytes")}
        problem = {
            "key": trial.problem_key,
            "op": trial.problem["op"],
            "rows": trial.problem["rows"],
            "json": _text(data["problem"]),
            "family": _text({name: value for name, value in data["problem"].items() if name != "rows"}),
        }
        row = {
            "problem_id": self._id("problem", problem, "key"),
            "device_id": self._id("device", {**device, "json": _text(data["device"])}, "json"),
            "environment_id": self._id("environment", {"json": _text(data["environment"])}, "json"),
            "width": trial.range.width,
            "lengths": len(trial.range.lengths),
            "final": 0 if trial.final is None else 1 if trial.final.place == 1 else -1,
            "json": _text(rest),
            **{name: data[name] for name in _PLAIN},
            **{name: _text(data[name]) for name in _TEXTS},
        }
        return self._insert_row("trial", row)

    def _insert_row(self, table: str, row: dict[str, Any]) -> int:
        # sqlite-utils would look at the table's schema for every row.
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        done = self.db.conn.execute(f"insert into {table} ({names}) values ({marks})", list(row.values()))
        return int(done.lastrowid or 0)

    def losers(self, only: Filter, older_than_days: int) -> list[int]:
        """Numbers of the trials that ended so long ago and win nothing.

        The best of each problem, range, environment, kind of evidence and origin is a winner, and so is every usable
        trial of its config for other rows of the problem, because one config may serve the rows between two.
        """
        until = (datetime.now(timezone.utc) - timedelta(days=older_than_days)).isoformat(timespec="seconds")
        found = self._rows(LOSERS, {"until": until, "keys": json.dumps(self.problems(only))})
        return [row["id"] for row in found]

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete these trials in one transaction and give their space back to the disk."""
        with self._writing():
            self.db.conn.executemany("delete from trial where id = ?", ((number,) for number in numbers))
        # Another process may be reading, or the disk too full for a copy: then SQLite uses the space again later.
        with contextlib.suppress(sqlite3.OperationalError):
            self.db.vacuum()

    def refute(self, problem_key: str, config: dict[str, int | str], status: str, reason: str) -> int:
        """Mark a config as not usable here, with the reason: what was imported, and where it computes wrongly what was
        measured here too; how many."""
        whose = "" if status == "wrong" else "and imported <> '' "
        query = (
            f"update trial set status = ?, json = json_set(json, '$.reason', ?) where status = 'ok' {whose}"
            "and config = ? and problem_id = (select id from problem where key = ?)"
        )
        with self._writing():
            return int(self.db.execute(query, [status, reason, _text(config), problem_key]).rowcount)

    def total(self) -> int:
        """Trials of all problems."""
        (found,) = self._rows("select count(*) n from trial")
        return int(found["n"])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._transaction():
                yield
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"can't write {self.path} ({error}): what it holds is kept; mend this and rerun"
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        # Immediate: one that starts by reading fails at once when another process wrote in between.
        self.db.execute("BEGIN IMMEDIATE")
        self._ids = {}
        try:
            yield
        except BaseException:
            self.db.rollback()
            raise
        self.db.commit()

    def _id(self, table: str, row: dict[str, Any], unique: str) -> int:
        place = table, row[unique]
        if place not in self._ids:
            found = self.db.conn.execute(f"select id from {table} where {unique} = ?", [row[unique]]).fetchone()
            if found is None and table == "environment":
                self._same_compiler = None
            self._ids[place] = int(found[0]) if found is not None else self._insert_row(table, row)
        return self._ids[place]

    # -- reading ------------------------------------------------------------------------------------------------

    def _rows(self, query: str, values: Any = ()) -> Iterator[dict[str, Any]]:
        try:
            # Not by sqlite-utils, which costs as much again for one row.
            found = self.db.conn.execute(query, values)
            names = [column[0] for column in found.description]
            for row in found:
                yield dict(zip(names, row, strict=True))
        except UNREADABLE as error:
            raise StoreError(f"can't read {self.path} ({error}): use another --db") from error

    def trials(self, problem_key: str | None = None) -> Iterator[Trial]:
        """Finished trials in the order they ended."""
        where, values = ("where p.key = ?", [problem_key]) if problem_key is not None else ("", [])
        for row in self._rows(f"{_SELECT} {where} order by t.id", values):
            yield _trial(row)

    def tried(self, problem_key: str, over: Range) -> Iterator[Tried]:
        """What became of each config over one range, in the order of `trials`, in a fifth of their memory.

        Without what finals timed again.
        """
        for row in self._rows(TRIED, {"key": problem_key, "range": _text(over.model_dump(mode="json"))}):
            with _readable():
                found = Tried(**{**row, "config": json.loads(row["config"]), "timed": json.loads(row["timed"])})
            yield found

    def problems(self, only: Filter = EVERYTHING) -> list[str]:
        """Keys of the problems with trials, by op, rows and silicon."""
        query = "select key from problem where (:op is null or op = :op) and (:rows is null or rows = :rows) "
        found = self._rows(query + "order by op, rows, key", {"op": only.op, "rows": only.rows})
        with _readable():
            return [row["key"] for row in found if only.matches(row["key"])]

    def best(self, problem_key: str, over: Range | None = None) -> Trial | None:
        """The usable trial to go by, over one range where it is named.

        Better evidence goes first (see `dsv4tune.tuned.records.evidence`), then one timed beside the server's kernel
        before one that was not, and a wider range before a narrower, because scores of different kinds don't compare;
        then the one that a search's final went by, then the lowest score, and between equal ones the first in the order
        of their words, so that every reader picks the same.
        """
        return next((best for _, best in self._best([problem_key], over)), None)

    def best_of(self, keys: Sequence[str]) -> dict[str, Trial]:
        """`best` of each of these problems that has one, in one query."""
        return dict(self._best(keys))

    def neighbours(self, problem: Mapping[str, Any]) -> list[Trial]:
        """What to go by at the nearest row counts below and above, of problems that differ in nothing else."""
        family = _text({name: value for name, value in problem.items() if name != "rows"})
        found = []
        for beyond, order in (("< :rows", "desc"), ("> :rows", "asc")):
            query = NEAREST.format(family="p.family", beyond=beyond, usable=USABLE[True], order=order)
            for row in self._rows(query, {"family": family, "rows": problem["rows"]}):
                (key,) = self._rows("select key from problem where family = ? and rows = ?", [family, row["rows"]])
                found.append(self.best(key["key"]))
        return [trial for trial in found if trial is not None]

    def winners(self, only: Filter = EVERYTHING) -> Iterator[tuple[str, Trial | None]]:
        """Each problem's key and `best`, by key."""
        keys = sorted(self.problems(only))
        best = self._best(keys)
        found = next(best, None)
        for key in keys:
            if found is not None and found[0] == key:
                yield found
                found = next(best, None)
            else:
                yield key, None

    def _best(self, keys: Sequence[str], over: Range | None = None) -> Iterator[tuple[str, Trial]]:
        """The best of each of these problems that has one, by key."""
        values = {"keys": json.dumps(keys), "range": None if over is None else _text(over.model_dump(mode="json"))}
        before = None
        for row in self._rows(self._best_query(over is not None), values):
            key = row["problem_key"]
            if key != before:
                before = key
                yield key, _usable(row)

    def _best_query(self, over: bool) -> str:
        if self._same_compiler is None:
            found = self._rows(
                "select id from environment where json_extract(json, '$.triton') = ?", [triton_version()]
            )
            self._same_compiler = ", ".join(str(row["id"]) for row in found)
        rank = BEST_RANK.format(same=self._same_compiler, wide="width desc")
        # Over one range the rows are read, and the planner finds them; else the index alone will do.
        index, within = ("", "and range = :range") if over else ("indexed by trial_best", "")
        return BEST.format(columns=_COLUMNS, joins=_JOINS, rank=rank, index=index, within=within)

    def held(self, entry: Entry) -> bool:
        """Whether this very result is here already, whoever brought it."""
        query = (
            f"{_SELECT} where p.key = ? and t.status = 'ok' and t.provenance = ? and t.score = ? and t.config = ? "
            "and t.source_sha = ?"
        )
        values = [entry.problem_key, entry.provenance, entry.score, _text(entry.config), entry.source_sha]
        return any(Entry.of(_trial(row)) == entry for row in self._rows(query, values))

    def tallies(self, only: Filter = EVERYTHING) -> list[Tally]:
        """By op, rows and silicon, and of one problem the widest range first."""
        found: dict[tuple[str, str], Tally] = {}
        keys = self.problems(only)
        for row in self._rows(TALLIES, {"keys": json.dumps(keys)}):
            place = row["key"], row["range"]
            if place not in found:
                with _readable():
                    over = Range(**json.loads(row["range"]))
                    found[place] = Tally(row["key"], dict(json.loads(row["problem"])), over, {})
            found[place].counts[row["status"]] = row["n"]
        place_of = {key: n for n, key in enumerate(keys)}

        def order(one: Tally) -> tuple[Any, ...]:
            return place_of[one.key], -one.over.width, -len(one.over.lengths), one.over.model_dump_json()

        return sorted(found.values(), key=order)

    def counts(self, problem_key: str, over: Range) -> dict[str, int]:
        """Trials over one range by status, without what finals timed again."""
        values = {"key": problem_key, "range": _text(over.model_dump(mode="json"))}
        return {row["status"]: row["n"] for row in self._rows(COUNTS, values)}


_COLUMNS = (
    "select t.config, t.range, t.source_sha, t.status, t.provenance, t.score, t.yardstick, t.imported, t.json, "
    "p.key problem_key, p.json problem, d.json device, e.json environment"
)
_JOINS = (
    "join problem p on p.id = t.problem_id join device d on d.id = t.device_id "
    "join environment e on e.id = t.environment_id"
)
_SELECT = f"{_COLUMNS} from trial t {_JOINS}"
#: The problems whose keys are in the JSON list :keys.
_MEANT = "(select id from problem where key in (select value from json_each(:keys)))"
#: The best trials of each, equal ones by their words.
BEST = (
    "with part as (select problem_id, provenance, imported, environment_id, yardstick, width, lengths, final, "
    f"min(score) score from trial {{index}} where problem_id in {_MEANT} and status = 'ok' and score is not null "
    "{within} group by 1, 2, 3, 4, 5, 6, 7, 8), "
    "ranked as (select *, rank() over (partition by problem_id order by {rank}) place from part) "
    # Crossed, so that no planner starts with another table.
    "{columns} from ranked r cross join trial t on t.problem_id = r.problem_id and t.provenance = r.provenance "
    "and t.imported = r.imported and t.environment_id = r.environment_id and t.yardstick = r.yardstick "
    "and t.width = r.width and t.lengths = r.lengths and t.final = r.final and t.score = r.score "
    "and t.status = 'ok' {within} {joins} where r.place = 1 order by p.key, t.config, t.id"
)
TALLIES = (
    "select p.key, p.json problem, t.range, t.status, count(*) n from problem p join trial t on t.problem_id = p.id "
    f"where p.id in {_MEANT} and t.final >= 0 group by p.id, t.range, t.status"
)
COUNTS = (
    "select status, count(*) n from trial where problem_id = (select id from problem where key = :key) "
    "and range = :range and final >= 0 group by 1"
)
TRIED = (
    "select config, status, provenance, yardstick, score, "
    "(select json_group_array(cast(key as integer)) from json_each(trial.json, '$.times_us')) timed from trial "
    "where problem_id = (select id from problem where key = :key) and range = :range and final >= 0 order by id"
)
#: Trials of :keys that ended before :until, but for winners; see `Store.losers`.
LOSERS = (
    f"with kin as (select id, family from problem where family in (select family from problem where id in {_MEANT})), "
    "best as (select problem_id, provenance, imported, environment_id, yardstick, range, min(score) score from trial "
    "where problem_id in (select id from kin) and status = 'ok' and score is not null "
    "group by 1, 2, 3, 4, 5, 6, final), "
    "winner as (select distinct kin.family, t.config from best b cross join kin on kin.id = b.problem_id "
    "cross join trial t on t.problem_id = b.problem_id and t.provenance = b.provenance and t.imported = b.imported "
    "and t.environment_id = b.environment_id and t.yardstick = b.yardstick and t.score = b.score and t.status = 'ok' "
    "where t.range = b.range) "
    f"select t.id from problem p join trial t on t.problem_id = p.id where p.id in {_MEANT} "
    "and coalesce(json_extract(t.json, '$.finished_at'), '') < :until "
    "and not (t.status = 'ok' and (p.family, t.config) in (select family, config from winner)) order by t.id"
)


def _trial(row: dict[str, Any]) -> Trial:
    with _readable():
        values = json.loads(row.pop("json"))
        for name in ("config", "range", "problem", "device", "environment"):
            row[name] = json.loads(row[name])
        return Trial(**row, **values)


def _usable(row: dict[str, Any]) -> Trial:
    """One to go by has all that an entry has."""
    trial = _trial(row)
    with _readable():
        Entry.of(trial)
    return trial


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    # Pydantic's errors are ValueErrors; a column may hold anything, or JSON that is nested too deep.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"the database holds a trial that this dsv4tune can't read ({reason_of(error)}): use another --db"
        ) from error


_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
