"""Reading the database where nothing may be heavy or fatal, as in a server: plain SQLite, read-only."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import platformdirs

from dsv4tune.codegen.words import visible
from dsv4tune.tuned.records import Entry, Trial, reason_of

#: Seconds to wait for a writer's lock; a search's writes take milliseconds.
LOCK_S = 0.3

#: What SQLite says of a file that is locked, spoilt or none of its own; text of a spoilt one may be no text.
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)

#: Migrations that this reader knows the tables of; see `dsv4tune.tuned.database`.
KNOWN = ("m001_trials", "m002_sharing", "m003_final")


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


def foreign_objects(connection: sqlite3.Connection) -> str:
    """What a database holds that could run when it is read or written, such as ``a trigger``; "" in one of ours.

    Ours are plain tables and indexes. SQLite goes by the text of each, whatever is written beside it.
    """
    plain = " and ".join(f"lower(sql) not like 'create {kind} %'" for kind in ("table", "index", "unique index"))
    odd = connection.execute(
        f"select lower(substr(sql, 8)) from sqlite_master where type not in ('table', 'index') or ({plain}) limit 1"
    ).fetchone()
    if odd is not None:
        known = ("trigger", "view", "virtual table")
        return next((f"a {kind}" for kind in known if str(odd[0]).startswith(kind)), "an object of an unknown kind")
    computed = "select 1 from sqlite_master m, pragma_table_xinfo(m.name) c where m.type = 'table' and c.hidden limit 1"
    return "a computed column" if connection.execute(computed).fetchone() is not None else ""


class Stored:
    """The usable trials of the user's database, looked up by problem and read from one state of the file.

    Whatever can't be read is left out, with one line to `tell`; after an error of the file nothing is found any more.
    A problem without its rows goes by `family`, its JSON text.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self._to = path, tell
        self._connection: sqlite3.Connection | None = None
        self._complained = False
        self._family, self._imported, self._lengths, self._final = "p.family", "t.imported", "t.lengths", "t.final"
        with self._errors():
            self._open()

    def _open(self) -> None:
        connection = self._connection = open_read_only(self.path, LOCK_S)
        applied = [
            name
            for (name,) in connection.execute("select name from _sqlite_migrations where migration_set = 'dsv4tune'")
        ]
        newer = [name for name in applied if name not in KNOWN]
        foreign = foreign_objects(connection)
        if newer or foreign:
            self.close()
            why = f"was written by a newer dsv4tune ({newer[0]})" if newer else f"holds {foreign}, none of ours"
            self._tell(f"{self.path} {why}: not read; " + ("upgrade dsv4tune" if newer else "name another database"))
            return
        if KNOWN[1] not in applied:
            self._family, self._imported = "json_remove(p.json, '$.rows')", "''"
            self._lengths = "case when json_valid(t.range) then json_array_length(t.range, '$.lengths') end"
        if KNOWN[2] not in applied:
            self._final = "0"
        connection.execute("BEGIN")

    def _tell(self, line: str) -> None:
        self._to(visible(line))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def rows(self, family: str, predicted: bool) -> list[int]:
        """Row counts with a usable trial, predicted ones too or measured ones only."""
        usable = USABLE[predicted]
        query = f"select p.rows from problem p where {self._family} = :family and exists {usable} order by p.rows"
        return _whole(self._query(query, {"family": family}))

    def nearest(self, family: str, rows: int, step: int, predicted: bool) -> list[int]:
        """The nearest such row count below (step -1) or above (1) these, if there is one."""
        beyond = "< :rows" if step < 0 else "> :rows"
        query = NEAREST.format(
            family=self._family, beyond=beyond, usable=USABLE[predicted], order="desc" if step < 0 else "asc"
        )
        return _whole(self._query(query, {"family": family, "rows": rows}))

    def entries(self, family: str, rows: int, width: int, triton: str, ptxas: str) -> Iterator[tuple[Entry, bool]]:
        """Of each config, range, compiler and kind of evidence the best entry, and whether it was measured here.

        The one to go by under these compilers, for calls of this width, comes first. Each is read when it is asked for:
        of a problem's hundreds, mostly one is.
        """
        same = self._query(SAME_COMPILER, {"triton": triton, "ptxas": ptxas})
        ranked = RANKED.format(
            rank=BEST_RANK.format(
                same=", ".join(str(number) for (number,) in same), wide=f"width < {int(width)}, width"
            ),
            family=self._family,
            imported=self._imported,
            lengths=self._lengths,
            final=self._final,
        )
        entry = ENTRY.format(imported=self._imported, others=_OTHERS)
        seen = set()
        places = self._query(ranked, {"family": family, "rows": rows})
        for _, alike in groupby(places, lambda place: place[1]):
            found = [row for number, _ in alike for row in self._query(entry, {"number": number})]
            for row in sorted(found, key=lambda row: str(row[2])):
                kind = row[:6]
                read = self._read(row[2:-1]) if kind not in seen else None
                if read is not None:
                    seen.add(kind)
                    yield read, bool(row[-1])

    def _read(self, texts: Sequence[Any]) -> Entry | None:
        try:
            return Entry.model_validate_json(_joined(*texts))
        except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
            self._complain(f"{self.path}: some trials can't be read ({reason_of(error)}): left out")
        return None

    def _query(self, query: str, values: dict[str, Any]) -> list[Any]:
        with self._errors():
            if self._connection is not None:
                return self._connection.execute(query, values).fetchall()
        return []

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            self.close()
            self._complain(f"can't read {self.path} ({_brief(error)}): not used; name another database in $DSV4TUNE_DB")

    def _complain(self, line: str) -> None:
        """Once: what else is wrong with a spoilt file says nothing new."""
        if not self._complained:
            self._complained = True
            self._tell(line)


def _whole(found: Sequence[Any]) -> list[int]:
    """Row counts; in a spoilt database the column may hold anything."""
    return [rows for (rows,) in found if isinstance(rows, int)]


def _brief(error: Exception) -> str:
    """SQLite quotes the whole text that it can't decode."""
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else f"{text[:120]}..."


_ANY = "select 1 from trial t where t.problem_id = p.id and t.status = 'ok' and t.score is not null"
#: By whether a prediction will do.
USABLE = {True: f"({_ANY})", False: f"({_ANY} and t.provenance = 'measured')"}
NEAREST = (
    "select p.rows from problem p where {family} = :family and p.rows {beyond} and exists {usable} "
    "order by p.rows {order} limit 1"
)
#: Fields of a trial that an entry has not.
_OTHERS = ", ".join(f"'$.{name}'" for name in Trial.model_fields if name not in Entry.model_fields)
# Columns of the index trial_best alone, so that the rows of the losers are never read.
BEST_RANK = (
    "case when provenance <> 'measured' then 3 when imported = '' then 0 when environment_id in ({same}) then 1 "
    "else 2 end, yardstick = 'byte floor', {wide}, lengths desc, final desc, score"
)
RANKED = (
    "select id, rank() over (order by {rank}) from (select t.id, t.provenance, {imported} imported, t.environment_id, "
    "t.yardstick, t.width, {lengths} lengths, {final} final, t.score from problem p "
    "join trial t on t.problem_id = p.id where {family} = :family and p.rows = :rows "
    "and t.status = 'ok' and t.score is not null) order by 2, id"
)
SAME_COMPILER = (
    "select id from environment where case when json_valid(json) then json_extract(json, '$.triton') = :triton "
    "and json_extract(json, '$.ptxas') = :ptxas end"
)
#: The trial :number: what tells its kind of others, with which its texts begin, and whether it was measured here.
ENTRY = (
    "select t.environment_id, {imported}, t.config, t.range, t.provenance, t.yardstick, "
    "p.key, p.json, d.json, e.json, t.score, t.source_sha, "
    "case when json_valid(t.json) then json_remove(t.json, {others}) else '' end, "
    "{imported} = '' and t.provenance = 'measured' from trial t join problem p on p.id = t.problem_id "
    "join device d on d.id = t.device_id join environment e on e.id = t.environment_id where t.id = :number"
)


def _joined(
    config: str,
    over: str,
    provenance: str,
    yardstick: str,
    key: str,
    problem: str,
    device: str,
    environment: str,
    score: float,
    sha: str,
    rest: str,
) -> str:
    """One entry's JSON text of the texts in its columns: read as a whole, which is faster than by parts."""
    if not rest.startswith("{"):
        raise ValueError("a trial's JSON is no object")
    plain = json.dumps(
        {"problem_key": key, "provenance": provenance, "score": score, "yardstick": yardstick, "source_sha": sha}
    )
    texts = f'"problem":{problem},"device":{device},"environment":{environment},"config":{config},"range":{over}'
    return f"{plain[:-1]},{texts}{',' if len(rest) > 2 else ''}{rest[1:]}"
