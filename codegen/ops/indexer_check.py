"""Inputs, float64 reference and judgement for the indexer, from one set of quantised bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4tune.codegen.later import torch
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Profile, Shape

if TYPE_CHECKING:
    from dsv4tune.codegen.ops.indexer import IndexerProblem

#: Relative L2 error that a row may have, and how far under the 512th score a pick may lie.
TOLERANCE = 1e-3
TOP_K = 512
#: Rows this short cancel: fp8 MMA accumulates with reduced precision, so a plain relative error says nothing there.
SHORT_ROW = 64

#: Live tokens of one check: their float64 reference takes 8 bytes each.
MAX_CHECKED_TOKENS = 1 << 27

_NAN_BYTE = 0x7F  # NaN in e4m3
_POISON = 0x7FC0BEEF  # a NaN payload that no kernel computes
_GUARD_COLUMNS = 64


def shape_of(rows: int, profile: Profile, length: int) -> Shape:
    """The call that a profile means: the same length everywhere, or consecutive queries of one prompt.

    A compressed entry stands for 4 tokens, so 4 neighbouring queries see the same entries.
    """
    if not profile.causal:
        return Shape(f"{rows}x{length}", "decode", profile.width, (length,) * rows, tuple(range(rows)))
    live = tuple(max(0, length - back // 4) for back in range(rows - 1, -1, -1))
    return Shape(f"{rows} to {length}", "prefill", profile.width, live, (0,) * rows)


def random_pool(problem: IndexerProblem, pages: int, device: str, seed: int) -> torch.Tensor:
    """uint8 ``[pages, page_bytes]``: normally distributed e4m3 values and positive scales, no NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    values = problem.page_size * problem.head_dim
    pool = torch.empty(pages, problem.page_bytes, dtype=torch.uint8, device=device)
    step = 1 << 14  # keeps the fp32 values of a part under 1 GB
    for i in range(0, pages, step):
        part = pool[i : i + step]
        noise = torch.randn(part.shape[0], values, device=device, generator=generator) * 64.0
        part[:, :values] = noise.to(torch.float8_e4m3fn).view(torch.uint8)
        scale = torch.rand(part.shape[0], problem.page_size, device=device, generator=generator) * 0.02 + 0.005
        part[:, values:] = scale.view(torch.uint8)
    return pool


def _call(
    problem: IndexerProblem,
    pool: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    logits: torch.Tensor,
    guard: torch.Tensor | None,
    generator: torch.Generator,
) -> IndexerCall:
    device = pool.device
    rows = seq_lens.shape[0]
    q = torch.randn(rows, problem.heads, problem.head_dim, device=device, generator=generator)
    weights = torch.randn(rows, problem.heads, device=device, generator=generator) * 0.05
    return IndexerCall(q.to(torch.float8_e4m3fn), pool, weights, seq_lens, page_table, logits, guard)


# -- checking ---------------------------------------------------------------------------------------------------


def cases(
    problem: IndexerProblem, width: int, lengths: Sequence[int], device: str, seed: int
) -> Iterator[tuple[str, IndexerCall]]:
    """Lengths 0, 1, 63, 64, 65, every one of `lengths` and random ones, spread over the rows of as few calls as hold
    them, then all rows at the maximum, and rows of one request; every unused page, page tail and table entry poisoned.

    Pages may be shared by rows, except a row's last: its tail is poisoned.
    """
    rows, page = problem.rows, problem.page_size
    random = torch.Generator().manual_seed(seed)
    wanted = [n for n in (0, 1, page - 1, page, page + 1, *lengths) if n <= width]
    wanted += torch.randint(0, width + 1, (2,), generator=random).tolist()
    most = min(width, max(page, MAX_CHECKED_TOKENS // rows))
    while len(wanted) % rows:
        wanted.append(int(torch.randint(0, most + 1, (1,), generator=random)))
    batches = [(f"mixed {i // rows}", wanted[i : i + rows]) for i in range(0, len(wanted), rows)]
    if rows > 1:
        # As many rows at the maximum as the reference has memory for.
        full = min(rows, max(1, MAX_CHECKED_TOKENS // width))
        batches.append(("maximum", [width] * full + [page] * (rows - full)))
        batches.append(("empty", [0] * rows))
        batches.append(("straggler", [width] + [1] * (rows - 1)))
        # Consecutive lengths, some of them past a page's end, of one prompt, and of requests with 3 draft tokens each.
        last = min(width, 8 * page + 1)
        batches += [(name, [max(0, last - back) for back in range(rows - 1, -1, -1)]) for name in ("prompt", "drafts")]
    for number, (name, batch) in enumerate(batches):
        share = {"prompt": rows, "drafts": 3}.get(name, 1)
        yield name, _poisoned_case(problem, width, batch, device, seed + number, share)


def _poisoned_case(
    problem: IndexerProblem, width: int, batch: list[int], device: str, seed: int, share: int
) -> IndexerCall:
    """`share` neighbouring rows are one request: each but the last ends inside that one's pages."""
    rows, page = problem.rows, problem.page_size
    generator = torch.Generator(device).manual_seed(seed)
    lens = torch.tensor(batch, dtype=torch.int32, device=device)
    table_width = width // page
    full = lens // page  # whole live pages of each row
    # Shared whole pages, one private last page a row, and stale pages that nothing live names.
    shared = int(full.max().clamp(min=1)) + 7
    stale = 5
    pool = random_pool(problem, shared + rows + stale, device, seed)
    values = page * problem.head_dim

    order = torch.randperm(pool.shape[0], device=device, generator=generator).to(torch.int32)
    shared_ids, private_ids, stale_ids = order[:shared], order[shared : shared + rows], order[shared + rows :]
    poison_values = torch.full((values,), _NAN_BYTE, dtype=torch.uint8, device=device)
    poison_scales = torch.full((page,), float("inf"), device=device).view(torch.uint8)
    pool[stale_ids.long(), :values] = poison_values
    pool[stale_ids.long(), values:] = poison_scales
    tail = torch.arange(page, device=device)[None, :] >= (lens % page)[:, None]
    private = pool[private_ids.long()]
    private_values = private[:, :values].view(rows, page, problem.head_dim)
    private_values.masked_fill_(tail[:, :, None], _NAN_BYTE)
    scales = private[:, values:].contiguous().view(torch.float32)
    scales[tail] = float("inf")
    private[:, values:] = scales.view(torch.uint8)
    pool[private_ids.long()] = private

    # A table wider than the call, so that its row stride is not the width.
    column = torch.arange(table_width + 3, device=device)[None, :]
    shift = torch.randint(0, shared, (rows, 1), device=device, generator=generator)
    table = shared_ids[(column + shift) % shared]
    table = torch.where(column == full[:, None], private_ids[:, None], table)
    longest = (torch.arange(rows, device=device) // share * share + share - 1).clamp(max=rows - 1)
    table = table[longest]
    dead = column >= (lens[:, None] + page - 1) // page
    # Stale entries of the kinds seen: a freed page, no page, an id outside the pool.
    kinds = torch.stack([stale_ids[0], stale_ids.new_tensor(-1), stale_ids.new_tensor(2**31 - 1)])
    table = torch.where(dead, kinds[(column + torch.arange(rows, device=device)[:, None]) % 3], table)

    guard = torch.empty(rows + 2, width + _GUARD_COLUMNS, dtype=torch.float32, device=device)
    guard.view(torch.int32).fill_(_POISON)
    logits = guard[1:-1, :width]
    # A slice with stride 2, as a caller may pass.
    spaced = torch.stack([lens, torch.full_like(lens, 2**30)], dim=1)[:, 0]
    return _call(problem, pool, spaced, table.to(torch.int32).contiguous(), logits, guard, generator)


@dataclass(frozen=True)
class _Rows:
    """Expected values of some rows of similar length, padded to the longest."""

    index: torch.Tensor  # [n]
    live: torch.Tensor  # bool [n, longest]
    want: torch.Tensor  # float64 [n, longest]
    norm: torch.Tensor  # float64 [n]; what an error is relative to
    threshold: torch.Tensor  # float64 [n]; the 512th score, -inf for rows that have no more than that
    slack: torch.Tensor  # float64 [n]; how far under the threshold a top-512 pick may score


@dataclass(frozen=True)
class Expected:
    """What a call must leave in its output."""

    rows: list[_Rows]
    lengths: list[int]


def reference(problem: IndexerProblem, call: IndexerCall, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logits of one row's live tokens, and the same sum over |weights|: the scale of the rounding."""
    pages = call.page_table[row, : -(-length // problem.page_size)].long()
    values = problem.page_size * problem.head_dim
    page = call.kv[pages]
    k = page[:, :values].contiguous().view(torch.float8_e4m3fn).float().double().view(-1, problem.head_dim)[:length]
    scale = page[:, values:].contiguous().view(torch.float32).double().view(-1)[:length]
    relu = (k @ call.q[row].float().double().T).relu_()
    weights = call.weights[row].double()
    return scale * (relu @ weights), scale * (relu @ weights.abs())


def expect(problem: IndexerProblem, call: IndexerCall) -> Expected:
    lengths = [max(0, min(n, call.width)) for n in call.seq_lens.tolist()]
    order = sorted((row for row, n in enumerate(lengths) if n > 0), key=lambda row: lengths[row])
    groups: list[_Rows] = []
    while order:
        # Rows of similar length side by side: at most this many padded values at once.
        count = 1
        while (
            count < len(order)
            and (count + 1) * lengths[order[-1 - count]] <= 1 << 24
            and (lengths[order[-1 - count]] * 2 >= lengths[order[-1]])
        ):
            count += 1
        groups.append(_expected_rows(problem, call, order[-count:], lengths))
        del order[-count:]
    return Expected(groups, lengths)


def _expected_rows(problem: IndexerProblem, call: IndexerCall, rows: list[int], lengths: list[int]) -> _Rows:
    device = call.kv.device
    longest = max(lengths[row] for row in rows)
    live = (
        torch.arange(longest, device=device)[None, :] < torch.tensor([lengths[r] for r in rows], device=device)[:, None]
    )
    want = torch.zeros(len(rows), longest, dtype=torch.float64, device=device)
    norm = torch.empty(len(rows), dtype=torch.float64, device=device)
    threshold = torch.full((len(rows),), float("-inf"), dtype=torch.float64, device=device)
    slack = torch.full((len(rows),), float("inf"), dtype=torch.float64, device=device)
    for i, row in enumerate(rows):
        length = lengths[row]
        want[i, :length], magnitude = reference(problem, call, row, length)
        scores = want[i, :length]
        norm[i] = magnitude.norm() if length < SHORT_ROW else scores.norm()
        if length > TOP_K:
            threshold[i] = scores.topk(TOP_K).values[-1]
            # A threshold near zero is as exact as the row's scores are, not as exact as itself.
            slack[i] = TOLERANCE * torch.maximum(threshold[i].abs(), scores.square().mean().sqrt())
    return _Rows(torch.tensor(rows, device=device), live, want, norm.clamp(min=1e-300), threshold, slack)


def verify(problem: IndexerProblem, call: IndexerCall, expected: Expected) -> Verdict:
    """Judge the call's output; see `TOLERANCE`. Leaves the output poisoned again."""
    worst, wrong = 0.0, None
    for group in expected.rows:
        got = call.logits[group.index, : group.want.shape[1]].double().masked_fill_(~group.live, 0.0)
        off = got - group.want
        errors = off.norm(dim=1) / group.norm
        errors = torch.where(errors.isfinite(), errors, float("inf"))
        worst = max(worst, float(errors.max()))
        if worst > TOLERANCE and wrong is None:
            row = int(group.index[errors.argmax()])
            wrong = f"row {row}, length {expected.lengths[row]}: relative error {worst:.1e}"
        # Where no score is off by half the slack, no pick can lie below it, and the selection need not be made.
        doubtful = off.abs().amax(dim=1) * 2 > group.slack
        if wrong is None and bool(doubtful.any()):
            some = got[doubtful].masked_fill(~group.live[doubtful], float("-inf"))
            picks = some.topk(min(TOP_K, some.shape[1])).indices
            lowest = group.want[doubtful].gather(1, picks).amin(dim=1)
            low = lowest < (group.threshold - group.slack)[doubtful]
            if bool(low.any()):
                row = int(group.index[doubtful][low][0])
                wrong = f"row {row}: a top-{TOP_K} pick scores below the {TOP_K}th"
    wrong = wrong or _outside(problem, call, expected)
    if call.guard is not None:
        call.guard.view(torch.int32).fill_(_POISON)
    return Verdict(worst, wrong)


def overlap(call: IndexerCall, expected: Expected) -> float | None:
    """The share of the reference's top 512 that the output's top 512 hold, in the worst row that has more tokens."""
    worst = None
    for group in expected.rows:
        long = group.threshold.isfinite()
        if bool(long.any()):
            got = call.logits[group.index[long], : group.want.shape[1]].masked_fill(~group.live[long], float("-inf"))
            want = group.want[long].masked_fill(~group.live[long], float("-inf"))
            picked = torch.zeros_like(want, dtype=torch.bool).scatter_(1, want.topk(TOP_K).indices, True)
            share = picked.gather(1, got.nan_to_num(nan=float("-inf")).topk(TOP_K).indices).double().mean(dim=1).min()
            worst = min(float(share), 1.0 if worst is None else worst)
    return worst


def _outside(problem: IndexerProblem, call: IndexerCall, expected: Expected) -> str | None:
    """Whether anything was written, or left unwritten, where the contract says otherwise."""
    if problem.clean:
        column = torch.arange(call.width, device=call.kv.device)
        for row, length in enumerate(expected.lengths):
            if not bool((call.logits[row][column >= length] == float("-inf")).all()):
                return f"row {row}: a column past length {length} is not -inf"
    else:
        empty = [row for row, length in enumerate(expected.lengths) if length == 0]
        if not _untouched(call.logits[empty]):
            return "a row of length 0 was written"
    if call.guard is not None:
        edges = (call.guard[0], call.guard[-1], call.guard[:, call.width :])
        if not all(_untouched(edge) for edge in edges):
            return "memory outside the rows was written"
    return None


def _untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.int32) == _POISON).all())


# -- timing -----------------------------------------------------------------------------------------------------


def live_pages(problem: IndexerProblem, shape: Shape) -> int:
    """Distinct pages of one call: those of each request's longest row."""
    longest: dict[int, int] = {}
    for owner, live in zip(shape.owner, shape.live, strict=True):
        longest[owner] = max(live, longest.get(owner, 0))
    return sum(-(-live // problem.page_size) for live in longest.values())


def timing_sets(
    problem: IndexerProblem, shape: Shape, sets: int, device: str, seed: int, pool: torch.Tensor
) -> list[IndexerCall]:
    """Calls over different pages of `pool` and one output, as a server's graph reuses its own."""
    generator = torch.Generator(device).manual_seed(seed)
    lens = torch.tensor(shape.live, dtype=torch.int32, device=device)
    owners = sorted(set(shape.owner))
    request = torch.tensor([owners.index(owner) for owner in shape.owner], device=device)
    longest = torch.zeros(len(owners), dtype=torch.int32, device=device).scatter_reduce(0, request, lens, "amax")
    pages = ((longest + problem.page_size - 1) // problem.page_size).long()
    before = torch.cumsum(pages, 0) - pages
    column = torch.arange(shape.width // problem.page_size, device=device)[None, :]
    logits = torch.empty(shape.rows, shape.width, dtype=torch.float32, device=device)
    order = torch.randperm(pool.shape[0], device=device, generator=generator).to(torch.int32)
    need = int(pages.sum())
    calls = []
    for number in range(sets):
        ids = order[(number * need + before[:, None] + column) % order.shape[0]]
        table = torch.where(column < pages[:, None], ids, 0)[request].contiguous()
        calls.append(_call(problem, pool, lens.clone(), table, logits, None, generator))
    return calls


def bench_shapes(width: int) -> list[Shape]:
    """What `bench` times unless told otherwise: decode at every length, ragged mixes, verify and prefill."""

    def decode(rows: int, live: int) -> Shape:
        return Shape(f"{rows}x{live}", "decode", width, (live,) * rows, tuple(range(rows)))

    def ragged(name: str, live: Sequence[int]) -> Shape:
        return Shape(name, "ragged", width, tuple(live), tuple(range(len(live))))

    def prefill(rows: int, length: int) -> Shape:
        # The table of a prefill is as wide as its prompt.
        columns = -(-length // 64) * 64
        return shape_of(rows, Profile(columns, (length,), (1.0,), causal=True), length)

    dice = torch.Generator().manual_seed(0)
    uniform = torch.randint(0, 32_769, (64,), generator=dice).tolist()
    drafts = [(request, 8192 + 97 * request + draft) for request in range(16) for draft in range(4)]
    return [
        *(decode(rows, live) for rows in (1, 16) for live in (128, 2048, 32_768, width)),
        *(decode(64, live) for live in (128, 2048, 32_768, 131_072)),
        ragged("64 one straggler", [131_072] + [128] * 63),
        ragged("64 uniform", uniform),
        ragged("64 half empty", [0, 8192] * 32),
        Shape("16 x 4 drafts", "verify", width, tuple(n for _, n in drafts), tuple(r for r, _ in drafts)),
        prefill(4096, 2048),
        prefill(4096, 32_768),
    ]
