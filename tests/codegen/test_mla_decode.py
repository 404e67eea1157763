"""MLA decode: its space, launch plan, compiled defaults, and its plain kernels through Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mla_jobs
import pytest
import torch
from pools import answers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4tune.codegen import devices, models, ops
from dsv4tune.codegen.compile import compile_config
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops.mla_decode import MlaDecode, even_splits, groups, refuse
from dsv4tune.codegen.ops.mla_decode_call import TOKEN_BYTES, MlaDecodeCall, MlaDecodeProblem, page_stride
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.runtime.launch import Variant
from dsv4tune.tools.measure import interpret_job
from dsv4tune.tools.workers import Pool

NO_EXTRA = {"extra_page_size": 0, "extra_width": 0}
WIDE = {"extra_page_size": 2, "extra_width": 8256}
HEADS = (8, 12, 16, 24, 32, 48, 64, 96, 128)


@pytest.fixture(scope="module")
def op() -> MlaDecode:
    found = ops.get("mla_decode")
    assert isinstance(found, MlaDecode)
    return found


def valid(op: MlaDecode, problem: MlaDecodeProblem, card: Device) -> list[Config]:
    return op.space(problem, card).valid()


def plain(op: MlaDecode, problem: MlaDecodeProblem, card: Device, **words: int | str) -> Config:
    """The plain config of the space that has these words."""
    wanted = {"dialect": "triton", **words}
    return next(c for c in valid(op, problem, card) if all(c[k] == v for k, v in wanted.items()))


# -- space ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200", "rtx-pro-6000"])
@pytest.mark.parametrize(("heads", "rows"), [(8, 1), (8, 16), (8, 64), (16, 4), (16, 64), (64, 4)])
def test_between_200_and_600_configs(op: MlaDecode, name: str, heads: int, rows: int) -> None:
    card = devices.DEVICES[name]
    problem = op.problem(rows, card.silicon, heads=heads)
    found = valid(op, problem, card)
    assert 200 <= len(found) <= 600
    assert {c["dialect"] for c in found} == {"triton", "gluon"}
    assert len({c.key for c in found}) == len(found)


@pytest.mark.parametrize("card", devices.DEVICES.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("heads", [1, 12, 64, 128])
def test_defaults_are_valid(op: MlaDecode, card: Device, heads: int) -> None:
    for rows in (1, 7, 64, 256, 16_384):
        for options in ({}, NO_EXTRA, WIDE, {"width": 64, "extra_width": 1024}):
            problem = op.problem(rows, card.silicon, heads=heads, **options)
            for config in (op.default(problem, card), op.reference_config(problem, card)):
                assert refuse(problem, card, config) is None, (problem.label, config)
                op.space(problem, card).check(dict(config))
            assert op.reference_config(problem, card)["splits"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operand_order": "qk"}, "heads as rows: the MMA takes 16"),
        ({"heads_per_program": 32}, "at least half would be padding, of 8 real heads"),
        ({"num_warps": 8}, "no columns for 8 warps"),
        ({"num_warps": 2, "block_t": 64}, "2 warps: tiles of 256 scores"),
        ({"num_stages": 2}, "cp_async has 1 or 2 tiles under way"),
        ({"load": "cp_async"}, "cp_async has 1 or 2 tiles under way"),
        (
            {"load": "cp_async", "num_stages": 3, "block_t": 64},
            "B of shared memory are more than the 101376 B of sm_120",
        ),
        ({"load": "cp_async", "num_stages": 2, "splits": 10}, "too few to have 2 under way"),
        ({"convert": "late", "block_t": 64}, "converted late: tokens as rows"),
        ({"loop": "apart", "splits": 4}, "too few for two loops"),
        ({"combine": "none"}, "combine and pdl belong to splits"),
        ({"splits": 16}, "the longest program has 2, as with fewer splits"),
        ({"splits": 20}, "are more than 2 for each of 188 SMs"),
        ({"splits": 128}, "as with fewer splits"),
        ({"combine": "1x128"}, "to combine are more than 8 for each of 188 SMs"),
        ({"pdl": "off"}, "programmatic dependent launch is late or early"),
        ({"splits": 4, "pdl": "early"}, "would wait in room"),
    ],
)
def test_each_refusal_states_its_reason(
    op: MlaDecode, card: Device, changes: dict[str, int | str], reason: str
) -> None:
    problem = op.problem(64, card.silicon)
    config = plain(op, problem, card, splits=2, pdl="late", operand_order="kq", block_t=32, load="pointer", num_warps=4)
    found = refuse(problem, card, config.with_(**changes))
    assert found is not None and reason in found


def test_no_extra_cache_no_second_loop(op: MlaDecode, card: Device) -> None:
    problem = op.problem(64, card.silicon, **NO_EXTRA)
    config = op.default(problem, card).with_(loop="joint")
    assert "one cache, one loop" in str(refuse(problem, card, config))


def test_no_dependent_launch_before_sm_90(op: MlaDecode) -> None:
    card = devices.DEVICES["rtx-4090"]
    problem = op.problem(16, card.silicon)
    config = op.default(problem, card)
    assert config["splits"] != 1 and config["pdl"] == "off"
    assert "programmatic dependent launch" in str(refuse(problem, card, config.with_(pdl="late")))


def test_even_splits() -> None:
    assert even_splits(10) == [1, 2, 3, 4, 5, 10]
    assert even_splits(20) == [1, 2, 3, 4, 5, 8, 10, 20]
    assert even_splits(1) == [1]


def test_command_line_options_become_fields(op: MlaDecode) -> None:
    assert op.width(1_048_576, 0) == 8256
    problem = op.problem(1, devices.DEVICES["h200"].silicon, **op.options({"tp": 8, "cache": "c128"}, 1 << 20, 0))
    assert (problem.heads, problem.extra_page_size, problem.extra_width) == (8, 2, 8256)
    assert op.profile(problem, 0).lengths == (1, 256, 8256)
    problem = op.problem(1, problem.silicon, **op.options({"heads": 16, "cache": "none"}, 1 << 20, 0))
    assert (problem.heads, problem.extra_width) == (16, 0) and op.profile(problem, 0).lengths == (128,)
    assert op.profile(op.problem(1, problem.silicon), 0).lengths == (1, 64, 512)
    assert op.profile(op.problem(4096, problem.silicon), 0).causal
    pro = {"model": models.PRO}
    assert op.options({}, 1 << 20, 0) == {"heads": 8, "extra_page_size": 64, "extra_width": 512}
    assert op.options(pro, 1 << 20, 0) == {"heads": 16, "extra_page_size": 64, "extra_width": 1024}
    assert op.options({"tp": 1, "cache": "c128"} | pro, 1 << 20, 0)["heads"] == 128
    assert op.options({"heads": 4} | pro, 1 << 20, 0) == {"heads": 4, "extra_page_size": 64, "extra_width": 1024}
    with pytest.raises(ValueError, match="--tp 3 doesn't divide the 64 query heads"):
        op.options({"tp": 3}, 1 << 20, 0)
    with pytest.raises(ValueError, match="unknown"):
        op.options({"cache": "c5"}, 1 << 20, 0)


def test_the_key_holds_every_field(op: MlaDecode, card: Device) -> None:
    problem = op.problem(64, card.silicon)
    assert ops.problem_from_json(problem.to_json()) == problem
    changed: tuple[dict[str, Any], ...] = (
        {"heads": 16}, {"page_size": 64}, {"width": 192}, {"extra_page_size": 2}, {"extra_width": 1024}, {"lse": True},
    )  # fmt: skip
    assert len({p.key for p in (problem, *(replace(problem, **change) for change in changed))}) == 7


def test_rows_widths_and_splits_share_sources(op: MlaDecode, card: Device) -> None:
    problem = op.problem(64, card.silicon)
    config = plain(op, problem, card, splits=3)
    source = render(op, problem, config)
    assert source == render(op, problem, config.with_(splits=4))
    assert source == render(op, replace(problem, rows=16_384, width=192, extra_width=1024), config)
    assert source != render(op, problem, config.with_(splits=5))
    assert source != render(op, replace(problem, heads=7), config)
    # A config from the database has its words sorted.
    assert render(op, problem, Config(json.loads(config.key))) == source


# -- plan -------------------------------------------------------------------------------------------------------


class NoHostCopies(TorchDispatchMode):
    """Refuses what would read a tensor's values on the host: a synchronisation, an error under capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "_to_copy", "equal", "nonzero"), name
        return func(*args, **(kwargs or {}))


class Recorder:
    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


def call_of(problem: MlaDecodeProblem, padded_heads: int) -> MlaDecodeCall:
    def cache_of(page_size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stride = page_stride(page_size)
        pool = torch.empty(500, stride, dtype=torch.uint8)
        indices = torch.empty(problem.rows, width + 16, dtype=torch.int32)[:, :width]
        lengths = torch.empty(problem.rows, 2, dtype=torch.int32)[:, 0]
        cache = pool.as_strided((500, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))
        return cache, indices, lengths

    extra: tuple[Any, ...] = (None, None, None)
    if problem.extra_width:
        extra = cache_of(problem.extra_page_size, problem.extra_width)
    q = torch.empty(problem.rows, padded_heads, 512, dtype=torch.bfloat16)
    cache, indices, lengths = cache_of(problem.page_size, problem.width)
    return MlaDecodeCall(
        q=q,
        cache=cache,
        indices=indices,
        lengths=lengths,
        extra_cache=extra[0],
        extra_indices=extra[1],
        extra_lengths=extra[2],
        sink=torch.empty(padded_heads),
        scale=512**-0.5,
        out=torch.empty_like(q),
        lse=torch.empty(problem.rows, padded_heads) if problem.lse else None,
    )


@pytest.mark.parametrize("rows", [1, 64, 70_000])
@pytest.mark.parametrize("options", [{}, {**NO_EXTRA, "lse": True}, WIDE], ids=["c4", "none", "c128"])
def test_launching_reads_shapes_only(op: MlaDecode, rows: int, options: dict[str, Any]) -> None:
    """The whole way from a call to the launchers, with tensors that have no values and host copies refused."""
    card = devices.DEVICES["h200"]
    problem = op.problem(rows, card.silicon, heads=12, **options)
    designs = {(c["dialect"], c["splits"], c["combine"]): c for c in valid(op, problem, card)}
    with FakeTensorMode(allow_non_fake_inputs=False):
        call = call_of(problem, padded_heads=64)
        for config in designs.values():
            arguments = op.arguments(problem, config)
            recorders = {name: Recorder() for name in arguments}
            variant = Variant(op, problem, config, 0, recorders, "cpu")
            with NoHostCopies():
                variant(call)
            plan = op.plan(problem, config, 0)
            assert [launch.kernel for launch in plan.launches] == list(arguments)
            for launch in plan.launches:
                ((grid, taken),) = recorders[launch.kernel].launches
                assert grid == launch.grid and len(taken) == len(arguments[launch.kernel])
                assert 1 <= grid[0] < 2**31 and 1 <= grid[1] < 2**16 and grid[2] == 1
            split = config["splits"] != 1
            assert bool(plan.scratch) is split and len(plan.launches) == 1 + split


def test_a_plan_follows_rows_groups_and_splits(op: MlaDecode, card: Device) -> None:
    problem = op.problem(100, card.silicon, heads=20)
    config = plain(op, problem, card, heads_per_program=16, splits=2, combine="2x512")
    assert groups(problem, config) == 2
    plan = op.plan(problem, config, 0)
    assert [launch.grid for launch in plan.launches] == [(200, 2, 1), (1000, 1, 1)]
    assert {buffer.name: buffer.shape for buffer in plan.scratch} == {
        "partial": (100, 2, 20, 512),
        "partial_lse": (100, 2, 20),
    }


def test_padded_heads_are_an_argument(op: MlaDecode, card: Device) -> None:
    problem = op.problem(3, card.silicon)
    config = op.reference_config(problem, card)
    names = [argument.name for argument in op.arguments(problem, config)["kernel"]]
    for padded in (8, 64):
        bound = op.bind(problem, config, call_of(problem, padded), {})["kernel"]
        assert bound[names.index("padded_heads")] == padded
        assert bound[names.index("slots")] == 500 * 256 and bound[names.index("extra_slots")] == 500 * 64
    with pytest.raises(ValueError, match="fewer than the 8"):
        op.bind(problem, config, call_of(problem, 7), {})


def test_work_counts_tiles_of_both_caches(op: MlaDecode, card: Device) -> None:
    problem = op.problem(10, card.silicon, heads=16)
    config = plain(op, problem, card, block_t=32, splits=10, heads_per_program=16)
    work = op.work(problem, config, op.profile(problem, 0), 65)
    assert (work.programs, work.steps, work.longest) == (100, 10 * (4 + 3), 1)


# -- compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_sm_120_defaults_fit_without_spills(op: MlaDecode, card: Device, heads: int) -> None:
    problem = op.problem(64, card.silicon, heads=heads)
    report = compile_config(op, problem, op.default(problem, card)).report
    assert report.shared_bytes <= 101_376 and report.refusal(card.silicon) is None
    assert report.stack_bytes == report.spill_bytes == 0 and report.mma.startswith("mma.sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "heads"),
    [("sm_120", n) for n in HEADS] + [(t, n) for t in devices.TARGETS for n in (8, 12, 64) if t != "sm_120"],
)
def test_every_default_fits_its_target(op: MlaDecode, target: str, heads: int) -> None:
    card = devices.named(target=target)
    for rows, options in ((4096, {}), (16, {**WIDE, "lse": True})):
        problem = op.problem(rows, card.silicon, heads=heads, **options)
        for config in {op.default(problem, card), op.reference_config(problem, card)}:
            report = compile_config(op, problem, config).report
            # With 64 heads as the rows of wgmma, Triton 3.6 spills a little of the fastest kernel.
            spilled = 128 if config["dialect"] == "gluon" and config["operand_order"] == "qk" else 0
            assert report.refusal(card.silicon) is None and report.spill_bytes <= spilled, (problem.label, config)
            if target == "sm_120":
                assert report.stack_bytes == 0


# -- interpreted ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    # Matrices this small are slower on more threads, and much so on a busy machine.
    found = Pool(2, 300, {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore", "OPENBLAS_NUM_THREADS": "1"})
    yield found
    found.close()


#: Options of the problem and words of the config: every knob's every value, heads, page sizes and caches.
INTERPRETED: dict[str, tuple[dict[str, Any], dict[str, int | str]]] = {
    "8 heads, tokens as rows": ({"heads": 8, "lse": True}, {"operand_order": "kq", "splits": 1}),
    "heads as rows": ({"heads": 8, "page_size": 64}, {"operand_order": "qk", "splits": 1, "block_t": 16}),
    "3 splits": ({"heads": 8, "rows": 64, "lse": True}, {"operand_order": "kq", "splits": 3, "combine": "1x512"}),
    "12 heads, early": (
        {"heads": 12, "rows": 16, "page_size": 2, "lse": True},
        {"splits": 8, "pdl": "early", "combine": "1x128", "operand_order": "kq"},
    ),
    "converted late": ({"heads": 7, "extra_page_size": 256}, {"convert": "late", "splits": 1}),
    "16 heads, copied ahead": ({"heads": 16, "rows": 128}, {"load": "cp_async", "num_stages": 3, "splits": 2}),
    "64 heads": ({"heads": 64, "rows": 128}, {"operand_order": "qk", "heads_per_program": 32, "splits": 1}),
    "two loops": ({"heads": 1, "page_size": 256, "extra_page_size": 2}, {"loop": "apart", "splits": 1, "block_t": 64}),
    "one cache": ({"heads": 8, "rows": 64, **NO_EXTRA}, {"splits": 2, "block_t": 32, "operand_order": "qk"}),
}


def job_of(op: MlaDecode, card: Device, name: str) -> tuple[MlaDecodeProblem, Config]:
    options, words = INTERPRETED[name]
    problem = op.problem(**{"rows": 512, "silicon": card.silicon, **options})
    return problem, plain(op, problem, card, **words)


def test_kernels_are_right_where_it_counts(op: MlaDecode, card: Device, pool: Pool) -> None:
    """The first case, 5 rows: both caches full, both empty, either one alone, and indices of -1 only."""
    jobs = {name: (mla_jobs.first_cases, *job_of(op, card, name), 1) for name in list(INTERPRETED)[::2]}
    for name, answer in answers(pool, jobs).items():
        assert answer.kind == "ok" and answer.value.ok, (name, answer)
        assert 0 < answer.value.error <= 3e-3


def test_infinities_are_no_warning(op: MlaDecode, card: Device, pool: Pool) -> None:
    """They belong to the kernel; a search printed a dozen lines of them."""
    answer = pool.ask(mla_jobs.warnings_of, *job_of(op, card, "3 splits"))
    assert answer.kind == "ok" and answer.value == []


@pytest.mark.slow
def test_kernels_are_right_in_every_case(op: MlaDecode, card: Device, pool: Pool) -> None:
    jobs = {name: (interpret_job, *job_of(op, card, name)) for name in INTERPRETED}
    for name, answer in answers(pool, jobs).items():
        assert answer.kind == "ok" and answer.value.ok, (name, answer)


def test_slots_past_2_31_bytes(op: MlaDecode, card: Device, pool: Pool) -> None:
    jobs = {}
    for page, extra_page in ((256, 64), (64, 2)):
        problem = op.problem(64, card.silicon, page_size=page, extra_page_size=extra_page)
        config = plain(op, problem, card, splits=2, operand_order="kq", block_t=64)
        jobs[page] = (mla_jobs.far, problem, config)
    for answer in answers(pool, jobs).values():
        assert answer.kind == "ok" and answer.value.ok, answer


def test_a_row_does_not_depend_on_its_neighbours(op: MlaDecode, card: Device, pool: Pool) -> None:
    problem = op.problem(64, card.silicon)
    configs = [plain(op, problem, card, splits=splits, block_t=32, operand_order="kq") for splits in (1, 3)]
    for answer in answers(pool, {c: (mla_jobs.neighbours, problem, c) for c in configs}).values():
        assert answer.kind == "ok" and len(answer.value) == 5 and all(answer.value), answer


FAULTS = {
    "scale forgotten": ("values.to(OPERAND) * scale_of(scales, chunk).to(OPERAND)[:, None]", "values.to(OPERAND)"),
    "scale of another chunk": ("(scales >> (8 * chunk))", "(scales >> (8 * (6 - chunk)))"),
    "holes attended to": (
        "score = tl.where(valid[:, None], score * scale,",
        "score = tl.where(score < 1e30, score * scale,",
    ),
    "NaN scale of slot 0 read": ("tl.uint64)), mask=valid, other=0)", "tl.uint64)))"),
    "NaN of rotary values read": ("tl.load(at, mask=valid[:, None], other=0.0)", "tl.load(at)"),
    "no decay": ("decay = tl.exp2(most - higher)", "decay = tl.exp2(higher - higher)"),
    "one cache twice": ("tl.where(in_window, token, extra_token)", "tl.where(in_window, token, token)"),
    "sink in the lse": ("(most + tl.log2(total)) * LN_2", "(most + tl.log2(total + 1e-2)) * LN_2"),
    "no sink": ("1.0 / (total + tl.exp2(joined - most))", "1.0 / total"),
    "length ignored": ("mask=at < length, other=-1)", "mask=at < length + 1, other=-1)"),
    "padded heads": ("row * padded_heads * HEAD_DIM", "row * HEADS * HEAD_DIM"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found(op: MlaDecode, card: Device, pool: Pool, fault: str) -> None:
    import faulty

    problem = op.problem(512, card.silicon, lse=True)
    config = plain(op, problem, card, operand_order="kq", block_t=32, splits=1, convert="early", load="pointer")
    answer = answers(pool, {fault: (faulty.interpret, problem, config, *FAULTS[fault])})[fault]
    assert answer.kind in ("raised", "died") or (answer.kind == "ok" and not answer.value.ok), answer
