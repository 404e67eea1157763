"""What a report shows, gathered from the database, the shipped entries and files of `dsv4tune bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.ops.mla_decode_call import CACHES
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.space import Config
from dsv4tune.tools.measure import floors_us
from dsv4tune.tuned.records import DeviceRecord, Entry, Positive, Range, Share, Tried, reason_of
from dsv4tune.tuned.selector import shipped
from dsv4tune.tuned.store import Filter, Store

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """A file that ``bench -o`` wrote."""

    path: Path
    data: dict[str, Any]

    @property
    def kernel(self) -> str:
        return str(self.data["kernel"])

    @property
    def device(self) -> str:
        return str(self.data["environment"]["device"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.data["rows"])

    def decode(self, problem: Problem, width: int) -> list[dict[str, Any]]:
        """The timed calls of this problem in which all rows are equally long, by length; see the ops' `describe`."""
        found = [row for row in self.rows if _is_decode(row["shape"], problem, width)]
        return sorted(found, key=lambda row: int(row["shape"]["live"]))


def _is_decode(shape: dict[str, Any], problem: Problem, width: int) -> bool:
    if shape["kind"] != "decode" or shape["rows"] != problem.rows or shape.get("cached"):
        return False
    if problem.op == "mla_decode":
        fields = {"heads": "heads", "topk": "width", "extra": "extra_width"}
        return all(shape.get(word) == getattr(problem, name) for word, name in fields.items())
    return bool(shape.get("width") == width and shape.get("positions") == shape["rows"] * shape["live"])


@dataclass(frozen=True)
class Studied:
    """One problem over one range, what was tried on it, and the entry to go by.

    Attributes:
        trials: in the order they ended; none for a shipped entry.
        best: None where nothing usable was found.
        origin: the file that `best` lies in.
    """

    problem: Problem
    range: Range
    device: DeviceRecord
    trials: tuple[Tried, ...]
    best: Entry | None
    origin: str

    @property
    def title(self) -> str:
        """Rows, and whether they are a prompt's."""
        rows = f"{self.problem.rows:,} row{'s' if self.problem.rows != 1 else ''}"
        return rows + (", prompt" if self.range.causal and self.problem.rows > 1 else "")

    @property
    def family(self) -> str:
        """What this problem has in common with those of other row counts; "" where the kernel has one kind alone."""
        if self.problem.op != "mla_decode":
            return ""
        page, width = getattr(self.problem, "extra_page_size", 0), getattr(self.problem, "extra_width", 0)
        cache = f"{CACHES.get(page, f'pages of {page}')}, {width:,} columns" if page else "no compressed cache"
        return f"{getattr(self.problem, 'heads', 0)} heads, {cache}"

    @cached_property
    def scored(self) -> list[tuple[int, Tried]]:
        """Number and trial of the usable ones, with scores that compare with the best's.

        One that was stopped early has the score of its shortest lengths, at which all are nearer to the server's kernel
        or farther: it counts as if it were as far behind the best at the others too.
        """
        best = self.best
        if best is None:
            return []
        against = best.baseline.times_us if best.baseline is not None else self.floors_us
        found = []
        for number, trial in enumerate(self.trials, 1):
            same = (trial.provenance, trial.yardstick) == (best.provenance, best.yardstick)
            if not same or trial.score is None or trial.status not in ("ok", "pruned"):
                continue
            score = trial.score
            if trial.status == "pruned" and trial.timed and against:
                score *= best.score / self.range.profile.only(trial.timed).score(best.times_us, against)
            found.append((number, trial.model_copy(update={"score": score})))
        return found

    @cached_property
    def floors_us(self) -> dict[int, float]:
        """By live length: each byte once at the vendor's bandwidth; empty for a card that isn't known."""
        bandwidth = devices.bandwidth(self.problem.silicon, self.device.name)
        if bandwidth is None:
            return {}
        return floors_us(self.problem, self.range.profile, bandwidth)


@dataclass(frozen=True)
class Section:
    """One kernel on one silicon, under the name of a card that has it."""

    kernel: str
    device: DeviceRecord
    studied: tuple[Studied, ...]
    benches: tuple[Bench, ...] = ()

    @property
    def target(self) -> str:
        return "sm_" + self.device.capability.replace(".", "")

    @property
    def trials(self) -> int:
        return sum(len(one.trials) for one in self.studied)


def _naming(one: Studied) -> tuple[bool, bool, bool, str]:
    """Orders problems by how good a name their device's is for its silicon: one that was measured on goes first, then a
    driver's product name before our word for it, then the user's own."""
    measured = one.best is not None and one.best.provenance == "measured"
    return not measured, one.device.name in devices.DEVICES, not one.trials, one.device.name


def sections(
    path: Path | None, benches: Sequence[Bench], kernel: str | None, say: Say, silicon: Silicon | None = None
) -> list[Section]:
    """What is known, by kernel and silicon; those with trials of the user's own go first.

    With a database of one's own, other cards' shipped entries are left out, and so is what is in both.

    Args:
        path: the database, None for none.
        silicon: only this one.

    Raises:
        StoreError: the database can't be read.
        ValueError: an unknown kernel, or a trial that this version can't read.
    """
    if kernel is not None:
        ops.get(kernel)
    grouped: dict[tuple[str, Silicon], list[Studied]] = {}
    measured: set[str] = set()
    known: set[tuple[Any, ...]] = set()
    if path is not None:
        for one in _stored(path, kernel):
            if silicon is not None and one.device.silicon != silicon:
                continue
            if one.best is not None:
                known.add(_content(one.best))
                if one.best.provenance == "measured":
                    measured.add(one.problem.key)
            grouped.setdefault((one.problem.op, one.device.silicon), []).append(one)
    cards = {of for _, of in grouped} if silicon is None else {silicon}
    benched = {bench.device for bench in benches} if silicon is None else set()
    for entry in shipped():
        asked = kernel is None or entry.problem["op"] == kernel
        near = not cards or entry.device.silicon in cards or entry.device.name in benched
        if asked and near and entry.problem_key not in measured and _content(entry) not in known:
            problem = ops.problem_from_json(entry.problem)
            one = Studied(problem, entry.range, entry.device, (), entry, "shipped with dsv4tune")
            grouped.setdefault((problem.op, entry.device.silicon), []).append(one)
    found = []
    for (op, of), group in grouped.items():
        alike = [one for (_, other), some in grouped.items() if other == of for one in some]
        studied = sorted(group, key=lambda one: (one.range.causal, one.problem.rows, one.problem.key))
        names = {one.device.name for one in alike}
        mine = [bench for bench in benches if bench.kernel == op and bench.device in names]
        found.append(Section(op, min(alike, key=_naming).device, tuple(studied), tuple(mine)))
    for bench in benches:
        if not any(bench in section.benches for section in found):
            say(f"{bench.path} is of {bench.kernel} on {bench.device}, of which nothing else is shown: left out")
    return sorted(found, key=lambda section: (-section.trials, section.kernel, section.device.name))


def _content(entry: Entry) -> tuple[Any, ...]:
    """What two entries that are shown alike have in common."""
    return entry.problem_key, entry.provenance, Config(entry.config).key, entry.range.model_dump_json()


def _stored(path: Path, kernel: str | None) -> Iterator[Studied]:
    store = Store(path, create=False)
    try:
        for key, problem, over, _ in store.tallies(Filter(op=kernel)):
            best = store.best(key, over)
            some = best or next(store.trials(key), None)
            if some is None:
                continue  # pruned since
            entry = Entry.of(best) if best is not None else None
            origin = f"{path}, imported from {best.imported}" if best is not None and best.imported else str(path)
            tried = tuple(store.tried(key, over))
            yield Studied(ops.problem_from_json(problem), over, some.device, tried, entry, origin)
    finally:
        store.close()


class _Part(BaseModel):
    """Of a bench's file, what the page takes from it; there is more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Shape(_Part):
    name: str
    kind: str
    rows: int
    live: Annotated[int, Field(ge=0)]


class _Row(_Part):
    shape: _Shape
    floor_us: Share
    us: dict[str, Positive]


class _Where(_Part):
    device: str


class _BenchFile(_Part):
    kernel: str
    environment: _Where
    copy_gb_per_s: Positive
    warnings: list[str]
    rows: list[_Row]


def read_bench(path: Path) -> Bench:
    """A bench's file.

    Raises:
        ValueError: it is none.
        OSError: it can't be read.
    """
    if not path.exists():
        raise ValueError(f"no file {path}: `dsv4tune bench -o` makes one, on a GPU")
    text = path.read_bytes()
    try:
        ops.get(_BenchFile.model_validate_json(text).kernel)
    except ValueError as error:
        why = reason_of(error)
        raise ValueError(f"{path} is no file of `dsv4tune bench -o` ({why}): name another with --bench") from error
    return Bench(path, json.loads(text))
