"""Planning, argument preparation and judgement of the indexer, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4tune.codegen import devices
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Profile, Shape
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant


class NoHostCopies(TorchDispatchMode):
    """Refuses what would read a tensor's values on the host: a synchronisation, an error under capture."""

    refused = ("_local_scalar_dense", "item", "is_nonzero", "_to_copy", "equal", "nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.refused, f"{name} reads the device"
        return func(*args, **(kwargs or {}))


class Recorder:
    """Stands in for a compiled kernel."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


def call_of(rows: int, width: int, page_stride: int = 0, device: str = "cpu") -> IndexerCall:
    table = torch.empty(rows, width // 64 + page_stride, dtype=torch.int32, device=device)
    return IndexerCall(
        q=torch.empty(rows, 64, 128, dtype=torch.float8_e4m3fn, device=device),
        kv=torch.empty(500, 8448, dtype=torch.uint8, device=device),
        weights=torch.empty(rows, 64, device=device),
        seq_lens=torch.empty(rows, dtype=torch.int32, device=device),
        page_table=table[:, : width // 64],
        logits=torch.empty(rows, width, device=device),
    )


def plain(op: Indexer, problem: IndexerProblem, card: Device) -> Config:
    valid = op.space(problem, card).valid()
    return next(c for c in valid if c["dialect"] == "triton" and c["schedule"] == "hybrid" and c["block_t"] == 64)


def designs(op: Indexer, problem: IndexerProblem, card: Device) -> list[Config]:
    found: dict[Any, Config] = {}
    for config in op.space(problem, card).valid():
        found.setdefault((config["dialect"], config["schedule"], config["load"], config["block_t"]), config)
    return list(found.values())


# Gluon's descriptor asks for the address to see that it is aligned.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("rows", [1, 3, 64, 512, 8192])
def test_launching_reads_shapes_only(indexer: Indexer, rows: int) -> None:
    """The whole way from a call to the launcher, with tensors that have no values and host copies refused."""
    card = devices.DEVICES["h200"]
    problem = indexer.problem(rows, card.silicon)
    width = 262_208
    with FakeTensorMode(allow_non_fake_inputs=False):
        call = call_of(rows, width, page_stride=5)
        for config in designs(indexer, problem, card):
            recorder = Recorder()
            variant = Variant(indexer, problem, config, width, {"kernel": recorder})
            with NoHostCopies():
                variant(call)
                variant.prepared(call)()
            (grid, first), (again, _) = recorder.launches
            assert grid == again == indexer.plan(problem, config, width).launches[0].grid
            assert len(first) == len(indexer.arguments(problem, config)["kernel"])
            assert 1 <= grid[0] < 2**31 and 1 <= grid[1] < 2**16 and grid[2] == 1


def test_a_plan_depends_on_shapes_and_silicon(indexer: Indexer) -> None:
    card = devices.DEVICES["h200"]
    config = plain(indexer, indexer.problem(64, card.silicon), card)

    def grid(rows: int, config: Config, width: int = 262_208) -> tuple[int, int, int]:
        return indexer.plan(indexer.problem(rows, card.silicon), config, width).launches[0].grid

    grids = {rows: grid(rows, config.with_(programs_per_sm=5))[0] for rows in (1, 16, 64, 100, 660)}
    # All that are resident, whatever the rows: 5 for each of 132 SMs. No more than there are pages.
    assert set(grids.values()) == {660}
    assert grid(1, config, 128)[0] == 2
    ring = config.with_(dialect="gluon", programs_per_sm=5)
    assert grid(64, ring) == (660, 1, 1)
    page_grid = indexer.reference_config(indexer.problem(70_000, card.silicon), card)
    assert grid(70_000, page_grid) == (70_000 * 4097, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, q=c.q.float()), "q is torch.float32"),
        (lambda c: replace(c, q=c.q.view(3, 1, 64, 128)), r"q is .*\[3, 1, 64, 128\]"),
        (lambda c: replace(c, q=c.q.transpose(0, 1).contiguous().transpose(0, 1)), "q has strides"),
        (lambda c: replace(c, kv=c.kv[:, :8192]), "kv is"),
        (lambda c: replace(c, kv=torch.empty(0, 8448, dtype=torch.uint8)), "kv has no pages"),
        (lambda c: replace(c, seq_lens=c.seq_lens.view(3, 1)), r"seq_lens is .*\[3, 1\], expected .*\[3\]"),
        (lambda c: replace(c, seq_lens=c.seq_lens.long()), "seq_lens is torch.int64"),
        (lambda c: replace(c, page_table=c.page_table[:, :2]), "columns cover"),
        (lambda c: replace(c, page_table=c.page_table.T.contiguous().T), "column stride 1"),
        (lambda c: replace(c, logits=torch.empty(3, 300)), "whole pages of 64"),
        (lambda c: replace(c, logits=torch.empty(3, 257)[:, :256]), "multiple of 16"),
        (lambda c: replace(c, logits=torch.empty(3 * 256 + 1)[1:].view(3, 256)), "not 16-byte aligned"),
    ],
)
def test_a_call_that_would_be_misread_is_refused(indexer: Indexer, change: Any, message: str) -> None:
    card = devices.DEVICES["h200"]
    problem = indexer.problem(3, card.silicon)
    call = call_of(3, 256)
    config = plain(indexer, problem, card).with_(load="pointer")
    indexer.bind(problem, config, call, {})
    # Any stride of lengths and rows is fine.
    indexer.bind(problem, config, replace(call, seq_lens=torch.empty(3, 2, dtype=torch.int32)[:, 0]), {})
    with pytest.raises(ValueError, match=message):
        indexer.bind(problem, config, change(call), {})


# -- the judge --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(indexer: Indexer) -> IndexerProblem:
    return indexer.problem(5, devices.DEVICES["h200"].silicon)


@pytest.fixture
def cases(indexer: Indexer, small: IndexerProblem) -> list[tuple[str, IndexerCall, Any]]:
    found = indexer.cases(small, 1024, (1024,), "cpu", seed=0)
    return [(name, call, indexer.expect(small, call)) for name, call in found]


def answer(problem: IndexerProblem, call: IndexerCall, row: int) -> torch.Tensor:
    length = int(call.seq_lens[row])
    return indexer_check.reference(problem, call, row, length)[0].float()


def fill(problem: IndexerProblem, call: IndexerCall) -> None:
    for row, length in enumerate(call.seq_lens.tolist()):
        call.logits[row, :length] = answer(problem, call, row)


def test_cases_hold_the_edges(cases: list[tuple[str, IndexerCall, Any]]) -> None:
    lengths = {n for _, call, _ in cases for n in call.seq_lens.tolist()}
    assert {0, 1, 63, 64, 65, 1024} <= lengths
    for name, call, _ in cases:
        assert call.seq_lens.stride(0) == 2
        assert call.page_table.stride(0) > call.width // 64
        for row, length in enumerate(call.seq_lens.tolist()):
            live = call.page_table[row, : -(-length // 64)]
            assert bool(((live >= 0) & (live < call.kv.shape[0])).all())
            stale = call.page_table[row, -(-length // 64) :]
            assert not bool(torch.isin(stale, live).any())
            if len(stale) > 3:
                assert -1 in stale and 2**31 - 1 in stale
            # Rows of one request end inside one another's pages.
            if length % 64 and (row == len(call.q) - 1 or name not in ("prompt", "drafts")):
                tail = call.kv[live[-1].long()]
                assert int(tail[(length % 64) * 128]) == 0x7F
                assert tail[8192:].contiguous().view(torch.float32)[length % 64 :].isinf().all()


def test_the_reference_agrees_with_plain_arithmetic(small: IndexerProblem, cases: Any) -> None:
    _, call, _ = next(case for case in cases if 65 in case[1].seq_lens.tolist())
    row = call.seq_lens.tolist().index(65)
    want = []
    for token in range(65):
        page = call.kv[int(call.page_table[row, token // 64])]
        key = page[:8192].view(torch.float8_e4m3fn).view(64, 128)[token % 64].double()
        scale = float(page[8192:].contiguous().view(torch.float32)[token % 64])
        total = 0.0
        for head in range(64):
            product = float((call.q[row, head].double() * key).sum())
            total += float(call.weights[row, head]) * max(product, 0.0)
        want.append(total * scale)
    torch.testing.assert_close(answer(small, call, row), torch.tensor(want).float())


def test_a_right_answer_passes(indexer: Indexer, small: IndexerProblem, cases: Any) -> None:
    for name, call, expected in cases:
        fill(small, call)
        verdict = indexer.verify(small, call, expected)
        assert verdict.ok and verdict.error < 1e-6, name
        assert call.logits.isnan().all(), "poisoned again"


def spoil_value(call: IndexerCall, row: int, length: int) -> None:
    call.logits[row, length // 2] *= 2


def spoil_nan(call: IndexerCall, row: int, length: int) -> None:
    call.logits[row, 0] = float("nan")


def spoil_order(call: IndexerCall, row: int, length: int) -> None:
    call.logits[row, :128] = call.logits[row, :128].flip(0)


def spoil_outside(call: IndexerCall, row: int, length: int) -> None:
    assert call.guard is not None
    call.guard[row + 1, call.width] = 0.0


def spoil_last(call: IndexerCall, row: int, length: int) -> None:
    call.logits[row, length - 1] = 0.0


def unwritten(call: IndexerCall, row: int, length: int) -> None:
    call.logits.view(torch.int32)[row, length - 1] = 0x7FC0BEEF


@pytest.mark.parametrize("spoil", [spoil_value, spoil_nan, spoil_order, spoil_outside, spoil_last, unwritten])
def test_a_wrong_answer_fails(indexer: Indexer, small: IndexerProblem, cases: Any, spoil: Any) -> None:
    _, call, expected = next(case for case in cases if case[0] == "maximum")
    fill(small, call)
    spoil(call, 2, 1024)
    assert not indexer.verify(small, call, expected).ok


def test_a_written_empty_row_fails(indexer: Indexer, small: IndexerProblem, cases: Any) -> None:
    _, call, expected = next(case for case in cases if case[0] == "empty")
    assert indexer.verify(small, call, expected).ok
    call.logits[3, 0] = 0.0
    assert "length 0 was written" in str(indexer.verify(small, call, expected).fault)


def test_a_pick_below_the_512th_fails(indexer: Indexer, small: IndexerProblem, cases: Any) -> None:
    """An error too small for the norm that still changes what is attended to."""
    _, call, expected = next(case for case in cases if case[0] == "maximum")
    group = expected.rows[0]
    loose = replace(group, norm=group.norm * 1e9)  # so that only the selection can object
    fill(small, call)
    worst = call.logits[0].argmin()
    call.logits[0, worst] = call.logits[0].max() + 1
    verdict = indexer.verify(small, call, replace(expected, rows=[loose, *expected.rows[1:]]))
    assert "top-512" in str(verdict.fault)


def test_cleaning_is_judged(indexer: Indexer, small: IndexerProblem) -> None:
    clean = replace(small, clean=True)
    _, call = next(iter(indexer.cases(clean, 1024, (1024,), "cpu", seed=0)))
    expected = indexer.expect(clean, call)
    fill(clean, call)
    assert "is not -inf" in str(indexer.verify(clean, call, expected).fault)
    for row, length in enumerate(call.seq_lens.tolist()):
        call.logits[row, length:] = float("-inf")
    fill(clean, call)
    assert indexer.verify(clean, call, expected).ok


def test_causal_rows_see_what_came_before_them() -> None:
    causal = indexer_check.shape_of(9, Profile(128, (100,), (1.0,), causal=True), 100)
    assert causal.live == (98, 99, 99, 99, 99, 100, 100, 100, 100) and set(causal.owner) == {0}
    decode = indexer_check.shape_of(3, Profile(128, (7,), (1.0,)), 7)
    assert decode.live == (7, 7, 7) and decode.owner == (0, 1, 2) and decode.positions == 21


def test_timing_sets_lie_on_different_pages(indexer: Indexer, small: IndexerProblem) -> None:
    shape = indexer.shape(small, Profile(1024, (640,), (1.0,)), 640)
    pool = indexer.timing_pool(small, [shape], 200 * 8448, "cpu", 0)
    sets = indexer.timing_sets(small, shape, 3, "cpu", 0, pool)
    used = [set(call.page_table[:, :10].flatten().tolist()) for call in sets]
    assert all(len(pages) == 50 for pages in used)
    assert not used[0] & used[1] and not used[1] & used[2]
    assert not pool[:, :8192].view(torch.float8_e4m3fn).float().isnan().any()


def test_rows_of_one_request_share_its_pages(indexer: Indexer, small: IndexerProblem) -> None:
    shape = Shape("drafts", "verify", 1024, (100, 129, 64, 65, 0), (7, 7, 3, 3, 9))
    pool = indexer.timing_pool(small, [shape], 0, "cpu", 0)
    assert pool.shape[0] == 3 + 2
    (call,) = indexer.timing_sets(small, shape, 1, "cpu", 0, pool)
    table = call.page_table.tolist()
    assert table[0] == table[1] and table[2] == table[3]
    assert len(set(table[0][:3] + table[2][:2])) == 5
    assert call.seq_lens.tolist() == [100, 129, 64, 65, 0]


def test_bytes_moved_counts_each_byte_once(indexer: Indexer, small: IndexerProblem) -> None:
    rows = 5 * (64 * 128 + 64 * 4 + 4)
    decode = indexer.shape(small, Profile(1024, (100,), (1.0,)), 100)
    assert indexer.bytes_moved(small, decode) == 5 * 2 * 8448 + 5 * 100 * 4 + rows
    causal = indexer.shape(small, Profile(1024, (100,), (1.0,), causal=True), 100)
    assert indexer.bytes_moved(small, causal) == 2 * 8448 + (99 + 4 * 100) * 4 + rows


def test_bench_shapes_are_those_that_the_bars_speak_of(indexer: Indexer) -> None:
    shapes = indexer.bench_shapes()
    kinds = [shape.kind for shape in shapes]
    assert {k: kinds.count(k) for k in kinds} == {"decode": 12, "ragged": 3, "verify": 1, "prefill": 2}
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert max(shape.positions for shape in shapes if shape.kind == "decode") >= 8_000_000
    with pytest.raises(ValueError, match=r"must lie in 0\.\.128"):
        Shape("x", "decode", 128, (129,), (0,))
    with pytest.raises(ValueError, match="is not decode"):
        Shape("x", "other", 128, (1,), (0,))
