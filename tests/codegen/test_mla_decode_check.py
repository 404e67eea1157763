"""The MLA decode check itself: its reference against plain arithmetic, and that its judge catches what it should."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops import mla_decode_check as check
from dsv4tune.codegen.ops.mla_decode_call import MlaDecodeCall, MlaDecodeProblem, page_stride

SILICON = devices.DEVICES["h200"].silicon


def problem_of(rows: int = 6, heads: int = 8, **options: Any) -> MlaDecodeProblem:
    values = {"page_size": 64, "width": 128, "extra_page_size": 2, "extra_width": 192, "lse": True, **options}
    return MlaDecodeProblem(rows=rows, heads=heads, silicon=SILICON, **values)


PROBLEM = problem_of()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more, and lose on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PADDED = "padded heads, slot 0 in use"
NAMES = [*(f"mixed {i}" for i in range(4)), "full, sinks 0", PADDED, "smallest scales", "empty"]


@functools.cache
def every_case() -> list[tuple[str, MlaDecodeCall, check.Expected]]:
    return [(name, call, check.expect(PROBLEM, call)) for name, call in check.cases(PROBLEM, (1, 100), "cpu", seed=0)]


def case(name: str) -> tuple[MlaDecodeCall, check.Expected]:
    return next((call, expected) for n, call, expected in every_case() if n == name)


def leave(call: MlaDecodeCall, expected: check.Expected) -> None:
    """What a right kernel leaves."""
    heads = expected.out.shape[1]
    call.out[:, :heads] = expected.out.bfloat16()
    if call.lse is not None:
        call.lse[:, :heads] = expected.lse.float()


# -- the reference ----------------------------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = [e4m3(byte) for byte in range(256)]


def memory(cache: torch.Tensor) -> bytes:
    """The whole pool, page padding and all."""
    return bytes(cache.as_strided((cache.shape[0] * page_stride(cache.shape[1]),), (1,), 0).tolist())


def plain_key(raw: bytes, page_size: int, slot: int) -> list[float]:
    """One token's 512 values, byte by byte, from the pool's memory."""
    page = slot // page_size * page_stride(page_size)
    row, footer = page + slot % page_size * 576, page + page_size * 576 + slot % page_size * 8
    nope = [E4M3[raw[row + i]] * 2.0 ** (raw[footer + i // 64] - 127) for i in range(448)]
    rope = [struct.unpack("<f", bytes([0, 0, raw[row + 448 + 2 * i], raw[row + 449 + 2 * i]]))[0] for i in range(64)]
    return nope + rope


def plain_row(call: MlaDecodeCall, row: int, head: int) -> tuple[list[float], float]:
    """One row and head by the contract's words: tokens one by one, the sink in the denominator."""
    found = []
    for cache, indices, lengths in (
        (call.cache, call.indices, call.lengths),
        (call.extra_cache, call.extra_indices, call.extra_lengths),
    ):
        if cache is None or indices is None or lengths is None:
            continue
        slots = cache.shape[0] * cache.shape[1]
        live = [s for s in indices[row, : int(lengths[row])].tolist() if 0 <= s < slots]
        raw = memory(cache)
        found += [plain_key(raw, cache.shape[1], slot) for slot in live]
    if not found:
        return [0.0] * 512, -math.inf
    q = call.q[row, head].tolist()
    scores = [call.scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in found]
    most = max(scores)
    total = math.fsum(math.exp(s - most) for s in scores)
    lse = most + math.log(total)
    sink = float(call.sink[head])
    below = math.inf if sink - most > 700 else total + math.exp(sink - most)
    out = [math.fsum(math.exp(s - most) * key[d] for s, key in zip(scores, found, strict=True)) for d in range(512)]
    return [value / below for value in out], lse


def test_the_reference_agrees_with_plain_arithmetic() -> None:
    problem = problem_of(rows=4, heads=2, width=64, extra_width=64)
    for number, (name, call) in enumerate(check.cases(problem, (3,), "cpu", seed=1)):
        expected = check.expect(problem, call)
        row, head = number % 4, number // 4 % 2
        out, lse = plain_row(call, row, head)
        torch.testing.assert_close(expected.out[row, head], torch.tensor(out), rtol=1e-5, atol=1e-6, msg=name)
        assert expected.lse[row, head].item() == pytest.approx(lse, abs=1e-12), name


@pytest.mark.parametrize("page_size", [2, 32, 64, 128, 256])
def test_tokens_come_back_from_where_the_layout_puts_them(page_size: int) -> None:
    cache = check.empty_cache(page_size, 3, "cpu")
    slots = torch.tensor([0, 1, page_size, 3 * page_size - 1])
    values = torch.randn(4, 448).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[-127, -6, -1, 0, 1, 7, 20]]).repeat(4, 1)
    rope = torch.randn(4, 64).bfloat16()
    check.pack(cache, slots, values, exponents, rope)
    found = check.keys(cache, slots)
    raw = memory(cache)
    for i, slot in enumerate(slots.tolist()):
        assert found[i].tolist() == plain_key(raw, page_size, slot)
    scaled = values.double().unflatten(1, (7, 64)) * torch.exp2(exponents.double())[..., None]
    assert found.equal(torch.cat([scaled.flatten(1), rope.double()], dim=1))
    # The fourth token is the pool's last; nothing but the four was written, the pad byte of their scales not either.
    before = bytes([0xFF]) * len(raw)
    assert 0 < sum(a != b for a, b in zip(raw, before, strict=True)) <= 4 * (448 + 128 + 7)


def test_every_row_that_the_reference_leaves_out_is_empty() -> None:
    for name, call, expected in every_case():
        tokens = [len(live_slots(call, row)) for row in range(PROBLEM.rows)]
        assert [n == 0 for n in tokens] == expected.lse.isneginf().all(dim=1).tolist(), name
        assert not expected.out.isnan().any() and not expected.lse.isnan().any(), name


def test_rows_in_chunks_equal_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, expected = case("mixed 0")
    monkeypatch.setattr(check, "_CHUNK_TOKENS", 1)
    again = check.expect(PROBLEM, call)
    torch.testing.assert_close(again.out, expected.out)
    torch.testing.assert_close(again.lse, expected.lse)


# -- what the cases hold ----------------------------------------------------------------------------------------


def live_slots(call: MlaDecodeCall, row: int, extra: bool = True) -> list[int]:
    found: list[int] = []
    for cache, indices, lengths in (
        (call.cache, call.indices, call.lengths),
        (call.extra_cache, call.extra_indices, call.extra_lengths),
    )[: 1 + extra]:
        if cache is not None and indices is not None and lengths is not None:
            slots = cache.shape[0] * cache.shape[1]
            found += [s for s in indices[row, : int(lengths[row])].tolist() if 0 <= s < slots]
    return found


def test_cases_hold_the_edges() -> None:
    assert [name for name, _, _ in every_case()] == NAMES
    pairs = set()
    for _, call, _ in every_case():
        assert call.extra_indices is not None and call.extra_lengths is not None
        call.validate(PROBLEM)
        assert call.lengths.stride(0) == 2 and call.indices.stride(0) == 144
        pairs |= set(zip(call.lengths.tolist(), call.extra_lengths.tolist(), strict=True))
    assert {(0, 0), (0, 192), (128, 0), (128, 192), (1, 1), (63, 63), (64, 64), (65, 65), (128, 100)} <= pairs
    rows = [(row.tolist(), int(n)) for _, c, _ in every_case() for row, n in zip(c.indices, c.lengths, strict=True)]
    assert any(n and set(row[:n]) == {-1} for row, n in rows), "a length, and every index -1"
    assert any(row[:64] == [-1] * 64 and min(row[64:n]) > 0 for row, n in rows if n == 128), "late"
    assert any(row[: n - 1] == [-1] * (n - 1) and row[n - 1] > 0 for row, n in rows if n == 128), "last"
    assert any(len(set(row[:n])) == 1 and row[0] > 0 for row, n in rows if n == 128), "repeat"
    assert any({2**31 - 1, -(2**31)} <= set(row[:n]) for row, n in rows), "outside"
    assert any(0 < row[:n].count(-1) < n / 2 for row, n in rows), "holes"
    assert all({2**31 - 1, -(2**31), -1, -2} <= set(row[n:]) for row, n in rows if n < 100), "garbage"
    sinks = case("full, sinks 0")[0].sink.tolist()
    assert sinks[:4] == [math.inf, -math.inf, 1e4, -1e4]


def test_what_no_row_names_is_poison() -> None:
    for name, call, _ in every_case():
        slots = torch.arange(call.cache.shape[0] * 64)
        named = torch.tensor([s for row in range(PROBLEM.rows) for s in live_slots(call, row, extra=False)]).long()
        values, scales = check.parts(call.cache)
        # Every second slot could be named; of the others none is.
        free = slots[::2][~torch.isin(slots[::2], named)]
        assert bool((values.flatten(0, 1)[free] == 0xFF).all()) and bool((scales.flatten(0, 1)[free] == 0xFF).all())
        assert not check.keys(call.cache, named).isnan().any()
        assert bool((torch.tensor(list(memory(call.cache)[64 * 584 : page_stride(64)])) == 0xFF).all()), "page padding"
        assert bool(check.keys(call.cache, slots[:1]).isnan().all()) == (name != PADDED)
    padded, _ = case(PADDED)
    assert padded.padded_heads == 64 and padded.q[:, 8:].isnan().all() and not padded.q[:, :8].isnan().any()
    assert int(padded.indices[0, 0]) == 0


@pytest.mark.parametrize(
    "problem",
    [
        problem_of(rows=1, heads=1, width=64, extra_width=64),
        problem_of(rows=1, heads=8, extra_width=0, extra_page_size=0),
        problem_of(rows=30, heads=128, page_size=256, extra_page_size=256, extra_width=64),
        problem_of(rows=2, heads=12, page_size=2, width=64, lse=False),
    ],
    ids=lambda p: p.label,
)
def test_cases_of_any_problem(problem: MlaDecodeProblem) -> None:
    sinks: set[float] = set()
    for name, call in check.cases(problem, (1, 64), "cpu", seed=3):
        call.validate(problem)
        expected = check.expect(problem, call)
        leave(call, expected)
        verdict = check.verify(problem, call, expected)
        assert verdict.ok and verdict.error < 2.5e-3, name
        sinks |= set(call.sink.tolist())
    assert {math.inf, -math.inf, 1e4, -1e4} <= sinks


@pytest.mark.parametrize(("page_size", "first_page"), [(256, 14_340), (64, 57_359), (2, 1_242_757)])
def test_far_slots_pass_two_to_the_31(page_size: int, first_page: int) -> None:
    """What the case that only a GPU gets puts its tokens: arithmetic, because the pool takes 2 GiB."""
    assert (first_page - 1) * page_stride(page_size) < 2**31 <= first_page * page_stride(page_size)


# -- the judge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_passes(name: str) -> None:
    call, expected = case(name)
    leave(call, expected)
    verdict = check.verify(PROBLEM, call, expected)
    assert verdict.ok and verdict.error < 1.9e-3, verdict
    assert call.out.isnan().all() and call.lse is not None and call.lse.isnan().all(), "poisoned again"
    assert "relative error inf" in str(check.verify(PROBLEM, call, expected).fault)


@pytest.mark.parametrize("name", NAMES)
def test_the_rounding_of_a_split_kernel_passes(name: str) -> None:
    """bf16 probabilities and bf16 partial outputs of four splits: what a tuned kernel may do."""
    call, expected = case(name)
    call.out[:, :8] = split_kernel(call, 4)
    assert call.lse is not None
    call.lse[:, :8] = expected.lse.float()
    verdict = check.verify(PROBLEM, call, expected)
    assert verdict.ok and (verdict.error > 1.5e-3 or name == "empty"), verdict


def split_kernel(call: MlaDecodeCall, splits: int) -> torch.Tensor:
    out = torch.zeros(call.q.shape[0], 8, 512)
    for row in range(out.shape[0]):
        parts, sums = [], []
        keys = [
            check.keys(cache, torch.tensor([s for s in indices[row, : int(n[row])].tolist() if 0 <= s < slots]).long())
            for cache, indices, n in (
                (call.cache, call.indices, call.lengths),
                (call.extra_cache, call.extra_indices, call.extra_lengths),
            )
            if cache is not None and indices is not None and n is not None
            for slots in [cache.shape[0] * cache.shape[1]]
        ]
        for k in torch.cat(keys).float().tensor_split(splits):
            if k.shape[0]:
                scores = call.q[row, :8].float() @ k.T * call.scale
                shares = torch.exp(scores - scores.amax(dim=1, keepdim=True))
                total = shares.sum(dim=1)
                parts.append((shares.bfloat16().float() @ k / total[:, None]).bfloat16().float())
                sums.append(scores.amax(dim=1) + total.log())
        if parts:
            weights = torch.stack(sums)
            most = weights.amax(dim=0)
            weights = torch.exp(weights - most)
            below = weights.sum(dim=0) + torch.exp(call.sink[:8] - most)
            out[row] = (torch.stack(parts) * weights[..., None]).sum(dim=0) / below[:, None]
    return out.bfloat16()


def wrong_input(change: Callable[[MlaDecodeCall], MlaDecodeCall]) -> Callable[[MlaDecodeCall, check.Expected], None]:
    """A kernel that computes the right thing of the wrong input."""

    def answer(call: MlaDecodeCall, expected: check.Expected) -> None:
        leave(call, check.expect(PROBLEM, change(call)))

    answer.__name__ = change.__name__
    return answer


def read_past(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, lengths=call.lengths + 1)


def read_short(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, lengths=(call.lengths - 1).clamp(min=0))


def ignore_holes(call: MlaDecodeCall) -> MlaDecodeCall:
    """-1 taken for slot 0."""
    return replace(call, indices=call.indices.clamp(min=0))


def leak_a_token(call: MlaDecodeCall) -> MlaDecodeCall:
    """A hole taken for the token before it: nothing is NaN, and it shows all the same."""
    indices = call.indices.clone()
    for row in range(indices.shape[0]):
        live = indices[row, : int(call.lengths[row])]
        good = live[(live >= 0) & (live < call.cache.shape[0] * 64)]
        if good.numel():
            live[live == -1] = good[0]
    return replace(call, indices=indices)


def one_wrong_scale(call: MlaDecodeCall) -> MlaDecodeCall:
    cache = repooled(call.cache)
    scales = check.parts(cache)[1]
    scales[..., 3] = torch.where(scales[..., 3] < 0xFE, scales[..., 3] + 1, scales[..., 3])
    return replace(call, cache=cache)


def shifted_scales(call: MlaDecodeCall) -> MlaDecodeCall:
    """Each group scaled by its neighbour's byte."""
    cache = repooled(call.cache)
    scales = check.parts(cache)[1]
    scales[..., :7] = scales[..., :7].roll(1, dims=-1)
    return replace(call, cache=cache)


def wrong_page_stride(call: MlaDecodeCall) -> MlaDecodeCall:
    """Pages taken to follow each other without padding."""
    cache, page = call.cache, call.cache.shape[1]
    return replace(call, cache=cache.as_strided(cache.shape, (page * 584, 584, 584, 1)))


def one_cache(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, extra_cache=None, extra_indices=None, extra_lengths=None)


def no_sink(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, sink=torch.full_like(call.sink, -math.inf))


def sinks_of_other_heads(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, sink=call.sink.roll(1))


def queries_of_other_heads(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, q=call.q.roll(1, dims=1))


def rows_swapped(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, indices=call.indices.flip(0), lengths=call.lengths.flip(0))


def scores_of_base_2(call: MlaDecodeCall) -> MlaDecodeCall:
    return replace(call, scale=call.scale * math.log(2))


def repooled(cache: torch.Tensor) -> torch.Tensor:
    """A copy with the same page stride."""
    again = check.empty_cache(cache.shape[1], cache.shape[0], "cpu")
    for mine, theirs in zip(check.parts(again), check.parts(cache), strict=True):
        mine.copy_(theirs)
    return again


def two_softmaxes(call: MlaDecodeCall, expected: check.Expected) -> None:
    """The caches' results weighed alike."""
    window = check.expect(PROBLEM, one_cache(call))
    extra = check.expect(PROBLEM, replace(call, lengths=torch.zeros_like(call.lengths)))
    leave(call, check.Expected((window.out + extra.out) / 2, expected.lse))


def sink_in_the_lse(call: MlaDecodeCall, expected: check.Expected) -> None:
    sink = call.sink[:8].double()
    leave(call, check.Expected(expected.out, torch.logaddexp(expected.lse, sink)))


def lse_of_base_2(call: MlaDecodeCall, expected: check.Expected) -> None:
    leave(call, check.Expected(expected.out, expected.lse / math.log(2)))


def no_lse(call: MlaDecodeCall, expected: check.Expected) -> None:
    assert call.lse is not None
    before = call.lse.clone()
    leave(call, expected)
    call.lse.copy_(before)


def sink_as_a_token(call: MlaDecodeCall, expected: check.Expected) -> None:
    """The sink in the numerator too: it weighs something instead of nothing."""
    share = torch.sigmoid(call.sink[:8].double() - expected.lse).float()
    leave(call, check.Expected(expected.out + share[..., None] * 0.05, expected.lse))


def coarse_output(call: MlaDecodeCall, expected: check.Expected) -> None:
    leave(call, replace(expected, out=expected.out.to(torch.float8_e4m3fn).float()))


def one_head_off(call: MlaDecodeCall, expected: check.Expected) -> None:
    out = expected.out.clone()
    out[-1, 5] *= 1.012
    leave(call, replace(expected, out=out))


def row_unwritten(call: MlaDecodeCall, expected: check.Expected) -> None:
    before = call.out[2].clone()
    leave(call, expected)
    call.out[2] = before


def one_value_unwritten(call: MlaDecodeCall, expected: check.Expected) -> None:
    before = call.out[0, 3, 511].clone()
    leave(call, expected)
    call.out[0, 3, 511] = before


def before_the_output(call: MlaDecodeCall, expected: check.Expected) -> None:
    leave(call, expected)
    assert call.guard is not None
    call.guard[call.out.storage_offset() // 2 - 1] = 0


def behind_the_output(call: MlaDecodeCall, expected: check.Expected) -> None:
    leave(call, expected)
    assert call.guard is not None
    call.guard[(call.out.storage_offset() + call.out.numel()) // 2] = 0


def behind_the_lse(call: MlaDecodeCall, expected: check.Expected) -> None:
    leave(call, expected)
    assert call.guard is not None and call.lse is not None
    call.guard[call.lse.storage_offset() + call.lse.numel()] = 0


FAULTS = [
    ("mixed 3", wrong_input(read_past), "relative error inf"),
    ("full, sinks 0", wrong_input(read_short), "relative error"),
    ("mixed 1", wrong_input(ignore_holes), "relative error inf"),
    ("mixed 1", wrong_input(leak_a_token), "relative error"),
    ("full, sinks 0", wrong_input(one_wrong_scale), "relative error"),
    ("full, sinks 0", wrong_input(shifted_scales), "relative error"),
    ("full, sinks 0", wrong_input(wrong_page_stride), "relative error inf"),
    ("full, sinks 0", wrong_input(one_cache), "relative error"),
    ("full, sinks 0", wrong_input(no_sink), "relative error inf"),
    ("mixed 2", wrong_input(no_sink), "relative error"),
    ("full, sinks 0", wrong_input(sinks_of_other_heads), "relative error inf"),
    ("full, sinks 0", wrong_input(queries_of_other_heads), "relative error"),
    ("mixed 0", wrong_input(rows_swapped), "relative error"),
    ("full, sinks 0", wrong_input(scores_of_base_2), "relative error"),
    ("full, sinks 0", two_softmaxes, "relative error"),
    ("mixed 2", sink_in_the_lse, "lse is"),
    ("mixed 0", lse_of_base_2, "lse is"),
    ("mixed 0", no_lse, "lse is nan"),
    ("full, sinks 0", sink_as_a_token, "relative error"),
    ("full, sinks 0", coarse_output, "relative error"),
    ("full, sinks 0", one_head_off, "relative error"),
    ("full, sinks 0", row_unwritten, "row 2: relative error inf"),
    ("full, sinks 0", one_value_unwritten, "row 0: relative error inf"),
    ("mixed 0", before_the_output, "outside the output"),
    ("mixed 0", behind_the_output, "outside the output"),
    ("mixed 0", behind_the_lse, "outside the output"),
]


@pytest.mark.parametrize(("name", "answer", "fault"), FAULTS, ids=[f"{f[0]} {f[1].__name__}" for f in FAULTS])
def test_a_wrong_answer_fails(name: str, answer: Any, fault: str) -> None:
    call, expected = case(name)
    answer(call, expected)
    assert fault in str(check.verify(PROBLEM, call, expected).fault)


def test_an_empty_row_is_exactly_zero_and_minus_infinity() -> None:
    call, expected = case("empty")
    assert bool((expected.out == 0).all()) and bool(expected.lse.isneginf().all())
    leave(call, expected)
    call.out[4, 7, 100] = 1e-38
    assert "row 4: relative error inf" in str(check.verify(PROBLEM, call, expected).fault)
    leave(call, expected)
    assert call.lse is not None
    call.lse[4, 7] = -1e30
    assert "row 4, head 7: lse is -1" in str(check.verify(PROBLEM, call, expected).fault)


@pytest.mark.parametrize("where", ["out", "lse"])
def test_padded_heads_stay_as_they_were(where: str) -> None:
    call, expected = case(PADDED)
    leave(call, expected)
    getattr(call, where)[3, 8:] = 0.0
    assert f"padded heads of {where} were written" in str(check.verify(PROBLEM, call, expected).fault)


def test_few_heads_are_judged_one_by_one() -> None:
    """A row of one head has no others to average with: 4e-3 may be rounding, 7e-3 is not."""
    problem = problem_of(rows=1, heads=1)
    name, call = next(iter(check.cases(problem, (), "cpu", seed=0)))
    expected = check.expect(problem, call)
    for factor, ok in ((1.0036, True), (1.007, False)):
        leave(call, replace(expected, out=expected.out * factor))
        assert check.verify(problem, call, expected).ok is ok, name


def test_a_row_alone() -> None:
    call, expected = case("full, sinks 0")
    again = check.expect(PROBLEM, check.alone(call, 3))
    assert again.out[3].equal(expected.out[3]) and again.lse[:3].isneginf().all() and again.lse[4:].isneginf().all()
