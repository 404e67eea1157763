"""The main job: for each problem, search its space and leave the best config in the database."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv4tune.codegen import cost, devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem, Profile
from dsv4tune.codegen.render import cache_folder, render, try_writing
from dsv4tune.codegen.space import Config
from dsv4tune.tools import final, measure, peers, samplers
from dsv4tune.tools.efforts import Effort
from dsv4tune.tools.evaluate import Evaluation, Pools, expected
from dsv4tune.tools.measure import Setup
from dsv4tune.tools.progress import Lines, Watcher, in_words
from dsv4tune.tools.progress import Problem as Shown
from dsv4tune.tools.search import Patience, Proposer, Result, search, usable_score
from dsv4tune.tools.sites import Local, Site
from dsv4tune.tuned.records import STATUSES, Baseline, Range, Trial, plain
from dsv4tune.tuned.selector import shipped_near
from dsv4tune.tuned.store import Store

#: A search on this machine and its first GPU.
HERE = Local()


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    kernel: str
    rows: Sequence[int]
    max_context: int
    draft_tokens: int
    options: Mapping[str, Any]
    device: Device
    on_gpu: bool
    effort: Effort
    budget_s: float | None
    seed: int
    sampler: str
    jobs: int | None
    db: Path
    lengths: Sequence[int] | None = None
    weights: Sequence[float] | None = None
    site: Site = HERE


#: Told what happens; the command line prints it.
Say = Callable[[str], None]


def choose_device(device: str | None, target: str | None, site: Site = HERE) -> tuple[Device, bool]:
    """The card to tune for, and whether the site has it.

    Raises:
        ValueError: unknown words, a GPU without fp8, or one that is not the named card.
    """
    if device is None and target is None:
        first = next(iter(site.devices()), None)
        return (first, True) if first is not None else (devices.named(), False)
    wanted = devices.named(device, target)
    with contextlib.suppress(ValueError):  # the GPU here can't serve, and was not asked for
        for found in site.devices():
            if found.silicon == wanted.silicon or (device is None and found.silicon.target == wanted.silicon.target):
                return found, True
    return wanted, False


class Budget:
    """The time of several problems, shared evenly among those that are left.

    None gets less than `LEAST_S` while there is time: a search that ends before it learned anything helps nobody.
    """

    LEAST_S = 20.0

    def __init__(self, seconds: float | None, problems: int) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._all = self._problems = problems

    @property
    def place(self) -> str:
        """Of the problem whose time began last, for people; nothing where it is the only one."""
        return f"{self._all - self._problems} of {self._all}: " if self._all > 1 else ""

    @property
    def reached(self) -> int:
        """How many problems of those that are left get their least time."""
        left = None if self._ends is None else self._ends - time.monotonic()
        return self._problems if left is None else min(self._problems, max(1, round(left / self.LEAST_S)))

    def next(self) -> float | None:
        """When the next problem's time ends, by ``time.monotonic``; None for never."""
        now, count = time.monotonic(), self._problems
        self._problems -= 1
        if self._ends is None:
            return None
        return min(self._ends, now + max((self._ends - now) / max(1, count), self.LEAST_S))

    @property
    def spent(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends


def tune(
    request: Request, say: Say, watch: Watcher | None = None, heading: str = "", budget: Budget | None = None
) -> list[dict[str, Any]]:
    """Search every problem of the request; one result each, in order, those that Ctrl-C kept from beginning too.

    Args:
        heading: said once the request and its files are found to be in order.
        budget: of these problems and others that follow; the request's own unless given.

    Raises:
        ValueError: a problem that the kernel does not serve, or a file that is no cost model.
        StoreError: the database can't be written.
        OSError: the cache folder can't be written.
    """
    watch = watch or Lines(say)
    op = ops.get(request.kernel)
    problems = _problems(request)
    try_writing(cache_folder(), "DSV4TUNE_CACHE")
    store = Store(request.db)
    for note in store.notes:
        say(note)
    if heading:
        say(heading)
    pools = request.site.pools(request.jobs, request.device, request.on_gpu, say)
    budget = budget or Budget(request.budget_s, len(problems))
    results = []
    with interrupted_once():
        try:
            for problem, profile in problems:
                result = _tune_one(op, problem, profile, request, store, pools, budget, say, watch)
                results.append(result)
                if result["status"] == "interrupted":
                    break
        finally:
            pools.close()
            store.close()
    return [*results, *_not_begun(request, problems[len(results) :], "interrupted")]


def tune_all(requests: Sequence[Request], watch: Watcher) -> list[dict[str, Any]]:
    """Several requests one after another, as `tune`; the budget of the first is that of all of them together."""
    results: list[dict[str, Any]] = []
    problems = [_problems(request) for request in requests]
    count = sum(len(of_one) for of_one in problems)
    budget = Budget(requests[0].budget_s, count)
    heading = _heading(requests[0], count)
    if budget.reached < count:
        least = f"{Budget.LEAST_S:.0f} s each at the least"
        heading += f"; the budget, {least}, may end after {budget.reached} of them, and the same command goes on"
    for request, of_one in zip(requests, problems, strict=True):
        if results and results[-1]["status"] == "interrupted":
            results += _not_begun(request, of_one, "interrupted")
        elif results and budget.spent:
            results += _not_begun(request, of_one, "budget")
        else:
            results += tune(request, watch.say, watch, "" if results else heading, budget)
    return results


def _heading(request: Request, problems: int) -> str:
    card = f"{request.device.name} ({request.device.silicon.target})"
    how = f"measuring on {card}"
    if not request.on_gpu:
        how = f"predicting for {card}: no such GPU here (the cost model was {cost.load().says(request.device)})"
    return how if problems == 1 else f"{how}\n{problems} problems, one after another"


def _problems(request: Request) -> list[tuple[Problem, Profile]]:
    op = ops.get(request.kernel)
    options = op.options(request.options, request.max_context, request.draft_tokens)
    problems = [op.problem(rows, request.device.silicon, **options) for rows in request.rows]
    width = op.width(request.max_context, request.draft_tokens)
    return [(problem, _profile(op, problem, width, request)) for problem in problems]


def _not_begun(request: Request, problems: Sequence[tuple[Problem, Profile]], status: str) -> list[dict[str, Any]]:
    """Results of problems that a search did not come to: what earlier runs found."""
    if not problems:
        return []
    op, store = ops.get(request.kernel), Store(request.db)
    try:
        return [_result(op, p, profile, store, Result(status=status), None, {}, 0.0) for p, profile in problems]
    finally:
        store.close()


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGTERM is a Ctrl-C; another of either, while the first one winds down, must not cost its result."""

    def interrupt(number: int, frame: Any) -> None:
        for held in previous:
            signal.signal(held, signal.SIG_IGN)
        raise KeyboardInterrupt

    # A signal that whoever started us has switched off, as a shell does for background jobs, stays off.
    previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    previous = {n: handler for n, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            # Once interrupted, what is left is to print the result and to leave: that stays undisturbed.
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


def _profile(op: Op[Any, Any], problem: Problem, width: int, request: Request) -> Profile:
    profile: Profile = op.profile(problem, width)
    if request.lengths is None:
        return profile
    weights = request.weights or (1.0,) * len(request.lengths)
    given = Profile(width, tuple(request.lengths), tuple(weights), profile.causal)
    # One order, so that the same lengths are the same range, and those that don't fit a GPU are the last.
    ordered = dict(sorted(zip(given.lengths, given.weights, strict=True)))
    return replace(given, lengths=tuple(ordered), weights=tuple(ordered.values()))


def _tune_one(
    op: Op[Any, Any],
    problem: Problem,
    profile: Profile,
    request: Request,
    store: Store,
    pools: Pools,
    budget: Budget,
    say: Say,
    watch: Watcher,
) -> dict[str, Any]:
    started, deadline = time.monotonic(), budget.next()
    result = Result(status="interrupted")
    baseline: Baseline | None = None
    references: dict[str, Any] = {}
    setup = Setup(problem, profile, request.device, request.seed)
    try:
        if deadline is not None and time.monotonic() >= deadline:
            result.status = "budget"
            return _result(op, problem, profile, store, result, baseline, references, 0.0)
        pools.warm()
        watch.phase("enumerating the space, and what it refuses")
        if request.on_gpu:
            watch.phase("timing the server's own kernel")
            setup = fitting(op, setup, pools, say)
            others = peers.REFERENCES if request.effort.references else ()
            baseline, references = timed_baseline(setup, pools, say, others)
        evaluation = Evaluation(setup, pools, baseline, request.effort.halving)
        space = op.space(problem, request.device)
        # Without a GPU no trial is spent on what can't be checked here, and so can't win.
        avoid = (lambda config: None) if request.on_gpu else op.unchecked
        sampler = samplers.make(request.sampler, space, request.seed, expected(setup))
        proposer = Proposer(space, sampler, _first(op, problem, store, request), avoid)
        stored = [trial for trial in store.trials(problem.key) if _repeats(trial, evaluation, op, problem)]
        patience = Patience(request.effort.patience)
        for trial in stored:
            evaluation.knows(trial)
            proposer.learn(Config(trial.config), usable_score(trial))
            patience.saw(trial)
        known = len({Config(trial.config) for trial in stored})
        left_out = sum(avoid(config) is not None for config in space.valid())
        note = f", {left_out} of them left out because only their GPU can check them" if left_out else ""
        refused = f"{len(space.valid())} valid configs of {space.size} combinations{note}"
        trials = request.effort.trials
        have = f"{known} of {trials}" if known <= trials else f"{known} (of {trials} asked for)"
        say(f"{budget.place}{problem.key}: {have} trials stored; {refused}")
        if known >= trials:
            say(f"nothing to try: --trials {2 * known} tries more")
        over = Range(**setup.profile.to_json())
        name = f"{problem.op}, {problem.rows} rows"
        shown = Shown(name, trials, known, deadline, pools.under_way, store.best(problem.key, over))
        watch.begin(shown)

        def finished(trial: Trial) -> None:
            store.add(trial)
            stored.append(trial)
            patience.saw(trial)
            watch.trial(trial)

        result = search(
            proposer,
            evaluation,
            finished,
            trials - known,
            deadline,
            lambda tried: watch.show(),
            patience.is_lost,
        )
        evaluation.close()
        if patience.is_lost() and known + result.tried < trials:
            say(
                f"ended: nothing better by {Patience.STEP:.0%} in the last {request.effort.patience} candidates; "
                f"--trials {2 * trials} tries on"
            )
        if request.on_gpu and result.status != "interrupted":
            watch.phase("timing the best ones again, in turn")
            final.hold(evaluation, space, store, stored, request.effort, say)
    except KeyboardInterrupt:
        pass
    finally:
        watch.end()
    return _result(op, problem, setup.profile, store, result, baseline, references, time.monotonic() - started)


def _first(op: Op[Any, Any], problem: Problem, store: Store, request: Request) -> list[Config]:
    """What is tried before the sampler has its say."""
    first = [op.default(problem, request.device)]
    # What is best for a few rows more or less is seldom far off, and then serves the rows between too. What is shipped
    # would be used in the place of what a search finds; without a GPU, both are but predictions.
    first += [Config(near.config) for near in store.neighbours(problem.to_json())]
    first += [Config(entry.config) for entry in shipped_near(problem)] if request.on_gpu else []
    if request.effort.references:
        first.append(op.reference_config(problem, request.device))
    return first


def _repeats(trial: Trial, evaluation: Evaluation, op: Op[Any, Any], problem: Problem) -> bool:
    """Whether a stored trial answers what this search would ask: same source, range, compiler and kind of evidence."""
    try:
        sha = render(op, problem, Config(trial.config)).sha
    except Exception:  # the words of an older space
        return False
    measured = evaluation.pools.on_gpu
    return (
        trial.answers(sha, Range(**evaluation.setup.profile.to_json()), evaluation.environment.triton)
        and trial.provenance == ("measured" if measured else "predicted")
        # One that was timed without the baseline is timed again once that is installed.
        and (trial.status != "ok" or trial.yardstick == evaluation.yardstick)
    )


class TooLarge(ValueError):
    """Not even the shortest live length of a problem fits the GPU's free memory."""


def fitting(op: Op[Any, Any], setup: Setup, pools: Pools, say: Say) -> Setup:
    """The setup with the lengths that fit the GPU's free memory.

    Raises:
        TooLarge: none does.
        ValueError: the GPU can't be used.
    """
    answers = pools.judges.ask_each(measure.memory_job)
    for answer in answers:
        if answer.kind != "ok":
            raise ValueError(f"the GPU can't be used: {answer.reason}")
    free = min(answer.value for answer in answers)
    profile = setup.profile
    needs = {n: op.memory_needed(setup.problem, profile, n) for n in profile.lengths}
    kept = [(n, w) for n, w in zip(profile.lengths, profile.weights, strict=True) if needs[n] <= free * 0.9]
    if len(kept) == len(needs):
        return setup
    if not kept:
        least = min(needs.values())
        raise TooLarge(f"measuring {setup.problem.label} takes {least} B of GPU memory, {free} B are free")
    for n in needs.keys() - {n for n, _ in kept}:
        say(f"live length {n} left out: {needs[n]} B of GPU memory needed, {free} B free")
    lengths, weights = zip(*kept, strict=True)
    return replace(setup, profile=Profile(profile.width, lengths, weights, profile.causal))


def timed_baseline(
    setup: Setup, pools: Pools, say: Say, others: Sequence[str] = peers.REFERENCES
) -> tuple[Baseline | None, dict[str, Any]]:
    """The server's own kernel, and those of `others` that compute the op and are installed, each timed alone."""
    server = peers.baseline(setup.problem.op, setup.problem.silicon)
    if server is None:
        say(f"no baseline: no server kernel is known for {setup.problem.silicon.target}")
    references: dict[str, Any] = {}
    for name in dict.fromkeys([*([server.name] if server is not None else []), *others]):
        other = peers.PEERS[name]
        if other.op != setup.problem.op:
            continue
        answer = pools.judges.ask(measure.peer_job, setup, name)
        if answer.kind == "ok" and answer.value.missing is None:
            found = answer.value
            references[name] = {"version": found.version, "times_us": found.times_us, "error": found.error}
            if found.left_out:
                references[name]["left_out"] = found.left_out
        else:
            why = answer.value.missing if answer.kind == "ok" else answer.reason
            references[name] = {"missing": why, "install": other.install}
            if other is server:
                say(f"no baseline: {name} can't run here ({why}). Install it with: {other.install}")
    own: dict[str, Any] = references[server.name] if server is not None else {}
    if server is None or "missing" in own or "left_out" in own:
        return None, references
    return Baseline(name=server.name, version=plain(own["version"]), times_us=own["times_us"]), references


def _result(
    op: Op[Any, Any],
    problem: Problem,
    profile: Profile,
    store: Store,
    result: Result,
    baseline: Baseline | None,
    references: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    over = Range(**profile.to_json())
    counts = store.counts(problem.key, over)
    best = store.best(problem.key, over)
    return {
        "status": result.status,
        "problem": {**problem.to_json(), "key": problem.key, "range": profile.to_json()},
        "best": best_json(best) if best is not None else None,
        "baseline": baseline.model_dump(mode="json") if baseline is not None else None,
        "references": references,
        "trials": {"total": sum(counts.values()), **{name: counts.get(name, 0) for name in STATUSES}},
        "tried": result.tried,
        "seconds": round(seconds, 2),
        "db": str(store.path),
    }


def best_json(trial: Trial) -> dict[str, Any]:
    """A winner as the commands print it."""
    assert trial.resources is not None
    times = "measured_us" if trial.provenance == "measured" else "predicted_us"
    return {
        "config": dict(in_words(trial)),
        "provenance": trial.provenance,
        times: {str(n): us for n, us in sorted(trial.times_us.items())},
        "score": trial.score,
        "yardstick": trial.yardstick,
        "resources": trial.resources.model_dump(),
        "error": trial.error,
        "checked_by": trial.checked_by,
        "source_sha": trial.source_sha,
        "baseline": trial.baseline.model_dump(mode="json") if trial.baseline is not None else None,
        "final": trial.final.model_dump(mode="json") if trial.final is not None else None,
    }
