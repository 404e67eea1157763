"""MLA decode: sparse attention of one query token a row over two paged fp8 caches.

``out[r, h] = sum_t softmax_t(scale * q[r, h] . k[t]) k[t]`` over the tokens that the row's indices name in both caches,
where a head's sink joins the softmax's denominator. Source of the contract: SGLang 0.5.23,
kernels/ops/attention/flash_mla_sm120.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.later import torch
from dsv4tune.codegen.models import FLASH, Model
from dsv4tune.codegen.op import Argument, Buffer, Launch, Op, Plan, Verdict, Work
from dsv4tune.codegen.ops import mla_decode_check, mla_decode_timing
from dsv4tune.codegen.ops.mla_decode_call import (
    FOOTER_BYTES,
    HEAD_DIM,
    NOPE_DIM,
    ROW_BYTES,
    TOKEN_BYTES,
    MlaDecodeCall,
    MlaDecodeProblem,
    page_stride,
)
from dsv4tune.codegen.problem import Profile, Shape, Silicon
from dsv4tune.codegen.space import Config, Parameter, Refusal, Space

#: Besides powers of two: the tiles of 128 + 512 tokens, 40, 20 and 10, divided evenly.
_SPLITS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 40, 64, 128)

_COMBINES = ("1x128", "1x512", "2x512")
_Branch: TypeAlias = dict[str, tuple[int | str, ...]]
_PLAIN: _Branch = {"dialect": ("triton",), "loop": ("joint", "apart"), "convert": ("early",)}
_GLUON: _Branch = {"dialect": ("gluon",), "loop": ("joint",), "convert": ("early",)}
_WAYS: tuple[_Branch, ...] = (
    {**_PLAIN, "load": ("pointer",), "num_stages": (1,)},
    {**_PLAIN, "load": ("cp_async",), "num_stages": (2, 3)},
    {
        **_PLAIN,
        "convert": ("late",),
        "operand_order": ("kq",),
        "heads_per_program": (8, 16),
        "load": ("pointer",),
        "num_warps": (4,),
        "num_stages": (1,),
    },
    {**_GLUON, "operand_order": ("kq",), "loop": ("joint", "crossed"), "load": ("pointer",), "num_stages": (1,)},
    {**_GLUON, "operand_order": ("kq",), "load": ("cp_async",), "num_stages": (2, 3)},
    {
        **_GLUON,
        "operand_order": ("qk",),
        "heads_per_program": (64,),
        "block_t": (64,),
        "load": ("pointer",),
        "num_warps": (8,),
        "num_stages": (2,),
    },
)
_LAUNCHES: tuple[_Branch, ...] = (
    {"splits": (1,), "combine": ("none",), "pdl": ("off",)},
    {"splits": _SPLITS[1:], "combine": _COMBINES},
)
_BRANCHES = tuple({**way, **launch} for way in _WAYS for launch in _LAUNCHES)

_PARAMETERS = (
    Parameter("dialect", ("triton", "gluon"), "language of the template"),
    Parameter("operand_order", ("kq", "qk"), "tokens or heads as the rows of the scores"),
    Parameter("heads_per_program", (8, 16, 32, 64), "heads that share one loading of the keys"),
    Parameter("block_t", (16, 32, 64), "tokens a tile"),
    Parameter("convert", ("early", "late"), "keys become bf16 before or after they pass through shared memory"),
    Parameter("load", ("pointer", "cp_async"), "keys gathered into registers, or ahead into shared memory"),
    Parameter("loop", ("joint", "apart", "crossed"), "one loop over both caches, one for each, or two tiles a turn"),
    Parameter("splits", _SPLITS, "programs a row and group of heads"),
    Parameter("num_warps", (2, 4, 8), "warps a program"),
    Parameter("num_stages", (1, 2, 3), "tiles under way"),
    Parameter("combine", ("none", *_COMBINES), "heads x dims a program of the kernel that weighs the splits"),
    Parameter("pdl", ("off", "late", "early"), "when that kernel starts to launch"),
)

LOG2_E = math.log2(math.e)

#: Prefill chunks come through the same function: rows of one prompt.
PREFILL_ROWS = 1024


class MlaDecode(Op[MlaDecodeProblem, MlaDecodeCall]):
    name = "mla_decode"
    reference = "unsplit"
    words = (
        "dialect",
        "operand_order",
        "heads_per_program",
        "block_t",
        "convert",
        "load",
        "loop",
        "splits",
        "num_warps",
        "num_stages",
        "combine",
        "pdl",
    )
    plan_words = ("splits",)

    def problem(self, rows: int, silicon: Silicon, **options: Any) -> MlaDecodeProblem:
        return MlaDecodeProblem(rows=rows, silicon=silicon, **{"heads": 8, **options})

    def options(self, given: Mapping[str, Any], max_context: int, draft_tokens: int) -> dict[str, Any]:
        """``heads`` or ``tp`` (ranks that share the model's, 8 unless given), ``cache``: that of the layer, c4 unless
        given, and ``model``: a `Model`, Flash unless given."""
        heads, tp, cache = given.get("heads"), given.get("tp"), given.get("cache", "c4")
        model: Model = given.get("model", FLASH)
        if heads is not None and tp is not None:
            raise ValueError("--heads and --tp say the same: give one")
        # Page size and columns of the index tensor.
        caches = {
            "c4": (64, model.topk),
            "c128": (2, self.width(max_context, draft_tokens)),
            "none": (0, 0),
        }
        if cache not in caches:
            raise ValueError(f"unknown --cache '{cache}': use one of {', '.join(caches)}")
        page, width = caches[cache]
        return {
            "heads": heads or model.heads_of(tp or 8),
            "extra_page_size": page,
            "extra_width": width,
        }

    def problem_from_json(self, data: dict[str, Any]) -> MlaDecodeProblem:
        return MlaDecodeProblem.from_json(data)

    def width(self, max_context: int, draft_tokens: int) -> int:
        """Columns of the c128 cache's indices, two for each column of the page table, in whole 64s.

        The other caches' widths don't depend on the context.
        """
        pages = -(-(max_context + 4 + draft_tokens) // 256)
        return -(-2 * pages // 64) * 64

    def profile(self, problem: MlaDecodeProblem, width: int) -> Profile:
        """`width` is not asked for: a problem holds its own."""
        if not problem.extra_width:
            return Profile(problem.width, (problem.width,), (1.0,), causal=problem.rows >= PREFILL_ROWS)
        middle = 256 if problem.extra_page_size == 2 else 64
        lengths = tuple(sorted({1, min(middle, problem.extra_width), problem.extra_width}))
        if problem.rows >= PREFILL_ROWS:
            lengths = lengths[-1:]
        return Profile(problem.extra_width, lengths, (1.0,) * len(lengths), causal=problem.rows >= PREFILL_ROWS)

    # -- space --------------------------------------------------------------------------------------------------

    def space(self, problem: MlaDecodeProblem, device: Device) -> Space:
        return Space(_PARAMETERS, lambda config: refuse(problem, device, config), _BRANCHES)

    def default(self, problem: MlaDecodeProblem, device: Device) -> Config:
        """What compiles without spills everywhere, with splits that fill the SMs; on sm_90 what was best on an H200."""
        heads = 8 if problem.heads <= 8 else 16 if problem.heads <= 16 else 32
        # Of 16 heads as columns, tiles of 32 tokens are multiplied twice over by 4 warps, and some targets spill.
        plain = self._unsplit(problem, heads, "kq" if heads == 8 else "qk")
        if problem.silicon.arch != 90:
            return self._filling(problem, plain)
        # Up to 4 rows, programs of 16 heads fill more SMs than those of 64 and win for all that they convert again.
        if heads < 32 or problem.heads == 32 or (problem.heads <= 64 and problem.rows <= 4):
            few = self._unsplit(problem, min(heads, 16), "kq")
            return self._filling(problem, few.with_(dialect="gluon", loop="joint"))
        many = plain.with_(heads_per_program=64, block_t=64, num_stages=2)
        return self._filling(problem, many.with_(dialect="gluon", loop="joint"))

    def reference_config(self, problem: MlaDecodeProblem, device: Device) -> Config:
        """A program for each row and group of heads, which are the rows of its scores."""
        return self._unsplit(problem, 16 if problem.heads <= 16 else 32, "qk")

    @staticmethod
    def _unsplit(problem: MlaDecodeProblem, heads: int, order: str) -> Config:
        return Config(
            {
                "dialect": "triton",
                "operand_order": order,
                "heads_per_program": heads,
                "block_t": 32,
                "convert": "early",
                "load": "pointer",
                "loop": "joint" if problem.extra_width else "apart",
                "splits": 1,
                "num_warps": 4 if heads < 32 else 8,
                "num_stages": 1,
                "combine": "none",
                "pdl": "off",
            }
        )

    @staticmethod
    def _filling(problem: MlaDecodeProblem, config: Config) -> Config:
        """`config` with the fewest splits that fill the SMs."""
        # One program an SM of plain Triton or of 8 warps, two of Gluon's with 4.
        resident = 2 if config["dialect"] == "gluon" and config["num_warps"] == 4 else 1
        room = resident * problem.silicon.sm_count // (problem.rows * groups(problem, config))
        splits = max(n for n in even_splits(tiles(problem, config)) if n <= max(1, room))
        if splits == 1:
            return config
        # Early, combine's programs wait beside those that still work: where not all SMs have one.
        early = problem.rows * groups(problem, config) * splits <= problem.silicon.sm_count
        pdl = "off" if problem.silicon.arch < 90 else "early" if early else "late"
        config = config.with_(splits=splits, pdl=pdl)
        # About 4 programs an SM: 1 x 128 was best at 1 and 16 rows of 8 heads, 1 x 512 at 64, 2 x 512 at 256 (H200).
        shapes = (config.with_(combine=shape) for shape in _COMBINES)
        wanted = 4 * problem.silicon.sm_count
        return min(shapes, key=lambda c: abs(math.log(combine_programs(problem, c) / wanted)))

    # -- render, compile, launch --------------------------------------------------------------------------------

    def template_values(self, problem: MlaDecodeProblem, config: Config) -> dict[str, Any]:
        splits, (combine_heads, combine_dims) = config.int("splits"), combine_shape(config)
        options: dict[str, Any] = {"num_warps": max(1, combine_heads * combine_dims // 512), "num_stages": 1}
        if config["pdl"] != "off":
            options["launch_pdl"] = True
        return {
            "row_bytes": ROW_BYTES,
            "rope_at": NOPE_DIM,
            "footer_bytes": FOOTER_BYTES,
            "page_stride": page_stride(problem.page_size),
            "extra_page_stride": page_stride(problem.extra_page_size),
            "groups": groups(problem, config),
            "split": splits > 1,
            "splits_ceil": 1 << (splits - 1).bit_length(),
            "combine_heads": combine_heads,
            "combine_dims": combine_dims,
            "combine_options": options,
        }

    def arguments(self, problem: MlaDecodeProblem, config: Config) -> Mapping[str, Sequence[Argument]]:
        found = _names(problem, config).items()
        return {kernel: [Argument(n, *_TYPES[n.removeprefix("extra_")]) for n in names] for kernel, names in found}

    def plan(self, problem: MlaDecodeProblem, config: Config, width: int) -> Plan:
        rows, heads, splits = problem.rows, problem.heads, config.int("splits")
        kernel = Launch("kernel", (rows * groups(problem, config), splits, 1))
        if splits == 1:
            return Plan((kernel,))
        combine = Launch("combine", (combine_programs(problem, config), 1, 1))
        partial = Buffer("partial", (rows, splits, heads, HEAD_DIM), "bfloat16")
        return Plan((kernel, combine), (partial, Buffer("partial_lse", (rows, splits, heads), "float32")))

    def work(self, problem: MlaDecodeProblem, config: Config, profile: Profile, length: int) -> Work:
        block_t, splits = config.int("block_t"), config.int("splits")
        shape = self.shape(problem, profile, length)
        window = -(-problem.width // block_t) if problem.extra_width else 0
        of_rows = [window + -(-live // block_t) for live in shape.live]
        share = groups(problem, config)
        values = problem.rows * problem.heads * HEAD_DIM
        partial = 4 * values * splits if splits > 1 else 0  # bf16, written and read
        return Work(
            programs=problem.rows * share * splits,
            steps=sum(of_rows) * share,
            longest=-(-max(of_rows) // splits),
            step_bytes=block_t * (TOKEN_BYTES + 4),
            instructions=_instructions(config),
            scanned=0,
            fixed_bytes=4 * values + partial,
            # Keys gathered by Triton pass through registers chunk by chunk, and only some of the 8 chunks' loads go out
            # together: it depends on the registers that are left.
            trips=4 if config["dialect"] == "triton" and config["load"] == "pointer" else 1,
            ahead=_ahead(config),
            first_trips=3,  # a length, slots, keys
            later=_LATER[str(config["pdl"])] if splits > 1 else 0.0,
            later_programs=combine_programs(problem, config) if splits > 1 else 0,
        )

    def bind(
        self, problem: MlaDecodeProblem, config: Config, call: MlaDecodeCall, scratch: Mapping[str, torch.Tensor]
    ) -> dict[str, list[Any]]:
        call.validate(problem)
        values: dict[str, Any] = {
            "q": call.q,
            "sink": call.sink,
            "out": call.out,
            "lse": call.lse,
            "scale": call.scale * LOG2_E,
            "padded_heads": call.padded_heads,
            "splits": config["splits"],
            **scratch,
            **_cache("", call.cache, call.indices, call.lengths),
        }
        if call.extra_cache is not None and call.extra_indices is not None and call.extra_lengths is not None:
            values |= _cache("extra_", call.extra_cache, call.extra_indices, call.extra_lengths)
        return {kernel: [values[n] for n in names] for kernel, names in _names(problem, config).items()}

    def unchecked(self, config: Config) -> str | None:
        return "Gluon has no interpreter" if config["dialect"] == "gluon" else None

    # -- checking and timing ------------------------------------------------------------------------------------

    def small(self, problem: MlaDecodeProblem) -> tuple[MlaDecodeProblem, int]:
        # Widths are no part of the source; programs take their time there, and a row of many heads has many.
        extra_width = min(problem.extra_width, 128)
        rows = min(problem.rows, 5 if problem.heads <= 16 else 2)
        small = replace(problem, rows=rows, width=64, extra_width=extra_width)
        return small, extra_width or small.width

    def cases(
        self, problem: MlaDecodeProblem, width: int, lengths: Sequence[int], device: str, seed: int
    ) -> Iterator[tuple[str, MlaDecodeCall]]:
        yield from mla_decode_check.cases(problem, lengths, device, seed)

    def expect(self, problem: MlaDecodeProblem, call: MlaDecodeCall) -> mla_decode_check.Expected:
        return mla_decode_check.expect(problem, call)

    def verify(self, problem: MlaDecodeProblem, call: MlaDecodeCall, expected: mla_decode_check.Expected) -> Verdict:
        return mla_decode_check.verify(problem, call, expected)

    def shape(self, problem: MlaDecodeProblem, profile: Profile, length: int) -> Shape:
        return mla_decode_timing.shape_of(problem, profile, length)

    def bench_shapes(self) -> list[Shape]:
        return mla_decode_timing.bench_shapes()

    def describe(self, shape: Shape) -> dict[str, Any]:
        return mla_decode_timing.describe(shape)

    def timing_pool(
        self, problem: MlaDecodeProblem, shapes: Sequence[Shape], min_bytes: int, device: str, seed: int
    ) -> mla_decode_timing.Pool:
        return mla_decode_timing.timing_pool(problem, shapes, min_bytes, device, seed)

    def timing_sets(
        self, problem: MlaDecodeProblem, shape: Shape, sets: int, device: str, seed: int, pool: mla_decode_timing.Pool
    ) -> list[MlaDecodeCall]:
        return mla_decode_timing.timing_sets(problem, shape, sets, device, seed, pool)

    def bytes_moved(self, problem: MlaDecodeProblem, shape: Shape) -> int:
        return mla_decode_timing.bytes_moved(problem, shape)

    def memory_needed(self, problem: MlaDecodeProblem, profile: Profile, length: int) -> int:
        return mla_decode_timing.memory_needed(problem, self.shape(problem, profile, length))

    def output(self, call: MlaDecodeCall) -> torch.Tensor:
        return call.out


#: How the kernels take what has this name; of the extra cache, what has it behind ``extra_``.
_TYPES: dict[str, tuple[str, bool]] = {
    "q": ("*bf16", True),
    "cache": ("*u8", True),
    "indices": ("*i32", True),
    # Slices of larger tensors: no promise of alignment.
    "lengths": ("*i32", False),
    "sink": ("*fp32", False),
    "out": ("*bf16", True),
    "lse": ("*fp32", False),
    "partial": ("*bf16", True),
    "partial_lse": ("*fp32", False),
    "scale": ("fp32", False),
    "padded_heads": ("i32", False),
    "splits": ("i32", False),
    "slots": ("i32", False),
    "width": ("i32", True),
    "indices_stride": ("i64", True),
    "lengths_stride": ("i32", False),
}


def _names(problem: MlaDecodeProblem, config: Config) -> dict[str, list[str]]:
    """What each kernel takes, in order; the templates hold the same lists."""

    def of_caches(*names: str) -> list[str]:
        return [prefix + name for prefix in ("", "extra_")[: 1 + bool(problem.extra_width)] for name in names]

    caches, numbers = (
        of_caches("cache", "indices", "lengths"),
        of_caches("slots", "width", "indices_stride", "lengths_stride"),
    )
    written, partial = ["sink", "out", *["lse"] * problem.lse], ["partial", "partial_lse"]
    if config["splits"] == 1:
        return {"kernel": ["q", *caches, *written, "scale", "padded_heads", *numbers]}
    return {
        "kernel": ["q", *caches, *partial, "scale", "padded_heads", *numbers],
        "combine": [
            *partial, *of_caches("lengths"), *written, "padded_heads", "splits", *of_caches("width", "lengths_stride"),
        ],
    }  # fmt: skip


def _cache(prefix: str, cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
    values = {
        "cache": cache,
        "indices": indices,
        "lengths": lengths,
        "slots": cache.shape[0] * cache.shape[1],
        "width": indices.shape[1],
        "indices_stride": indices.stride(0),
        "lengths_stride": lengths.stride(0),
    }
    return {prefix + name: value for name, value in values.items()}


def groups(problem: MlaDecodeProblem, config: Config) -> int:
    """Programs that share a row's heads."""
    return -(-problem.heads // config.int("heads_per_program"))


def tiles(problem: MlaDecodeProblem, config: Config) -> int:
    """Of a row whose indices are all live."""
    block_t = config.int("block_t")
    return -(-problem.width // block_t) + -(-problem.extra_width // block_t)


def combine_shape(config: Config) -> tuple[int, int]:
    """Heads and dims of a program; nothing where there is none."""
    heads, _, dims = str(config["combine"]).partition("x")
    return (int(heads), int(dims)) if dims else (0, 0)


def combine_programs(problem: MlaDecodeProblem, config: Config) -> int:
    heads, dims = combine_shape(config)
    return problem.rows * -(-problem.heads // heads) * (HEAD_DIM // dims)


#: What `combine` adds to a launch, of a kernel that starts when the one before has ended.
_LATER = {"off": 1.0, "late": 1.0, "early": 0.8}


def _instructions(config: Config) -> float:
    """That a warp issues for a step, about, as counted in the PTX of some variants.

    To load, convert, scale and store the 512 values of a token, which Gluon packs by four; for the products; and for
    addresses and scores besides.
    """
    tokens, warps = config.int("block_t"), config.int("num_warps")
    values = tokens * HEAD_DIM / (32 * warps) * (3 if config["dialect"] == "gluon" else 5)
    # Two products of 512 dims by MMAs of 16 x 8 x 16, each of which counts as two instructions.
    products = 2 * tokens * config.int("heads_per_program") * 2 * HEAD_DIM / (16 * 8 * 16) / warps
    # Converted late, keys are converted for each of the two products.
    return (350 + values + products) * (1.6 if config["convert"] == "late" else 1.0)


def _ahead(config: Config) -> int:
    """Tiles whose keys are under way while one is worked on."""
    if config["load"] == "cp_async":
        return config.int("num_stages") - 1
    return 1 if config["dialect"] == "gluon" else 0


def even_splits(most: int) -> list[int]:
    """Numbers of splits of a row's tiles without those that leave the longest program as long as fewer would."""
    return [n for i, n in enumerate(_SPLITS) if n <= most and all(-(-most // m) > -(-most // n) for m in _SPLITS[:i])]


def shared_bytes(config: Config) -> int:
    """About what a program takes: queries, one tile as bf16, and raw tiles that are under way."""
    block_t, under_way = config.int("block_t"), config.int("num_stages") - 1
    return (config.int("heads_per_program") + block_t) * HEAD_DIM * 2 + under_way * block_t * TOKEN_BYTES


def refuse(problem: MlaDecodeProblem, device: Device, config: Config) -> Refusal:
    """The whole constraint set: the first reason why this config is no candidate, or None."""
    if config["dialect"] == "gluon":
        return _refuse_padding(problem, config) or _refuse_gluon(problem, config) or _refuse_splits(problem, config)
    return (
        _refuse_padding(problem, config)
        or _refuse_heads(problem, config)
        or _refuse_tile(problem, config)
        or _refuse_splits(problem, config)
    )  # fmt: skip


def _refuse_padding(problem: MlaDecodeProblem, config: Config) -> Refusal:
    heads, block_h = problem.heads, config.int("heads_per_program")
    least = 8 if config["operand_order"] == "kq" else 64 if config["dialect"] == "gluon" else 16
    if block_h < least:
        return f"heads as rows: the MMA takes {least} of them"
    if block_h > max(least, 1 << (heads - 1).bit_length()):
        return f"{block_h} heads a program: at least half would be padding, of {heads} real heads"
    gluon = config["dialect"] == "gluon"
    if {8: 1, 16: 4 if gluon else 2}.get(block_h, 4) * block_h < heads:
        return f"{groups(problem, config)} programs would each convert all keys of a row: more heads a program"
    return None


def _refuse_gluon(problem: MlaDecodeProblem, config: Config) -> Refusal:
    block_h, block_t, warps = config.int("heads_per_program"), config.int("block_t"), config.int("num_warps")
    ring, crossed = config.int("num_stages") - 1, config["loop"] == "crossed"
    if config["operand_order"] == "qk":
        if problem.silicon.arch != 90:
            return "heads as rows: Gluon has wgmma for it, which sm_90 alone has"
        if (block_t, warps, config["load"], config["loop"]) != (64, 8, "pointer", "joint") or ring != 1:
            return "heads as rows: Gluon takes 64 tokens, 8 warps, pointer loads, a joint loop and 2 buffers"
        return None
    if (config["load"] == "cp_async") != (ring > 0) or (crossed and ring):
        return "cp_async has 1 or 2 tiles under way (num_stages 2, 3), pointer none (1); crossed is pointer's"
    if block_h > 32:
        return "tokens as rows: up to 32 heads a program, whose outputs fit the registers"
    parts, left = divmod(warps * 16, block_t)
    if left or not 1 <= parts <= 8:
        return f"{warps} warps share {block_t} tokens 16 at a time, up to 8 of them the same"
    # Outputs and raw words of a lane; beyond this it was seen to spill.
    words = block_t * 144 // (32 * warps) * (2 if crossed else 1)
    outputs = HEAD_DIM * block_h // (32 * warps)
    if outputs > 64 or outputs + words > 104:
        return f"{outputs} outputs and {words} words of keys a lane leave the registers"
    # Keys as bf16, what the warps exchange, and raw tiles that are under way.
    need = block_t * (2 * HEAD_DIM * (2 if crossed else 1) + 64 + ring * 648)
    if need > problem.silicon.shared_bytes:
        return f"about {need} B of shared memory are more than the {problem.silicon.shared_bytes} B of a program"
    return None


def _refuse_heads(problem: MlaDecodeProblem, config: Config) -> Refusal:
    block_h, warps = config.int("heads_per_program"), config.int("num_warps")
    block_t, kq = config.int("block_t"), config["operand_order"] == "kq"
    # From here on: what was seen to spill, or to leave warps without work of their own.
    if block_h == 64 and (not kq or problem.silicon.arch != 90 or block_t == 64):
        return "the accumulators of 64 heads leave the registers, except for 4 warps of wgmma with short tiles"
    if warps < {8: 2, 16: 2, 32: 4, 64: 8}[block_h]:
        return f"{warps} warps can't hold the accumulators of {block_h} heads"
    if warps == 2 and (block_t * block_h > 256 or not kq):
        return "2 warps: tiles of 256 scores, tokens as their rows"
    if warps == 8 and kq and block_h < 32:
        return f"tokens as rows: {block_h} heads are no columns for 8 warps to share"
    if warps == 4 and block_h == 32 and (block_t == 64 or not kq):
        return "32 heads: 4 warps for short tiles with tokens as rows, else 8"
    return None


def _refuse_tile(problem: MlaDecodeProblem, config: Config) -> Refusal:
    silicon, ahead = problem.silicon, config["load"] == "cp_async"
    if ahead != (config.int("num_stages") > 1):
        return "cp_async has 1 or 2 tiles under way (num_stages 2, 3), pointer none (1)"
    if config["loop"] == "apart" and ahead:
        return "two pipelined loops: twice the buffers, and each fills its own"
    if not problem.extra_width and config["loop"] == "joint":
        return "one cache, one loop (apart)"
    if config["convert"] == "late":
        if ahead:
            return "converted late, a tile has two layouts in shared memory, and Triton's pipeliner copies for one"
        if config["operand_order"] == "qk" or config.int("heads_per_program") > 16 or config.int("block_t") > 32:
            return "converted late: tokens as rows, up to 16 heads and 32 tokens, else it spills"
        if config.int("num_warps") != 4 or (problem.extra_width and config["loop"] == "apart"):
            return "converted late: 4 warps and one loop, as one design to compare with"
    need = shared_bytes(config)
    if need > silicon.shared_bytes:
        return f"about {need} B of shared memory are more than the {silicon.shared_bytes} B of {silicon.target}"
    return None


def _refuse_splits(problem: MlaDecodeProblem, config: Config) -> Refusal:
    rows, sms = problem.rows, problem.silicon.sm_count
    splits, most = config.int("splits"), tiles(problem, config)
    if (splits > 1) != (config["combine"] != "none") or (splits == 1 and config["pdl"] != "off"):
        return "combine and pdl belong to splits, which need a combine"
    longest = -(-most // splits)
    if config["load"] == "cp_async" and longest <= config.int("num_stages"):
        return f"up to {longest} tiles a program: too few to have {config['num_stages']} under way"
    if config["loop"] == "apart" and problem.extra_width and longest < 8:
        return f"up to {longest} tiles a program: too few for two loops"
    if splits == 1:
        return None
    programs = rows * groups(problem, config) * splits
    if splits not in even_splits(most):
        return f"{splits} splits of {most} tiles: the longest program has {longest}, as with fewer splits"
    room = (4 if splits <= 4 else 2) * sms
    if programs > room:
        return f"{programs} programs are more than {room // sms} for each of {sms} SMs: fewer splits fill them"
    if 2 * programs <= sms and 4 * splits <= most:
        return f"{programs} programs leave at least half of {sms} SMs idle"
    to_combine = combine_programs(problem, config)
    # The next shape makes a fourth of these programs, and the one after it half.
    many = {"1x128": 8, "1x512": 6}.get(str(config["combine"]), to_combine)
    if to_combine > many * sms:
        return f"{to_combine} programs to combine are more than {many} for each of {sms} SMs: larger ones"
    if to_combine < 2 * sms and config["combine"] != _COMBINES[0]:
        return f"{to_combine} programs to combine are fewer than 2 for each of {sms} SMs"
    if (config["pdl"] != "off") != (problem.silicon.arch >= 90):
        return "programmatic dependent launch is late or early where there is such (from sm_90 on), else off"
    if config["pdl"] == "early" and programs > sms:
        return f"combine would wait in room that some of {programs} programs need"
    return None
