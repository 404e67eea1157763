"""Serving on a real GPU: captured as a server captures, replayed over what a server replays, and what it costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_trial
from serving import any_resources

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.problem import Problem
from dsv4tune.runtime import kernels, paged_mqa_logits, plugin, sparse_mla_decode, startup
from dsv4tune.runtime.compilers import Job
from dsv4tune.runtime.dispatch import Table
from dsv4tune.runtime.targets import baselines
from dsv4tune.runtime.wanted import Server, Wanted
from dsv4tune.tuned.records import Baseline, Range
from dsv4tune.tuned.selector import Book, Decision, Found

pytestmark = pytest.mark.gpu

PAGES = 40  # of the table
WIDTH = PAGES * 64
ROWS = (64, 48, 17, 8, 3, 1)
HEADS = 8
CUDA = "cuda"


@pytest.fixture(scope="module")
def card() -> Device:
    found = devices.here()
    assert found is not None
    return found


@pytest.fixture(scope="module", autouse=True)
def table(card: Device) -> Iterator[None]:
    """Every shape of ROWS ready with the op's default config, whatever was measured."""
    server = Server(PAGES, ROWS, (), (HEADS,), ((0, 0), (64, 512), (2, 128)))
    wanted = server.wanted(card.silicon, ("indexer", "mla_decode"))
    prepared = startup.make_ready([(one, decision(one, card)) for one in wanted], rules(card), startup.Gpu())
    assert all(choice.variant is not None for choice in prepared.choices), [c.reason for c in prepared.choices]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TABLE", Table())
        kernels.TABLE.extend(prepared.found)
        yield


@pytest.fixture(autouse=True)
def fresh() -> None:
    """The module's table instead of one for each test."""


def rules(card: Device) -> Any:
    return startup.rules_here("measured", card.silicon, baselines(card.silicon.arch))


def decision(wanted: Wanted, card: Device) -> Decision:
    op = ops.get(wanted.problem.op)
    trial = make_trial(
        op.default(wanted.problem, card),
        problem=wanted.problem.to_json(),
        problem_key=wanted.problem.key,
        provenance="measured",
        range=Range(width=1 << 20, lengths=[128], weights=[1.0]),
        baseline=Baseline(name=baselines(card.silicon.arch)[op.name], version="1", times_us={128: 4.0}),
        resources=any_resources(),
        score=0.9,
    )
    book = Book(card.silicon, pytest.fail)
    from dsv4tune.tuned.records import Entry

    book.add([Found(Entry.of(trial), "test")])
    return book.choose(wanted.problem, wanted.width, rules(card))


# -- tensors as a server holds them: fixed addresses, other contents for each replay -----------------------------


class Held:
    """The static inputs of one captured shape, and how to fill them with a random step."""

    problem: Problem
    run: Callable[[], torch.Tensor]

    def fill(self, seed: int) -> None: ...

    def judge(self, out: torch.Tensor) -> Any: ...


class HeldIndexer(Held):
    def __init__(self, rows: int, card: Device) -> None:
        self.problem = ops.get("indexer").problem(rows, card.silicon)
        call = self._case(0)
        self.q, self.weights = call.q.clone(), call.weights.clone()
        self.kv = torch.zeros(4096, 8448, dtype=torch.uint8, device=CUDA)
        self.lens = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        self.table = torch.zeros(rows, PAGES, dtype=torch.int32, device=CUDA)
        q, kv = self.q[:, None], self.kv.view(-1, 64, 1, 132)

        def run() -> torch.Tensor:
            return paged_mqa_logits(q, kv, self.weights, self.lens, self.table, None, WIDTH, False)

        self.run = run

    def _case(self, seed: int) -> Any:
        cases = list(ops.get("indexer").cases(self.problem, WIDTH, (64, 2048), CUDA, seed))
        return cases[seed % len(cases)][1]

    def fill(self, seed: int) -> None:
        self.call = self._case(seed)
        self.q.view(torch.uint8).copy_(self.call.q.view(torch.uint8))
        self.weights.copy_(self.call.weights)
        self.kv[: self.call.kv.shape[0]] = self.call.kv
        self.table.copy_(self.call.page_table[:, :PAGES])
        self.lens.copy_(self.call.seq_lens)

    def judge(self, out: torch.Tensor) -> Any:
        op = ops.get("indexer")
        expected = op.expect(self.problem, self.call)
        self.call.logits.copy_(torch.where(self._live(), out, self.call.logits))
        return op.verify(self.problem, self.call, expected)

    def _live(self) -> torch.Tensor:
        return torch.arange(WIDTH, device=CUDA)[None] < self.lens[:, None]


class HeldMla(Held):
    def __init__(self, rows: int, card: Device, extra: tuple[int, int], padded: int) -> None:
        options = {"heads": HEADS, "extra_page_size": extra[0], "extra_width": extra[1]}
        self.problem = ops.get("mla_decode").problem(rows, card.silicon, **options)
        self.padded = padded
        self.words: dict[str, Any] = {}
        self.fill(0)
        self.words["topk_length"].zero_()
        if extra[1]:
            self.words["extra_topk_length"].zero_()

        def run() -> torch.Tensor:
            return sparse_mla_decode(**self.words)[0]

        self.run = run

    def fill(self, seed: int) -> None:
        cases = ops.get("mla_decode").cases(self.problem, 0, (1,), CUDA, seed)
        self.call = call = next(iter(cases))[1]
        q = torch.full((call.q.shape[0], 1, self.padded, 512), float("nan"), dtype=torch.bfloat16, device=CUDA)
        q[:, 0, :HEADS] = call.q[:, :HEADS]
        sink = torch.zeros(self.padded, device=CUDA)
        sink[:HEADS] = call.sink[:HEADS]
        words = {
            "q": q, "k_cache": call.cache, "indices": call.indices[:, None], "topk_length": call.lengths.contiguous(),
            "attn_sink": sink, "head_dim_v": 512, "softmax_scale": call.scale,
        }  # fmt: skip
        if call.extra_indices is not None and call.extra_lengths is not None:
            words["extra_k_cache"] = call.extra_cache
            words["extra_indices_in_kvcache"] = call.extra_indices[:, None]
            words["extra_topk_length"] = call.extra_lengths.contiguous()
        for name, value in words.items():
            held = self.words.get(name)
            if held is None or not isinstance(value, torch.Tensor):
                # Caches keep their layout: a view with page padding must not become a plain tensor.
                self.words[name] = value
            else:
                held.copy_(value)
                if name.endswith("k_cache"):
                    whole(held).copy_(whole(value))

    def judge(self, out: torch.Tensor) -> Any:
        op = ops.get("mla_decode")
        expected = op.expect(self.problem, self.call)
        self.call.out[:, :HEADS].copy_(out[:, 0, :HEADS])
        return op.verify(self.problem, self.call, expected)


def whole(cache: torch.Tensor) -> torch.Tensor:
    """A cache with the padding of its pages."""
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1), cache.storage_offset())


def every_shape(card: Device) -> list[Held]:
    found: list[Held] = [HeldIndexer(rows, card) for rows in ROWS]
    for extra in ((0, 0), (64, 512), (2, 128)):
        found += [HeldMla(rows, card, extra, 64 if rows <= 64 else HEADS) for rows in ROWS]
    return found


def test_captured_as_a_server_captures_and_replayed_as_it_replays(card: Device) -> None:
    """Two eager runs, then capture, biggest first, one pool, every length 0; then random steps in mixed order."""
    shapes = every_shape(card)
    pool = None
    graphs: list[tuple[Held, torch.cuda.CUDAGraph, torch.Tensor]] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for held in shapes:
            for _ in range(2):
                held.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = held.run()
            pool = graph.pool()
            graphs.append((held, graph, out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dice = random.Random(0)
    for step in range(3):
        dice.shuffle(graphs)
        torch.cuda.empty_cache()
        junk = [torch.full((1 << dice.randrange(12, 22),), float("nan"), device=CUDA) for _ in range(16)]
        for held, graph, out in graphs:
            held.fill(7 + step)
            graph.replay()
            replayed = out.clone()
            verdict = held.judge(replayed)
            assert verdict.ok, (held.problem.key, step, verdict)
            eager = held.run()
            same = held.judge(eager)
            assert same.ok and same.error == verdict.error, (held.problem.key, step, same)
        del junk


def test_a_shape_first_met_under_capture_falls_back(card: Device) -> None:
    held = HeldIndexer(5, card)  # of 5 rows nothing is ready
    plugin._ours["indexer"] = paged_mqa_logits

    def theirs(*arguments: Any) -> torch.Tensor:
        return torch.full((5, WIDTH), -7.0, device=CUDA)

    graph = torch.cuda.CUDAGraph()
    arguments = [held.q[:, None], held.kv.view(-1, 64, 1, 132), held.weights, held.lens, held.table, None, WIDTH, False]
    with torch.cuda.graph(graph):
        out = plugin.indexer(theirs, *arguments)
    graph.replay()
    assert bool((out == -7.0).all())
    plugin._ours.clear()


def test_replay_adds_no_kernel_and_the_graph_holds_ours(card: Device) -> None:
    """By the names in the graph: one launch of the indexer, and nothing but what the variant's plan says."""
    from torch.profiler import ProfilerActivity, profile

    held = HeldIndexer(64, card)
    held.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if str(event.device_type).endswith("CUDA")]
    assert names == ["kernel"], names


def test_an_eager_call_adds_little(card: Device) -> None:
    """Host time over making an output and launching the same compiled kernel with its arguments made."""
    bound = {}
    for held in (HeldIndexer(64, card), HeldMla(64, card, (64, 512), 64)):
        variant = kernels.TABLE.ready[kernels.key_of(held.problem, WIDTH)]
        call = held.call if isinstance(held, HeldMla) else held._case(1)
        launch, output = variant.prepared(call), held.run()

        def plain(launch: Callable[[], None] = launch, output: torch.Tensor = output) -> None:
            torch.empty_like(output)
            launch()

        spent = {}
        for name, run in (("launch", plain), ("call", held.run)):
            rounds = []
            for _ in range(30):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(50):
                    run()
                rounds.append((time.perf_counter() - started) / 50 * 1e6)
            spent[name] = min(rounds)
        bound[held.problem.op] = spent["call"] - spent["launch"]
    print(f"added microseconds of an eager call: {bound}")
    assert all(added <= 10.0 for added in bound.values()), bound


@pytest.mark.slow
def test_a_warm_start_takes_seconds(card: Device, tmp_path: Path) -> None:
    """52 captured sizes of both kernels, caches filled by a first start."""
    from dsv4tune.runtime.wanted import server

    wanted = server(1 << 20).wanted(card.silicon, ("indexer", "mla_decode"))
    choices = [(one, decision(one, card)) for one in wanted]
    spent = []
    for _ in range(2):
        started = time.perf_counter()
        prepared = startup.make_ready(choices, rules(card), startup.Gpu())
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
        assert all(choice.variant is not None for choice in prepared.choices)
    texts = len({Job.of(one.problem, choice.config).source.sha for one, choice in choices})
    print(f"start of {len(wanted)} shapes, {texts} texts: cold {spent[0]:.1f} s, warm {spent[1]:.1f} s")
    assert spent[0] <= 60 and spent[1] <= 3
