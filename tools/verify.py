"""Entries of others, measured here: compile, check and time each again on this GPU.

Each is told and stored the moment it ends; what an earlier run found right is not measured again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.render import cache_folder, render, try_writing
from dsv4tune.codegen.space import Config
from dsv4tune.tools.evaluate import Evaluation, Pools, default_jobs
from dsv4tune.tools.executor import NoSeatsLeft
from dsv4tune.tools.measure import Setup, compile_job
from dsv4tune.tools.progress import Problem, Watcher
from dsv4tune.tools.sites import Site
from dsv4tune.tools.tune import HERE, TooLarge, fitting, interrupted_once, timed_baseline
from dsv4tune.tuned import files, share, trust
from dsv4tune.tuned.records import Entry, Trial, triton_version
from dsv4tune.tuned.store import EVERYTHING, Filter, Store


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
        place: an exported file, folder or URL; None for what the database would choose.
        again: whether what was found right here is measured too.
    """

    place: str | None
    db: Path
    only: Filter = EVERYTHING
    again: bool = False
    budget_s: float | None = None
    site: Site = HERE


@dataclass(frozen=True)
class Verified:
    """What became of one entry: ``ok`` and its figures here, or how it failed and why.

    Attributes:
        status: of its trial, or ``untried`` where it could not come to one: that says nothing of the entry.
        said, found: score and yardstick of the entry, and those measured here.
        earlier: it was measured by an earlier run.
    """

    problem_key: str
    status: str
    said: str
    found: str
    reason: str
    earlier: bool = False

    @classmethod
    def of(cls, entry: Entry, trial: Trial, earlier: bool = False) -> Verified:
        found = f"{trial.score:.3f} of {trial.yardstick}" if trial.score is not None else ""
        return cls(entry.problem_key, trial.status, _figure(entry), found, trial.reason, earlier)

    @classmethod
    def untried(cls, entry: Entry, reason: object) -> Verified:
        return cls(entry.problem_key, "untried", _figure(entry), "", str(reason))

    def __str__(self) -> str:
        if self.status == "ok":
            when = " earlier" if self.earlier else ""
            return f"{self.problem_key}: measured here{when}, {self.found}; it said {self.said}"
        return f"{self.problem_key}: {self.status}: {self.reason}; it said {self.said}"


def _figure(entry: Entry) -> str:
    return f"{entry.provenance}, {entry.score:.3f} of {entry.yardstick}"


@dataclass
class Outcome:
    """How it ended, ``complete``, ``budget`` or ``interrupted``; and what became of the entries that it came to."""

    entries: int
    status: str = "complete"
    results: list[Verified] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every entry was measured here, and is right."""
        return len(self.results) == self.entries and all(result.status == "ok" for result in self.results)


#: Told of each result as it comes.
Tell = Callable[[Verified], object]


def verify(request: Request, watch: Watcher, tell: Tell) -> Outcome:
    """Measure the entries of a file, or the ones that the database would choose, on the GPU here.

    Raises:
        ValueError: there is no GPU here, or it can't be used any more, or nothing is for it.
        StoreError: the database can't be used.
        OSError: the cache folder can't be written.
    """
    started = time.monotonic()
    card = next(iter(request.site.devices()), None)
    if card is None:
        raise ValueError("verify measures, and there is no GPU here: run it on the machine that serves")
    entries = _entries(request, card, watch)
    try_writing(cache_folder(), "DSV4TUNE_CACHE")
    deadline = None if request.budget_s is None else started + request.budget_s
    with contextlib.closing(Store(request.db)) as store, interrupted_once():
        for note in store.notes:
            watch.say(note)
        run = Run(request, card, store, watch, tell, deadline, Outcome(len(entries)))
        try:
            run.work_off(entries)
        except KeyboardInterrupt:
            run.outcome.status = "interrupted"
        finally:
            watch.end()
    return run.outcome


def _entries(request: Request, card: Device, watch: Watcher) -> list[Entry]:
    """Those that are meant and are for this card."""
    entries, others = [], 0
    for entry in _all(request):
        if not request.only.matches(entry.problem_key):
            continue
        if entry.device.silicon == card.silicon:
            entries.append(entry)
        else:
            others += 1
    if others:
        watch.say(f"{others} entries are for other silicon than the {card.name} here ({card.silicon}): left out")
    if not entries:
        raise ValueError(f"nothing to verify on the {card.name} here: name a file with entries for it")
    return entries


def _all(request: Request) -> Iterator[Entry]:
    if request.place is None:
        with contextlib.closing(Store(request.db, create=False)) as store:
            yield from share.exported(store, request.only, [])
        return
    with files.opened(request.place) as sources:
        for source in sources:
            yield from share.trusted(source, current_source=False)


@dataclass
class Group:
    """Entries of one problem and range, for which inputs and the baseline are made once; by config, until they end."""

    setup: Setup
    waiting: dict[Config, list[Entry]]


@dataclass
class Run:
    """One set of processes measures all groups, one after another."""

    request: Request
    card: Device
    store: Store
    watch: Watcher
    tell: Tell
    deadline: float | None
    outcome: Outcome
    _said: set[str] = field(default_factory=set)
    _ahead: set[tuple[str, Config]] = field(default_factory=set)

    def work_off(self, entries: Sequence[Entry]) -> None:
        groups = self._groups(entries)
        known = len(self.outcome.results)
        earlier = sum(result.earlier for result in self.outcome.results)
        if earlier:
            self.watch.say(f"{earlier} of {len(entries)} entries were found right here before; --again measures them")
        if not groups:
            return
        jobs = min(default_jobs(), len(entries) - known)
        pools = self._start(jobs)
        shown = Problem("", len(entries), known, self.deadline, lambda: pools.under_way(), what="entries", race=False)
        self.watch.begin(shown)
        try:
            lost = False
            for number, group in enumerate(groups):
                shown.label = f"verifying {group.setup.problem.op}, {group.setup.problem.rows} rows"
                self.watch.show()
                try:
                    self._compile(groups[number:], pools)
                    if not self._measure(group, pools):
                        self.outcome.status = "budget"
                        return
                    lost = False
                except TooLarge as error:
                    self._untried(group, error)
                except NoSeatsLeft as error:
                    if lost:
                        raise
                    # It may be this problem alone whose inputs can't be made: new processes take the next one.
                    self._untried(group, error)
                    lost = True
                    pools.close()
                    pools = self._start(jobs)
        finally:
            pools.close()

    def _start(self, jobs: int) -> Pools:
        pools = self.request.site.pools(jobs, self.card, True, self._say)
        pools.warm()
        self._ahead.clear()
        return pools

    def _groups(self, entries: Sequence[Entry]) -> list[Group]:
        """What is to be measured; those that need not be, or can't, are told at once."""
        groups: dict[tuple[str, str], Group] = {}
        for entry in entries:
            try:
                problem = ops.problem_from_json(entry.problem)
                config = trust.valid_config(entry, problem)
            except ValueError as error:  # of this database, and an older space
                self._ended(Verified.untried(entry, error), progress=False)
                continue
            source_sha = render(ops.get(problem.op), problem, config).sha
            known = None if self.request.again else self._known(entry, source_sha)
            if known is not None:
                self._ended(Verified.of(entry, known, earlier=True), progress=False)
                continue
            key = entry.problem_key, entry.range.model_dump_json()
            group = groups.setdefault(key, Group(Setup(problem, entry.range.profile, self.card, 0), {}))
            group.waiting.setdefault(config, []).append(entry)
        return list(groups.values())

    def _known(self, entry: Entry, source_sha: str) -> Trial | None:
        """The latest word on it here, of this kernel's text over its range by this Triton, if that finds it right."""
        triton = triton_version()
        found = None
        for trial in self.store.trials(entry.problem_key):
            of_it = trial.config == entry.config and trial.here and trial.status != "pruned"
            if of_it and trial.answers(source_sha, entry.range, triton):
                found = trial
        return found if found is not None and found.status == "ok" else None

    def _compile(self, groups: Sequence[Group], pools: Pools) -> None:
        """Compile what the first group needs and, of later ones, a config for each compiler, while the GPU is busy with
        other things. Nobody takes the answers: whoever asks again finds it in the cache of compiled kernels."""
        ahead = 0
        for number, group in enumerate(groups):
            for config in group.waiting:
                ahead += number > 0
                key = group.setup.problem.key, config
                if key not in self._ahead:
                    self._ahead.add(key)
                    pools.compilers.submit((None, config), compile_job, group.setup.problem, config)
            if ahead >= pools.compilers.size:
                break

    def _measure(self, group: Group, pools: Pools) -> bool:
        """All of a group; False where the time runs out before."""
        setup = fitting(ops.get(group.setup.problem.op), group.setup, pools, self._say)
        baseline, _ = timed_baseline(setup, pools, self._say, others=())
        evaluation = Evaluation(setup, pools, baseline)
        for config in group.waiting:
            evaluation.submit(config)
        while group.waiting:
            left = 1.0 if self.deadline is None else self.deadline - time.monotonic()
            if left <= 0:
                return False
            for config, trial in evaluation.collect(min(1.0, left)):
                for entry in group.waiting.pop(config):
                    self.store.add(trial)
                    if trial.status != "ok":
                        reason = f"verified here: {trial.reason}"
                        self.store.refute(entry.problem_key, entry.config, trial.status, reason)
                    self._ended(Verified.of(entry, trial))
            self.watch.show()
        return True

    def _untried(self, group: Group, reason: object) -> None:
        for entry in [entry for same in group.waiting.values() for entry in same]:
            self._ended(Verified.untried(entry, reason))

    def _ended(self, result: Verified, progress: bool = True) -> None:
        self.outcome.results.append(result)
        with self.watch.aside():
            self.tell(result)
        if progress:
            self.watch.ended(result.status)

    def _say(self, text: str) -> None:
        """Once: what is so for many problems, such as a baseline that is not installed."""
        if text not in self._said:
            self._said.add(text)
            self.watch.say(text)
