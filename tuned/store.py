"""The SQLite database of trials, and its migrations. The only room that speaks SQL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlite_utils import Database, Migrations

from dsv4tune.tuned.reader import default_path as default_path
from dsv4tune.tuned.reader import open_read_only
from dsv4tune.tuned.records import Range, Trial

migrations = Migrations("dsv4tune")


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


# Columns of their own tables; the rest of a trial is one JSON text.
_PLAIN = ("source_sha", "status", "provenance", "score", "yardstick")
_TEXTS = ("config", "range")
_ELSEWHERE = {"problem", "problem_key", "device", "environment", *_PLAIN, *_TEXTS}


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
        if create:
            self.db = self._open_for_writing()
        else:
            if not self.path.is_file():
                raise StoreError(f"no database at {self.path}: run a search first, or name another with --db")
            try:
                self.db = Database(open_read_only(self.path, timeout=30), execute_plugins=False)
                self._refuse_newer(self.db)
                if migrations.pending(self.db):
                    raise StoreError(
                        f"{self.path} has an older schema or no trials: run a search with it to migrate it"
                    )
            except sqlite3.DatabaseError as error:
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
            db = self._connect()
        except sqlite3.OperationalError:
            raise  # locked, or a full disk: the file may be sound
        except sqlite3.DatabaseError as error:
            aside = _free_name(self.path)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
            self.notes.append(f"{self.path} is no sound database ({error}); set aside as {aside}, starting a new one")
            db = self._connect()
        migrations.apply(db)
        return db

    def _connect(self) -> Database:
        db = Database(sqlite3.connect(self.path.absolute(), timeout=30), execute_plugins=False)
        db.conn.execute("PRAGMA journal_mode = WAL")
        # Each commit reaches the disk: a finished trial cost GPU time.
        db.conn.execute("PRAGMA synchronous = FULL")
        for (answer,) in db.conn.execute("PRAGMA quick_check(1)"):
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
        self._refuse_newer(db)
        return db

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
        data = trial.model_dump(mode="json")
        rest = {name: value for name, value in data.items() if name not in _ELSEWHERE}
        device = {name: data["device"][name] for name in ("capability", "sm_count", "shared_bytes")}
        try:
            with self._transaction():
                row = {
                    "problem_id": self._id(
                        "problem",
                        {
                            "key": trial.problem_key,
                            "op": trial.problem["op"],
                            "rows": trial.problem["rows"],
                            "json": _text(data["problem"]),
                        },
                        "key",
                    ),
                    "device_id": self._id("device", {**device, "json": _text(data["device"])}, "json"),
                    "environment_id": self._id("environment", {"json": _text(data["environment"])}, "json"),
                    "width": trial.range.width,
                    "json": _text(rest),
                    **{name: data[name] for name in _PLAIN},
                    **{name: _text(data[name]) for name in _TEXTS},
                }
                return int(self.db.table("trial").insert(row).last_pk)  # type: ignore[arg-type]
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
        found = list(self.db.query(f"select id from {table} where {unique} = ?", [row[unique]]))
        if found:
            return int(found[0]["id"])
        return int(self.db.table(table).insert(row).last_pk)  # type: ignore[arg-type]

    # -- reading ------------------------------------------------------------------------------------------------

    def trials(self, problem_key: str | None = None) -> Iterator[Trial]:
        """Finished trials in the order they ended."""
        where, values = ("where p.key = ?", [problem_key]) if problem_key is not None else ("", [])
        for row in self.db.query(f"{_SELECT} {where} order by t.id", values):
            yield _trial(row)

    def problems(self, op: str | None = None, rows: int | None = None) -> list[str]:
        """Keys of the problems with trials, by op, rows and silicon."""
        query = (
            "select key from problem where (:op is null or op = :op) and (:rows is null or rows = :rows) "
            "order by op, rows, key"
        )
        return [row["key"] for row in self.db.query(query, {"op": op, "rows": rows})]

    def best(self, problem_key: str, over: Range | None = None) -> Trial | None:
        """The usable trial to go by, over one range where it is named.

        Measured goes before predicted, one timed beside the server's kernel before one that was not, and a wider
        range before a narrower, because scores of different kinds don't compare; then the lowest score, and between
        equal ones the first in the order of their words, so that every reader picks the same.
        """
        query = (
            f"{_SELECT} where p.key = :key and t.status = 'ok' and t.score is not null "
            "and (:range is null or t.range = :range) order by t.provenance = 'measured' desc, "
            "t.yardstick <> 'byte floor' desc, t.width desc, length(t.range) desc, t.score, t.config limit 1"
        )
        values = {"key": problem_key, "range": None if over is None else _text(over.model_dump(mode="json"))}
        return next((_trial(row) for row in self.db.query(query, values)), None)

    def ranges(self, problem_key: str) -> list[Range]:
        """The ranges that a problem was tried over, the widest first."""
        query = (
            "select distinct t.range, t.width from trial t join problem p on p.id = t.problem_id where p.key = ? "
            "order by t.width desc, length(t.range) desc, t.range"
        )
        return [Range(**json.loads(row["range"])) for row in self.db.query(query, [problem_key])]

    def counts(self, problem_key: str, over: Range) -> dict[str, int]:
        """Trials over one range by status."""
        query = (
            "select status, count(*) n from trial t join problem p on p.id = t.problem_id "
            "where p.key = ? and t.range = ? group by 1"
        )
        values = [problem_key, _text(over.model_dump(mode="json"))]
        return {row["status"]: row["n"] for row in self.db.query(query, values)}


_SELECT = (
    "select t.config, t.range, t.source_sha, t.status, t.provenance, t.score, t.yardstick, t.json, "
    "p.key problem_key, p.json problem, "
    "d.json device, e.json environment from trial t join problem p on p.id = t.problem_id "
    "join device d on d.id = t.device_id join environment e on e.id = t.environment_id"
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


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


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
