"""Nothing that arrives from outside is taken on trust: each hostile file is refused, and its valid twin imports."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exports import make_entry, measured
from hostile import HOSTILE, twins, valid
from typer.testing import CliRunner

from dsv4tune.tools.cli import app
from dsv4tune.tuned import files, reader, share
from dsv4tune.tuned.files import FileRefused
from dsv4tune.tuned.store import Store, StoreError


def bring_in(place: Path | str, database: Path) -> int:
    with files.opened(str(place)) as sources:
        store = Store(database)
        try:
            return share.bring_in(sources, store).stored
        finally:
            store.close()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One with an entry of its own, which stays the only one."""
    store = Store(tmp_path_factory.mktemp("trust") / "tuned.db")
    store.add(measured(64))
    yield store
    store.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_whole(name: str, store: Store, tmp_path: Path) -> None:
    hostile, _ = twins(name)
    file = tmp_path / "hostile.json"
    file.write_bytes(hostile.encode("utf-8", "surrogateescape"))
    with files.opened(str(file)) as sources, pytest.raises(FileRefused) as refusal:
        share.bring_in(sources, store)
    said = str(refusal.value)
    assert said.startswith(str(file)) and "\n" not in said and len(said) < 600
    assert store.total() == 1 and not Path("/tmp/owned").exists()


def test_there_are_enough_of_them_and_each_differs_from_its_twin() -> None:
    assert len(HOSTILE) >= 60
    for name in HOSTILE:
        hostile, twin = twins(name)
        assert hostile != twin and twin == json.dumps(valid())


def test_the_valid_twin_imports(tmp_path: Path) -> None:
    file = tmp_path / "fine.json"
    file.write_text(json.dumps(valid()))
    assert bring_in(file, tmp_path / "tuned.db") == 2


@pytest.mark.parametrize("path", ["problem", "device", "range", "config", "entries[0]"])
def test_a_refusal_names_the_path(path: str, tmp_path: Path) -> None:
    entry = make_entry(8)
    if path == "entries[0]":
        entry["extra"] = 1
    else:
        entry[path]["extra"] = 1
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema_version": 2, "entries": [entry]}))
    with pytest.raises(FileRefused, match=rf"entries\[0\].*{'extra' if path != 'problem' else 'problem'}"):
        bring_in(file, tmp_path / "tuned.db")


# -- sizes ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(FileRefused, match="has 1073741824 B: a file has at most"):
        bring_in(huge, tmp_path / "tuned.db")


def test_a_stream_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)

    class Endless:
        read = 0

        class buffer:
            @staticmethod
            def read(size: int) -> bytes:
                Endless.read += size
                return b" " * size

    monkeypatch.setattr("sys.stdin", Endless)
    with pytest.raises(FileRefused, match="stdin has more than 1048576 B"):
        bring_in("-", tmp_path / "tuned.db")
    assert Endless.read <= 3 << 20


# -- names and URLs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "file:///tmp/../etc/passwd",
        "file:///tmp/%2e%2e/etc/passwd",
        "file:///tmp/%252e%252e/etc/passwd",
        "memory://a\\..\\b.json",
        "simplecache::file:///etc/passwd",
        "zip://x.json::file:///tmp/x.zip",
        "reference://x.json",
        "nosuch://host/x.json",
        "file:///tmp/x\n.json",
        "/tmp/x\0.json",
        "/nowhere/x.json",
        "/dev/zero",
        "file:///dev/zero",
        "",
    ],
)
def test_a_place_that_is_not_followed(place: str, tmp_path: Path) -> None:
    with pytest.raises(FileRefused) as refusal:
        bring_in(place, tmp_path / "tuned.db")
    assert "\n" not in str(refusal.value)


def test_a_folder_holds_no_way_out_of_it(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.json", tmp_path / "folder"
    outside.write_text(json.dumps(valid()))
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(valid()))
    assert bring_in(folder, tmp_path / "tuned.db") == 2
    (folder / "b.json").symlink_to(outside)
    for place in (folder, folder.as_uri()):
        with pytest.raises(FileRefused, match="leads out of"):
            bring_in(place, tmp_path / "tuned.db")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for place in (pipe, pipe.as_uri(), f"local://{pipe}"):
        with pytest.raises(FileRefused, match="no regular file"):
            bring_in(place, tmp_path / "tuned.db")


@pytest.mark.parametrize("name", [b"\x1b]0;owned\x07\x1b[2J.json", b"\xff\xfe.json", "\u202etxt.json".encode()])
def test_a_files_name_is_data_too(name: bytes, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(name)
    file.write_text(json.dumps(valid()))
    assert bring_in(file, tmp_path / "tuned.db") == 2
    shown = run("show", "--kernel", "indexer", "--db", tmp_path / "tuned.db")
    assert shown.exit_code == 0 and f"imported from {tmp_path}/" in shown.stdout
    file.write_text("{}")
    for said in (shown.stdout, run("import", file, "--db", tmp_path / "tuned.db").stderr):
        assert str(tmp_path) in said and said.replace("\n", "").isprintable()


# -- databases --------------------------------------------------------------------------------------------------


def _database(path: Path, *statements: str) -> Path:
    store = Store(path)
    store.add(measured(8))
    store.close()
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.execute("pragma journal_mode = delete")
    connection.close()
    return path


DATABASES = {
    "a trigger": ["create trigger t after insert on trial begin delete from trial; end"],
    "a view": ["create view v as select * from trial"],
    "a view in the place of a table": ["alter table trial rename to other", "create view trial as select * from other"],
    "a view of another type": [
        "pragma writable_schema = on",
        "insert into sqlite_master values ('VIEW', 'v', 'v', 0, 'create view v as select 1')",
    ],
    "a virtual table that is written oddly": [
        "pragma writable_schema = on",
        "insert into sqlite_master values ('table', 'v', 'v', 0, 'create/**/virtual table v using fts5(x)')",
    ],
    "a computed column": ["alter table trial add column more as (zeroblob(900000000))"],
    "a virtual table": ["create virtual table f using fts5(x)"],
    "a number as text": ["update trial set score = 'fast'"],
    "a blob": ["update trial set config = x'00ff'"],
    "JSON of another shape": ["update trial set json = '[]'"],
    "no JSON": ["update problem set json = 'x'"],
    "an unknown field": ["update trial set json = json_set(json, '$.extra', 1)"],
    "an unknown config": ["""update trial set config = '{"block_t": 1}'"""],
    "code in a name": ["update device set json = json_set(json, '$.name', 'x''; import os')"],
    "another source": ["update trial set source_sha = '" + "0" * 64 + "'"],
    "another key": ["update problem set key = 'indexer rows=9'"],
    "JSON that is nested deep": [f"update trial set json = '{'[' * 200_000}'"],
    "a config that is nested deep": [f"update trial set config = '{'[' * 200_000}'"],
    "a problem that is nested deep": [f"update problem set json = '{'[' * 200_000}'"],
    "a range of another shape": ["update trial set range = '[]'"],
    "a problem of another shape": ["update problem set json = '7'"],
    "a key of bytes": ["update problem set key = x'00ff'"],
    "no key": ["update problem set key = null"],
    "no times": ["update trial set json = json_set(json, '$.times_us', json('{}'))"],
    "no error": ["update trial set json = json_remove(json, '$.error')"],
    "no resources": ["update trial set json = json_set(json, '$.resources', null)"],
    "a terminal's codes": ["update trial set yardstick = char(27) || '[2J'"],
    "a table is missing": ["drop table environment"],
    "a newer schema": ["insert into _sqlite_migrations (migration_set, name) values ('dsv4tune', 'm999_new')"],
}


@pytest.mark.parametrize("name", DATABASES)
def test_a_hostile_database_is_refused(name: str, tmp_path: Path) -> None:
    path = _database(tmp_path / "theirs.db", *DATABASES[name])
    with pytest.raises(FileRefused) as refusal:
        bring_in(path, tmp_path / "mine.db")
    assert "\n" not in str(refusal.value)
    assert Store(tmp_path / "mine.db", create=False).total() == 0


@pytest.mark.parametrize("name", DATABASES)
def test_whoever_names_a_hostile_database_gets_a_line(name: str, tmp_path: Path) -> None:
    """With --db, of which less is asked than of what is imported: it may be shown, or be refused."""
    path = _database(tmp_path / "theirs.db", *DATABASES[name])
    out = tmp_path / "out"
    for command in (["list"], ["show", "--kernel", "indexer"], ["export", "-o", out], ["report", "-o", out]):
        done = run(*command, "--db", path)
        assert done.exit_code in (0, 2) and isinstance(done.exception, SystemExit | None), done.exception
        if done.exit_code == 2:
            assert done.stderr.startswith("dsv4tune: ") and done.stderr.count("\n") == 1 and len(done.stderr) < 600
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()


def test_a_databases_valid_twin_imports(tmp_path: Path) -> None:
    path = _database(tmp_path / "theirs.db")
    assert bring_in(path, tmp_path / "mine.db") == 1
    for command in (["list"], ["show", "--kernel", "indexer"], ["export"], ["report", "-o", tmp_path / "out"]):
        assert run(*command, "--db", path).exit_code == 0


def test_a_row_count_that_is_none_is_not_found(tmp_path: Path) -> None:
    path = _database(tmp_path / "theirs.db", "update problem set rows = 'many'")
    lines: list[str] = []
    stored = reader.Stored(path, lines.append)
    ((family,),) = sqlite3.connect(path).execute("select family from problem")
    assert stored.rows(family, True) == [] and stored.nearest(family, 1, 1, True) == [] and lines == []


@pytest.mark.parametrize("name", [name for name in DATABASES if name.startswith("a trigger") or "view" in name])
def test_no_code_of_a_database_runs(name: str, tmp_path: Path) -> None:
    """Neither in a search, nor in a list, nor in a server."""
    path = _database(tmp_path / "theirs.db", *DATABASES[name])
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(StoreError, match="which dsv4tune never made"):
            Store(path, create=create)
    lines: list[str] = []
    stored = reader.Stored(path, lines.append)
    assert stored.rows("any", True) == [] and len(lines) == 1 and "none of ours" in lines[0]
    assert path.read_bytes() == before
