"""What a server of given arguments will call: the problems to have ready before its graphs are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dsv4tune.codegen import ops
from dsv4tune.codegen.models import FLASH, Model
from dsv4tune.codegen.ops.indexer import PREFILL_ROWS
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.runtime.dispatch import Key
from dsv4tune.runtime.kernels import key_of


def batches(most: int, speculative: bool, padding: bool = True) -> list[int]:
    """The batches that SGLang 0.5.23 captures up to a largest one (model_executor's sizes)."""
    if not padding:
        return list(range(1, most + 1))
    if speculative:
        steps = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16))
    else:
        steps = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32))
    return sorted({*(size for size in steps if size <= most), most})


#: Requests of the graphs that it captures by default: up to 512, and up to 256 with speculative decoding.
CAPTURED, CAPTURED_DRAFTS = tuple(batches(512, False)), tuple(batches(256, True))

#: Heads that SGLang pads an MLA decode's query to, where the kernel behind it takes no fewer. A rank with more has all
#: 128 of Pro to itself, and shows just these.
PADDED_HEADS = 64
WINDOW, WINDOW_PAGE = 128, 256
#: Tokens of a page of the server's table.
TABLE_PAGE = 256


@dataclass(frozen=True)
class Wanted:
    """One shape of call.

    Attributes:
        problem: with the real heads.
        width: columns of the call, for ops whose problem does not say; 0 for prompts, which have any.
        shown: other head counts that the same call shows, padded ones.
    """

    problem: Problem
    width: int
    shown: tuple[int, ...] = ()

    @property
    def keys(self) -> list[Key]:
        return [key_of(self.problem, self.width), *(key_of(self.problem, self.width, heads) for heads in self.shown)]


@dataclass(frozen=True)
class Server:
    """The facts of a server that shapes follow from.

    Attributes:
        table_pages: columns of its page table, ``ceil((context + 4 + draft tokens) / 256)``.
        rows: of decode and verify calls, those that are captured first of all.
        prefill_rows: of prefill chunks.
        heads: real query heads of a rank.
        extras: page size and width of each compressed cache that some layer has; ``(0, 0)`` for layers without.
        window: width and page size of the recent tokens' cache.
    """

    table_pages: int
    rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    heads: tuple[int, ...]
    extras: tuple[tuple[int, int], ...]
    window: tuple[int, int] = (WINDOW, WINDOW_PAGE)

    @property
    def columns(self) -> int:
        """Of the indexer's logits."""
        return self.table_pages * 64

    def wanted(self, silicon: Silicon, kernels: Iterable[str]) -> list[Wanted]:
        """Every call shape, by kernel and rows. A shape that an op doesn't serve is left out: it stays the server's."""
        found: list[Wanted] = []
        called = [kernel for kernel in kernels if kernel in CALLS]
        for rows in sorted({*self.rows, *self.prefill_rows}):
            for kernel in called:
                for width, shown, options in CALLS[kernel](self, rows):
                    found += _served(kernel, rows, silicon, width, shown, options)
        return found

    def _indexer(self, rows: int) -> Iterator[_Call]:
        # A prompt's table is as wide as the prompt: its launch must not depend on that.
        yield self.columns if rows in self.rows or rows < PREFILL_ROWS else 0, (), {}

    def _mla_decode(self, rows: int) -> Iterator[_Call]:
        for heads in self.heads:
            shown = (PADDED_HEADS,) if heads < PADDED_HEADS else ()
            for page, width in self.extras:
                options = {
                    "heads": heads, "width": self.window[0], "page_size": self.window[1],
                    "extra_width": width, "extra_page_size": page,
                }  # fmt: skip
                yield width or self.window[0], shown, options


#: Width of a call, other head counts that it shows, and its problem's fields.
_Call: TypeAlias = tuple[int, tuple[int, ...], dict[str, Any]]
#: The ops that a server calls, and what each call of so many rows is like; of another op it has no calls.
CALLS: Mapping[str, Callable[[Server, int], Iterator[_Call]]] = {
    "indexer": Server._indexer,
    "mla_decode": Server._mla_decode,
}


def _served(
    kernel: str, rows: int, silicon: Silicon, width: int, shown: tuple[int, ...], options: dict[str, Any]
) -> list[Wanted]:
    try:
        return [Wanted(ops.get(kernel).problem(rows, silicon, **options), width, shown)]
    except ValueError:
        return []


def captured_rows(draft_tokens: int) -> list[int]:
    """Of the calls that SGLang captures by default; a request that is verified has a row for each draft token."""
    return [size * draft_tokens for size in CAPTURED_DRAFTS] if draft_tokens > 1 else list(CAPTURED)


def table_pages(context: int, draft_tokens: int) -> int:
    return -(-(context + 4 + draft_tokens) // TABLE_PAGE)


def extras(table: int, topk: int, ratios: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Page size and width of each compression ratio's cache; a page of 256 tokens holds 64 entries, or 2."""
    known = {0: (0, 0), 4: (64, topk), 128: (2, -(-2 * table // 64) * 64)}
    return tuple(known[ratio] for ratio in ratios if ratio in known)


def server(
    context: int,
    tp: int = 8,
    draft_tokens: int = 0,
    rows: Sequence[int] | None = None,
    chunk: int = 0,
    model: Model = FLASH,
) -> Server:
    """A server by its arguments, as `explain` and `warm` are told them.

    Args:
        context: tokens.
        tp: ranks that share the model's query heads.
        rows: of calls; what SGLang captures by default unless given.
        chunk: rows of a prefill chunk, 0 for none.

    Raises:
        ValueError: heads that can't be shared by so many ranks.
    """
    rows = captured_rows(draft_tokens) if rows is None else rows
    table = table_pages(context, draft_tokens)
    layers = extras(table, model.topk, model.ratios(draft_tokens > 0))
    return Server(table, tuple(rows), (chunk,) if chunk else (), (model.heads_of(tp),), layers)
