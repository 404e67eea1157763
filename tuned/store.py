"""The SQLite database of trials, and its migrations. The only room that speaks SQL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sqlite_utils import Database, Migrations

from dsv4tune.tuned.reader import UNREADABLE, foreign_objects, open_read_only
from dsv4tune.tuned.reader import default_path as default_path
from dsv4tune.tuned.records import Entry, Range, Trial, triton_version

migrations = Migrations("dsv4tune")

#: Bytes of a database that is checked whole before it is written to.
_CHECKED_WHOLE = 128 << 20


class StoreError(Exception):
    """The database can't be used; one line that says what to do."""


@migrations()
def m001_trials(db: Database) -> None:
    """Devices, environments and problems once each; trials point at them."""
    db.table("device").create(
        {"id": int, "capability": str, "sm_count": int, "shared_bytes": int, "json": str}, pk="id"
    )
    db.table("device").create_index(["json"], unique=True)
    db.table("environment").create({"id": int, "json": str}, pk="id")
    db.table("environment").create_index(["json"], unique=True)
    db.table("problem").create({"id": int, "key": str, "op": str, "rows": int, "json": str}, pk="id")
    db.table("problem").create_index(["key"], unique=True)
    db.table("trial").create(
        {
            "id": int,
            "problem_id": int,
            "device_id": int,
            "environment_id": int,
            "config": str,
            "source_sha": str,
            "status": str,
            "provenance": str,
            "score": float,
            "yardstick": str,
            "range": str,
            "width": int,
            "json": str,
        },
        pk="id",
        not_null={
            "problem_id",
            "device_id",
            "environment_id",
            "config",
            "source_sha",
            "status",
            "provenance",
            "range",
            "json",
        },
        foreign_keys=[("problem_id", "problem"), ("device_id", "device"), ("environment_id", "environment")],
    )
    db.table("trial").create_index(["problem_id", "status", "provenance", "score"])


@migrations()
def m002_sharing(db: Database) -> None:
    """Where a trial came from, and indexes for a million of them; see the tests of the query plans."""
    db.table("trial").add_column("imported", str, not_null_default="")
    db.table("trial").add_column("lengths", int, not_null_default=0)
    db.execute("update trial set lengths = json_array_length(range, '$.lengths')")
    db.execute("drop index idx_trial_problem_id_status_provenance_score")
    db.execute(
        "create index trial_best on trial(problem_id, provenance, imported, environment_id, yardstick, width, lengths, "
        # With the status, for which SQLite 3.40 would read the row where the index doesn't hold it.
        "score, status) where status = 'ok' and score is not null"
    )
    db.execute("create index trial_range on trial(problem_id, range, status)")
    # A problem without its rows.
    db.table("problem").add_column("family", str, not_null_default="")
    db.execute("update problem set family = json_remove(json, '$.rows')")
    db.execute("create index problem_family on problem(family, rows)")


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
        if create:
            self.db = self._open_for_writing()
        else:
            if not self.path.is_file():
                raise StoreError(f"no database at {self.path}: run a search first, or name another with --db")
            try:
                self.db = Database(open_read_only(self.path, timeout=30), execute_plugins=False)
                self._refuse_foreign(self.db)
                if migrations.pending(self.db):
                    raise StoreError(
                        f"{self.path} has an older schema or no trials: a search or `dsv4tune prune` migrates it"
                    )
            except UNREADABLE as error:
                raise StoreError(f"can't read {self.path} ({error}): name another database with --db") from error

    def _open_for_writing(self) -> Database:
        if self.path.is_dir():
            raise StoreError(f"{self.path} is a folder: name a file with --db")
        if self.path.exists() and not self.path.is_file():
            raise StoreError(f"{self.path} is no regular file: name another with --db")
        folder = self.path.absolute().parent
        if self.path == default_path():
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise StoreError(f"folder {folder} does not exist: create it or choose another database with --db")
        try:
            with _lock(self.path):
                return self._migrated()
        except PermissionError as error:
            raise StoreError(
                f"can't write {self.path} ({error.strerror}): choose another database with --db"
            ) from error
        except (sqlite3.OperationalError, OSError) as error:
            raise StoreError(f"can't write {self.path} ({error}): choose another database with --db") from error

    def _migrated(self) -> Database:
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise PermissionError(13, "it is read-only")
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise  # locked, or a full disk: the file may be sound
        except UNREADABLE as error:
            aside = _free_name(self.path)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
            self.notes.append(f"{self.path} is no sound database ({error}); set aside as {aside}, starting a new one")
            return self._connect()

    def _connect(self) -> Database:
        db = Database(sqlite3.connect(self.path.absolute(), timeout=30), execute_plugins=False)
        db.conn.execute("PRAGMA trusted_schema = OFF")
        self._refuse_foreign(db)
        db.conn.execute("PRAGMA journal_mode = WAL")
        # Each commit reaches the disk: a finished trial cost GPU time.
        db.conn.execute("PRAGMA synchronous = FULL")
        # A large file is read for seconds: there only its size is held against what its header says.
        if self.path.stat().st_size <= _CHECKED_WHOLE:
            for (answer,) in db.conn.execute("PRAGMA quick_check(1)"):
                if answer != "ok":
                    raise sqlite3.DatabaseError(answer)
        migrations.apply(db)
        return db

    def _refuse_foreign(self, db: Database) -> None:
        found = foreign_objects(db.conn)
        if found:
            raise StoreError(f"{self.path} holds {found}, which dsv4tune never made: use another --db")
        self._refuse_newer(db)

    def _refuse_newer(self, db: Database) -> None:
        known = {m.name for m in migrations._migrations}
        newer = [m.name for m in migrations.applied(db) if m.name not in known]
        if newer:
            raise StoreError(f"{self.path} was written by a newer dsv4tune ({newer[0]}): upgrade, or use another --db")

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
        meant = set(self.problems(only))
        found = self._rows(LOSERS, {"until": until})
        return [row["id"] for row in found if row["key"] in meant]

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete these trials in one transaction and give their space back to the disk."""
        with self._writing():
            self.db.conn.executemany("delete from trial where id = ?", ((number,) for number in numbers))
        # Another process may be reading, or the disk too full for a copy: then SQLite uses the space again later.
        with contextlib.suppress(sqlite3.OperationalError):
            self.db.vacuum()

    def refute(self, problem_key: str, config: dict[str, int | str], status: str, reason: str) -> int:
        """Mark what was imported for a config as not usable here, with the reason; how many."""
        query = (
            "update trial set status = ?, json = json_set(json, '$.reason', ?) where status = 'ok' and imported <> '' "
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
        try:
            yield
        except BaseException:
            self.db.rollback()
            raise
        self.db.commit()

    def _id(self, table: str, row: dict[str, Any], unique: str) -> int:
        found = self.db.conn.execute(f"select id from {table} where {unique} = ?", [row[unique]]).fetchone()
        if found is not None:
            return int(found[0])
        if table == "environment":
            self._same_compiler = None
        return self._insert_row(table, row)

    # -- reading ------------------------------------------------------------------------------------------------

    def _rows(self, query: str, values: Any = None) -> Iterator[dict[str, Any]]:
        try:
            yield from self.db.query(query, values)
        except UNREADABLE as error:
            raise StoreError(f"can't read {self.path} ({error}): use another --db") from error

    def trials(self, problem_key: str | None = None) -> Iterator[Trial]:
        """Finished trials in the order they ended."""
        where, values = ("where p.key = ?", [problem_key]) if problem_key is not None else ("", [])
        for row in self._rows(f"{_SELECT} {where} order by t.id", values):
            yield _trial(row)

    def problems(self, only: Filter = EVERYTHING) -> list[str]:
        """Keys of the problems with trials, by op, rows and silicon."""
        query = "select key from problem where (:op is null or op = :op) and (:rows is null or rows = :rows) "
        found = self._rows(query + "order by op, rows, key", {"op": only.op, "rows": only.rows})
        return [row["key"] for row in found if only.matches(row["key"])]

    def best(self, problem_key: str, over: Range | None = None) -> Trial | None:
        """The usable trial to go by, over one range where it is named.

        Better evidence goes first (see `dsv4tune.tuned.records.evidence`), then one timed beside the server's kernel
        before one that was not, and a wider range before a narrower, because scores of different kinds don't compare;
        then the lowest score, and between equal ones the first in the order of their words, so that every reader picks
        the same.
        """
        values = {"key": problem_key, "range": None if over is None else _text(over.model_dump(mode="json"))}
        return next((_trial(row) for row in self._rows(self._best_query(over is not None), values)), None)

    def _best_query(self, over: bool) -> str:
        if self._same_compiler is None:
            found = self._rows(
                "select id from environment where json_extract(json, '$.triton') = ?", [triton_version()]
            )
            self._same_compiler = ", ".join(str(row["id"]) for row in found)
        rank = BEST_RANK.format(same=self._same_compiler)
        # Over one range the rows are read, and the planner finds them; else the index alone will do.
        where = (
            {"index": "", "range": "and range = :range "} if over else {"index": "indexed by trial_best", "range": ""}
        )
        return BEST.format(columns=_COLUMNS, joins=_JOINS, rank=rank, **where)

    def winners(self, only: Filter = EVERYTHING) -> Iterator[tuple[str, Trial | None]]:
        """Each problem's key and `best`, by key."""
        for key in sorted(self.problems(only)):
            yield key, self.best(key)

    def held(self, trial: Trial) -> bool:
        """Whether this very result is here already, whoever brought it."""
        query = (
            f"{_SELECT} where p.key = ? and t.status = 'ok' and t.provenance = ? and t.score = ? and t.config = ? "
            "and t.source_sha = ?"
        )
        values = [trial.problem_key, trial.provenance, trial.score, _text(trial.config), trial.source_sha]
        wanted = Entry.of(trial)
        return any(Entry.of(_trial(row)) == wanted for row in self._rows(query, values))

    def problem(self, key: str) -> dict[str, Any]:
        """A stored problem as JSON."""
        (found,) = self._rows("select json from problem where key = ?", [key])
        return dict(json.loads(found["json"]))

    def ranges(self, problem_key: str) -> list[Range]:
        """The ranges that a problem was tried over, the widest first."""
        found = [Range(**json.loads(row["range"])) for row in self._rows(RANGES, {"key": problem_key})]
        return sorted(found, key=lambda over: (-over.width, -len(over.lengths), over.model_dump_json()))

    def counts(self, problem_key: str, over: Range) -> dict[str, int]:
        """Trials over one range by status."""
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
# Columns of the index trial_best alone, so that the rows of the losers are never read.
BEST_RANK = (
    "case when provenance <> 'measured' then 3 when imported = '' then 0 when environment_id in ({same}) then 1 "
    "else 2 end, yardstick = 'byte floor', width desc, lengths desc, score"
)
#: The best trial of the problem :key; equal ones by their words.
BEST = (
    "with ranked as (select id, rank() over (order by {rank}) place from trial {index} "
    "where problem_id = (select id from problem where key = :key) and status = 'ok' and score is not null {range}) "
    # Crossed, so that no planner starts with another table.
    "{columns} from ranked cross join trial t on t.id = ranked.id {joins} where ranked.place = 1 "
    "order by t.config, t.id limit 1"
)


RANGES = "select distinct range from trial where problem_id = (select id from problem where key = :key)"
COUNTS = (
    "select status, count(*) n from trial where problem_id = (select id from problem where key = :key) "
    "and range = :range group by 1"
)
#: Old trials but for winners; see `Store.losers`.
LOSERS = (
    "with best as (select t.id, t.config, p.family, rank() over (partition by t.problem_id, t.range, t.environment_id, "
    "t.provenance, t.imported, t.yardstick order by t.score, t.config) place from trial t "
    "join problem p on p.id = t.problem_id where t.status = 'ok' and t.score is not null), "
    "winner as (select distinct family, config from best where place = 1) "
    "select t.id, p.key from trial t join problem p on p.id = t.problem_id "
    "where coalesce(json_extract(t.json, '$.finished_at'), '') < :until and not (t.status = 'ok' and "
    "(p.family, t.config) in (select family, config from winner)) order by t.id"
)


def _trial(row: dict[str, Any]) -> Trial:
    try:
        values = json.loads(row.pop("json"))
        for name in ("config", "range", "problem", "device", "environment"):
            row[name] = json.loads(row[name])
        return Trial(**row, **values)
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        first = str(error).splitlines()[0]
        raise StoreError(
            f"the database holds a trial that this dsv4tune can't read ({first}): use another --db"
        ) from error


_text = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _free_name(path: Path) -> Path:
    number = 1
    while Path(f"{path}.bad-{number}").exists():
        number += 1
    return Path(f"{path}.bad-{number}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time creates or migrates; sqlite-utils' migrations of two at once end in "locked"."""
    with open(f"{path}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
