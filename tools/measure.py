"""What a worker process does with one candidate: compile it, check it, time it. Every function here is a picklable job.

How a time is taken is written down once, in benchmarks/README.md.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import Report, compile_config, first_line
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op, Verdict
from dsv4tune.codegen.problem import Problem, Profile
from dsv4tune.codegen.render import render, try_writing
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools import gpu, peers
from dsv4tune.tools.executor import Last, Poisoned, Unusable
from dsv4tune.tools.halving import Halving, stages
from dsv4tune.tools.interpreter import interpreted
from dsv4tune.tools.timing import ROUNDS, Captured, Timer, middle


@dataclass(frozen=True)
class Setup:
    """What all candidates of one problem share; a worker builds it once."""

    problem: Problem
    profile: Profile
    device: Device
    seed: int


def floors_us(problem: Problem, profile: Profile, bandwidth: float) -> dict[int, float]:
    """By live length: every byte once at the vendor's bandwidth, in bytes a second."""
    op = ops.get(problem.op)
    moved = {n: op.bytes_moved(problem, op.shape(problem, profile, n)) for n in profile.lengths}
    return {n: bytes_ / bandwidth * 1e6 for n, bytes_ in moved.items()}


@dataclass(frozen=True)
class Timing:
    """Microseconds at one live length, medians over rounds; spread is the interquartile range over the median."""

    us: float
    spread: float
    baseline_us: float | None = None


@dataclass(frozen=True)
class Measured:
    """A candidate's check and, where that passed, its times by live length."""

    verdict: Verdict
    timings: dict[int, Timing]
    warnings: tuple[str, ...] = ()
    pruned: str = ""


#: Microseconds of one launch in each round, by live length.
Rounds = dict[int, list[float]]


def partial_score(profile: Profile, us: Rounds, baseline_us: Rounds, floors: Mapping[int, float]) -> float:
    """Over the lengths and rounds that there are, against the baseline's in the same rounds or the byte floors."""
    medians, beside = ({n: middle(times)[0] for n, times in of.items() if times} for of in (us, baseline_us))
    return profile.only(medians).score(medians, beside or floors)


@dataclass(frozen=True)
class Timed:
    """A candidate's check and, where that passed, its rounds and the baseline's in turn with them, where there is one.

    `pruned` says why it was not measured to the end.
    """

    verdict: Verdict
    us: Rounds
    baseline_us: Rounds
    warnings: tuple[str, ...] = ()
    pruned: str = ""

    def measured(self) -> Measured:
        timings = {}
        for length, times in self.us.items():
            us, spread = middle(times)
            beside = self.baseline_us.get(length)
            timings[length] = Timing(us, spread, middle(beside)[0] if beside else None)
        return Measured(self.verdict, timings, self.warnings, self.pruned)


class Compiled(NamedTuple):
    """What compiling a candidate tells: the source's hash, what it takes, and what the machine runs."""

    source_sha: str
    report: Report
    code: str


#: Bytes of GPU memory that candidates may leave behind, by modules that stay loaded, before their process is replaced.
LEAK_BYTES = 1 << 30


# -- jobs -------------------------------------------------------------------------------------------------------


def import_job() -> None:
    """Import what compiling takes, and see that Triton can keep what it compiles.

    Raises:
        Unusable: it can't be imported, or its cache folder can't be written.
    """
    try:
        import triton.compiler  # noqa: F401
        from triton import knobs

        try_writing(Path(knobs.cache.dir), "TRITON_CACHE_DIR")
    except Exception as error:
        raise Unusable(first_line(error)) from error


def compile_job(problem: Problem, config: Config) -> Compiled:
    """Compile into Triton's cache, for whichever process launches it.

    Raises:
        CompileError: the compiler refused it.
        Unusable: what it wrote can't be kept, as on a full disk.
    """
    op = ops.get(problem.op)
    try:
        kernel = compile_config(op, problem, config)
        return Compiled(kernel.source.sha, kernel.report, kernel.code)
    except Exception as error:
        if _disk_fails(error):
            raise Unusable(
                f"{first_line(error)}: see to the folder of $DSV4TUNE_CACHE and $TRITON_CACHE_DIR"
            ) from error
        raise


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EMFILE}


def _disk_fails(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def interpret_job(problem: Problem, config: Config) -> Verdict:
    """Check through Triton's interpreter; the process has ``TRITON_INTERPRET=1`` and no GPU is needed."""
    torch.set_num_threads(1)
    op = ops.get(problem.op)
    small, width = op.small(problem)
    variant = Variant(op, small, config, width, interpreted(render(op, problem, config).load()), "cpu")
    cases = op.cases(small, width, (width,), "cpu", seed=0)
    return check(op, small, ((name, call, op.expect(small, call)) for name, call in cases), variant)


def check(
    op: Op[Any, Any],
    problem: Problem,
    cases: Iterable[tuple[str, Any, Any]],
    run: Callable[[Any], object],
    times: int = 1,
) -> Verdict:
    """Run every case (name, call, expected) and judge it; the worst error, and the first fault if there is one."""
    worst = 0.0
    for name, call, expected in cases:
        for _ in range(times):
            run(call)
            verdict = op.verify(problem, call, expected)
            worst = max(worst, verdict.error)
            if not verdict.ok:
                return Verdict(worst, f"case '{name}': {verdict.fault}")
    return Verdict(worst)


def device_job(setup: Setup, config: Config, baseline: str | None, halving: bool = False) -> Measured | Last:
    """As `rounds_job`, with the medians alone; with `halving` not to the end where the candidate is far behind others
    that this process measured."""
    done = rounds_job(setup, config, baseline, halving)
    return Last(done.value.measured()) if isinstance(done, Last) else done.measured()


def rounds_job(setup: Setup, config: Config, baseline: str | None, halving: bool = False) -> Timed | Last:
    """Check on the GPU, then time at every length of the profile, in turn with the baseline.

    Raises:
        Poisoned: the candidate broke the CUDA context, or keeps memory; this process must end.
        Unusable: the problem's inputs could not be made here.
    """
    session = _session(setup)
    try:
        measured = session.measure(config, baseline, halving)
        torch.cuda.synchronize()  # what it broke shows before it counts as sound
    except Exception as error:
        if _context_is_broken():
            raise Poisoned(f"device fault: {first_line(error)}") from error
        # What only the error's frames hold is no leak.
        traceback.clear_frames(error.__traceback__)
        kept = session.leaked()
        if kept > LEAK_BYTES:
            raise Poisoned(f"{first_line(error)}; {kept >> 20} MiB of GPU memory were left behind") from error
        raise
    return Last(measured) if session.leaked() > LEAK_BYTES else measured


def final_job(
    setup: Setup, configs: Sequence[Config], baseline: str | None, rounds: int
) -> tuple[dict[Config, Rounds], Rounds]:
    """Time candidates that are known to be right, and the baseline, in turn: of each config, and of the baseline.

    Raises:
        Poisoned: one of them broke the CUDA context; this process must end.
        Unusable: the problem's inputs could not be made here.
    """
    session = _session(setup)
    try:
        return session.again(configs, baseline, rounds)
    except Exception as error:
        if _context_is_broken():
            raise Poisoned(f"device fault: {first_line(error)}") from error
        raise


def session_job(setup: Setup) -> None:
    """Make the inputs and expected values of a problem, for the candidates that follow.

    Raises:
        Unusable: there is not the GPU that the problem is for, or it does not do.
    """
    here = devices.here()
    if here is None or here.silicon != setup.device.silicon:
        found = "no GPU" if here is None else here.name
        raise Unusable(f"this process sees {found}, not {setup.device.name}")
    _session(setup)


def memory_job() -> int:
    """Free bytes of the GPU here."""
    _current.clear()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@dataclass(frozen=True)
class PeerTimes:
    """A peer's own figures, timed as a candidate is; or why there are none."""

    missing: str | None
    version: str = ""
    times_us: dict[int, float] | None = None
    error: float | None = None
    left_out: str = ""


def peer_job(setup: Setup, name: str) -> PeerTimes:
    """Time a peer over the profile; lengths that don't fit in memory are left out and named."""
    peer = peers.PEERS[name]
    missing = peer.missing()
    if missing is not None:
        return PeerTimes(missing)
    session = _session(setup)
    times, left_out = {}, ""
    try:
        error = session.peer_error(peer)
        for length in setup.profile.lengths:
            launches = 1 if peer.slow else session.launches[length]
            calls = session.sets[length][: 1 if peer.slow else None]
            try:
                graph = session.timer.capture([peer.prepare(setup.problem, c) for c in calls], launches)
                times[length] = round(middle(session.timer.time([graph])[0])[0], 4)
            except torch.cuda.OutOfMemoryError:
                left_out += f"{length}: out of memory; "
            torch.cuda.empty_cache()
    except Exception as error_:
        if _context_is_broken():
            raise Poisoned(f"{name}: device fault: {first_line(error_)}") from error_
        raise
    return PeerTimes(None, peer.version(), times, error, left_out.rstrip("; "))


# -- one problem on one GPU -------------------------------------------------------------------------------------

_current: list[tuple[Setup, Session]] = []


def _session(setup: Setup) -> Session:
    if not _current or _current[0][0] != setup:
        _current.clear()  # the old one's memory first
        try:
            torch.cuda.empty_cache()
            _current.append((setup, Session(setup)))
        except Exception as error:
            raise Unusable(first_line(error)) from error
    return _current[0][1]


class Session:
    """Inputs, expected values and the baseline's graphs of one problem."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.op: Op[Any, Any] = ops.get(setup.problem.op)
        problem, profile = setup.problem, setup.profile
        cases = self.op.cases(problem, profile.width, profile.lengths, "cuda", setup.seed)
        self.cases = [(name, call, self.op.expect(problem, call)) for name, call in cases]
        self.timer = Timer(setup.device)
        shapes = {length: self.op.shape(problem, profile, length) for length in profile.lengths}
        enough = 4 * setup.device.l2_bytes
        pool = self.op.timing_pool(problem, list(shapes.values()), enough, "cuda", setup.seed)
        self.sets: dict[int, list[Any]] = {}
        self.launches: dict[int, int] = {}
        for length, shape in shapes.items():
            moved = self.op.bytes_moved(problem, shape)
            self.launches[length] = self.timer.launches(moved)
            sets = self.timer.sets(moved)
            self.sets[length] = self.op.timing_sets(problem, shape, sets, "cuda", setup.seed, pool)
        self.floors = floors_us(problem, profile, setup.device.bandwidth)
        self.halving = Halving()
        self.peers: dict[str, dict[int, Captured]] = {}
        torch.cuda.synchronize()
        self._held = _held()

    def peer(self, name: str) -> dict[int, Captured]:
        """A peer's graphs by length, kept for as long as candidates are timed beside it."""
        if name not in self.peers:
            prepare = peers.PEERS[name].prepare
            self.peers[name] = {
                length: self.timer.capture([prepare(self.setup.problem, c) for c in calls], self.launches[length])
                for length, calls in self.sets.items()
            }
            self._held = _held()
        return self.peers[name]

    def leaked(self) -> int:
        """Bytes of GPU memory that are held now and were not before the first candidate."""
        return _held() - self._held

    def peer_error(self, peer: Any) -> float:
        """A peer's error by the measure that ours is judged by, on a call without poison: it owes us no more."""
        length = min(self.sets, key=lambda n: abs(n - 2048))
        call = self.sets[length][0]
        problem = self.setup.problem
        self.op.output(call).copy_(peer.prepare(problem, call)())
        return self.op.verify(problem, call, self.op.expect(problem, call)).error

    def variant(self, config: Config) -> Variant:
        problem = self.setup.problem
        compiled = compile_config(self.op, problem, config).compiled
        return Variant(self.op, problem, config, self.setup.profile.width, compiled)

    def graphs(self, variants: Sequence[Variant], beside: Captured | None, length: int) -> list[Captured]:
        """Those that are timed in turn."""
        calls, launches = self.sets[length], self.launches[length]
        own = [self.timer.capture([variant.prepared(call) for call in calls], launches) for variant in variants]
        return own if beside is None else [*own, beside]

    def measure(self, config: Config, baseline: str | None, halving: bool = False) -> Timed:
        problem, profile = self.setup.problem, self.setup.profile
        variant = self.variant(config)
        verdict = check(self.op, problem, self.cases, variant)
        if not verdict.ok:
            return Timed(verdict, {}, {})
        beside = self.peer(baseline) if baseline is not None else {}
        us: Rounds = {}
        baseline_us: Rounds = {}
        graphs: dict[int, list[Captured]] = {}
        candidate = self.halving.candidate() if halving else None
        pruned = ""
        for length, rounds in stages(profile.lengths, ROUNDS, halving):
            if length not in graphs:
                graphs[length] = self.graphs([variant], beside.get(length), length)
            taken = len(us.setdefault(length, []))
            own, *others = self.timer.time(graphs[length], rounds - taken)
            us[length] += own
            if others:
                baseline_us.setdefault(length, []).extend(others[0])
            if candidate is not None and candidate.falls_behind(self.score(us, baseline_us)):
                pruned = f"behind after {sum(map(len, us.values()))} of {ROUNDS * len(profile.lengths)} rounds"
                break
        if candidate is not None:
            candidate.ends(self.score(us, baseline_us))
        # Doubtful where another process works on this GPU, or clocks are held down.
        return Timed(verdict, us, baseline_us, gpu.state().warnings, pruned)

    def score(self, us: Rounds, baseline_us: Rounds) -> float:
        return partial_score(self.setup.profile, us, baseline_us, self.floors)

    def again(
        self, configs: Sequence[Config], baseline: str | None, rounds: int
    ) -> tuple[dict[Config, Rounds], Rounds]:
        """Candidates that are known to be right, and the baseline, in turn on a warm device."""
        variants = [self.variant(config) for config in configs]
        beside = self.peer(baseline) if baseline is not None else {}
        times: dict[Config, Rounds] = {config: {} for config in configs}
        baseline_us: Rounds = {}
        for length in self.setup.profile.lengths:
            graphs = self.graphs(variants, beside.get(length), length)
            self.timer.warm(graphs)
            found = self.timer.time(graphs, rounds)
            for config, own in zip(configs, found, strict=False):
                times[config][length] = own
            if length in beside:
                baseline_us[length] = found[-1]
        return times, baseline_us


def _held() -> int:
    """Bytes of the GPU's memory in use, other processes' included, without what torch only keeps for later."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated())


def _context_is_broken() -> bool:
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except Exception:
        return True
    return False
