"""Triton's compiler for every named target, without a GPU: what the defaults take, and how failures are told."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import CompileError, compile_config, compile_source
from dsv4tune.codegen.devices import DEVICES, Device
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.problem import Silicon
from dsv4tune.codegen.render import Source, environment, render

TRITON = tuple(int(part) for part in metadata.version("triton").split(".")[:2])


@pytest.mark.parametrize("target", devices.TARGETS)
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_every_default_fits_its_target(indexer: Indexer, target: str, rows: int) -> None:
    card = devices.named(target=target)
    problem = indexer.problem(rows, card.silicon)
    report = compile_config(indexer, problem, indexer.default(problem, card)).report
    assert report.refusal(card.silicon) is None and report.shared_bytes <= card.silicon.shared_bytes
    assert report.spill_bytes == 0 and 0 < report.registers <= 255
    # Triton 3.6 compiles an fp8 product to an f16 one on sm_121; the report says so.
    assert report.native_fp8 is (target != "sm_121" or TRITON > (3, 6)), report.mma
    assert report.async_copy == ("tma" if target in ("sm_90", "sm_100") else "cp.async")
    assert len(report.binary) == 64 and report.instructions > 100


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 700, 4096])
@pytest.mark.parametrize(
    # Ways to load and refill: nothing loads by TMA before sm_90, and only sm_90 has a template for prompts.
    ("target", "decode", "prompts"),
    [("sm_89", 2, 0), ("sm_90", 4, 2), ("sm_120", 4, 0), ("sm_121", 4, 0)],
)
def test_the_gluon_templates_compile_without_spills(
    indexer: Indexer, target: str, decode: int, prompts: int, rows: int
) -> None:
    card = devices.named(target=target)
    problem = indexer.problem(rows, card.silicon)
    seen = set()
    for config in indexer.space(problem, card).valid():
        design = (config["load"], config["refill"])
        if config["dialect"] == "gluon" and design not in seen:
            seen.add(design)
            report = compile_config(indexer, problem, config).report
            assert report.spill_bytes == 0 and report.native_fp8, (config, report)
            assert report.refusal(card.silicon) is None
    assert len(seen) == (decode if rows == 64 else prompts)


def test_what_the_cache_has_is_known_by_its_text(
    indexer: Indexer, problem: IndexerProblem, card: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loads a text again reads no syntax tree and compiles nothing; another text is another kernel."""
    configs = [indexer.reference_config(problem, card).with_(block_t=block) for block in (64, 128)]
    first = [compile_config(indexer, problem, config) for config in configs]
    for kernel in first:
        del sys.modules[f"dsv4tune_rendered.{kernel.source.name}"]
    for where in ("triton.runtime.jit.DependenciesFinder.visit", "triton.compiler.ASTSource.make_ir"):
        monkeypatch.setattr(where, lambda *_, **__: pytest.fail("it was read or compiled again"))
    again = [compile_config(indexer, problem, config) for config in configs]
    codes = [[kernel.code for kernel in kernels] for kernels in (first, again)]
    assert codes[0] == codes[1] and codes[0][0] != codes[0][1]


def test_too_much_shared_memory_is_refused_with_the_number(
    indexer: Indexer, problem: IndexerProblem, card: Device
) -> None:
    """147,456 B on a card that allows 101,376 was seen to fail at launch, in a server."""
    report = compile_config(indexer, problem, indexer.default(problem, card)).report
    large = replace(report, shared_bytes=147_456)
    assert large.refusal(card.silicon) == "needs 147456 B of shared memory, sm_120 allows 101376 B a program"
    assert report.refusal(Silicon("12.0", 188, report.shared_bytes)) is None


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_one_machine_code_is_told_from_another(indexer: Indexer, target: str) -> None:
    """Three and four buffers of a pointer load were seen to give the same instructions under other line tables."""
    card = devices.named(target=target)
    problem = indexer.problem(64, card.silicon)
    words = {"schedule": "split", "load": "pointer", "dot": "fp8", "block_t": 64, "splits": 2, "num_warps": 4}
    like_it = [c for c in indexer.space(problem, card).valid() if all(c[w] == v for w, v in words.items())]
    three = next(c for c in like_it if c["num_stages"] == 3)
    variants = {
        "three": three,
        "four": three.with_(num_stages=4),
        "two": three.with_(num_stages=2),
        "more warps": three.with_(num_warps=8),
    }
    kernels = {name: compile_config(indexer, problem, config) for name, config in variants.items()}
    assert all(config in like_it or name == "more warps" for name, config in variants.items())
    assert kernels["three"].report.binary != kernels["four"].report.binary
    assert kernels["three"].code == kernels["four"].code
    assert len({kernel.code for kernel in kernels.values()}) == 3
    assert all(len(kernel.code) == 64 for kernel in kernels.values())
    # The same file asked for with more shared memory is another launch.
    (one,) = kernels["three"].compiled.values()
    more = SimpleNamespace(asm=one.asm, metadata=SimpleNamespace(**{**one.metadata._asdict(), "shared": 50_000}))
    assert replace(kernels["three"], compiled={"kernel": more}).code != kernels["three"].code
    # So is one whose last instruction, a no-op that fills the section up, has another bit.
    text = bytearray(one.asm["cubin"])
    text[text.rindex(b"\x18\x79" + bytes(8))] ^= 1
    other = SimpleNamespace(asm={"cubin": bytes(text)}, metadata=one.metadata)
    assert replace(kernels["three"], compiled={"kernel": other}).code != kernels["three"].code


@pytest.mark.parametrize(
    "text",
    [
        "import triton\n@triton.jit\ndef kernel(q):\n    return undefined_name\nOPTIONS = {'kernel': {}}\n",
        "this is no Python",
        "OPTIONS = {}\n",
    ],
)
def test_what_the_compiler_raises_is_one_line(indexer: Indexer, problem: IndexerProblem, text: str) -> None:
    source = Source(f"broken_{abs(hash(text))}", text, "0" * 64)
    config = indexer.default(problem, devices.DEVICES["rtx-pro-6000"])
    with pytest.raises(CompileError) as raised:
        compile_source(source, {"kernel": indexer.arguments(problem, config)["kernel"][:1]}, problem.silicon)
    assert "\n" not in str(raised.value) and len(str(raised.value)) <= 300


def test_the_text_is_that_of_the_whole_problem_and_config() -> None:
    """What is kept of a rendering leaves rows, SMs and plan words out: no template may read them."""
    for op in ops.OPS.values():
        for card in (DEVICES["h200"], DEVICES["rtx-pro-6000"]):
            problem = op.problem(48, card.silicon)
            configs = op.space(problem, card).valid()
            for config in configs[:: len(configs) // 20]:
                structure = {name: config[name] for name in op.words if name not in op.plan_words}
                values = op.template_values(problem, config)
                text = (
                    environment()
                    .get_template(op.template(config))
                    .render(problem=problem, config=config, structure=structure, **values)
                )
                assert render(op, problem, config).text == text


def test_sources_are_readable_and_shared_between_plans(
    indexer: Indexer, problem: IndexerProblem, card: Device, cache: Path
) -> None:
    config = indexer.default(problem, card)
    source = render(indexer, problem, config)
    assert source == render(indexer, problem, config.with_(programs_per_sm=2))
    # Row counts of one power of two share a binary too.
    assert source == render(indexer, indexer.problem(33, problem.silicon), config)
    assert source != render(indexer, indexer.problem(32, problem.silicon), config)
    path = source.save()
    assert path.parent.parent == cache and path.read_text() == source.text
    assert source.sha[:16] in path.name and "schedule         hybrid" in source.text


@pytest.mark.parametrize("found", ["", "OPTIONS = {}\n"])
def test_a_saved_source_that_was_truncated_or_edited_is_written_again(
    indexer: Indexer, problem: IndexerProblem, card: Device, found: str
) -> None:
    source = render(indexer, problem, indexer.default(problem, card))
    source.save().write_text(found)
    assert source.save().read_text() == source.text


def test_cleaning_is_another_kernel(indexer: Indexer, card: Device) -> None:
    problem = indexer.problem(64, card.silicon, clean=True)
    config = indexer.default(problem, card)
    assert "clean_tail" in render(indexer, problem, config).text
    assert compile_config(indexer, problem, config).report.spill_bytes == 0
