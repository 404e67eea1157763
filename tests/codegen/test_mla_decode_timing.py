"""Shapes and inputs of timed MLA decode calls."""

from __future__ import annotations

from typing import Any

import torch

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops import mla_decode_check as check
from dsv4tune.codegen.ops import mla_decode_timing as timing
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeProblem
from dsv4tune.codegen.problem import Profile, Shape

SILICON = devices.DEVICES["h200"].silicon


def problem_of(rows: int = 5, **options: Any) -> MlaDecodeProblem:
    values = {"heads": 8, "page_size": 64, "width": 128, "extra_page_size": 64, "extra_width": 192, **options}
    return MlaDecodeProblem(rows=rows, silicon=SILICON, **values)


def test_a_profile_means_extra_tokens_and_a_full_window() -> None:
    problem = problem_of()
    shape = timing.shape_of(problem, Profile(192, (70,), (1.0,)), 70)
    assert shape.live == (70,) * 5 and shape.owner == (0, 1, 2, 3, 4) and shape.width == 192
    (call,) = timing.timing_sets(problem, shape, 1, "cpu", 0, timing.timing_pool(problem, [shape], 0, "cpu", 0))
    call.validate(problem)
    assert call.extra_lengths is not None and call.extra_indices is not None
    assert call.lengths.tolist() == [128] * 5 and call.extra_lengths.tolist() == [70] * 5
    assert int(call.indices.min()) >= 0 and int(call.extra_indices[:, :70].min()) >= 0
    assert set(call.extra_indices[:, 70:].flatten().tolist()) == {-1}


def test_without_an_extra_cache_it_means_the_window() -> None:
    problem = problem_of(extra_page_size=0, extra_width=0)
    shape = timing.shape_of(problem, Profile(128, (70,), (1.0,)), 70)
    pool = timing.timing_pool(problem, [shape], 0, "cpu", 0)
    (call,) = timing.timing_sets(problem, shape, 1, "cpu", 0, pool)
    call.validate(problem)
    assert pool.extra_cache is None and call.lengths.tolist() == [70] * 5
    assert set(call.indices[:, 70:].flatten().tolist()) == {-1}


def test_rows_of_a_prompt_see_what_came_before_them() -> None:
    causal = Profile(192, (100,), (1.0,), causal=True)
    assert timing.shape_of(problem_of(9), causal, 100).live == (98, 99, 99, 99, 99, 100, 100, 100, 100)
    assert timing.shape_of(problem_of(130, extra_page_size=2), causal, 100).live == (99,) * 2 + (100,) * 128
    alone = problem_of(9, extra_page_size=0, extra_width=0)
    assert timing.shape_of(alone, Profile(128, (100,), (1.0,), causal=True), 100).live == tuple(range(92, 101))


def test_sets_lie_on_different_tokens_and_pools_are_as_large_as_asked() -> None:
    problem = problem_of()
    shape = timing.shape_of(problem, Profile(192, (150,), (1.0,)), 150)
    pool = timing.timing_pool(problem, [shape], 2_000_000, "cpu", 0)
    assert pool.extra_cache is not None
    assert sum(c.untyped_storage().nbytes() for c in (pool.cache, pool.extra_cache)) >= 2_000_000
    calls = timing.timing_sets(problem, shape, 2, "cpu", 0, pool)
    assert calls[0].out is calls[1].out and not calls[0].q.equal(calls[1].q)
    for name, live, each in (("indices", 128, 5 * 128), ("extra_indices", 150, 5 * 150)):
        used = [set(getattr(call, name)[:, :live].flatten().tolist()) for call in calls]
        assert [len(slots) for slots in used] == [each, each] and not used[0] & used[1]
    for cache in (pool.cache, pool.extra_cache):
        assert not check.keys(cache, torch.arange(cache.shape[0] * 64)).isnan().any()
    # A window lies in whole runs, as a server's; selected tokens lie anywhere.
    steps = calls[0].indices.diff(dim=1)
    assert int((steps != 1).sum()) <= 5 and calls[0].extra_indices is not None
    assert int((calls[0].extra_indices[:, :150].diff(dim=1) == 1).sum()) < 20


def test_a_pool_serves_the_longest_of_its_shapes() -> None:
    problem = problem_of(extra_page_size=2)
    shapes = [timing.shape_of(problem, Profile(192, (n,), (1.0,)), n) for n in (1, 191)]
    pool = timing.timing_pool(problem, shapes, 0, "cpu", 0)
    assert pool.extra_cache is not None and pool.extra_cache.shape[0] == 5 * 96
    (call,) = timing.timing_sets(problem, shapes[1], 1, "cpu", 0, pool)
    assert call.extra_indices is not None
    slots = call.extra_indices[:, :191]
    assert len(set(slots.flatten().tolist())) == 5 * 191
    assert bool((slots[:, 1::2] == slots[:, :-1:2] + 1).all()), "both tokens of a page"


def test_rows_of_one_request_read_the_same_tokens() -> None:
    problem = problem_of(4)
    shape = Shape("drafts", "verify", 192, (100, 101, 64, 0), (7, 7, 3, 9))
    pool = timing.timing_pool(problem, [shape], 0, "cpu", 0)
    (call,) = timing.timing_sets(problem, shape, 1, "cpu", 0, pool)
    assert call.extra_indices is not None and call.extra_lengths is not None
    extra, window = call.extra_indices, call.indices
    assert extra[0, :100].equal(extra[1, :100]) and not set(extra[0].tolist()) & set(extra[2, :64].tolist())
    # The second query's window begins one token later.
    assert window[0, 1:].equal(window[1, :-1]) and int(window[0, 0]) not in window[1].tolist()
    assert call.extra_lengths.tolist() == [100, 101, 64, 0]
    per_row = 8 * 2 * 1024 + 8
    assert timing.bytes_moved(problem, shape) == (129 + 128 + 128 + 101 + 64) * 584 + (
        4 * (4 * 128 + 265) + 4 * per_row + 8 * 4
    )


def test_the_byte_floor_of_the_bars() -> None:
    problem = problem_of(256, page_size=256, extra_width=512)
    shape = timing.shape_of(problem, Profile(512, (512,), (1.0,)), 512)
    moved = timing.bytes_moved(problem, shape)
    assert moved == 256 * 640 * 584 + 256 * 640 * 4 + 256 * (8 * 2048 + 8) + 32
    assert timing.memory_needed(problem, shape) > moved


def test_what_a_timed_call_expects_is_finite_and_not_all_alike() -> None:
    problem = problem_of(lse=True)
    shape = timing.shape_of(problem, Profile(192, (100,), (1.0,)), 100)
    (call,) = timing.timing_sets(problem, shape, 1, "cpu", 0, timing.timing_pool(problem, [shape], 0, "cpu", 0))
    expected = check.expect(problem, call)
    assert expected.lse.isfinite().all() and 1.0 < float(expected.lse.mean()) < 12.0
    call.out.copy_(expected.out)
    assert call.lse is not None
    call.lse.copy_(expected.lse)
    assert check.verify(problem, call, expected).ok
    assert not call.out.isnan().any(), "no guard, no poison"


def test_bench_shapes_are_those_that_the_bars_speak_of() -> None:
    benches = timing.bench_shapes()
    found = [timing.describe(bench) for bench in benches]
    assert len({item["name"] for item in found}) == len(found) == (4 + 1) * 4 * 6
    assert {item["heads"] for item in found} == {8, 16, 32, 64}
    assert {item["rows"] for item in found} == {1, 4, 16, 64, 128, 256}
    mixes = {(item["topk"], item["extra"], item["live"]) for item in found}
    assert mixes == {(128, 512, 512), (128, 0, 128), (128, 8256, 256), (128, 256, 256)}
    for bench in benches:
        problem = MlaDecodeProblem(rows=bench.rows, silicon=SILICON, **bench.options)
        assert timing.bytes_moved(problem, bench) > 0
