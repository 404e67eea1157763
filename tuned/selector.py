"""Which entry a problem gets: exact, else one that serves a measured range of rows, else none; and why.

A pure function of the files and the problem: every rank of a server makes the same choice.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from dsv4tune.codegen import ops
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import listed
from dsv4tune.tuned.files import parsed
from dsv4tune.tuned.reader import Stored
from dsv4tune.tuned.records import Entry, reason_of
from dsv4tune.tuned.trust import Distrust, valid_config

if TYPE_CHECKING:
    from dsv4tune.tuned.store import Store

#: measured: timed on this silicon and faster than the server's own kernel; strict: with the running Triton and ptxas
#: too; predicted: what only the cost model vouches for is taken as well.
Policy = Literal["measured", "strict", "predicted"]
POLICIES: tuple[Policy, ...] = ("measured", "strict", "predicted")

#: What a measured entry must be faster by, as a share of the server's time: less is noise.
MARGIN = 0.01

ONLY_PREDICTED = "predicted, not measured (policy predicted would take it)"

Tell = Callable[[str], None]


def _shipped_files() -> Iterator[tuple[str, bytes]]:
    for folder in sorted(resources.files("dsv4tune.tuned").joinpath("configs").iterdir(), key=lambda f: f.name):
        if folder.is_dir():
            for file in sorted(folder.iterdir(), key=lambda f: f.name):
                if file.name.endswith(".json"):
                    yield f"{folder.name}/{file.name}", file.read_bytes()


@lru_cache(maxsize=1)
def shipped() -> tuple[Entry, ...]:
    """Every entry in ``tuned/configs/<device>/<op>.json``."""
    return tuple(entry for name, text in _shipped_files() for entry in parsed(name, text))


def entry_for(problem: Problem, store: Store | None) -> Entry | None:
    """The entry of exactly this problem, or None."""
    best = store.best(problem.key) if store is not None else None
    if best is not None:
        return Entry.of(best)
    return next((entry for entry in shipped() if entry.problem_key == problem.key), None)


def shipped_near(problem: Problem) -> list[Entry]:
    """The shipped entries of this problem and of the nearest row counts below and above, as far as there are any."""
    wanted = problem.to_json()
    at = {cast(int, e.problem["rows"]): e for e in shipped() if {**e.problem, "rows": problem.rows} == wanted}
    below, above = [n for n in at if n < problem.rows], [n for n in at if n > problem.rows]
    return [at[n] for n in (problem.rows, max(below, default=0), min(above, default=0)) if n in at]


# -- for a server -----------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """An entry, the file it lies in, and whether this machine's own search measured it."""

    entry: Entry
    origin: str
    here: bool = False


class Refused(NamedTuple):
    """An entry that was considered, and what stands against it."""

    found: Found
    reason: str

    def __str__(self) -> str:
        entry = self.found.entry
        rows, config = entry.problem["rows"], Config(entry.config)
        what = f"rows={rows}, {entry.provenance}, {config.brief}"
        return f"{self.found.origin}, {what}: {self.reason}"


@dataclass(frozen=True)
class Rules:
    """What an entry is held against.

    Attributes:
        policy: what evidence is asked for.
        baseline: the kernel that runs where no entry is chosen, by op; measured entries must have been timed beside it.
        triton, ptxas: the running versions.
    """

    policy: Policy
    baseline: Mapping[str, str]
    triton: str
    ptxas: str

    @property
    def predicted(self) -> bool:
        return self.policy == "predicted"

    def counts(self, entry: Entry) -> bool:
        """Whether an entry stands for its rows: a prediction only where one would be taken."""
        return self.predicted or entry.provenance == "measured"

    def same_compiler(self, entry: Entry) -> bool:
        return entry.environment.triton == self.triton and entry.environment.ptxas == self.ptxas

    def refusal(self, entry: Entry, problem: Problem, width: int) -> str | None:
        """Why this entry is no ground for replacing the server's kernel, or None."""
        if entry.provenance == "predicted":
            if self.policy != "predicted":
                return ONLY_PREDICTED
        else:
            expected = self.baseline.get(problem.op, "")
            if entry.baseline is None or entry.baseline.name != expected:
                beside = "no server kernel" if entry.baseline is None else entry.baseline.name
                return f"timed beside {beside}, and this server runs {expected or 'an unknown kernel'}"
            if entry.final is not None and not entry.final.won:
                asked = f"{entry.final.margin:.0%} less and more than the spread was asked for"
                return f"{expected} stayed in the search's final ({entry.score:.3f} of its time; {asked})"
            if entry.score > 1.0 - MARGIN:
                return f"not faster than {expected} by {MARGIN:.0%} ({entry.score:.3f} of its time)"
        if self.policy == "strict" and not self.same_compiler(entry):
            e = entry.environment
            here = f"here are {self.triton} and {self.ptxas}"
            return f"made with Triton {e.triton} and ptxas {e.ptxas}, {here} (policy strict)"
        if columns_asked(problem, width) > entry.range.width:
            return f"tried up to {entry.range.width} columns, asked for {width}"
        return None


def _until_lost(found: Iterator[Found]) -> Iterator[Found]:
    """Where this machine's own final left the server's kernel in place, that is the last word: others were slower."""
    for one in found:
        yield one
        if _lost(one):
            return


def _lost(one: Found) -> bool:
    return one.here and one.entry.final is not None and not one.entry.final.won


def columns_asked(problem: Problem, width: int) -> int:
    """Columns of a call that an entry's range must hold; an MLA decode's are part of its problem."""
    return width if problem.op == "indexer" else 0


@dataclass(frozen=True)
class Decision:
    """What one call shape gets.

    Attributes:
        entry: the chosen one, or None: the server's own kernel stays.
        origin: the file of the entry.
        why: one line: how the entry was found, or what stands against the first one that was considered.
        considered: every entry that was refused before that.
    """

    problem: Problem
    width: int
    entry: Entry | None
    origin: str
    why: str
    considered: tuple[Refused, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the server's own kernel stays because this machine's search for these rows found nothing faster."""
        of_these = [one.found for one in self.considered if one.found.entry.problem_key == self.problem.key]
        return self.entry is None and any(map(_lost, of_these))

    @property
    def config(self) -> Config:
        """In the op's order of words."""
        assert self.entry is not None
        words = ops.get(self.problem.op).words
        return Config({word: self.entry.config[word] for word in words})


@dataclass
class Book:
    """The entries of one silicon, by problem without rows, then by rows.

    The user's database may hold millions: it is asked for one problem at a time, and goes first.
    """

    silicon: Silicon
    tell: Tell
    stored: Stored | None = None
    _families: dict[str, dict[int, list[Found]]] = field(default_factory=dict)
    _mine: dict[tuple[str, int, int, str, str], Iterator[Found]] = field(default_factory=dict)

    @classmethod
    def read(cls, silicon: Silicon, database: Path | None, tell: Tell) -> Book:
        """The user's database first, then the shipped entries; what can't be read is left out, with a line each."""
        stored = Stored(database, tell) if database is not None and _is_there(database, tell) else None
        book = cls(silicon, tell, stored)
        for name, text in _shipped_files():
            try:
                items = json.loads(text)["entries"]
            except (ValueError, TypeError, KeyError) as error:
                tell(f"shipped {name} can't be read ({error}): not used; reinstall dsv4tune")
                continue
            book.add(_parsed(items, f"shipped {name}", tell))
        return book

    def close(self) -> None:
        if self.stored is not None:
            self.stored.close()

    def add(self, found: Iterable[Found]) -> None:
        for one in found:
            problem = self._problem_of(one)
            if problem is not None and self._words_agree(one):
                self._families.setdefault(family(problem), {}).setdefault(problem.rows, []).append(one)

    def _problem_of(self, one: Found) -> Problem | None:
        """What an entry is for, or None where it can't be used or is for other silicon."""
        try:
            problem = ops.problem_from_json(one.entry.problem)
            if problem.silicon != self.silicon:
                return None
            if problem.key != one.entry.problem_key:
                raise ValueError(f"its key is '{one.entry.problem_key}', its problem's '{problem.key}'")
        except (ValueError, TypeError, KeyError) as error:
            self.tell(f"{one.origin}: an entry can't be used ({str(error).splitlines()[0]}): left out")
            return None
        return problem

    def _words_agree(self, one: Found) -> bool:
        missing = set(ops.get(str(one.entry.problem["op"])).words) ^ set(one.entry.config)
        if missing:
            words = ", ".join(sorted(missing))
            self.tell(f"{one.origin}: an entry can't be used (config words {words} are of another dsv4tune): left out")
        return not missing

    def _at(self, family: str, rows: int, width: int, rules: Rules) -> Iterator[Found]:
        """Everything for one problem, the first to consider first; of equal evidence the user's own goes first.

        The database is read as far as this is.
        """
        shipped = self._families.get(family, {}).get(rows, [])
        order = [str(self.stored.path)] if self.stored is not None else []
        order += dict.fromkeys(one.origin for one in shipped)

        def rank(one: Found) -> tuple[Any, ...]:
            return _rank(one, order, width, rules)

        return _until_lost(heapq.merge(self._held(family, rows, width, rules), sorted(shipped, key=rank), key=rank))

    def _held(self, family: str, rows: int, width: int, rules: Rules) -> Iterator[Found]:
        """The user's own; what was read once is kept."""
        if self.stored is None:
            return iter(())
        place = family, rows, width, rules.triton, rules.ptxas
        known = self._mine[place] if place in self._mine else self._usable(self.stored, *place)
        self._mine[place], found = tee(known)
        return found

    def _usable(self, stored: Stored, family: str, rows: int, width: int, triton: str, ptxas: str) -> Iterator[Found]:
        for number, (entry, here) in enumerate(stored.entries(family, rows, width, triton, ptxas)):
            one = Found(entry, str(stored.path), here)
            # One row of the database is the problem of all of them.
            if number == 0 and self._problem_of(one) is None:
                return
            if self._words_agree(one):
                yield one

    def _counted(self, family: str, rows: int, width: int, rules: Rules) -> Iterator[Found]:
        """What counts as tried for one problem: a prediction does where the policy would take it."""
        return (one for one in self._at(family, rows, width, rules) if rules.counts(one.entry))

    def _nearest(self, family: str, rows: int, step: int, width: int, rules: Rules) -> list[Found]:
        """Everything that counts for the nearest row count below (step -1) or above (1) that has anything."""
        shipped = self._shipped_rows(family, rules)
        at = rows
        while True:
            stored = self.stored.nearest(family, at, step, rules.predicted) if self.stored is not None else []
            beyond = [r for r in shipped + stored if (r - at) * step > 0]
            if not beyond:
                return []
            at = min(beyond, key=lambda r: abs(r - rows))
            found = list(self._counted(family, at, width, rules))
            if found:
                return found

    def _shipped_rows(self, family: str, rules: Rules) -> list[int]:
        by_rows = self._families.get(family, {})
        return [rows for rows, found in by_rows.items() if any(rules.counts(one.entry) for one in found)]

    def choose(self, problem: Problem, width: int, rules: Rules) -> Decision:
        """The entry for a call shape, or the reason why there is none."""
        of, asked = family(problem), columns_asked(problem, width)
        exact = self._exact(problem, width, rules, self._counted(of, problem.rows, asked, rules))
        if exact is not None:
            return exact
        below, above = (self._nearest(of, problem.rows, step, asked, rules) for step in (-1, 1))
        if below and above:
            return self._between(problem, width, rules, (below, above))
        guessed = self._exact(problem, width, rules, self._at(of, problem.rows, asked, rules))
        if guessed is not None:
            return guessed  # which says what stands against them
        held = {*self._shipped_rows(of, rules), *self._stored_rows(of, rules.predicted)} - {problem.rows}
        if held:
            why = f"entries are for {listed(held)} rows, which don't enclose these"
        elif guesses := {*self._families.get(of, {}), *self._stored_rows(of, True)}:
            why = f"entries are for {listed(guesses)} rows, and predicted, not measured"
        else:
            why = self._elsewhere(problem)
        return Decision(problem, width, None, "", why)

    def _stored_rows(self, family: str, predicted: bool) -> list[int]:
        return self.stored.rows(family, predicted) if self.stored is not None else []

    def _elsewhere(self, problem: Problem) -> str:
        """What the shipped entries of the nearest other shapes are for, if there are any for this silicon."""
        wanted = json.loads(family(problem))
        shapes = [shape for shape in map(json.loads, self._families) if shape["op"] == wanted["op"]]
        if not shapes:
            return "no entry for this silicon"

        def apart(shape: dict[str, Any]) -> tuple[int, int]:
            differ = [(wanted[name], value) for name, value in shape.items() if wanted[name] != value]
            return len(differ), sum(abs(one - other) for one, other in differ if isinstance(one, int))

        nearest = min(shapes, key=apart)
        mine, theirs = problem.said, ops.problem_from_json({**nearest, "rows": problem.rows}).said
        missing, there = (", ".join(w for w in a if w not in b) for a, b in ((mine, theirs), (theirs, mine)))
        return f"no entry for {missing}: search for one (there are some for {there})"

    def _exact(self, problem: Problem, width: int, rules: Rules, found: Iterator[Found]) -> Decision | None:
        """The first that is usable, or what stands against the first one; None where nothing was found."""
        refused: list[Refused] = []
        slow: set[str] = set()
        for one in found:
            config = Config(one.entry.config)
            reason = rules.refusal(one.entry, problem, width) or _invalid(problem, one.entry)
            if reason is None and config.key in slow:
                reason = "timed before, and not faster then"
            if reason is None:
                why = "exact" + _other(one.entry, rules)
                return Decision(problem, width, one.entry, one.origin, why, tuple(refused))
            if one.entry.baseline is not None and one.entry.score > 1.0 - MARGIN:
                slow.add(config.key)
            refused.append(Refused(one, reason))
        return Decision(problem, width, None, "", refused[0].reason, tuple(refused)) if refused else None

    def _between(
        self, problem: Problem, width: int, rules: Rules, ends: tuple[Sequence[Found], Sequence[Found]]
    ) -> Decision:
        """One config that is usable at both neighbouring row counts that were tried."""
        usable: list[dict[tuple[str, bool], Found]] = []
        refused: list[Refused] = []
        for found in ends:
            usable.append({})
            for one in found:
                at = ops.problem_from_json(one.entry.problem)
                reason = rules.refusal(one.entry, at, width) or _invalid(problem, one.entry)
                if reason is None:
                    # Decode and prompts are timed over different calls: one says nothing of the other.
                    usable[-1].setdefault((Config(one.entry.config).key, one.entry.range.causal), one)
                else:
                    refused.append(Refused(one, reason))
        low, high = usable
        rows = " and ".join(str(found[0].entry.problem["rows"]) for found in ends)
        both = [key for key in low if key in high]
        if not both:
            return Decision(problem, width, None, "", f"no one config is usable at both {rows} rows", tuple(refused))
        # The worse end speaks for what lies between.
        key = min(both, key=lambda k: (max(low[k].entry.score, high[k].entry.score), k))
        chosen = max((low[key], high[key]), key=lambda one: one.entry.score)
        why = f"the same config at {rows} rows" + _other(chosen.entry, rules)
        return Decision(problem, width, chosen.entry, chosen.origin, why, tuple(refused))


def family(problem: Problem) -> str:
    """A problem without its rows, as the database's column has it."""
    shape = {name: value for name, value in problem.to_json().items() if name != "rows"}
    return json.dumps(shape, sort_keys=True, separators=(",", ":"))


def _is_there(database: Path | None, tell: Tell) -> bool:
    """None is no fault: not everyone has searched."""
    try:
        if database is None or not database.exists():
            return False
        if database.is_file():
            return True
        why = "is no regular file"
    except OSError as error:
        why = f"can't be looked at ({error.strerror})"
    tell(f"{database} {why}: not used; name another database in $DSV4TUNE_DB")
    return False


def _parsed(items: Any, origin: str, tell: Tell) -> Iterator[Found]:
    for item in items:
        try:
            yield Found(Entry.model_validate(item), origin)
        except ValueError as error:
            tell(f"{origin}: an entry can't be read ({reason_of(error)}): left out")


def _rank(one: Found, order: Sequence[str], width: int, rules: Rules) -> tuple[Any, ...]:
    """Better evidence first, then files in their order; of one file that of `dsv4tune.tuned.records.Entry.standing`."""
    stands, *rest = one.entry.standing(one.here, rules.same_compiler(one.entry), width)
    return (stands, order.index(one.origin), *rest)


def _other(entry: Entry, rules: Rules) -> str:
    e = entry.environment
    return "" if rules.same_compiler(entry) else f", with Triton {e.triton} and ptxas {e.ptxas}"


def _invalid(problem: Problem, entry: Entry) -> str | None:
    """Why the space has no such config for these rows."""
    try:
        valid_config(entry, problem)
    except Distrust as error:
        return error.reason
    return None
