"""The indexer's space: its size, its reasons, and that every knob changes the binary or the launch."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import compile_source
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem, refuse
from dsv4tune.codegen.problem import Profile, Silicon
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config

#: Knobs that another one brings along.
BRINGS = {"schedule": ("splits", "programs_per_sm", "num_stages"), "dialect": ("refill", "page_ahead")}

CARDS = list(devices.DEVICES.values())


@pytest.mark.parametrize(
    ("name", "rows"),
    [("rtx-pro-6000", 1), ("rtx-pro-6000", 512), ("rtx-5090", 64), ("h200", 16), ("h200", 512), ("gb10", 64)],
)
def test_between_200_and_600_configs_with_their_own_launch(indexer: Indexer, name: str, rows: int) -> None:
    card = devices.DEVICES[name]
    problem = indexer.problem(rows, card.silicon)
    valid = indexer.space(problem, card).valid()
    launches = {(render(indexer, problem, c).sha, indexer.plan(problem, c, 262_208)) for c in valid}
    assert 200 <= len(launches) <= 600
    assert len(launches) == len(valid)


@pytest.mark.parametrize("card", CARDS, ids=lambda d: d.name)
@pytest.mark.parametrize("rows", [1, 7, 64, 512, 1024, 16384])
def test_defaults_are_valid(indexer: Indexer, card: Device, rows: int) -> None:
    problem = indexer.problem(rows, card.silicon)
    valid = indexer.space(problem, card).valid()
    assert indexer.default(problem, card) in valid
    assert indexer.reference_config(problem, card) in valid


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"splits": 4}, "splits belongs to the split schedule"),
        ({"schedule": "split", "splits": 4}, "programs_per_sm belongs to"),
        (
            {"schedule": "split", "splits": 1024, "programs_per_sm": 0},
            "programs are more than 8 for each of 188 SMs and of 64 rows",
        ),
        ({"num_stages": 1}, "no loop to pipeline"),
        ({"load": "tma", "block_t": 256, "num_warps": 8}, "more than 2 boxes"),
        ({"heads_per_step": 32}, "all heads at once"),
        ({"operand_order": "qk", "num_warps": 8, "block_t": 128}, "heads as rows"),
        ({"num_warps": 8}, "8 warps need 128 tokens"),
        ({"block_t": 256}, "256 tokens need 8 warps"),
        ({"num_stages": 6, "block_t": 256, "num_warps": 8}, "B of shared memory are more than the 101376 B"),
        ({"num_stages": 6}, "don't fit the 102400 B of an SM"),
        ({"dot": "block_scaled", "operand_order": "qk", "num_stages": 3, "programs_per_sm": 2}, "block-scaled: tokens"),
    ],
)
def test_each_refusal_states_its_reason(
    indexer: Indexer, problem: IndexerProblem, card: Device, changes: dict[str, int | str], reason: str
) -> None:
    config = indexer.default(problem, card).with_(**changes)
    found = refuse(problem, card, config)
    assert found is not None and reason in found


def test_no_tma_before_sm_90(indexer: Indexer) -> None:
    card = devices.DEVICES["rtx-4090"]
    problem = indexer.problem(64, card.silicon)
    config = indexer.default(problem, card).with_(load="tma")
    assert "no TMA" in str(refuse(problem, card, config))


@pytest.mark.slow
def test_every_knob_changes_the_binary_or_the_plan(indexer: Indexer, problem: IndexerProblem, card: Device) -> None:
    """For each parameter: two valid configs that differ in it alone, with another machine code or another grid."""
    valid = indexer.space(problem, card).valid()
    seen: dict[str, set[str]] = defaultdict(set)

    def identity(config: Config) -> str:
        kernel = compile_source(render(indexer, problem, config), indexer.arguments(problem, config), problem.silicon)
        return f"{kernel.report.binary} {indexer.plan(problem, config, 262_208).launches[0].grid}"

    for parameter in indexer.space(problem, card).parameters:
        if len(parameter.values) == 1:
            continue
        groups: dict[str, list[Config]] = defaultdict(list)
        for config in valid:
            rest = {k: v for k, v in config.items() if k != parameter.name}
            rest = {k: v for k, v in rest.items() if k not in BRINGS.get(parameter.name, ())}
            groups[json.dumps(rest, sort_keys=True)].append(config)
        siblings = max(groups.values(), key=lambda group: len({c[parameter.name] for c in group}))
        assert len({c[parameter.name] for c in siblings}) > 1, parameter.name
        by_value = {c[parameter.name]: c for c in siblings}
        seen[parameter.name] = {identity(config) for config in by_value.values()}
        assert len(seen[parameter.name]) == len(by_value), parameter.name


def test_the_key_is_canonical_and_holds_every_field(indexer: Indexer, problem: IndexerProblem) -> None:
    assert problem.key == (
        "indexer clean=False head_dim=128 heads=64 layout=fp8_fp32_scale page_size=64 rows=64 "
        "sm_120 sms=188 shared=101376"
    )
    assert ops.problem_from_json(problem.to_json()) == problem
    others = [
        indexer.problem(65, problem.silicon),
        indexer.problem(64, problem.silicon, clean=True),
        indexer.problem(64, problem.silicon, heads=32),
        indexer.problem(64, Silicon("12.1", 188, 101376)),
        indexer.problem(64, Silicon("12.0", 170, 101376)),
        indexer.problem(64, Silicon("12.0", 188, 100000)),
    ]
    assert len({p.key for p in [problem, *others]}) == 7


def test_the_order_of_words_changes_nothing(indexer: Indexer, problem: IndexerProblem, card: Device) -> None:
    """A config from the database has its words sorted; it must find its own source again."""
    space = indexer.space(problem, card)
    assert tuple(p.name for p in space.parameters) == indexer.words
    for config in space.valid()[::40]:
        again = Config(json.loads(config.key))
        assert again == config and list(again) != list(config)
        assert render(indexer, problem, again) == render(indexer, problem, config)


def test_the_same_silicon_under_another_name_is_the_same_problem(indexer: Indexer, card: Device) -> None:
    workstation = Device("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", card.silicon, 102400, 1, 1.0, "test")
    assert indexer.problem(1, workstation.silicon).key == indexer.problem(1, card.silicon).key


def test_width_follows_the_page_table(indexer: Indexer) -> None:
    assert indexer.width(1_048_576, 0) == 4097 * 64 == 262_208
    assert indexer.width(8192, 0) == 33 * 64
    assert indexer.width(8192, 253) == 34 * 64


def test_a_profile_states_what_is_wrong(indexer: Indexer, problem: IndexerProblem) -> None:
    assert indexer.profile(problem, 262_208).lengths == (128, 2048, 32768, 262_208)
    assert indexer.profile(problem, 1024).lengths == (128, 1024)
    assert indexer.profile(indexer.problem(4096, problem.silicon), 262_208).causal
    with pytest.raises(ValueError, match="outside 1"):
        Profile(1024, (2048,), (1.0,))
    with pytest.raises(ValueError, match="above 0"):
        Profile(1024, (128,), (0.0,))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bogus": 1}, "unknown config word 'bogus'"),
        ({"block_t": 96}, "block_t=96 is not one of"),
        ({"block_t": True}, "block_t=True is not one of"),
        ({"num_stages": 1}, "config refused"),
        ({"schedule": "import os"}, "is not one of"),
    ],
)
def test_values_from_outside_are_held_against_the_space(
    indexer: Indexer, problem: IndexerProblem, card: Device, values: dict[str, object], message: str
) -> None:
    space = indexer.space(problem, card)
    good = dict(indexer.default(problem, card))
    assert space.check(good) == indexer.default(problem, card)
    with pytest.raises(ValueError, match=message):
        space.check({**good, **values})
    with pytest.raises(ValueError, match="is missing"):
        space.check({})


def test_unknown_words_name_the_known_ones(indexer: Indexer) -> None:
    with pytest.raises(ValueError, match="did you mean 'indexer'"):
        ops.get("indexr")
    with pytest.raises(ValueError, match="unknown device 'rtx-6000'"):
        devices.named("rtx-6000")
    with pytest.raises(ValueError, match="is sm_120, not sm_90"):
        devices.named("rtx-5090", "sm_90")
    assert devices.named(target="sm_120").name == "rtx-pro-6000"
    with pytest.raises(ValueError, match="rows must be 1 to 262144, not 0"):
        indexer.problem(0, CARDS[0].silicon)
    with pytest.raises(ValueError, match="unknown layout"):
        indexer.problem(1, CARDS[0].silicon, layout="fp4")
