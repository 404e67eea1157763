"""The indexer: paged FP8 MQA logits of DeepSeek-V4's sparse attention.

``logits[r, t] = scale[t] * sum_h weights[r, h] * relu(q[r, h] . k[t])`` for every live token t of row r, where k and
scale lie in pages that the row's table names. Source of the contract: SGLang 0.5.23,
srt/layers/attention/dsv4/indexer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dsv4tune.codegen.devices import KB, Device
from dsv4tune.codegen.later import torch
from dsv4tune.codegen.op import Argument, Launch, Op, Plan, Verdict, Work
from dsv4tune.codegen.ops import indexer_check
from dsv4tune.codegen.ops.indexer_call import IndexerCall
from dsv4tune.codegen.problem import Problem, Profile, Shape, Silicon
from dsv4tune.codegen.space import Config, Parameter, Refusal, Space

#: Bytes a token takes in a page beyond its values, by cache layout.
LAYOUTS = {"fp8_fp32_scale": 4}

#: Capabilities where the block-scaled MMA is an instruction of its own that some cards run faster.
BLOCK_SCALED = (120, 121)

#: Above this many rows the scan of all lengths costs more than it balances, and its vector leaves the registers.
MAX_SCANNED_ROWS = 2048

#: Rows that the Gluon template's scan was checked for.
MAX_GLUON_ROWS = 1024

#: Bounds of the kernels' 32-bit counts: programs of a page grid over a 1M context, and columns.
MAX_ROWS, MAX_WIDTH = 1 << 18, 1 << 30

#: Prefill chunks come through the same function: rows of one prompt with causal lengths.
PREFILL_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class IndexerProblem(Problem):
    """Shapes of the indexer's calls.

    Attributes:
        rows: query tokens of a call (batch, times draft tokens when verifying).
        heads: index heads; never split over ranks.
        head_dim: e4m3 bytes of one key.
        page_size: tokens a page.
        layout: what a page holds, a word of `LAYOUTS`.
        clean: whether columns at or past a row's length are set to -inf.
    """

    op = "indexer"
    heads: int = 64
    head_dim: int = 128
    page_size: int = 64
    layout: str = "fp8_fp32_scale"
    clean: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be 1 to {MAX_ROWS}, not {self.rows}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout '{self.layout}': use one of {', '.join(LAYOUTS)}")
        if self.heads not in (16, 32, 64, 128) or self.head_dim != 128 or self.page_size != 64:
            raise ValueError(
                f"heads={self.heads} head_dim={self.head_dim} page_size={self.page_size}: the templates serve "
                "16, 32, 64 or 128 heads of 128 and pages of 64"
            )

    @property
    def page_bytes(self) -> int:
        return self.page_size * (self.head_dim + LAYOUTS[self.layout])


_PLAIN: dict[str, tuple[int | str, ...]] = {
    "dialect": ("triton",),
    "refill": ("auto",),
    "page_ahead": (0,),
}
_RING: dict[str, tuple[int | str, ...]] = {
    "dialect": ("gluon",),
    "operand_order": ("kq",),
    "dot": ("fp8",),
    "block_t": (64,),
    "num_stages": (3, 4),
    "refill": ("late", "early"),
    "page_ahead": (1, 2),
}
_BRANCHES: tuple[dict[str, tuple[int | str, ...]], ...] = (
    {**_PLAIN, "schedule": ("page_grid",), "splits": (0,), "programs_per_sm": (0,), "num_stages": (1,)},
    {**_PLAIN, "schedule": ("split",), "programs_per_sm": (0,)},
    {**_PLAIN, "schedule": ("persistent", "hybrid"), "splits": (0,)},
    {
        **_RING,
        "schedule": ("split",),
        "load": ("tma",),
        "splits": (1,),
        "programs_per_sm": (0,),
        "num_stages": (2, 3, 4),
    },
    {**_RING, "schedule": ("hybrid",), "splits": (0,)},
)


@cache
def _parameters(heads: int, scaled: bool) -> tuple[Parameter, ...]:
    return (
        Parameter("dialect", ("triton", "gluon"), "language of the template"),
        Parameter(
            "schedule",
            ("page_grid", "split", "persistent", "hybrid"),
            "which program takes which tile of live tokens",
        ),
        Parameter("load", ("pointer", "tma"), "how keys come into shared memory"),
        Parameter("operand_order", ("kq", "qk"), "tokens or heads as the rows of the product"),
        Parameter("dot", ("fp8", "block_scaled") if scaled else ("fp8",), "matrix instruction"),
        Parameter("block_t", (64, 128, 256), "tokens a step"),
        Parameter("heads_per_step", (heads // 2, heads), "heads multiplied at once"),
        Parameter("splits", (0, *(1 << i for i in range(11))), "programs a row (schedule split)"),
        Parameter("programs_per_sm", (0, 1, 2, 3, 4, 5, 6), "programs an SM (persistent, hybrid)"),
        Parameter("num_warps", (2, 4, 8), "warps a program"),
        Parameter("num_stages", (1, 2, 3, 4, 6), "buffers of the load pipeline"),
        Parameter("refill", ("auto", "late", "early"), "when a buffer is loaded again (Gluon)"),
        Parameter("page_ahead", (0, 1, 2), "tiles between loading a page id and following it (Gluon)"),
    )


class Indexer(Op[IndexerProblem, IndexerCall]):
    name = "indexer"
    reference = "page_grid"
    words = (
        "dialect",
        "schedule",
        "load",
        "operand_order",
        "dot",
        "block_t",
        "heads_per_step",
        "splits",
        "programs_per_sm",
        "num_warps",
        "num_stages",
        "refill",
        "page_ahead",
    )
    plan_words = ("splits", "programs_per_sm")

    def problem(self, rows: int, silicon: Silicon, **options: Any) -> IndexerProblem:
        return IndexerProblem(rows=rows, silicon=silicon, **options)

    def problem_from_json(self, data: dict[str, Any]) -> IndexerProblem:
        return IndexerProblem.from_json(data)

    def width(self, max_context: int, draft_tokens: int) -> int:
        """SGLang's page table spans the context, 4 spare tokens and the draft tokens, in pages of 256 tokens.

        One compressed entry stands for 4 tokens, so a page holds 64 of them.
        """
        width = -(-(max_context + 4 + draft_tokens) // 256) * 64
        if width > MAX_WIDTH:
            raise ValueError(f"a context of {max_context} tokens is too long: the kernels serve up to {MAX_WIDTH * 4}")
        return width

    def profile(self, problem: IndexerProblem, width: int) -> Profile:
        if problem.rows >= PREFILL_ROWS:
            lengths = tuple(sorted({min(n, width) for n in (2048, 32768)}))
            return Profile(width, lengths, (1.0,) * len(lengths), causal=True)
        # A length next to the maximum would count that twice.
        lengths = (*(n for n in (128, 2048, 32768) if n <= width / 2), width)
        return Profile(width, lengths, (1.0,) * len(lengths))

    # -- space --------------------------------------------------------------------------------------------------

    def space(self, problem: IndexerProblem, device: Device) -> Space:
        parameters = _parameters(problem.heads, problem.silicon.arch in BLOCK_SCALED)
        return Space(parameters, lambda config: refuse(problem, device, config), _BRANCHES)

    def default(self, problem: IndexerProblem, device: Device) -> Config:
        """On sm_90 what won on an H200, at 1, 16 and 64 rows and for prompts; elsewhere the plain template's."""
        plain = self._plain_default(problem, device)
        if plain["schedule"] == "hybrid":
            ring = plain.with_(dialect="gluon", num_stages=4, refill="early", page_ahead=2)
        else:
            ring = plain.with_(dialect="gluon", num_stages=3, refill="late", page_ahead=1)
        return ring if problem.silicon.arch == 90 and refuse(problem, device, ring) is None else plain

    def _plain_default(self, problem: IndexerProblem, device: Device) -> Config:
        scan = problem.rows <= MAX_SCANNED_ROWS
        values: dict[str, int | str] = {
            "dialect": "triton",
            "schedule": "hybrid" if scan else "split",
            "load": "tma" if _four_warp_mma(problem) else "pointer",
            "operand_order": "kq",
            "dot": "fp8",
            "block_t": 64,
            "heads_per_step": problem.heads,
            "splits": 0 if scan else 1,
            "programs_per_sm": 4 if scan else 0,
            "num_warps": 4,
            "num_stages": 4 if _four_warp_mma(problem) else 2,
            "refill": "auto",
            "page_ahead": 0,
        }
        config = Config(values)
        if refuse(problem, device, config) is None:
            return config
        space = self.space(problem, device)
        plain = (c for c in space.valid() if c["dialect"] == "triton")
        return min(plain, key=lambda c: space.distance(config, c))

    def reference_config(self, problem: IndexerProblem, device: Device) -> Config:
        return self._plain_default(problem, device).with_(
            schedule="page_grid", load="pointer", splits=0, programs_per_sm=0, num_stages=1
        )

    # -- render, compile, launch --------------------------------------------------------------------------------

    def template(self, config: Config) -> str:
        return "indexer_prompt.gluon.py.j2" if _prompt(config) else super().template(config)

    def template_values(self, problem: IndexerProblem, config: Config) -> dict[str, Any]:
        ceil = 1 << (problem.rows - 1).bit_length()
        # The Gluon scan takes up to 256 rows at once, in two sizes, so that row counts share binaries.
        return {"rows_ceil": ceil, "scan": 64 if ceil <= 64 else 256, "one_chunk": ceil <= 256}

    def arguments(self, problem: IndexerProblem, config: Config) -> Mapping[str, Sequence[Argument]]:
        q = Argument("q", "*fp8e4nv", True)
        pool = [Argument("kv", "*u8", True)]
        if config["load"] == "tma":
            pool.append(Argument("kv_desc", f"tensordesc<fp8e4nv[{problem.page_size}, {problem.head_dim}]>"))
            if config["dialect"] == "gluon":
                q = Argument("q_desc", f"tensordesc<fp8e4nv[{problem.heads}, {problem.head_dim}]>")
        arguments = [
            q,
            *pool,
            Argument("weights", "*fp32", True),
            # Slices of larger tensors: no promise of alignment.
            Argument("seq_lens", "*i32"),
            Argument("page_table", "*i32"),
            Argument("logits", "*fp32", True),
            Argument("rows", "i32"),
            *([Argument("rows_inverse", "u32")] if _divides(config) else []),
            Argument("pages", "i32"),
            Argument("width", "i32", True),
            Argument("lens_stride", "i32"),
            Argument("table_stride", "i64"),
            Argument("logits_stride", "i64", True),
        ]
        return {"kernel": arguments}

    def plan(self, problem: IndexerProblem, config: Config, width: int) -> Plan:
        schedule = config["schedule"]
        if schedule == "page_grid":
            programs = problem.rows * -(-width // config.int("block_t"))
        elif schedule == "split":
            programs = problem.rows * config.int("splits")
        else:
            resident = problem.silicon.sm_count * config.int("programs_per_sm")
            # Of the hybrid's programs no more than all rows have pages.
            most = problem.rows * (width // problem.page_size)
            programs = resident if schedule == "persistent" else min(resident, most)
        return Plan((Launch("kernel", (programs, 1, 1)),))

    def work(self, problem: IndexerProblem, config: Config, profile: Profile, length: int) -> Work:
        block_t = config.int("block_t")
        rows = torch.tensor(self.shape(problem, profile, length).live)
        tiles = (rows + block_t - 1) // block_t
        total, most = int(tiles.sum()), int(tiles.max())
        programs = self.plan(problem, config, profile.width).programs
        schedule = config["schedule"]
        scanned = problem.rows if schedule in ("persistent", "hybrid") else 0
        if schedule == "page_grid":
            longest = 1
        elif schedule == "split":
            longest = -(-most // config.int("splits"))
        elif schedule == "persistent":
            longest = -(-total // programs)
        else:
            direct = programs // problem.rows
            left = int((tiles - direct).clamp(min=0).sum())
            longest = 1 + -(-left // programs)
            scanned = scanned if left else scanned // 2  # only whether there is any left
        return Work(
            programs=programs,
            steps=total,
            longest=longest,
            step_bytes=block_t // problem.page_size * problem.page_bytes,
            instructions=_instructions(problem, config),
            scanned=scanned,
            fixed_bytes=problem.rows * problem.heads * (problem.head_dim + 4) + int(rows.sum()) * 4,
            ahead=config.int("num_stages") - 1,
            # A length, a page id and its keys; Gluon asks for the first two at once, a scan's programs for all lengths
            # and then their own.
            first_trips=2 if config["dialect"] == "gluon" else 4 if schedule in ("persistent", "hybrid") else 3,
        )

    def bind(
        self, problem: IndexerProblem, config: Config, call: IndexerCall, scratch: Mapping[str, torch.Tensor]
    ) -> dict[str, list[Any]]:
        call.validate(problem.heads, problem.head_dim, problem.page_size, problem.page_bytes)
        rows = call.q.shape[0]
        q: Any = call.q
        pool: list[Any] = [call.kv]
        if config["load"] == "tma":
            describe = _describe_gluon if config["dialect"] == "gluon" else _describe
            matrix = call.kv.view(torch.float8_e4m3fn).view(-1, problem.head_dim)
            pool.append(describe(matrix, [problem.page_size, problem.head_dim]))
            if config["dialect"] == "gluon":
                q = describe(call.q.view(-1, problem.head_dim), [problem.heads, problem.head_dim])
        arguments = [
            q,
            *pool,
            call.weights,
            call.seq_lens,
            call.page_table,
            call.logits,
            rows,
            *([-(-(1 << 31) // rows)] if _divides(config) else []),
            call.kv.shape[0],
            call.width,
            call.seq_lens.stride(0),
            call.page_table.stride(0),
            call.logits.stride(0),
        ]
        return {"kernel": arguments}

    def unchecked(self, config: Config) -> str | None:
        if config["dot"] == "block_scaled":
            return "block-scaled MMA runs on its own silicon only"
        if config["dialect"] == "gluon":
            return "Gluon has no interpreter"
        return None

    # -- checking and timing ------------------------------------------------------------------------------------

    def small(self, problem: IndexerProblem) -> tuple[IndexerProblem, int]:
        # Few SMs: every schedule has programs with several tiles, with one, and with none.
        silicon = replace(problem.silicon, sm_count=4)
        return replace(problem, rows=min(problem.rows, 5), silicon=silicon), 5 * problem.page_size

    def cases(
        self, problem: IndexerProblem, width: int, lengths: Sequence[int], device: str, seed: int
    ) -> Iterator[tuple[str, IndexerCall]]:
        yield from indexer_check.cases(problem, width, lengths, device, seed)

    def expect(self, problem: IndexerProblem, call: IndexerCall) -> indexer_check.Expected:
        return indexer_check.expect(problem, call)

    def verify(self, problem: IndexerProblem, call: IndexerCall, expected: indexer_check.Expected) -> Verdict:
        return indexer_check.verify(problem, call, expected)

    def agreement(self, call: IndexerCall, expected: indexer_check.Expected) -> float | None:
        return indexer_check.overlap(call, expected)

    def shape(self, problem: IndexerProblem, profile: Profile, length: int) -> Shape:
        return indexer_check.shape_of(problem.rows, profile, length)

    def bench_shapes(self) -> list[Shape]:
        return indexer_check.bench_shapes(self.width(1 << 20, 0))

    def timing_pool(
        self, problem: IndexerProblem, shapes: Sequence[Shape], min_bytes: int, device: str, seed: int
    ) -> torch.Tensor:
        live = max(indexer_check.live_pages(problem, shape) for shape in shapes)
        pages = max(1, live, -(-min_bytes // problem.page_bytes))
        return indexer_check.random_pool(problem, pages, device, seed)

    def timing_sets(
        self, problem: IndexerProblem, shape: Shape, sets: int, device: str, seed: int, pool: torch.Tensor
    ) -> list[IndexerCall]:
        return indexer_check.timing_sets(problem, shape, sets, device, seed, pool)

    def bytes_moved(self, problem: IndexerProblem, shape: Shape) -> int:
        per_row = problem.heads * (problem.head_dim + 4) + 4
        keys = indexer_check.live_pages(problem, shape) * problem.page_bytes
        return keys + shape.positions * 4 + shape.rows * per_row

    def memory_needed(self, problem: IndexerProblem, profile: Profile, length: int) -> int:
        shape = self.shape(problem, profile, length)
        tables = problem.rows * (profile.width // problem.page_size) * 4
        logits = problem.rows * profile.width * 4
        pool = indexer_check.live_pages(problem, shape) * problem.page_bytes
        # The peer's own output, ours, and the check's float64 reference of one row.
        return pool + 2 * logits + 32 * tables + length * problem.heads * 16

    def output(self, call: IndexerCall) -> torch.Tensor:
        return call.logits


def refuse(problem: IndexerProblem, device: Device, config: Config) -> Refusal:
    """The whole constraint set: the first reason why this config is no candidate, or None."""
    arch = problem.silicon.arch
    rows = problem.rows
    sms = problem.silicon.sm_count
    schedule = config["schedule"]
    block_t, splits, per_sm = config.int("block_t"), config.int("splits"), config.int("programs_per_sm")
    warps, stages, heads = config.int("num_warps"), config.int("num_stages"), config.int("heads_per_step")
    gluon = config["dialect"] == "gluon"

    if (splits > 0) != (schedule == "split"):
        return "splits belongs to the split schedule, which needs it"
    if (per_sm > 0) != (schedule in ("persistent", "hybrid")):
        return "programs_per_sm belongs to the persistent and hybrid schedules, which need it"
    if schedule in ("persistent", "hybrid") and rows > MAX_SCANNED_ROWS:
        return f"{rows} rows: the scan of all lengths serves up to {MAX_SCANNED_ROWS}"
    if schedule == "hybrid" and rows > sms * per_sm:
        return f"{rows} rows are more than the {sms * per_sm} resident programs: none would take a second tile"
    if schedule == "split":
        if rows * splits > 8 * max(sms, rows):
            return f"{rows * splits} programs are more than 8 for each of {sms} SMs and of {rows} rows"
        if rows * splits < min(sms, rows * 1024) and splits < 1024 and rows * splits * 2 <= sms:
            return f"{rows * splits} programs leave at least half of {sms} SMs idle"
    if gluon:
        reason = _refuse_gluon(problem, config)
        if reason is not None:
            return reason
    elif config["refill"] != "auto" or config["page_ahead"] != 0:
        return "refill and page_ahead are decided by Triton's pipeliner; only Gluon names them"
    if (stages == 1) != (schedule == "page_grid"):
        return "page_grid has no loop to pipeline (num_stages 1); the others have one (2 or more)"
    if config["load"] == "tma":
        if arch < 90:
            return f"sm_{arch} has no TMA (sm_90 and newer have)"
        if block_t > 128:
            return "a TMA step of more than 2 boxes: the same bytes in flight as more stages"
    if heads < problem.heads and (block_t < 128 or warps > 4):
        return "all heads at once where the accumulators fit: steps of 64 tokens, or 8 warps to share them"
    if config["operand_order"] == "qk" and (heads < problem.heads or warps > 4 or block_t > 64):
        return "heads as rows: all heads at once, 4 warps, one page a step"
    if warps == 2 and (_four_warp_mma(problem) or block_t * heads > 64 * 64):
        return "2 warps: accumulators of up to 64 x 64, and not the MMA of sm_90 and sm_100, which takes 4 warps"
    if warps == 8 and block_t < 128:
        return "8 warps need 128 tokens to share"
    if warps == 4 and block_t > 128:
        return "256 tokens need 8 warps: the accumulator would fill the registers"
    if config["dot"] == "block_scaled":
        if arch not in BLOCK_SCALED:
            return f"block-scaled MMA is no other instruction on sm_{arch}"
        if config["operand_order"] != "kq" or heads < problem.heads or stages not in (1, 3):
            return "block-scaled: tokens as rows, all heads at once, 3 stages"
    # Buffers of the pipeline and one of the queries; the compiler's own figure is held against the limit again.
    queries = 2 if gluon and not _prompt(config) else 1
    need = stages * block_t * problem.head_dim + queries * problem.heads * problem.head_dim
    if need > problem.silicon.shared_bytes:
        return f"about {need} B of shared memory are more than the {problem.silicon.shared_bytes} B of {device.name}"
    if per_sm * (need + KB) > device.sm_shared_bytes:
        return f"{per_sm} programs of about {need} B don't fit the {device.sm_shared_bytes} B of an SM"
    return None


def _instructions(problem: IndexerProblem, config: Config) -> float:
    """That a warp issues for a step, about, as counted in the PTX of some variants."""
    threads = 32 * config.int("num_warps")
    tokens = config.int("block_t")
    # A maximum, a product and a sum for each score; with heads as rows the sum goes across lanes and warps: on an H200
    # that took 2.2 times as long.
    scores = 3 * tokens * problem.heads / threads * (2.2 if config["operand_order"] == "qk" else 1.0)
    # An address, a mask, a load and a store for 16 bytes that are gathered.
    gathered = 4 * tokens * problem.head_dim / 16 / threads if config["load"] == "pointer" else 0.0
    return 120 + scores + gathered


def _divides(config: Config) -> bool:
    """Whether the kernel divides by the number of rows, which it does by a multiplication."""
    return config["dialect"] == "gluon" and config["schedule"] == "hybrid"


def _prompt(config: Config) -> bool:
    """Whether the Gluon template for prompts renders this config."""
    return config["dialect"] == "gluon" and config["schedule"] == "split"


def _four_warp_mma(problem: IndexerProblem) -> bool:
    """Hopper and the data-centre Blackwells multiply by groups of four warps and load by TMA best."""
    return 90 <= problem.silicon.arch < 120


def _refuse_gluon(problem: IndexerProblem, config: Config) -> Refusal:
    arch = problem.silicon.arch
    if arch != 90 and _four_warp_mma(problem):
        return f"the Gluon template has no tcgen05 product: sm_{arch} takes the plain one"
    if problem.clean or problem.heads != 64:
        return "the Gluon template serves 64 heads and leaves dead columns alone"
    if config["schedule"] not in ("hybrid", "split") or config.int("splits") > 1:
        return "the Gluon templates have the hybrid schedule, and one program a row (split)"
    if _prompt(config) and (arch != 90 or config["load"] != "tma"):
        return f"the Gluon template for prompts has wgmma and TMA loads only (sm_90); sm_{arch} takes the plain one"
    if problem.rows > MAX_GLUON_ROWS and config["schedule"] == "hybrid":
        return f"{problem.rows} rows: the Gluon scan serves up to {MAX_GLUON_ROWS}"
    if config.int("block_t") > problem.page_size or config.int("heads_per_step") < problem.heads:
        return "the Gluon template takes one page and all heads a step"
    if config["operand_order"] != "kq" or config["dot"] != "fp8":
        return "the Gluon template has tokens as rows and the plain fp8 product"
    if config["num_warps"] not in ((4,) if arch == 90 else (4, 8)):
        return "the Gluon template takes 4 warps, or 8 without wgmma"
    if config["refill"] == "auto" or config["page_ahead"] == 0:
        return "Gluon names refill and page_ahead"
    if config.int("num_stages") < (2 if _prompt(config) else 3) + (config["refill"] == "early"):
        return "Gluon's ring needs 3 buffers (2 for prompts), and one more with early refill"
    return None


def _describe(matrix: torch.Tensor, box: list[int]) -> Any:
    # Imported here: planning needs no Triton.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, box)


def _describe_gluon(matrix: torch.Tensor, box: list[int]) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)
