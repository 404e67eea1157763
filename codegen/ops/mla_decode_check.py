"""Inputs, float64 reference and judgement for MLA decode, from one set of quantised bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsv4tune.codegen.later import torch
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.ops.mla_decode_call import (
    FOOTER_BYTES,
    HEAD_DIM,
    NOPE_DIM,
    ROPE_DIM,
    ROW_BYTES,
    TOKEN_BYTES,
    MlaDecodeCall,
    MlaDecodeProblem,
    page_stride,
)

#: Relative L2 error of a row: root mean square over its heads, each head's 512 values relative to their own norm.
#: The output's rounding to bf16 alone gives 1.7e-3, bf16 probabilities or bf16 partial outputs bring it to 2.1e-3,
#: both to 2.5e-3. These errors are independent, so L2 averages them where a maximum would pick the worst rounding of
#: many; each head counts alike, so that no large one hides another.
TOLERANCE = 3e-3
#: Of a single head: in rows of two or three tokens the rounding of one probability is no average (4.1e-3 seen).
HEAD_TOLERANCE = 6e-3
#: Heads that average enough for `TOLERANCE`.
AVERAGING_HEADS = 4
#: Natural logarithm, absolute.
LSE_TOLERANCE = 1e-3

#: Of the scores, as SGLang passes it.
SCALE = HEAD_DIM**-0.5
#: Tokens of one check: their float64 reference takes 4 KB each, in chunks.
MAX_CHECKED_TOKENS = 1 << 24
_CHUNK_TOKENS = 1 << 16
_CHUNK_VALUES = 1 << 26

_SCALES = NOPE_DIM // 64
_NAN_BYTE = 0xFF  # NaN as e4m3, as either half of a bf16 and as a UE8M0 scale
_POISON = 0x7FD57FD5  # NaN as fp32 and as two bf16, with a payload that no kernel computes
_GUARD_WORDS = 4096
_SINKS = (float("inf"), float("-inf"), 1e4, -1e4, 0.0, 3.0)


# -- caches -----------------------------------------------------------------------------------------------------


def empty_cache(page_size: int, pages: int, device: str) -> torch.Tensor:
    """uint8 ``[pages, page_size, 1, 584]`` as SGLang's view of its pool; NaN in every value, scale and padding byte."""
    stride = page_stride(page_size)
    pool = torch.full((pages, stride), _NAN_BYTE, dtype=torch.uint8, device=device)
    return pool.as_strided((pages, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))


def parts(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a cache by page and token: values ``[pages, page_size, 576]`` and scales ``[pages, page_size, 8]``,
    where they really lie."""
    pages, page, stride, start = cache.shape[0], cache.shape[1], cache.stride(0), cache.storage_offset()
    return (
        cache.as_strided((pages, page, ROW_BYTES), (stride, ROW_BYTES, 1), start),
        cache.as_strided((pages, page, FOOTER_BYTES), (stride, FOOTER_BYTES, 1), start + page * ROW_BYTES),
    )


def pack(
    cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, exponents: torch.Tensor, rope: torch.Tensor
) -> None:
    """Store tokens: e4m3 ``values [n, 448]``, ``exponents [n, 7]`` of their scales, bf16 ``rope [n, 64]``."""
    rows, footers = parts(cache)
    page, inside = slots // cache.shape[1], slots % cache.shape[1]
    rows[page, inside] = torch.cat([values.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    footers[page, inside, :_SCALES] = (exponents + 127).to(torch.uint8)


def keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float64 ``[..., 512]`` of the tokens in these slots."""
    rows, footers = parts(cache)
    page, inside = slots // cache.shape[1], slots % cache.shape[1]
    row, scale = rows[page, inside], footers[page, inside, :_SCALES]
    found = torch.empty(*slots.shape, HEAD_DIM, dtype=torch.float64, device=cache.device)
    found[..., :NOPE_DIM] = row[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    factor = torch.exp2(scale.double() - 127).masked_fill_(scale == 255, float("nan"))
    found[..., :NOPE_DIM] *= factor.repeat_interleave(64, dim=-1)
    found[..., NOPE_DIM:] = row[..., NOPE_DIM:].contiguous().view(torch.bfloat16)
    return found


def fill(cache: torch.Tensor, slots: torch.Tensor, generator: torch.Generator, low: int = -6, high: int = 1) -> None:
    """Random tokens: normally distributed values with scales from 2^low to 2^high, so that a wrong scale shows."""
    step, device = 1 << 16, cache.device  # keeps the fp32 values of a part under 128 MB
    for i in range(0, slots.shape[0], step):
        some = slots[i : i + step]
        n = some.shape[0]
        values = (torch.randn(n, NOPE_DIM, device=device, generator=generator) * 2).to(torch.float8_e4m3fn)
        exponents = torch.randint(low, high + 1, (n, _SCALES), device=device, generator=generator)
        rope = torch.randn(n, ROPE_DIM, device=device, generator=generator).bfloat16()
        pack(cache, some, values, exponents, rope)


# -- cases ------------------------------------------------------------------------------------------------------

#: What one row does with one cache: a live length, or one of these words for a length of the whole width.
#: holes: some -1; none: only -1; late: 64 times -1, then tokens; last: a token in the last column alone; repeat: one
#: slot everywhere; outside: some slots that the cache does not have.
_Kind = int | str
_Row = tuple[_Kind, _Kind]


def _rows_wanted(problem: MlaDecodeProblem, lengths: Sequence[int]) -> list[_Row]:
    """Window and extra cache of the rows that the cases must hold, each once."""
    w, e = problem.width, problem.extra_width
    found: list[_Row] = [
        (w, e), (0, 0), (0, e), (w, 0), (w, "none"), ("none", e), ("none", "none"),
        *((word, word) for word in ("holes", "late", "last", "repeat", "outside")),
        *((n, n) for n in (1, 63, 64, 65)), (w - 1, e - 1), (w // 2, "late"), ("holes", 0),
        *((w, n) if e else (n, 0) for n in lengths),
    ]  # fmt: skip
    return list(dict.fromkeys((_most(window, w), _most(extra, e)) for window, extra in found))


def _most(kind: _Kind, width: int) -> _Kind:
    if isinstance(kind, str):
        return kind if width else 0
    return max(0, min(kind, width))


@dataclass(frozen=True)
class _Options:
    """What a whole call does besides what its rows do."""

    padded_heads: int = 0
    sinks: tuple[float, ...] = ()
    exponents: tuple[int, int] = (-6, 1)
    first_slot: int = 1  # slot 0 is used where it is 0
    far: bool = False  # used slots lie past 2^31 bytes


def cases(
    problem: MlaDecodeProblem, lengths: Sequence[int], device: str, seed: int
) -> Iterator[tuple[str, MlaDecodeCall]]:
    """The contract's edge cases, spread over the rows of as few calls as hold them, then those that take a call.

    Every slot that no row names holds NaN, slot 0 among them, and so do the caches' page padding, padded heads, output
    and lse. Indices past a row's length are garbage of every kind. The calls share one query and one output.
    """
    rows, heads = problem.rows, problem.heads
    full: _Row = (problem.width, problem.extra_width)
    # As many rows at the maximum as the reference has time for.
    all_full = [full] * min(rows, max(1, MAX_CHECKED_TOKENS // (problem.width + problem.extra_width)))
    wanted = _rows_wanted(problem, lengths)
    batches = [(f"mixed {i // rows}", wanted[i : i + rows], _Options()) for i in range(0, len(wanted), rows)]
    for i in range(0, len(_SINKS), heads):
        batches.append((f"full, sinks {i // heads}", all_full, _Options(sinks=_SINKS[i : i + heads])))
    padded = next((n for n in (64, 128) if n > heads), heads)
    batches.append(("padded heads, slot 0 in use", [full, (0, 0)][:rows], _Options(padded_heads=padded, first_slot=0)))
    batches.append(("smallest scales", [full], _Options(exponents=(-127, 0))))
    if rows > 1:
        batches.append(("empty", [(0, 0)] * rows, _Options()))
    enough = 8 * (2**31 + (64 << 20))
    if device.startswith("cuda") and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > enough:
        batches.append(("bytes past 2^31", [full], _Options(far=True)))
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.randn(rows, heads, HEAD_DIM, device=device, generator=generator).bfloat16()
    guarded = _guarded(problem, heads, device)
    for name, some, options in batches:
        yield name, _case(problem, some, options, q, guarded, generator)


def _case(
    problem: MlaDecodeProblem,
    wanted: Sequence[_Row],
    options: _Options,
    q: torch.Tensor,
    guarded: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    generator: torch.Generator,
) -> MlaDecodeCall:
    """A call whose first rows are the wanted ones; the others have random lengths, and every second some holes."""
    heads, padded, device = problem.heads, options.padded_heads or problem.heads, q.device
    if padded > heads:
        padding = q.new_full((problem.rows, padded - heads, HEAD_DIM), float("nan"))
        q, guarded = torch.cat([q, padding], dim=1), _guarded(problem, padded, str(device))
    sink = torch.full((padded,), float("nan"), device=device)
    sink[:heads] = torch.randn(heads, device=device, generator=generator) * 2
    sink[: len(options.sinks)] = sink.new_tensor(options.sinks)
    shape = (problem.rows, problem.page_size, problem.width)
    cache, indices, lengths = _poisoned(*shape, [window for window, _ in wanted], options, generator)
    extra: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    if problem.extra_width:
        shape = (problem.rows, problem.extra_page_size, problem.extra_width)
        extra = _poisoned(*shape, [kind for _, kind in wanted], options, generator)
    guard, out, lse = guarded
    return MlaDecodeCall(q, cache, indices, lengths, *extra, sink=sink, scale=SCALE, out=out, lse=lse, guard=guard)


def _poisoned(
    rows: int, page_size: int, width: int, kinds: Sequence[_Kind], options: _Options, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache with NaN in every slot that is not used, the rows' indices into it and their lengths."""
    device = generator.device
    first = (2**31 // page_stride(page_size) + 1) * page_size if options.far else options.first_slot
    # Every second slot from the last one down is used; the first row's first token is the last slot.
    count = width + 32
    pages = -(-(first + 2 * count) // page_size)
    slots = pages * page_size
    cache = empty_cache(page_size, pages, str(device))
    order = 1 + torch.randperm(count - 1, device=device, generator=generator)
    used = slots - 1 - 2 * torch.cat([order.new_zeros(1), order])
    if options.first_slot == 0:
        used[0] = 0
    fill(cache, used, generator, *options.exponents)

    row, column = torch.arange(rows, device=device)[:, None], torch.arange(width, device=device)[None, :]
    shift = torch.randint(0, count, (rows, 1), device=device, generator=generator)
    shift[0] = 0
    indices = used.to(torch.int32)[(column + shift) % count]

    def rows_of(word: str) -> torch.Tensor:
        return torch.isin(row, row.new_tensor([i for i, kind in enumerate(kinds) if kind == word]))

    holes = torch.rand(rows, width, device=device, generator=generator) < 0.2
    holes &= rows_of("holes") | ((row >= len(kinds)) & (row % 2 == 1))
    holes |= rows_of("none") | (rows_of("late") & (column < min(64, width - 1)))
    holes |= rows_of("last") & (column < width - 1)
    indices = torch.where(rows_of("repeat"), indices[:, :1], indices).masked_fill_(holes, -1)
    # What may stand where no token is: past the end, huge, negative, and real slots that hold NaN.
    garbage = indices.new_tensor([slots, 2**31 - 1, -(2**31), -2, -1, slots - 2, 0 if options.first_slot else -1])
    indices = torch.where(rows_of("outside") & (column % 3 == 1), garbage[column % 4], indices)
    most = min(width, max(64, MAX_CHECKED_TOKENS // rows))
    lengths = torch.randint(0, most + 1, (rows,), device=device, generator=generator, dtype=torch.int32)
    lengths[: len(kinds)] = lengths.new_tensor([kind if isinstance(kind, int) else width for kind in kinds])
    # A tensor wider than the call, so that its row stride is not the width.
    wide = garbage[(torch.arange(width + 16, device=device)[None, :] + row) % 7]
    wide[:, :width] = torch.where(column < lengths[:, None], indices, wide[:, :width])
    # A slice with stride 2, as a caller may pass.
    spaced = torch.stack([lengths, torch.full_like(lengths, 2**30)], dim=1)[:, 0]
    return cache, wide[:, :width], spaced


def _guarded(
    problem: MlaDecodeProblem, padded: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Poison all over, and the output and lse within it."""
    outs = problem.rows * padded * HEAD_DIM // 2
    lses = problem.rows * padded if problem.lse else 0
    guard = torch.full((3 * _GUARD_WORDS + outs + lses,), _POISON, dtype=torch.int32, device=device)
    out = guard[_GUARD_WORDS : _GUARD_WORDS + outs].view(torch.bfloat16).view(problem.rows, padded, HEAD_DIM)
    at = 2 * _GUARD_WORDS + outs
    lse = guard[at : at + lses].view(torch.float32).view(problem.rows, padded) if problem.lse else None
    return guard, out, lse


def alone(call: MlaDecodeCall, row: int) -> MlaDecodeCall:
    """The same call with every other row empty: for whether a row's result depends on its neighbours."""

    def only(lengths: torch.Tensor | None) -> torch.Tensor | None:
        return None if lengths is None else lengths * (torch.arange(lengths.shape[0], device=lengths.device) == row)

    lengths = only(call.lengths)
    assert lengths is not None
    return replace(call, lengths=lengths, extra_lengths=only(call.extra_lengths))


# -- reference and judgement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a call must leave in its output: float64 results, the outputs rounded to fp32 to be kept."""

    out: torch.Tensor  # fp32 [rows, heads, 512]
    lse: torch.Tensor  # float64 [rows, heads]; -inf where a row has no token


def _tokens(
    cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[n, longest, 512]`` of some rows, 0 where no token is, and where one is."""
    lens = lengths[rows].clamp(0, indices.shape[1])
    slots = indices[rows, : int(lens.max())].long()
    valid = torch.arange(slots.shape[1], device=cache.device)[None, :] < lens[:, None]
    valid &= (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    # Masked afterwards: what slot 0 holds may be NaN.
    found = keys(cache, torch.where(valid, slots, 0))
    return found.masked_fill_(~valid[..., None], 0.0), valid


def expect(problem: MlaDecodeProblem, call: MlaDecodeCall) -> Expected:
    """One softmax over both caches; the sink joins its denominator, and not the lse."""
    caches = [(call.cache, call.indices, call.lengths)]
    if call.extra_cache is not None and call.extra_indices is not None and call.extra_lengths is not None:
        caches.append((call.extra_cache, call.extra_indices, call.extra_lengths))
    device, rows, heads = call.q.device, call.q.shape[0], problem.heads
    totals = sum(lengths.clamp(0, indices.shape[1]) for _, indices, lengths in caches)
    assert isinstance(totals, torch.Tensor)
    longest, order = totals.sort(descending=True)
    out = torch.zeros(rows, heads, HEAD_DIM, dtype=torch.float32, device=device)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64, device=device)
    sink, counts, start = call.sink[:heads].double(), longest.tolist(), 0
    while start < rows and counts[start] > 0:
        # Rows of similar length side by side; the two caches' longest rows need not be the same one, hence the 2.
        some = order[start : start + max(1, _CHUNK_TOKENS // (2 * counts[start]))]
        start += some.shape[0]
        k, valid = (torch.cat(pair, dim=1) for pair in zip(*(_tokens(*c, some) for c in caches), strict=True))
        scores = torch.einsum("nhd,ntd->nht", call.q[some, :heads].double(), k) * call.scale
        scores.masked_fill_(~valid[:, None, :], float("-inf"))
        sums = scores.logsumexp(dim=2)
        empty = sums == float("-inf")
        probabilities = torch.exp(scores - sums.masked_fill(empty, 0.0)[..., None])
        kept = torch.sigmoid(sums - sink).masked_fill_(empty, 0.0)
        out[some] = (torch.einsum("nht,ntd->nhd", probabilities, k) * kept[..., None]).float()
        lse[some] = sums
    return Expected(out, lse)


def verify(problem: MlaDecodeProblem, call: MlaDecodeCall, expected: Expected) -> Verdict:
    """Judge the call's output; see `TOLERANCE`. Leaves output and lse poisoned again where they are guarded."""
    heads = problem.heads
    step = max(1, _CHUNK_VALUES // (heads * HEAD_DIM))
    errors = torch.empty_like(expected.lse)
    for i in range(0, errors.shape[0], step):
        want = expected.out[i : i + step]
        got, norm = call.out[i : i + step, :heads].float(), want.norm(dim=-1)
        # An output of 0, of no token or an infinite sink, must be met exactly.
        errors[i : i + step] = torch.where(
            norm > 0, (got - want).norm(dim=-1) / norm, torch.where((got != 0).any(dim=-1), float("inf"), 0.0)
        )
    errors = torch.where(errors.isfinite(), errors, float("inf"))
    by_row = errors.square().mean(dim=1).sqrt()
    worst, fault = float(by_row.max()), None
    if heads >= AVERAGING_HEADS and worst > TOLERANCE:
        fault = f"row {int(by_row.argmax())}: relative error {worst:.1e}"
    elif float(errors.max()) > HEAD_TOLERANCE:
        row, head = divmod(int(errors.argmax()), heads)
        fault = f"row {row}, head {head}: relative error {float(errors.max()):.1e}"
    fault = fault or _lse_fault(call, expected) or _outside(problem, call)
    if call.guard is not None:
        call.guard.fill_(_POISON)
    return Verdict(worst, fault)


def _lse_fault(call: MlaDecodeCall, expected: Expected) -> str | None:
    if call.lse is None:
        return None
    got = call.lse[:, : expected.lse.shape[1]].double()
    # Of two -inf the difference is NaN: equal ones are off by nothing.
    off = torch.where(got == expected.lse, 0.0, (got - expected.lse).abs()).nan_to_num(nan=float("inf"))
    if float(off.max()) <= LSE_TOLERANCE:
        return None
    row, head = divmod(int(off.argmax()), off.shape[1])
    return f"row {row}, head {head}: lse is {float(got[row, head])}, expected {float(expected.lse[row, head])}"


def _outside(problem: MlaDecodeProblem, call: MlaDecodeCall) -> str | None:
    """Whether anything was written where the contract says otherwise."""
    if call.guard is None:
        return None
    for name, tensor in (("out", call.out), ("lse", call.lse)):
        if tensor is not None and not _untouched(tensor[:, problem.heads :]):
            return f"padded heads of {name} were written"
    outs = _GUARD_WORDS + call.out.numel() // 2
    lses = call.lse.numel() if call.lse is not None else 0
    edges = call.guard[:_GUARD_WORDS], call.guard[outs : outs + _GUARD_WORDS], call.guard[outs + _GUARD_WORDS + lses :]
    return None if all(_untouched(edge) for edge in edges) else "memory outside the output was written"


def _untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.int32) == _POISON).all())
