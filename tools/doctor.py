"""Whether this machine can tune and serve: what is here, what is broken, what is missing, and what mends it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dsv4tune import __version__
from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import Report, first_line, ptxas_version
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.render import cache_folder, try_writing
from dsv4tune.codegen.words import counted
from dsv4tune.runtime import compilers, switches, targets
from dsv4tune.runtime.compilers import Job
from dsv4tune.runtime.wanted import Server
from dsv4tune.tools import coverage, gpu, peers
from dsv4tune.tuned.reader import default_path
from dsv4tune.tuned.store import Store, StoreError

#: ``ok``; ``note``: works, and should be known; ``gap``: something to tune; ``broken``: has to be mended.
Status = Literal["ok", "note", "gap", "broken"]

#: SGLang versions whose functions were read or run; see README.md.
TRIED = ("0.5.16", "0.5.20", "0.5.23")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` is what to run or do, "" where nothing is to be done."""

    what: str
    status: Status
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
        card: the named one, None for the GPU here.
        server: whose captured sizes are looked at; `context` is its in tokens.
        database: None for the one that a server would read.
        like: what the server was read from, where it was.
    """

    card: Device | None
    server: Server
    context: int
    database: Path | None = None
    like: coverage.Like | None = None


def examine(request: Request) -> Iterator[Finding]:
    """Everything, in the order in which one thing needs another."""
    yield Finding("dsv4tune", "ok", __version__)
    here, finding = _gpu()
    yield finding
    card = request.card or here
    yield from _compilers(card)
    if card is None:
        yield Finding("card", "note", "none to look at", "name one with --device, such as --device rtx-pro-6000")
    else:
        yield from _kernels(card)
    yield from _variables()
    yield _cache()
    yield from _sglang(card)
    yield _database(request.database)
    if card is not None:
        if request.card is None:
            yield from _baselines(card)
        yield from _entries(card, request)


# -- the machine ------------------------------------------------------------------------------------------------


def _gpu() -> tuple[Device | None, Finding]:
    import torch

    driver = gpu.state().driver
    try:
        found = devices.here()
    except ValueError as error:  # too old a GPU, which serves no one
        return None, Finding("GPU", "broken", str(error), "use a GPU of capability 8.9 or newer")
    if found is not None:
        s = found.silicon
        shared = f"{s.shared_bytes // devices.KB} KB of shared memory a program"
        text = f"{found.name}, {s.target}, {s.sm_count} SMs, {shared}, driver {driver or 'unknown'}"
        return found, Finding("GPU", "ok", text)
    if driver:
        what = f"driver {driver} is here, and torch {torch.__version__} sees no GPU"
        return None, Finding("GPU", "broken", what, "install a torch with CUDA that this driver can run")
    return None, Finding("GPU", "note", "none here: searches predict, and nothing can be measured")


def _compilers(card: Device | None) -> Iterator[Finding]:
    for package in ("torch", "triton"):
        try:
            yield Finding(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "broken", "not installed", f"pip install {package}")
    # Triton brings two: one for the Blackwells and one for what came before them.
    version = ptxas_version(card.silicon.arch if card is not None else 120)
    if version == "unknown":
        yield Finding("ptxas", "broken", "Triton's own does not run", "reinstall triton: its wheel brings ptxas")
    else:
        yield Finding("ptxas", "ok", version)


def _kernels(card: Device) -> Iterator[Finding]:
    """Compiles each kernel's default for the card."""
    for op in ops.OPS.values():
        what = f"{op.name} for {card.silicon.target}"
        try:
            problem = op.problem(64, card.silicon, **op.options({}, 1 << 20, 0))
            job = Job.of(problem, op.default(problem, card))
            outcome = next(iter(compilers.compile_all([job], 1).values()))
        except Exception as error:
            outcome = first_line(error)
        if not isinstance(outcome, Report):
            yield Finding(what, "broken", f"does not compile: {outcome}", "install a Triton of 3.6 to 3.9")
            continue
        refusal = outcome.refusal(card.silicon)
        text = f"compiles: {outcome.registers} registers, {outcome.shared_bytes} B shared, {outcome.mma or 'no MMA'}"
        if refusal is not None:
            yield Finding(what, "broken", refusal, "install another Triton, of 3.6 to 3.9")
        elif op.name == "indexer" and not outcome.native_fp8:
            text += ": not the card's fp8 instruction"
            yield Finding(what, "note", text, "pip install -U triton: a newer one may have it")
        else:
            yield Finding(what, "ok", text)


def _variables() -> Iterator[Finding]:
    decided = switches.read()
    for note in decided.notes:
        yield Finding("environment", "broken", note, "correct or unset the variable")
    if not decided.kernels:
        text = "switched off by DSV4TUNE_DISABLE: a server keeps its own kernels"
        yield Finding("environment", "note", text, "unset DSV4TUNE_DISABLE")


def _cache() -> Finding:
    folder = cache_folder()
    try:
        try_writing(folder, "DSV4TUNE_CACHE")
    except OSError as error:
        return Finding("cache", "broken", str(error), "name another folder in DSV4TUNE_CACHE")
    return Finding("cache", "ok", str(folder))


# -- the server -------------------------------------------------------------------------------------------------


def _sglang(card: Device | None) -> Iterator[Finding]:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        text = "not in this environment: nothing is served from here"
        yield Finding("SGLang", "note", text, "on the machine that serves: pip install this clone where SGLang is")
        return
    known = version in TRIED
    text = version if known else f"{version}, not one of those that were tried ({', '.join(TRIED)})"
    yield Finding("SGLang", "ok" if known else "note", text)
    names = {point.name for point in metadata.entry_points(group="sglang.srt.plugins")}
    wanted = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if "dsv4tune" not in names:
        fix = "pip install dsv4tune's clone into SGLang's environment"
        yield Finding("plugin", "broken", "SGLang can't see it: the package is not installed here", fix)
    elif wanted and "dsv4tune" not in wanted:
        text = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out"
        yield Finding("plugin", "broken", text, "add dsv4tune to SGLANG_PLUGINS, or unset it")
    else:
        yield Finding("plugin", "ok", "SGLang will load it")
    if card is None:
        return
    found, missing = targets.usable([card.silicon.arch], list(ops.OPS))
    hooked = sorted({target.kernel for target in found if target.kernel})
    for line in missing:
        yield Finding("hook", "note", f"not there, so not hooked: {line}")
    if targets.RUNNER not in found or not hooked:
        text = "nothing can be hooked for this card: the server would keep its own kernels"
        yield Finding("hooks", "broken", text, f"use an SGLang that was tried: {', '.join(TRIED)}")
    else:
        yield Finding("hooks", "ok", f"{len(found)} functions for {', '.join(hooked)}")


def _database(named: Path | None) -> Finding:
    path = named or default_path()
    try:
        if not path.exists():
            return Finding("database", "broken" if named else "note", f"none at {path} yet", "dsv4tune search makes it")
        store = Store(path, create=False)
        try:
            keys, trials = store.problems(), store.total()
        finally:
            store.close()
    except (StoreError, ValueError, OSError) as error:
        return Finding(
            "database", "broken", str(error), "a search sets a damaged file aside; or name another with --db"
        )
    return Finding("database", "ok", f"{path}: {counted(len(keys), 'problem')}, {counted(trials, 'trial')}")


# -- what was tuned ---------------------------------------------------------------------------------------------


def _baselines(card: Device) -> Iterator[Finding]:
    """The server's own kernels, without which nothing counts as faster than the server."""
    for name in ops.OPS:
        peer = peers.baseline(name, card.silicon)
        missing = peer.missing() if peer is not None else None
        if peer is not None and missing is not None:
            text = f"{peer.name} can't run here ({missing}): searches can't time beside it"
            yield Finding(f"baseline of {name}", "note", text, peer.install)


def _entries(card: Device, request: Request) -> Iterator[Finding]:
    told: list[str] = []
    found: list[coverage.Strip] = []
    for name in ops.OPS:
        try:
            found += coverage.strips(card, name, request.server, request.context, request.database, told.append)
        except ValueError as error:
            yield Finding(f"entries of {name}", "note", str(error))
    whole = coverage.command_like(request.like, found) if request.like is not None else ""
    for strip in found:
        covered, predicted = strip.count("exact", "between"), strip.count("predicted")
        text = f"{covered} of {len(strip.cells)} captured sizes have a measured entry"
        if predicted:
            text += f", {predicted} a predicted one only"
        if covered < len(strip.cells):
            text += "; the others keep the server's own kernel"
        if stays := strip.count("server"):
            text += f", at {stays} because a search here found it as fast"
        if strip.open:
            yield Finding(f"entries of {strip.name}", "gap", text, whole or strip.command)
        else:
            yield Finding(f"entries of {strip.name}", "ok", text)
    for line in dict.fromkeys(told):
        yield Finding("entries", "note", line)


def broken(findings: list[Finding]) -> bool:
    return any(finding.status == "broken" for finding in findings)
