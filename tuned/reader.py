"""Reading the database where nothing may be heavy or fatal, as in a server: plain SQLite, read-only."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

from dsv4tune.codegen.problem import Silicon
from dsv4tune.tuned.records import Entry

#: Seconds to wait for a writer's lock; a search's writes take milliseconds.
LOCK_S = 0.3

#: Migrations that this reader knows the tables of; see `dsv4tune.tuned.store`.
KNOWN = ("m001_trials",)


def default_path() -> Path:
    """``$DSV4TUNE_DB``, else the user's data folder."""
    return Path(os.environ.get("DSV4TUNE_DB") or platformdirs.user_data_path("dsv4tune") / "tuned.db")


def open_read_only(path: Path, timeout: float) -> sqlite3.Connection:
    """A connection that creates and changes nothing.

    Raises:
        sqlite3.DatabaseError: it can't be opened.
    """
    # In a folder that can't be written SQLite can't make a log's index; where no log lies, none is needed.
    writable = os.access(path.absolute().parent, os.W_OK, effective_ids=True)
    still = not writable and not Path(f"{path}-wal").exists()
    uri = f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if still else "")
    return sqlite3.connect(uri, uri=True, timeout=timeout)


def usable_entries(path: Path, op: str, silicon: Silicon, tell: Callable[[str], None]) -> list[Entry]:
    """The ok trials of an op on this silicon, the best of each problem, range, config, compiler and kind of evidence.

    Whatever can't be read is left out, with a line to `tell`.
    """
    query = (
        "select p.key problem_key, p.json problem, d.json device, e.json environment, t.config, t.range, t.provenance, "
        "min(t.score) score, t.yardstick, t.source_sha, t.json from trial t join problem p on p.id = t.problem_id "
        "join device d on d.id = t.device_id join environment e on e.id = t.environment_id "
        "where t.status = 'ok' and t.score is not null and p.op = ? and d.capability = ? and d.sm_count = ? and "
        "d.shared_bytes = ? group by p.id, e.id, t.config, t.range, t.provenance, t.yardstick order by min(t.id)"
    )
    values = (op, silicon.capability, silicon.sm_count, silicon.shared_bytes)
    try:
        connection = open_read_only(path, LOCK_S)
        try:
            applied = "select name from _sqlite_migrations where migration_set = 'dsv4tune'"
            newer = [name for (name,) in connection.execute(applied) if name not in KNOWN]
            if newer:
                tell(f"{path} was written by a newer dsv4tune ({newer[0]}): not read; upgrade dsv4tune")
                return []
            connection.row_factory = sqlite3.Row
            rows = [dict(row) for row in connection.execute(query, values)]
        finally:
            connection.close()
    except sqlite3.Error as error:
        tell(f"can't read {path} ({error}): not used; name another database in $DSV4TUNE_DB")
        return []
    found, bad = [], ""
    for row in rows:
        try:
            found.append(_entry(row))
        except (ValueError, TypeError, KeyError) as error:  # pydantic's errors are ValueErrors
            bad = bad or str(error).splitlines()[0]
    if bad:
        tell(f"{path}: {len(rows) - len(found)} of {len(rows)} {op} trials can't be read ({bad}): left out")
    return found


def _entry(row: dict[str, Any]) -> Entry:
    rest = json.loads(row.pop("json"))
    for name in ("config", "range", "problem", "device", "environment"):
        row[name] = json.loads(row[name])
    return Entry(**{name: {**rest, **row}[name] for name in Entry.model_fields})
