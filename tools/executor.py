"""Where jobs run: one seam, with processes of this machine (`workers`) or of a Ray cluster (`ray_pool`) behind it.

A job is a function of a module with picklable arguments; its answer comes back whatever happens to the process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

#: Jobs in a row that a seat may fail to run, and seconds that it rests after one: its GPU may be coming back.
MOST_FAILURES, REST_S = 2, 2.0
#: How often a job may fail to be run, while others are, before that counts as its own doing.
MOST_LOSSES = 3


class Poisoned(Exception):
    """Raised by a job whose process must not be used again, such as one whose CUDA context is broken."""


class Unusable(Exception):
    """Raised by a job that its surroundings keep from running: no device, a full disk. Nothing is wrong with the job,
    so another process or seat gets it; a seat where this happens again is given up."""


@dataclass(frozen=True)
class Last:
    """What a job returns whose process must not be used again, though the value is sound."""

    value: Any


class NoSeatsLeft(ValueError):
    """Every seat was given up, and jobs are left; one line that says why."""


@dataclass(frozen=True)
class Seat:
    """Where one worker of an executor sits.

    Attributes:
        host: the machine; jobs of one host share its cache of compiled kernels. Empty for this one.
        card: UUID of the GPU that it works on, the only one that it sees; empty where it was given none.
        environment: variables of its processes.
    """

    host: str = ""
    card: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " of ".join(part for part in (self.card, self.host) if part) or "this machine"


@dataclass(eq=False)
class Job:
    """What is to run.

    Attributes:
        near: the host to prefer.
        seat: the number of the only seat that may run it.
        long: it may take what the first job of a process may take.
        needed: its seat is no good without it; it has no answer.
        lost: how often a seat could not run it; `others` are the jobs that had been run when one could not first.
    """

    tag: Any
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    near: str = ""
    seat: int | None = None
    long: bool = False
    needed: bool = False
    lost: int = 0
    others: int = 0


@dataclass(frozen=True)
class Answer:
    """How a job ended: ``ok`` with its value, else ``raised``, ``died`` or ``timeout`` with one line that says why."""

    tag: Any
    kind: str
    value: Any = None
    reason: str = ""
    seconds: float = 0.0
    seat: Seat = Seat()

    @property
    def failure(self) -> str:
        """What became of a candidate whose job did not end well, in the words of a trial's status."""
        return "timeout" if self.kind == "timeout" else "failed"


class Executor(ABC):
    """Runs jobs on its seats, one at a time each; a job that crashes or hangs costs itself alone.

    Attributes:
        what: what its seats are, for messages.
        say: told of seats that are given up while others go on.
    """

    def __init__(self, seats: Sequence[Seat], what: str) -> None:
        self.seats, self.what = list(seats), what
        self.say: Callable[[str], object] = lambda text: None
        self._queue: deque[Job] = deque()
        #: Why a seat was given up, by its number; and how often in a row it could not run a job.
        self._closed: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._rests: dict[int, float] = {}
        self._preparation: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        #: Jobs that were run, whatever they answered.
        self._run = 0
        #: Of jobs that ended with their seat.
        self._lost: list[Answer] = []

    # -- for callers --------------------------------------------------------------------------------------------

    def submit(self, tag: Any, function: Callable[..., Any], *arguments: Any, near: str = "") -> None:
        """Queue ``function(*arguments)``; its answer carries `tag`."""
        self._add(Job(tag, function, arguments, near))

    def prepare(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Queue for every seat what each of its processes must do first; a seat that can't is given up. No answer."""
        self.prepares_with(function, *arguments)
        for number in self._open():
            self._add(self._prepares(number))

    def prepares_with(self, function: Callable[..., Any], *arguments: Any) -> None:
        """What the processes to come must do first."""
        self._preparation = function, arguments

    def _prepares(self, number: int) -> Job:
        function, arguments = self._preparation or (None, ())
        assert function is not None
        return Job(None, function, arguments, seat=number, long=True, needed=True)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """One job on the first seat, waited for: what is asked one after another ran in one place."""
        return self._answers([next(iter(self._open()), 0)], function, arguments)[0]

    def ask_each(self, function: Callable[..., Any], *arguments: Any) -> list[Answer]:
        """The same job on every seat, waited for; answers by seat. Those of other jobs meanwhile are dropped."""
        return self._answers(self._open() or [0], function, arguments)

    def forget(self) -> None:
        """Drop the jobs that nobody began, but for what seats must do first."""
        self._queue = deque(job for job in self._queue if job.needed)
        self._lost.clear()

    @property
    def size(self) -> int:
        """Seats that take jobs."""
        return len(self._open())

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._lost) + self._running()

    @property
    def rests(self) -> bool:
        """Whether a job waits for a seat to be tried again."""
        return bool(self._queue) and any(until > time.monotonic() for until in self._rests.values())

    # -- for `collect` ------------------------------------------------------------------------------------------

    @abstractmethod
    def connections(self) -> list[Any]:
        """What becomes readable when a job ends."""

    @abstractmethod
    def next_limit(self) -> float:
        """Seconds until something is due here without a connection's word, such as a job's time limit."""

    @abstractmethod
    def ready(self, connections: Sequence[Any]) -> list[Answer]:
        """Answers behind those of `connections`, and of every job past its limit.

        Raises:
            NoSeatsLeft: jobs are queued that nobody can run.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process, whatever it does."""

    # -- for the two kinds --------------------------------------------------------------------------------------

    @abstractmethod
    def _running(self) -> int: ...

    @abstractmethod
    def _free(self) -> Iterable[int]:
        """Numbers of the seats that could take a job now, in order."""

    @abstractmethod
    def _start(self, number: int, job: Job) -> None: ...

    def _open(self) -> list[int]:
        return [number for number in range(len(self.seats)) if number not in self._closed]

    def _add(self, job: Job) -> None:
        self._queue.append(job)
        self._start_queued()

    def _start_queued(self) -> None:
        for number in list(self._free()) if self._queue else ():
            if self._rests.get(number, 0.0) > time.monotonic():
                continue
            job = self._next_for(number)
            if job is not None:
                self._start(number, job)

    def _next_for(self, number: int) -> Job | None:
        """The first job of the seat's own host, else the first that it may run."""
        allowed = [job for job in self._queue if job.seat is None or job.seat == number]
        host = self.seats[number].host
        job = next((job for job in allowed if job.near in ("", host)), allowed[0] if allowed else None)
        if job is not None:
            self._queue.remove(job)
        return job

    def _settle(self, number: int, job: Job, answer: Answer, may_fail: int = MOST_FAILURES) -> Answer | None:
        """What a job that ended means for its seat and its caller: nothing to tell where another turn is to come."""
        if answer.kind != "unusable" and (answer.kind == "ok" or not job.needed):
            self._failures.pop(number, None)
            self._run += 1
            return None if job.needed else answer
        self._failures[number] = self._failures.get(number, 0) + 1
        self._rests[number] = time.monotonic() + REST_S
        if self._failures[number] >= may_fail:
            self._give_up(number, answer.reason)
        job.lost, job.others = job.lost + 1, job.others if job.lost else self._run
        if job.needed and number in self._closed:
            return None
        own = job.lost >= MOST_LOSSES and self._run > job.others
        if own or (job.seat is not None and number in self._closed):
            return replace(answer, kind="died")
        self._queue.appendleft(job)
        return None

    def _give_up(self, number: int, reason: str) -> None:
        """Close a seat; what only it could run ends with it."""
        if self._open() != [number] and reason not in self._closed.values():
            self.say(f"{self.what} can't be used any more on {self.seats[number]}: {reason}")
        self._closed[number] = reason
        for job in [job for job in self._queue if job.seat == number]:
            self._queue.remove(job)
            if not job.needed:
                self._lost.append(Answer(job.tag, "died", reason=reason, seat=self.seats[number]))

    def _with_lost(self, answers: list[Answer]) -> list[Answer]:
        answers, self._lost = answers + self._lost, []
        if not answers and not self._open():
            reasons = "; ".join(dict.fromkeys(self._closed.values()))
            raise NoSeatsLeft(f"{self.what} can't be used here: {reasons}")
        return answers

    def _answers(
        self, numbers: Sequence[int], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[Answer]:
        tags = {object(): number for number in numbers}
        for tag, number in tags.items():
            self._add(Job(tag, function, tuple(arguments), seat=number, long=True))
        found: dict[int, Answer] = {}
        while len(found) < len(tags):
            found.update({tags[a.tag]: a for _, a in collect([self], 1.0) if a.tag in tags})
        return [found[number] for number in numbers]


def collect(executors: Sequence[Executor], timeout: float) -> list[tuple[Executor, Answer]]:
    """Wait until a job of any of them ends, at most `timeout` seconds; may return nothing."""
    limit = min([timeout, *(max(0.0, e.next_limit()) + 0.01 for e in executors)])
    if any(e.rests for e in executors):
        limit = min(limit, REST_S / 2)
    found = wait([c for e in executors for c in e.connections()], timeout=max(0.0, limit))
    return [(executor, answer) for executor in executors for answer in executor.ready(found)]
