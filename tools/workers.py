"""Spawned worker processes with a time limit for each job: a job that crashes or hangs costs itself alone."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from dsv4tune.codegen.compile import first_line

#: From linux/prctl.h: the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1
#: What a worker says when it takes a job up.
_BEGUN = "begun"


class Poisoned(Exception):
    """Raised by a job whose process must not be used again, such as one whose CUDA context is broken."""


@dataclass(frozen=True)
class Answer:
    """How a job ended: ``ok`` with its value, else ``raised``, ``died`` or ``timeout`` with one line that says why."""

    tag: Any
    kind: str
    value: Any = None
    reason: str = ""
    seconds: float = 0.0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    tag: Any = None
    started: float = 0.0
    busy: bool = False
    job: Any = None
    #: Whether its process has taken the job up, and has answered one before.
    begun: bool = False
    answered: bool = False


@dataclass
class Pool:
    """`size` processes that run picklable jobs one at a time.

    Attributes:
        size: processes.
        limit_s: seconds a job may take; its process is killed and replaced.
        environment: variables set in the processes before they import anything.
        nice: how far they stand back for other processes.
    """

    size: int
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0
    _workers: list[_Worker] = field(default_factory=list)
    _queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=deque)

    def submit(self, tag: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Queue ``function(*arguments)``, a function of a module; its answer carries `tag`."""
        self._queue.append((tag, function, arguments))
        self._start_queued()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """One job, waited for; answers of other jobs that end meanwhile are dropped."""
        tag = object()
        self.submit(tag, function, *arguments)
        while True:
            for _, answer in collect([self], 1.0):
                if answer.tag is tag:
                    return answer

    @property
    def pending(self) -> int:
        return len(self._queue) + sum(w.busy for w in self._workers)

    def _start_queued(self) -> None:
        while self._queue:
            # One that died while idle, of the system's need for memory say, is no fault of the next job.
            for worker in [w for w in self._workers if not w.busy and not w.process.is_alive()]:
                self._discard(worker)
            idle = next((w for w in self._workers if not w.busy), None)
            if idle is None:
                if len(self._workers) >= self.size:
                    return
                idle = self._spawn()
            idle.job = tag, function, arguments = self._queue.popleft()
            idle.tag, idle.started, idle.busy, idle.begun = tag, time.monotonic(), True, False
            # One that dies now has a closed pipe, which is seen as such.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                idle.pipe.send((function.__module__, function.__qualname__, arguments))

    def _spawn(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, dict(self.environment), self.nice), daemon=True)
        # Born with Ctrl-C blocked, which is the parent's to handle; nor does a signal come between start and append.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
            theirs.close()
            worker = _Worker(process, ours)
            self._workers.append(worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return worker

    def _discard(self, worker: _Worker) -> None:
        # Its group first: a compiler that hangs is as often the assembler that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)

    def ready(self, connections: Sequence[Any]) -> list[Answer]:
        """Answers of the workers among `connections`, and of every job past its limit."""
        answers = []
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.pipe in connections:
                answer = self._receive(worker)
                if answer is not None:
                    answers.append(answer)
            elif worker.busy and now - worker.started > self.limit_s:
                reason = f"no answer in {self.limit_s:g} s"
                answers.append(Answer(worker.tag, "timeout", reason=reason, seconds=now - worker.started))
                self._discard(worker)
        self._start_queued()
        return answers

    def _receive(self, worker: _Worker) -> Answer | None:
        seconds = time.monotonic() - worker.started
        try:
            kind, value, reason = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            code = worker.process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
            self._discard(worker)
            if worker.answered and not worker.begun:
                # It was dying already when the job was sent: that is another's to do.
                self._queue.appendleft(worker.job)
                return None
            return Answer(worker.tag, "died", reason=f"its process ended with {how}", seconds=seconds)
        if kind == _BEGUN:
            worker.begun = True
            return None
        worker.busy, worker.answered = False, True
        if kind == "poisoned":
            self._discard(worker)
            kind = "died"
        return Answer(worker.tag, kind, value, reason, seconds)

    def connections(self) -> list[Connection]:
        return [w.pipe for w in self._workers if w.busy]

    def next_limit(self) -> float:
        """Seconds until a running job is past its limit."""
        now = time.monotonic()
        return min((w.started + self.limit_s - now for w in self._workers if w.busy), default=float("inf"))

    def close(self) -> None:
        self._queue.clear()
        for worker in list(self._workers):
            self._discard(worker)


def collect(pools: Sequence[Pool], timeout: float) -> list[tuple[Pool, Answer]]:
    """Wait until a job of any pool ends, at most `timeout` seconds; may return nothing."""
    limit = min([timeout, *(max(0.0, p.next_limit()) + 0.01 for p in pools)])
    found = wait([c for p in pools for c in p.connections()], timeout=max(0.0, limit))
    return [(pool, answer) for pool in pools for answer in pool.ready(found)]


def _serve(pipe: Connection, environment: dict[str, str], nice: int) -> None:
    """A worker's life, in a process group of its own; it ends with its parent, whatever ends that."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    os.nice(nice)
    # Compilers and libraries print to stdout; a search's own output there is one JSON object.
    os.dup2(2, 1)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            pipe.send((_BEGUN, None, ""))
        except (BrokenPipeError, ConnectionResetError):
            return
        try:
            function = getattr(importlib.import_module(module), name)
            reply: tuple[str, Any, str] = ("ok", function(*arguments), "")
        except Poisoned as error:
            reply = ("poisoned", None, str(error))
        except Exception as error:
            if os.environ.get("DSV4TUNE_DEBUG"):
                traceback.print_exc()
            reply = ("raised", None, first_line(error))
        try:
            pipe.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            return
        if reply[0] == "poisoned":
            return
