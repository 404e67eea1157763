"""What runs on a GPU, run without one: sessions, captures, rounds, bench rows; real kernels in the interpreter."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import mla_jobs
import pretend_gpu
import pytest

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import CompileError
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.codegen.problem import Shape
from dsv4tune.tools import measure
from dsv4tune.tools.executor import Unusable
from dsv4tune.tools.measure import Timed, Timing
from dsv4tune.tools.timing import ROUNDS
from dsv4tune.tools.workers import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(1, 300, {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"})
    yield found
    found.close()


def test_a_candidate_is_checked_and_timed_in_turn_with_the_baseline(indexer: Indexer, pool: Pool) -> None:
    card = DEVICES["rtx-pro-6000"]
    config = indexer.default(indexer.problem(3, card.silicon), card)
    answer = pool.ask(pretend_gpu.measured, 3, config)
    assert answer.kind == "ok", answer
    peer, measured, rounds = answer.value
    assert peer.missing is None and peer.error < 1e-6 and set(peer.times_us) == {64, 320} and peer.version
    assert measured.verdict.ok and measured.verdict.error < 1e-6
    # 0.25 ms between the events of a graph of 2 launches.
    for timing in measured.timings.values():
        assert timing.us == timing.baseline_us == 125.0 and timing.spread == 0.0
    assert set(measured.timings) == {64, 320}
    assert rounds.us == rounds.baseline_us == {length: [125.0] * ROUNDS for length in (64, 320)}


def test_who_is_far_behind_stops_early_and_a_final_times_all_in_turn(indexer: Indexer, pool: Pool) -> None:
    card = DEVICES["rtx-pro-6000"]
    problem = indexer.problem(3, card.silicon)
    configs = [indexer.default(problem, card), indexer.reference_config(problem, card)]
    answer = pool.ask(pretend_gpu.raced, 3, configs)
    assert answer.kind == "ok", answer
    (first, second), (times, beside) = answer.value
    assert first.us == {64: [125.0] * ROUNDS, 320: [125.0] * ROUNDS} and not first.pruned
    assert second.us == {64: [250.0] * 3} and second.pruned == f"behind after 3 of {2 * ROUNDS} rounds"
    assert second.verdict.ok and second.measured().pruned
    assert list(times) == configs and all(set(one) == {64, 320} == set(beside) for one in times.values())
    assert all(len(rounds) == 5 for one in [*times.values(), beside] for rounds in one.values())


def test_a_time_is_the_median_of_its_rounds() -> None:
    rounds = Timed(Verdict(1e-7), {64: [4.0, 2.0, 3.0], 128: [5.0, 5.0, 5.0]}, {64: [6.0, 9.0, 7.0]}, ("hot",))
    measured = rounds.measured()
    assert measured.timings == {64: Timing(3.0, 2 / 3, 7.0), 128: Timing(5.0, 0.0, None)}
    assert measured.verdict == Verdict(1e-7) and measured.warnings == ("hot",)


@pytest.mark.parametrize(("number", "own"), [(errno.ENOSPC, False), (errno.EROFS, False), (errno.ENOENT, True)])
def test_a_full_disk_is_no_fault_of_the_candidate(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch, number: int, own: bool
) -> None:
    def compile_config(*_: object) -> None:
        try:
            raise OSError(number, os.strerror(number), "kernel.cubin")
        except OSError as error:
            raise CompileError(str(error)) from error

    monkeypatch.setattr(measure, "compile_config", compile_config)
    card = DEVICES["rtx-pro-6000"]
    problem = indexer.problem(3, card.silicon)
    with pytest.raises(CompileError if own else Unusable, match=os.strerror(number)):
        measure.compile_job(problem, indexer.default(problem, card))


def test_a_bench_row_holds_everyone_on_the_same_tensors(indexer: Indexer, pool: Pool) -> None:
    card = DEVICES["rtx-pro-6000"]
    problem = indexer.problem(4, card.silicon)
    configs = {"default": indexer.default(problem, card), "page_grid": indexer.reference_config(problem, card)}
    shape = Shape("drafts", "verify", 640, (600, 601, 0, 64), (0, 0, 1, 2))
    answer = pool.ask(pretend_gpu.benched, "indexer", shape, configs, ("deep_gemm",))
    assert answer.kind == "ok", answer
    row = answer.value
    assert row["shape"] == {"name": "drafts", "kind": "verify", "rows": 4, "live": 601, "width": 640, "positions": 1265}
    assert set(row["us"]) == set(row["spread"]) == set(row["error"]) == {"default", "page_grid", "deep_gemm"}
    assert all(error < 1e-6 for error in row["error"].values())
    assert row["top512"] == {"default": 1.0, "page_grid": 1.0, "deep_gemm": 1.0} and row["left_out"] == {}
    assert row["floor_us"] > 0 and row["configs"]["default"] == dict(configs["default"])


def test_a_bench_row_of_mla_decode(pool: Pool) -> None:
    op, card = ops.get("mla_decode"), DEVICES["rtx-pro-6000"]
    options = {"heads": 4, "width": 64, "extra_width": 64}
    shape = Shape("4x2 64+64 cached", "decode", 64, (64, 3), (0, 1), options, cached=True)
    default = op.default(op.problem(2, card.silicon, **options), card)
    answer = pool.ask(pretend_gpu.benched, "mla_decode", shape, {"default": default}, ("gather",))
    assert answer.kind == "ok", answer
    row = answer.value
    assert row["shape"] == {
        **{"name": "4x2 64+64 cached", "kind": "decode", "heads": 4, "rows": 2, "topk": 64, "extra": 64, "live": 64},
        "cached": True,
    }
    assert set(row["us"]) == {"default", "gather"} and row["left_out"] == {}
    # What loads and computes nothing has no error.
    assert set(row["error"]) == {"default"} and row["error"]["default"] < 3e-3


def test_the_gather_floor_reads_every_live_byte(pool: Pool) -> None:
    answer = pool.ask(mla_jobs.gathered)
    assert answer.kind == "ok", answer
    got, want = answer.value
    assert got == want != 0
