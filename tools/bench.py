"""Tuned entry, defaults and installed peers on the same tensors, replayed in turn; see benchmarks/README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import cache_environment, compile_config, first_line
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.op import Op
from dsv4tune.codegen.problem import Problem, Shape
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools import gpu, peers
from dsv4tune.tools.evaluate import default_jobs, environment
from dsv4tune.tools.executor import Poisoned, collect
from dsv4tune.tools.measure import compile_job
from dsv4tune.tools.timing import Timer, copy_gb_per_s, middle
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.selector import entry_for
from dsv4tune.tuned.store import Store

ROUNDS = 15
#: Seconds that one shape may take with everything that is timed on it.
LIMIT_S = 300.0


@dataclass(frozen=True)
class Job:
    """One shape and what is timed on it: our configs by label, peers by name."""

    op: str
    device: Device
    shape: Shape
    configs: dict[str, Config]
    peers: tuple[str, ...]
    copy_gb_per_s: float
    seed: int = 0

    @property
    def problem(self) -> Problem:
        problem: Problem = ops.get(self.op).problem(self.shape.rows, self.device.silicon, **self.shape.options)
        return problem


def bench(
    op: Op[Any, Any],
    device: Device,
    shapes: Sequence[Shape],
    wanted: Sequence[str],
    db: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time every shape in a worker process; the object that ``bench --json`` prints."""
    store = Store(db, create=False) if db is not None else None
    pool = Pool(1, LIMIT_S, cache_environment())
    try:
        started = pool.ask(start_job, tuple(wanted))
        if started.kind != "ok":
            raise ValueError(f"the GPU can't be used: {started.reason}")
        copy, found = started.value
        installed = tuple(name for name in wanted if "missing" not in found[name])
        for name in wanted:
            if name not in installed:
                say(f"{name} left out: {found[name]['missing']}. Install it with: {found[name]['install']}")
        jobs = [_job(op, device, shape, installed, copy, store) for shape in shapes]
        _compile_all(jobs)
        rows: dict[str, dict[str, Any]] = {}
        for job in jobs:
            pool.submit(job.shape.name, shape_job, job)
        while pool.pending:
            for _, answer in collect([pool], 1.0):
                if answer.kind == "ok":
                    rows[answer.tag] = answer.value
                    say(_line(answer.value))
                else:
                    say(f"{answer.tag}: {answer.kind}: {answer.reason}")
    finally:
        pool.close()
        if store is not None:
            store.close()
    return {
        "kernel": op.name,
        "environment": {**environment(device.silicon.arch, True).model_dump(), "device": device.name},
        "copy_gb_per_s": round(copy, 1),
        "peers": found,
        "warnings": list(gpu.state().warnings),
        "rows": [rows[shape.name] for shape in shapes if shape.name in rows],
    }


def read_shapes(path: Path) -> list[Shape]:
    """Shapes from a JSON list: ``name``, ``kind``, ``width``, ``live`` (a list, or one length with ``rows``), and if
    wanted ``share`` (rows of a request that read the same pages), ``options`` and ``cached``; see `Shape`.

    Raises:
        ValueError: the file is not such a list.
        OSError: it can't be read.
    """
    try:
        shapes = []
        for item in json.loads(path.read_text()):
            live = item["live"] if isinstance(item["live"], list) else [item["live"]] * item["rows"]
            owner = [row // item.get("share", 1) for row in range(len(live))]
            how = (item.get("options", {}), item.get("cached", False))
            shapes.append(Shape(item["name"], item["kind"], item["width"], tuple(live), tuple(owner), *how))
        return shapes
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no list of shapes ({type(error).__name__}: {error}); see bench --help") from error


def _job(
    op: Op[Any, Any], device: Device, shape: Shape, installed: tuple[str, ...], copy: float, store: Store | None
) -> Job:
    problem: Problem = op.problem(shape.rows, device.silicon, **shape.options)
    configs = {"default": op.default(problem, device), op.reference: op.reference_config(problem, device)}
    entry = entry_for(problem, store)
    if entry is not None:
        configs = {"tuned": op.space(problem, device).check(entry.config), **configs}
    return Job(op.name, device, shape, configs, installed, copy)


def _compile_all(jobs: Sequence[Job]) -> None:
    """On every core, into the cache that the worker reads; what doesn't compile shows where it is timed."""
    wanted = {(job.problem, config) for job in jobs for config in job.configs.values()}
    pool = Pool(default_jobs(), LIMIT_S, {**cache_environment(), "CUDA_VISIBLE_DEVICES": ""})
    try:
        for problem, config in wanted:
            pool.submit(None, compile_job, problem, config)
        while pool.pending:
            collect([pool], 1.0)
    finally:
        pool.close()


# -- in the worker ----------------------------------------------------------------------------------------------


def start_job(names: Sequence[str]) -> tuple[float, dict[str, dict[str, str]]]:
    """The copy bandwidth, and each peer's version or how to get it."""
    found = {}
    for name in names:
        peer = peers.PEERS[name]
        missing = peer.missing()
        found[name] = {"version": peer.version()} if missing is None else {"missing": missing, "install": peer.install}
    return copy_gb_per_s(), found


def shape_job(job: Job) -> dict[str, Any]:
    """One row of the result.

    Raises:
        Poisoned: something broke the GPU's context.
    """
    try:
        return _row(job)
    except Exception as error:
        raise Poisoned(first_line(error)) from error


def _row(job: Job) -> dict[str, Any]:
    op, shape, problem = ops.get(job.op), job.shape, job.problem
    timer = Timer(job.device)
    moved = op.bytes_moved(problem, shape)
    launches = timer.launches(moved)
    pool = op.timing_pool(problem, [shape], 4 * job.device.l2_bytes, "cuda", job.seed)
    calls = op.timing_sets(problem, shape, 1 if shape.cached else timer.sets(moved), "cuda", job.seed, pool)
    expected = op.expect(problem, calls[0])
    graphs, errors, agreement, left_out = {}, {}, {}, {}
    for name, prepare, slow, computes in _contenders(op, problem, job):
        runs = calls[:1] if slow else calls
        try:
            prepared = [prepare(call) for call in runs]
            op.output(calls[0]).fill_(float("nan"))
            output = prepared[0]()
            if output is not None:
                op.output(calls[0]).copy_(output)
            if computes:
                errors[name] = op.verify(problem, calls[0], expected).error
                share = op.agreement(calls[0], expected)
                if share is not None:
                    agreement[name] = round(share, 5)
            del output
            graphs[name] = timer.capture(prepared, 1 if slow else launches)
        except torch.cuda.OutOfMemoryError as error:
            left_out[name] = str(error).split(".")[0]
            torch.cuda.empty_cache()
    times = timer.time(list(graphs.values()), ROUNDS, flush=not shape.cached)
    middles = {n: middle(t) for n, t in zip(graphs, times, strict=True)}
    return {
        "shape": op.describe(shape),
        "floor_us": round(moved / job.copy_gb_per_s / 1e3, 4),
        "us": {name: round(us, 4) for name, (us, _) in middles.items()},
        "spread": {name: round(spread, 4) for name, (_, spread) in middles.items()},
        "error": {name: error if math.isfinite(error) else None for name, error in errors.items()},
        "top512": agreement,
        "left_out": left_out,
        "configs": {label: dict(config) for label, config in job.configs.items()},
    }


def _contenders(op: Op[Any, Any], problem: Problem, job: Job) -> list[tuple[str, Callable[[Any], Any], bool, bool]]:
    """Name, what prepares a call of it, whether it is timed by single launches, and whether it computes anything."""
    found: list[tuple[str, Callable[[Any], Any], bool, bool]] = []
    for label, config in job.configs.items():
        kernel = compile_config(op, problem, config)
        found.append((label, Variant(op, problem, config, job.shape.width, kernel.compiled).prepared, False, True))
    for name in job.peers:
        peer = peers.PEERS[name]
        found.append((name, partial(peer.prepare, problem), peer.slow, peer.computes))
    return found


# -- for people -------------------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    return f"{row['shape']['name']}: floor {row['floor_us']:.2f}, {times} us"


def ratios(result: dict[str, Any], kinds: Sequence[str] = ("decode", "ragged", "verify")) -> dict[str, Any]:
    """Speed of the tuned entries over each peer, and over the better of the kernels that servers run: geometric mean
    and worst shape."""
    servers = [name for name, peer in peers.PEERS.items() if peer.server]
    rows = [row["us"] for row in result["rows"] if row["shape"]["kind"] in kinds and "tuned" in row["us"]]
    names = sorted({name for us in rows for name in us} - {"tuned"})
    found = {name: _over([us[name] / us["tuned"] for us in rows if name in us]) for name in names}
    better = [min(us[n] for n in servers if n in us) / us["tuned"] for us in rows if any(n in us for n in servers)]
    return {**found, "better server kernel": _over(better)} if better else found


def _over(speeds: Sequence[float]) -> dict[str, float]:
    mean = math.exp(sum(math.log(s) for s in speeds) / len(speeds))
    return {"geometric_mean": round(mean, 4), "worst": round(min(speeds), 4), "shapes": len(speeds)}
