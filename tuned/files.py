"""Exported files: read entry by entry within limits, written whole; local files, folders and fsspec's URLs.

What is read is data. It is copied first, as far as the limits go, so that what was summed up is what is imported, and
decoded an entry at a time, so that no file costs more memory than its largest entry may.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import unquote

from pydantic import ValidationError

from dsv4tune.codegen.words import visible
from dsv4tune.tuned.records import Catalogue, Entry, reason_of

#: Bytes of one file, characters of one entry, and files of one folder or URL that are read at most.
MAX_BYTES, MAX_ENTRY, MAX_FILES = 64 << 20, 64 << 10, 1000

#: Version of the files that are written, and all that are read.
VERSION = 2
VERSIONS = (1, 2)
#: Fields that came with a version.
_SINCE = {"spread": 2, "finished_at": 2}


class FileRefused(ValueError):
    """A file or URL can't be taken: its name, the path of the value, and why."""


@dataclass
class Source:
    """One file's name and a private copy of its bytes.

    The copy is empty where it is a local database: that is read in its place, with what its log holds.
    """

    name: str
    copy: IO[bytes]
    is_database: bool = False

    @property
    def shown(self) -> str:
        """Its name as it can be printed and stored, whatever bytes the file system has."""
        return visible(self.name)

    def entries(self) -> Iterator[Entry]:
        """Its entries in order.

        Raises:
            FileRefused: where the first fault is met; what came before it was sound.
        """
        self.copy.seek(0)
        yield from _File(self.name, self.copy).entries()


def parsed(name: str, data: bytes) -> list[Entry]:
    """The entries of a file that is in memory.

    Raises:
        FileRefused: it is none.
    """
    return list(Source(name, io.BytesIO(data)).entries())


# -- reading ----------------------------------------------------------------------------------------------------


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{_shown(twice)}' is there twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
_SPACE = re.compile(r"[ \t\r\n]*")


class _File:
    """``{"schema_version": V, "entries": [...]}`` with its two keys in any order, decoded one entry at a time."""

    def __init__(self, name: str, handle: IO[bytes]) -> None:
        self.name, self.handle = name, handle
        self.decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self.text, self.at, self.ended = "", 0, False

    def entries(self) -> Iterator[Entry]:
        version: int | None = None
        newest_field, seen = 1, set()
        self._take("{")
        if self._next() == "}":
            self._refuse("", "a file has schema_version and entries, and this one is empty")
        while True:
            key = self._value("")
            if key not in ("schema_version", "entries"):
                self._refuse("", f"unknown key '{_shown(key)}': a file has schema_version and entries")
            if key in seen:
                self._refuse("", f"the key '{key}' is there twice")
            seen.add(key)
            self._take(":")
            if key == "schema_version":
                version = self._version()
            else:
                for entry in self._list():
                    newest_field = max(newest_field, *(_SINCE.get(name, 1) for name in entry.model_fields_set))
                    yield entry
            if self._next() != ",":
                break
            self._take(",")
        self._take("}")
        if self._next():
            self._refuse("", "there is more behind its end")
        if seen != {"schema_version", "entries"}:
            self._refuse("", "a file has schema_version and entries")
        if version is not None and newest_field > version:
            self._refuse("entries", f"one has fields of version {newest_field} in a file of {version}")

    def _version(self) -> int:
        version = self._value("schema_version")
        if type(version) is not int or version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            why = ": upgrade dsv4tune" if type(version) is int and version > VERSION else ""
            self._refuse("schema_version", f"{_shown(version)} is none that is known here ({known}){why}")
        return version

    def _list(self) -> Iterator[Entry]:
        self._take("[")
        number = 0
        if self._next() == "]":
            self._take("]")
            return
        while True:
            path = f"entries[{number}]"
            start = self._fill()
            value = self._value(path)
            if not isinstance(value, dict):
                self._refuse(path, f"{_shown(value)} is no entry")
            try:
                entry = Entry.model_validate_json(self.text[start : self.at], strict=True)
            except ValidationError as error:
                self._refuse("", f"{path}.{reason_of(error)}")
            yield entry
            number += 1
            if self._next() != ",":
                break
            self._take(",")
        self._take("]")

    def _value(self, path: str) -> Any:
        start = self._fill()
        try:
            value, self.at = _DECODER.raw_decode(self.text, start)
        except RecursionError:
            self._refuse(path, "is nested too deep")
        except ValueError as error:
            if len(self.text) - start >= MAX_ENTRY and not self.ended:
                self._refuse(path, f"is longer than the {MAX_ENTRY} characters that an entry may have, or no JSON")
            self._refuse(path, f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error))
        if self.at - start > MAX_ENTRY:
            self._refuse(path, f"is longer than the {MAX_ENTRY} characters that an entry may have")
        return value

    def _take(self, mark: str) -> None:
        found = self._next()
        if found != mark:
            self._refuse("", f"'{mark}' expected, not {_shown(found) or 'its end'}")
        self.at += 1

    def _next(self) -> str:
        self._fill()
        return self.text[self.at : self.at + 1]

    def _fill(self) -> int:
        """Skip white space and see that an entry's length lies ahead, if the file has it; the place."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if len(self.text) - self.at >= MAX_ENTRY or self.ended:
                return self.at
            data = self.handle.read(MAX_ENTRY)
            self.ended = not data
            try:
                self.text, self.at = self.text[self.at :] + self.decode(data, self.ended), 0
            except UnicodeDecodeError as error:
                self._refuse("", f"is no UTF-8 ({error.reason})")

    def _refuse(self, path: str, reason: str) -> NoReturn:
        raise FileRefused(f"{self.name}: {path}{': ' if path else ''}{reason}")


def _shown(value: object, most: int = 60) -> str:
    """A foreign value in a message: short, on one line, without control characters."""
    text = str(value) if isinstance(value, str) else repr(value)
    return visible(text[:most]) + ("..." if len(text) > most else "")


# -- where files lie --------------------------------------------------------------------------------------------


def is_url(place: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", place) is not None and ("://" in place or "::" in place)


def _local(place: str) -> str:
    """The path that a URL of this machine's files names, so that it is opened as carefully as a path; else as it is."""
    if not re.match("(file|local)://", place) or "::" in place:
        return place
    return str(file_system(place)[1])


@contextlib.contextmanager
def opened(place: str) -> Iterator[list[Source]]:
    """Copies of the files at a path, a folder (its ``*.json``, also a level down), a URL or ``-`` (stdin), by name.

    Raises:
        FileRefused: there is none, or one is no regular file, too large, or lies outside its folder.
    """
    with contextlib.ExitStack() as stack:
        yield [Source(name, stack.enter_context(copy), database) for name, copy, database in _copies(place)]


def _copies(place: str) -> Iterator[tuple[str, IO[bytes], bool]]:
    if place == "-":
        yield "stdin", _copied("stdin", sys.stdin.buffer), False
        return
    place = _local(place)
    if not place or "\0" in place or "\n" in place:
        raise FileRefused(f"'{_shown(place)}' is no name of a file")
    if is_url(place):
        for name, handle in _from_url(place):
            yield name, _copied(name, handle), False
        return
    for path in _files(Path(place)):
        try:
            # Not to wait for whoever may write into a pipe.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(number, "rb") as handle:
                state = os.fstat(number)
                if not stat.S_ISREG(state.st_mode):
                    raise FileRefused(f"{path} is no regular file")
                if handle.read(16) == b"SQLite format 3\0":
                    yield str(path), io.BytesIO(), True
                    continue
                if state.st_size > MAX_BYTES:
                    raise FileRefused(f"{path} has {state.st_size} B: a file has at most {MAX_BYTES}")
                handle.seek(0)
                yield str(path), _copied(str(path), handle), False
        except OSError as error:
            raise FileRefused(f"can't read {path} ({error.strerror})") from error


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    root = path.resolve()
    found = sorted([*path.glob("*.json"), *path.glob("*/*.json")])
    for file in found:
        if not file.resolve().is_relative_to(root):
            raise FileRefused(f"{file} leads out of {path}: import it by its own name, if it is meant")
    if not found:
        raise FileRefused(f"no *.json in {path}")
    if len(found) > MAX_FILES:
        raise FileRefused(f"{path} has {len(found)} files: {MAX_FILES} are read at most")
    return found


def _copied(name: str, handle: IO[bytes]) -> IO[bytes]:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        while data := handle.read(1 << 20):
            copy.write(data)
            if copy.tell() > MAX_BYTES:
                raise FileRefused(f"{name} has more than {MAX_BYTES} B, the most that a file has")
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return copy


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system and the path in it.

    Raises:
        FileRefused: the URL is no plain one, or what it needs is not installed.
    """
    import fsspec

    if "::" in url or url.split(":", 1)[0] == "reference":
        raise FileRefused(f"{_shown(url)}: URLs within URLs are not followed")
    if ".." in unquote(unquote(url)).replace("\\", "/").split("/") or not url.isprintable():
        raise FileRefused(f"{_shown(url)}: a URL without '..' and control characters is asked for")
    try:
        system, path = fsspec.core.url_to_fs(url)
        return system, str(path)
    except Exception as error:  # every file system has its own
        missing = _line(error, 200) if isinstance(error, ImportError) else _line(error)
        raise FileRefused(f"can't open {_shown(url)} ({missing})") from error


def _from_url(url: str) -> Iterator[tuple[str, IO[bytes]]]:
    system, path = file_system(url)
    try:
        names = [path]
        if not path.endswith(".json") and system.isdir(path):
            names = sorted(n for n in system.find(path, maxdepth=2) if n.endswith(".json"))
            if not names or len(names) > MAX_FILES:
                raise FileRefused(f"{url} has {len(names)} *.json: 1 to {MAX_FILES} are read")
            inside = path.rstrip("/") + "/"
            if any(not n.startswith(inside) or ".." in n.split("/") for n in names):
                raise FileRefused(f"{url} lists names outside of it")
        for name in names:
            with system.open(name, "rb") as handle:
                yield (url if name == path else name), handle
    except FileRefused:
        raise
    except Exception as error:
        raise FileRefused(f"can't read {_shown(url)} ({_line(error)})") from error


def _line(error: BaseException, most: int = 60) -> str:
    lines = str(error).strip().splitlines()
    return _shown(lines[0], most) if lines else type(error).__name__


# -- writing ----------------------------------------------------------------------------------------------------


def text_of(entries: Iterable[Entry]) -> Iterator[str]:
    """An exported file in parts, the same for the same entries."""
    yield '{\n "entries": ['
    before, end = "\n  ", "]"
    for entry in entries:
        yield before + _indented(entry.model_dump(mode="json"), "\n  ")
        before, end = ",\n  ", "\n ]"
    yield f'{end},\n "schema_version": {VERSION}\n}}\n'


def _indented(value: Any, margin: str) -> str:
    """As ``json.dumps(value, indent=1, sort_keys=True)``, a few times as fast: Python's own doesn't indent in C.

    Args:
        value: what JSON holds; the keys of objects are words.
        margin: a line's end and the white space of the lines that follow.
    """
    inner = margin + " "
    encoded = _flat(inner).encode
    if not isinstance(value, dict | list) or not value:
        return encoded(value)
    if not any(isinstance(item, dict | list) for item in (value.values() if isinstance(value, dict) else value)):
        text = encoded(value)
        return text[0] + inner + text[1:-1] + margin + text[-1]
    if isinstance(value, dict):
        items = [f"{encoded(key)}: {_indented(value[key], inner)}" for key in sorted(value)]
        return "{" + inner + ("," + inner).join(items) + margin + "}"
    return "[" + inner + ("," + inner).join(_indented(item, inner) for item in value) + margin + "]"


@lru_cache(maxsize=16)
def _flat(margin: str) -> json.JSONEncoder:
    """Of what holds nothing that holds more: one item a line."""
    return json.JSONEncoder(sort_keys=True, separators=("," + margin, ": "))


def write(place: str, parts: Iterable[str]) -> None:
    """Write a file whole or not at all; a URL by its file system.

    Raises:
        FileRefused: it can't be written.
    """
    place = _local(place)
    if not is_url(place):
        try:
            write_whole(Path(place), parts)
        except OSError as error:
            raise FileRefused(f"can't write {place} ({error.strerror or error}): choose another with -o") from error
        return
    system, path = file_system(place)
    try:
        with system.open(path, "wb") as handle, io.TextIOWrapper(handle, encoding="utf-8", newline="\n") as out:
            out.writelines(parts)
    except Exception as error:
        raise FileRefused(f"can't write {_shown(place)} ({_line(error)})") from error


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """The whole file or, where the disk or the process fails, the one that was there."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as f:
            f.writelines(parts)  # a pipe or a device takes the text; replaced, it would be gone
        return
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.writelines(parts)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# -- the format -------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """The JSON Schema of the files that are written."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dsv4tune entries, version {VERSION}",
        **{name: value for name, value in Catalogue.model_json_schema().items() if name != "title"},
    }


def published_versions() -> list[int]:
    """Versions whose JSON Schema lies in ``tuned/schema``."""
    names = (file.name for file in resources.files("dsv4tune.tuned").joinpath("schema").iterdir())
    return [int(name[1:-5]) for name in names if name.endswith(".json")]


def published(version: int) -> dict[str, Any]:
    """That of one version."""
    file = resources.files("dsv4tune.tuned").joinpath("schema", f"v{version}.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
