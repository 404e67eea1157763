"""Compiling before a server captures: each text once a machine, in processes of their own, with a time limit."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import dsv4tune
from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Kernel, Report, cache_environment, compile_config, ptxas_version
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.render import Source, cache_folder, render
from dsv4tune.codegen.space import Config

#: Seconds that one compile may take.
LIMIT_S = 60.0


@dataclass(frozen=True)
class Job:
    """One text to compile; problem and config are those of a variant that has it."""

    problem: Problem
    config: Config
    source: Source

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Job:
        return cls(problem, config, render(ops.get(problem.op), problem, config))


#: A report, or why there is none.
Outcome = Report | str


@contextlib.contextmanager
def our_cache() -> Iterator[None]:
    """Triton's cache where searches and `warm` have it: a server may have moved that of its process."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(_triton_folder())
        yield


def known_report(job: Job) -> Report | None:
    """The report of a compile that this machine has done with this Triton and ptxas, if Triton's cache still has it."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        known = json.loads(_record(job).read_bytes())
        # Who launches it would compile it in the server's own process otherwise, one text after another.
        if all(_triton_folder().joinpath(file).is_file() for file in known["files"]):
            return Report(**known["report"])
    return None


def _triton_folder() -> Path:
    return Path(cache_environment()["TRITON_CACHE_DIR"])


def _files(kernel: Kernel) -> list[str]:
    """A kernel's files in Triton's cache, relative to it."""
    groups = [one.metadata_group.values() for one in kernel.compiled.values()]
    return [os.path.join(*Path(path).parts[-2:]) for group in groups for path in group]


def _record(job: Job) -> Path:
    arch = job.problem.silicon.arch
    versions = f"triton{metadata.version('triton')}_ptxas{ptxas_version(arch)}"
    return cache_folder() / "compiled" / f"{job.source.name}_sm{arch}_{versions}.json"


def compile_here(problem: Problem, config: Config) -> Report:
    """Compile in this process, unless another does or has: ranks wait for the one that started first.

    Raises:
        CompileError: the compiler refused it.
        OSError: the cache folder can't be written.
    """
    job = Job.of(problem, config)
    record = _record(job)
    record.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{record}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = known_report(job)
        if known is not None:
            return known
        with our_cache():
            kernel = compile_config(ops.get(problem.op), problem, config)
        handle, temporary = tempfile.mkstemp(dir=record.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as f:
            json.dump({"report": kernel.report.to_json(), "files": _files(kernel)}, f)
        os.replace(temporary, record)
        return kernel.report


def compile_all(jobs: Sequence[Job], processes: int = 0, limit_s: float = LIMIT_S) -> dict[str, Outcome]:
    """Reports, or the reasons why there are none, by the texts' hashes; `processes` 0 for one a core."""
    found: dict[str, Outcome] = {}
    queue: SimpleQueue[Job] = SimpleQueue()
    missing = 0
    for sha, job in {job.source.sha: job for job in jobs}.items():
        known = known_report(job)
        if known is not None:
            found[sha] = known
        else:
            queue.put(job)
            missing += 1
    wanted = min(missing, processes or max(1, len(os.sched_getaffinity(0))))
    threads = [threading.Thread(target=_work, args=(queue, found, limit_s), daemon=True) for _ in range(wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _work(queue: SimpleQueue[Job], found: dict[str, Outcome], limit_s: float) -> None:
    worker: subprocess.Popen[bytes] | None = None
    try:
        while True:
            try:
                job = queue.get_nowait()
            except Empty:
                return
            try:
                if worker is None or worker.poll() is not None:
                    worker = _start()
                answer = _ask(worker, {"problem": job.problem.to_json(), "config": dict(job.config)}, limit_s)
                found[job.source.sha] = answer["failed"] if "failed" in answer else Report(**answer["report"])
            except Exception as error:
                found[job.source.sha] = f"{type(error).__name__}: {error}"
                if worker is not None:
                    _stop(worker)
                    worker = None
    finally:
        if worker is not None:
            _stop(worker)


def _environment() -> Mapping[str, str]:
    # Neither a server's memory hooks nor its GPUs are a compiler's.
    kept = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "TRITON_INTERPRET")}
    package = str(Path(dsv4tune.__file__).parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, **cache_environment(), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


def _start() -> subprocess.Popen[bytes]:
    # No multiprocessing: a server's workers may be daemons, which can't have children, and spawning imports their main.
    command = [sys.executable, "-m", "dsv4tune.runtime.compile_worker"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )


def _ask(worker: subprocess.Popen[bytes], job: Any, limit_s: float) -> Any:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps(job).encode() + b"\n")
    worker.stdin.flush()
    line, deadline = b"", time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the compiler gave no answer in {limit_s:g} s")
        part = os.read(worker.stdout.fileno(), 1 << 16)
        if not part:
            raise RuntimeError(f"the compiler's process ended with status {worker.wait()}")
        line += part
    return json.loads(line)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    # Its group: a compiler that hangs is as often the assembler that it started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
