"""What a server of given arguments would choose and why, and compiling it all beforehand; no server is needed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4tune.codegen import devices
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.render import cache_folder, try_writing
from dsv4tune.codegen.space import Config
from dsv4tune.codegen.words import ranges
from dsv4tune.runtime import compilers, startup, targets
from dsv4tune.runtime.compilers import Job
from dsv4tune.runtime.wanted import CALLS, Server, Wanted
from dsv4tune.tuned.reader import default_path
from dsv4tune.tuned.selector import Decision, Policy, Refused

Say = Callable[[str], None]

#: So many row counts are told in full; of more, a summary is.
FEW = 8


@dataclass(frozen=True)
class Request:
    """What the command line asked for; `database` None for the one that a server would read."""

    server: Server
    kernels: Sequence[str]
    card: Device
    policy: Policy
    database: Path | None = None

    @property
    def path(self) -> Path:
        return self.database or default_path()


def card_for(device: str | None, target: str | None) -> Device:
    """The named card, else the GPU here.

    Raises:
        ValueError: unknown words, or neither.
    """
    if device is not None or target is not None:
        return devices.named(device, target)
    found = devices.here()
    if found is None:
        raise ValueError("no NVIDIA GPU here: name a card with --device or --target")
    return found


def decide(request: Request, say: Say) -> list[tuple[Wanted, Decision]]:
    """The choice for every call shape, by the rules that a server here would go by.

    Raises:
        ValueError: no kernel serves these arguments, or a database was named that is not there.
    """
    silicon = request.card.silicon
    if not any(kernel in CALLS for kernel in request.kernels):
        raise ValueError(f"no server calls {', '.join(request.kernels)}: use one of {', '.join(CALLS)}")
    wanted = request.server.wanted(silicon, request.kernels)
    if not wanted:
        raise ValueError("no kernel serves a server of these arguments: check --rows and --context")
    if request.database is not None and not request.database.exists():
        raise ValueError(f"no database at {request.database}: name another with --db, or leave --db out")
    rules = startup.rules_here(request.policy, silicon, targets.baselines(silicon.arch))
    return startup.choose(wanted, rules, request.path, say)


def explain(request: Request, say: Say) -> list[dict[str, Any]]:
    """One item for each call shape: the entry that would be chosen, or why none, and what was refused before it."""
    found = []
    for wanted, decision in decide(request, say):
        entry = decision.entry
        chosen = None
        if entry is not None:
            chosen = {
                "config": dict(decision.config),
                "origin": decision.origin,
                "provenance": entry.provenance,
                "device": entry.device.name,
                "rows": entry.problem["rows"],
                "times_us": dict(sorted(entry.times_us.items())),
                "score": entry.score,
                "yardstick": entry.yardstick,
                "baseline": entry.baseline.model_dump() if entry.baseline is not None else None,
                "environment": entry.environment.model_dump(),
            }
        found.append(
            {
                "kind": wanted.problem.kind,
                "problem": {**wanted.problem.to_json(), "key": wanted.problem.key},
                "width": wanted.width,
                "chosen": chosen,
                "why": decision.why,
                "refused": _folded(decision.considered),
            }
        )
    return found


def summary(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What `explain` found, for a reader: how many row counts of each kind have an entry, and those alike at once."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        kinds.setdefault(one["kind"], []).append(one)
    for kind, calls in kinds.items():
        alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for one in calls:
            outcome, config = _outcome(one)
            alike.setdefault((_SCORE.sub("", outcome), config), []).append(one)
        served = sum(one["chosen"] is not None for one in calls)
        head = f"{kind}: {served} of {len(calls)} row counts have an entry"
        if not served and len(alike) == 1:
            yield f"{head}: {_spanned(calls)}"
            continue
        yield head
        every = [one["problem"]["rows"] for one in calls]
        for (_, config), some in alike.items():
            stays = "" if config else "the server's own kernel stays: "
            yield f"  rows {ranges([one['problem']['rows'] for one in some], every)}: {stays}{_spanned(some)}"
            if config:
                yield f"    {config}"


#: What differs between outcomes that are told as one.
_SCORE = re.compile(r"\b\d+\.\d{3}(?= of )")


def _outcome(one: dict[str, Any]) -> tuple[str, str]:
    """In a line without the rows, and the config."""
    chosen = one["chosen"]
    if chosen is None:
        return one["why"], ""
    where = f"{chosen['provenance']} on {chosen['device']}, from {chosen['origin']}"
    return f"{chosen['score']:.3f} of {chosen['yardstick']}, {where}", Config(chosen["config"]).brief


def _spanned(alike: Sequence[dict[str, Any]]) -> str:
    """The one outcome of all these, with the scores from the best to the worst."""
    outcomes = [_outcome(one)[0] for one in alike]
    scores = sorted({score for outcome in outcomes for score in _SCORE.findall(outcome)}, key=float)
    return _SCORE.sub("-".join(dict.fromkeys((scores[0], scores[-1]))) if scores else "", outcomes[0])


def _folded(refused: Sequence[Refused]) -> list[str]:
    """A line for the first entry of each file, row count and reason: a search leaves hundreds behind."""
    alike: dict[tuple[Any, ...], list[Refused]] = {}
    for one in refused:
        entry = one.found.entry
        alike.setdefault((one.found.origin, entry.problem["rows"], entry.provenance, one.reason), []).append(one)
    return [f"{some[0]}{f'; {len(some) - 1} more like it' if some[1:] else ''}" for some in alike.values()]


def warm(request: Request, jobs: int, say: Say) -> dict[str, Any]:
    """Compile what would be chosen into the cache that servers of this user read.

    Returns:
        Shapes, those with an entry, texts compiled, and those that failed by their variant's source name.

    Raises:
        OSError: the cache can't be written.
    """
    started = time.monotonic()
    decisions = decide(request, say)
    work = [Job.of(wanted.problem, decision.config) for wanted, decision in decisions if decision.entry is not None]
    texts = {job.source.sha: job for job in work}
    known = sum(compilers.known_report(job) is not None for job in texts.values())
    if known < len(texts):
        try_writing(cache_folder(), "DSV4TUNE_CACHE")
    outcomes = compilers.compile_all(work, jobs)
    names = {job.source.sha: job.source.name for job in work}
    return {
        "shapes": len(decisions),
        "with_entry": len(work),
        "texts": len(outcomes),
        "known": known,
        "failed": {names[sha]: why for sha, why in outcomes.items() if isinstance(why, str)},
        "seconds": round(time.monotonic() - started, 2),
        "cache": str(cache_folder()),
    }
