"""The SQLite file of trials: its migrations, and opening it, which creates, migrates or sets it aside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlite_utils import Database, Migrations

from dsv4tune.tuned.reader import UNREADABLE, default_path, foreign_objects, open_read_only

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


@migrations()
def m003_final(db: Database) -> None:
    """1 for what the latest final of a search went by, which stands before lower scores that were timed alone; -1 for
    what is the second trial of one candidate; 0 for all others."""
    db.table("trial").add_column("final", int, not_null_default=0)
    db.execute("drop index trial_best")
    db.execute(
        "create index trial_best on trial(problem_id, provenance, imported, environment_id, yardstick, width, lengths, "
        "final, score, status) where status = 'ok' and score is not null"
    )
    db.execute("drop index trial_range")
    db.execute("create index trial_range on trial(problem_id, range, status, final)")


def open_for_reading(path: Path) -> Database:
    """As it is; nothing is created or migrated.

    Raises:
        StoreError: it is missing, no database, or of an older or newer schema.
    """
    if not path.is_file():
        raise StoreError(f"no database at {path}: run a search first, or name another with --db")
    try:
        db = Database(open_read_only(path, timeout=30), execute_plugins=False)
        _refuse_foreign(path, db)
        if migrations.pending(db):
            raise StoreError(f"{path} has an older schema or no trials: a search or `dsv4tune prune` migrates it")
    except UNREADABLE as error:
        raise StoreError(f"can't read {path} ({error}): name another database with --db") from error
    return db


def open_for_writing(path: Path, notes: list[str]) -> Database:
    """Created, migrated or set aside where it has to be; `notes` gets what a user should know of that.

    Raises:
        StoreError: the file or its folder is missing or not writable, or of a newer dsv4tune.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder: name a file with --db")
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is no regular file: name another with --db")
    folder = path.absolute().parent
    if path == default_path():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        raise StoreError(f"folder {folder} does not exist: create it or choose another database with --db")
    try:
        with _lock(path):
            return _migrated(path, notes)
    except PermissionError as error:
        raise StoreError(f"can't write {path} ({error.strerror}): choose another database with --db") from error
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreError(f"can't write {path} ({error}): choose another database with --db") from error


def _migrated(path: Path, notes: list[str]) -> Database:
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "it is read-only")
    try:
        return _connect(path)
    except UNREADABLE as error:
        if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error):
            raise  # locked, or a full disk: the file may be sound
        aside = _free_name(path)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
        notes.append(f"{path} is no sound database ({error}); set aside as {aside}, starting a new one")
        return _connect(path)


def _connect(path: Path) -> Database:
    db = Database(sqlite3.connect(path.absolute(), timeout=30), execute_plugins=False)
    db.conn.execute("PRAGMA trusted_schema = OFF")
    _refuse_foreign(path, db)
    db.conn.execute("PRAGMA journal_mode = WAL")
    # Each commit reaches the disk: a finished trial cost GPU time.
    db.conn.execute("PRAGMA synchronous = FULL")
    # A large file is read for seconds: there only its size is held against what its header says.
    if path.stat().st_size <= _CHECKED_WHOLE:
        for (answer,) in db.conn.execute("PRAGMA quick_check(1)"):
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
    migrations.apply(db)
    return db


def _refuse_foreign(path: Path, db: Database) -> None:
    found = foreign_objects(db.conn)
    if found:
        raise StoreError(f"{path} holds {found}, which dsv4tune never made: use another --db")
    _refuse_newer(path, db)


def _refuse_newer(path: Path, db: Database) -> None:
    known = {m.name for m in migrations._migrations}
    newer = [m.name for m in migrations.applied(db) if m.name not in known]
    if newer:
        raise StoreError(f"{path} was written by a newer dsv4tune ({newer[0]}): upgrade, or use another --db")


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
