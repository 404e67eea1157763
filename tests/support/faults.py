"""Faults at a server's start and in its calls. After each the server's own function answers, and one line says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import serving
import torch
from fakes import RESOURCES
from serving import ROWS, FakeMachine

from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.runtime import plugin, startup
from dsv4tune.tuned.records import Baseline, Environment, Range


@dataclass
class Scene:
    """A server of the indexer alone, and one call to it; a fault changes what it likes."""

    database: Path
    patch: pytest.MonkeyPatch
    machine: FakeMachine = field(default_factory=FakeMachine)
    runner: Any = field(default_factory=serving.model_runner)
    entry: dict[str, Any] = field(default_factory=dict)
    rows: int = ROWS
    call: IndexerCall = field(default_factory=serving.indexer_call)
    #: What becomes of the call's arguments.
    change: Callable[[list[Any]], list[Any]] = lambda arguments: arguments
    words: dict[str, Any] = field(default_factory=dict)
    #: Done to the database once it is written.
    spoil: Callable[[Path], object] = lambda path: None
    #: Goes through the hook before capture.
    capture: Callable[[Any], object] = lambda runner: plugin.before_capture(lambda _: "captured", runner)

    def start(self) -> None:
        """Write the entry, spoil it, and go through the hook before capture."""
        self.patch.setenv("DSV4TUNE_DISABLE", "mla_decode")
        self.patch.setattr(startup, "Gpu", lambda processes: self.machine)
        self.patch.setattr(startup, "silicon_here", self.machine.silicon_here)
        serving.write_entry(self.database, rows=self.rows, **self.entry)
        self.spoil(self.database)
        assert self.capture(self.runner) in ("captured", "eager")

    def arguments(self) -> list[Any]:
        return self.change(serving.indexer_arguments(self.call))


Fault = Callable[[Scene], object]
#: Name: what goes wrong, and what the line says.
FAULTS: dict[str, tuple[Fault, str]] = {}


def fault(name: str, says: str) -> Callable[[Fault], Fault]:
    def register(inject: Fault) -> Fault:
        FAULTS[name] = (inject, says)
        return inject

    return register


def told(records: Sequence[Any]) -> list[str]:
    """Warnings, or, where all is as it should be and the evidence is not enough, the line that says so."""
    lines = [(r.levelname, r.getMessage()) for r in records if r.name == "dsv4tune"]
    warnings = [text for level, text in lines if level != "INFO"]
    return warnings or [text for _, text in lines if "the server's own kernel" in text]


# -- files ------------------------------------------------------------------------------------------------------


def _sql(statement: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return run


@fault("a database of other bytes", "can't read .*tuned.db .*not a database")
def _(scene: Scene) -> None:
    scene.spoil = lambda path: path.write_bytes(b"no database" * 400)


@fault("a database cut in half", "can't read .*tuned.db")
def _(scene: Scene) -> None:
    def spoil(path: Path) -> None:
        _sql("PRAGMA wal_checkpoint(TRUNCATE)")(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    scene.spoil = spoil


@fault("a locked database", "can't read .*tuned.db .*locked")
def _(scene: Scene) -> None:
    def spoil(path: Path) -> None:
        scene.machine.held = sqlite3.connect(path, isolation_level=None)  # type: ignore[attr-defined]
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE"):
            scene.machine.held.execute(statement)  # type: ignore[attr-defined]

    scene.spoil = spoil


@fault("a folder in the database's place", "no regular file")
def _(scene: Scene) -> None:
    def spoil(path: Path) -> None:
        path.unlink()
        path.mkdir()

    scene.spoil = spoil


@fault("a pipe in the database's place", "no regular file")
def _(scene: Scene) -> None:
    def spoil(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    scene.spoil = spoil


@fault("a database of a newer dsv4tune", "newer dsv4tune .m999_next.")
def _(scene: Scene) -> None:
    scene.spoil = _sql(
        "insert into _sqlite_migrations (migration_set, name, applied_at) values ('dsv4tune', 'm999_next', '')"
    )


@fault("a database without tables", "can't read .*no such table")
def _(scene: Scene) -> None:
    scene.spoil = _sql("drop table environment")


@fault("a trial that is no JSON", "some trials can't be read")
def _(scene: Scene) -> None:
    scene.spoil = _sql("update trial set json = '{'")


@fault("a trial with a field of another version", "some trials can't be read")
def _(scene: Scene) -> None:
    scene.spoil = _sql("""update device set json = '{"colour": "green"}'""")


@fault("config words of another version", "config words .*speed.* are of another dsv4tune")
def _(scene: Scene) -> None:
    scene.entry = {"config": {**serving.config_of("indexer"), "speed": 11}}


@fault("a config that the space refuses", "config refused|is not one of")
def _(scene: Scene) -> None:
    scene.entry = {"config": {**serving.config_of("indexer"), "num_warps": 64}}


@fault("a key that is not its problem's", "its key is 'indexer of old'")
def _(scene: Scene) -> None:
    scene.entry = {"problem_key": "indexer of old"}


@fault("shipped entries that are no JSON", "shipped rtx/indexer.json can't be read")
def _(scene: Scene) -> None:
    scene.patch.setattr("dsv4tune.tuned.selector._shipped_files", lambda: iter([("rtx/indexer.json", b"{")]))
    scene.spoil = lambda path: path.unlink()


@fault("a shipped entry that is malformed", "shipped rtx/indexer.json: an entry can't be read")
def _(scene: Scene) -> None:
    text = json.dumps({"schema_version": 1, "entries": [{"problem": 3}]}).encode()
    scene.patch.setattr("dsv4tune.tuned.selector._shipped_files", lambda: iter([("rtx/indexer.json", text)]))
    scene.spoil = lambda path: path.unlink()


# -- evidence ---------------------------------------------------------------------------------------------------


@fault("only a prediction", "predicted, not measured")
def _(scene: Scene) -> None:
    scene.entry = {"provenance": "predicted", "baseline": None, "yardstick": "byte floor", "score": 1.5}


@fault("slower than the server's kernel", "not faster than tilelang by 1% .1.020")
def _(scene: Scene) -> None:
    scene.entry = {"score": 1.02}


@fault("faster within noise", "not faster than tilelang by 1% .0.995")
def _(scene: Scene) -> None:
    scene.entry = {"score": 0.995}


@fault("timed beside another kernel", "timed beside deep_gemm, and this server runs tilelang")
def _(scene: Scene) -> None:
    scene.entry = {"baseline": Baseline(name="deep_gemm", version="1", times_us={128: 4.0})}


@fault("timed beside nothing", "timed beside no server kernel")
def _(scene: Scene) -> None:
    scene.entry = {"baseline": None, "yardstick": "byte floor"}


@fault("measured on other silicon", "no entry for this silicon")
def _(scene: Scene) -> None:
    scene.machine.silicon = replace(serving.CARD.silicon, sm_count=160)


@fault("tried up to fewer columns", "tried up to 128 columns, asked for 768")
def _(scene: Scene) -> None:
    scene.entry = {"range": Range(width=128, lengths=[128], weights=[1.0])}


@fault("strict, and another Triton", "made with Triton 3.0.0 .*policy strict")
def _(scene: Scene) -> None:
    scene.patch.setenv("DSV4TUNE_POLICY", "strict")
    scene.entry = {"environment": Environment(dsv4tune="0", triton="3.0.0", ptxas="1", torch="2")}


@fault("no entry for these rows", "entries are for 64 rows, which don't enclose these")
def _(scene: Scene) -> None:
    scene.rows = 64


@fault("a switch that makes no sense", "DSV4TUNE_POLICY=bold is not measured, strict or predicted")
def _(scene: Scene) -> None:
    scene.patch.setenv("DSV4TUNE_POLICY", "bold")
    scene.patch.setattr(plugin, "_pending", [*__import__("dsv4tune.runtime.switches", fromlist=["x"]).read().notes])
    scene.entry = {"score": 1.5}


@fault("another backend by the user's choice", "left to torch_sm120, as SGLANG_OPT_USE_TILELANG_INDEXER=0")
def _(scene: Scene) -> None:
    scene.patch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "0")
    scene.patch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    scene.patch.delenv("SGLANG_SM120_MMA_INDEXER", raising=False)


# -- compile, load, check ---------------------------------------------------------------------------------------


def _raise(error: Exception) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


@fault("a text that can't be rendered", "can't be rendered: KeyError")
def _(scene: Scene) -> None:
    scene.patch.setattr("dsv4tune.runtime.compilers.render", _raise(KeyError("speed")))


@fault("a compile error", "can't be compiled here: CompileError: no such layout")
def _(scene: Scene) -> None:
    scene.machine.compiled = lambda job: "CompileError: no such layout"


@fault("a compiler without an answer", "can't be compiled here: TimeoutError")
def _(scene: Scene) -> None:
    scene.machine.compiled = lambda job: "TimeoutError: the compiler gave no answer in 60 s"


@fault("a compiler that was forgotten", "can't be compiled here: not compiled")
def _(scene: Scene) -> None:
    scene.machine.compile = lambda jobs: {}  # type: ignore[method-assign]


@fault("compilers that can't be started", "nothing is served: OSError: no processes")
def _(scene: Scene) -> None:
    scene.machine.compile = _raise(OSError("no processes"))  # type: ignore[method-assign]


@fault("more shared memory than the card has", "needs 147456 B of shared memory, sm_120 allows 101376")
def _(scene: Scene) -> None:
    scene.machine.compiled = lambda job: Report(**{**RESOURCES.model_dump(), "shared_bytes": 147_456, "binary": "1"})


@fault("another Triton makes it spill", "worse code than was timed .spill_bytes 0 to 64 B.")
def _(scene: Scene) -> None:
    scene.machine.compiled = lambda job: Report(**{**RESOURCES.model_dump(), "spill_bytes": 64, "binary": "1"})


@fault("another Triton loses the fp8 product", "no fp8 MMA any more")
def _(scene: Scene) -> None:
    scene.machine.compiled = lambda job: Report(**{**RESOURCES.model_dump(), "native_fp8": False, "binary": "1"})


@fault("a binary that can't be loaded", "can't be loaded: RuntimeError: no kernel image")
def _(scene: Scene) -> None:
    scene.machine.loaded = _raise(RuntimeError("no kernel image"))


@fault("wrong values", "failed its check: case 'mixed 0': row")
def _(scene: Scene) -> None:
    scene.machine.launched = lambda job, arguments: None


@fault("values just past the tolerance", "failed its check: case 'mixed 1': row .*relative error")
def _(scene: Scene) -> None:
    def slightly_off(job: Any, arguments: Sequence[Any]) -> None:
        serving.compute(job, arguments)
        arguments[5].mul_(1.002)

    scene.machine.launched = slightly_off


@fault("a check that raises", "can't be loaded: RuntimeError: device-side assert")
def _(scene: Scene) -> None:
    scene.machine.launched = _raise(RuntimeError("device-side assert"))


# -- the runner -------------------------------------------------------------------------------------------------


@fault("no GPU", "nothing is served: ValueError: no NVIDIA GPU here")
def _(scene: Scene) -> None:
    scene.machine.silicon = None


@fault("silicon that no server kernel is known for", "no server kernel is known for sm_89")
def _(scene: Scene) -> None:
    scene.machine.silicon = serving.DEVICES["rtx-4090"].silicon


@fault("a runner that says nothing of its heads", "no attention layer says how many of its heads are real")
def _(scene: Scene) -> None:
    scene.runner = serving.model_runner(model=torch.nn.Linear(1, 1))


@fault("a runner of another SGLang", "nothing is served: AttributeError: .*req_to_token_pool")
def _(scene: Scene) -> None:
    del scene.runner.req_to_token_pool


@fault("a cache of another layout", "takes 528 bytes a token, and the kernels read 584")
def _(scene: Scene) -> None:
    scene.runner.token_to_kv_pool = SimpleNamespace(get_swa_key_bytes_per_token=lambda: 528)


# -- ranks ------------------------------------------------------------------------------------------------------


class Store:
    """A process group's store, of one process."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.held for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.held.setdefault(key, desired).encode()


def _ranks(scene: Scene, store: Any) -> None:
    from dsv4tune.runtime.runner import Ranks

    scene.patch.setattr("dsv4tune.runtime.runner.ranks_of", lambda runner: Ranks(0, (0, 1), store))
    scene.patch.setattr(plugin, "_rounds", 0)
    scene.patch.setenv("DSV4TUNE_RANK_SECONDS", "0.2")


@fault("a rank with another table", "ranks don't agree.*rank 1 has table 0123")
def _(scene: Scene) -> None:
    store = Store()
    store.set("dsv4tune/0-1/1/1", "0123")
    _ranks(scene, store)


@fault("a rank that says nothing", "ranks don't agree.*rank 1 said nothing in 0.2 s")
def _(scene: Scene) -> None:
    _ranks(scene, Store())


@fault("a verdict that was there first", "ranks don't agree.*rank 3 said nothing")
def _(scene: Scene) -> None:
    store = Store()
    store.set("dsv4tune/0-1/1/verdict", "off rank 3 said nothing in 60 s")
    _ranks(scene, store)


@fault("a store that fails", "ranks don't agree.*store failed .ConnectionError: gone")
def _(scene: Scene) -> None:
    store = Store()
    store.check = _raise(ConnectionError("gone"))  # type: ignore[method-assign]
    _ranks(scene, store)


# -- calls ------------------------------------------------------------------------------------------------------


def _argument(number: int, change: Callable[[Any], Any]) -> Fault:
    def inject(scene: Scene) -> None:
        def changed(arguments: list[Any]) -> list[Any]:
            return [change(a) if i == number else a for i, a in enumerate(arguments)]

        scene.change = changed

    return inject


def _padded_pages(kv: torch.Tensor) -> torch.Tensor:
    """The same pages with 64 bytes between them."""
    wide = torch.zeros(kv.shape[0], 8448 + 64, dtype=torch.uint8)
    wide[:, :8448] = kv.view(kv.shape[0], -1)
    return wide[:, :8448].as_strided((kv.shape[0], 64, 1, 132), (8512, 132, 132, 1))


fault("queries of another dtype", "q is torch.bfloat16")(_argument(0, lambda q: q.to(torch.bfloat16)))
fault("queries with a stride", "indexer: ")(_argument(0, lambda q: torch.stack([q, q], dim=2)[:, :, 0]))
fault("pages with bytes between", "indexer: ")(_argument(1, _padded_pages))
fault("weights of another dtype", "weights is torch.float64")(_argument(2, lambda w: w.double()))
fault("weights with a stride", "weights has strides")(_argument(2, lambda w: w.t().contiguous().t()))
fault("lengths of another dtype", "seq_lens is torch.int64")(_argument(3, lambda n: n.long()))
fault("too few lengths", "seq_lens is")(_argument(3, lambda n: n[:2]))
fault("a page table with a column stride", "column stride 1")(
    _argument(4, lambda t: torch.stack([t, t], dim=2)[:, :, 0])
)
fault("a page table that is too narrow", "whole pages of 64 that the table's 11 columns cover")(
    _argument(4, lambda t: t[:, :11])
)
fault("columns that are not ready", "nothing is ready for 3 rows of 704 columns")(_argument(6, lambda n: n - 64))
fault("clean_logits", "clean_logits=True is not served")(_argument(7, lambda _: True))


@fault("a tensor on another device", "seq_lens is on meta")
def _(scene: Scene) -> None:
    _argument(3, lambda n: n.to("meta"))(scene)


@fault("rows that are not ready", "nothing is ready for 2 rows")
def _(scene: Scene) -> None:
    scene.call = serving.indexer_call((700, 5))


@fault("an argument that nobody knows", "unexpected keyword argument 'sink'")
def _(scene: Scene) -> None:
    scene.words = {"sink": None}


@fault("too few arguments", "missing 2 required positional arguments")
def _(scene: Scene) -> None:
    scene.change = lambda arguments: arguments[:5]


@fault("a launch that raises", "RuntimeError: out of resources")
def _(scene: Scene) -> None:
    launched = scene.machine.launched

    def later(job: Any, arguments: Sequence[Any]) -> None:
        if arguments[5].shape[1] == serving.WIDTH:  # not in the check, whose calls are narrower
            raise RuntimeError("out of resources")
        launched(job, arguments)

    scene.machine.launched = later


def matches(line: str, says: str) -> bool:
    return re.search(says, line) is not None


def remove(path: Path) -> None:
    """Whatever a fault put there."""
    if path.is_dir():
        shutil.rmtree(path)
