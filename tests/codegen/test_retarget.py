"""Code for sm_120, rewritten for sm_90a: assembled everywhere, executed where there is a Hopper GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import CompileError, Kernel, compile_source, nvidia_tools
from dsv4tune.codegen.devices import Device
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.render import render
from dsv4tune.codegen.retarget import assemble, hopper_ptx, retarget, unpack_f32x2
from dsv4tune.codegen.space import Config, Space
from dsv4tune.tools.emulate import emulate

WIDTH = 40 * 64
#: Its programs take several tiles each, copied ahead.
LOOPED = ("triton", "split", "pointer")
DESIGN = ("dialect", "schedule", "load", "operand_order")


def designs(op: Indexer, problem: IndexerProblem, card: Device, dot: str = "fp8") -> list[Config]:
    """The middle config of each design: with a pipeline, and not the space's corner."""
    space = op.space(problem, card)
    # Enumerating all values takes many seconds.
    few: dict[str, tuple[int | str, ...]] = {
        "dot": (dot,),
        "block_t": (64, 128),
        "splits": (0, 4, 8),
        "programs_per_sm": (0, 1, 2),
        "num_warps": (2, 4),
        "num_stages": (1, 2, 3, 4),
    }
    parameters = tuple(replace(p, values=few.get(p.name, p.values)) for p in space.parameters)
    found: dict[Any, list[Config]] = {}
    for config in Space(parameters, space.refuse).valid():
        found.setdefault(tuple(config[word] for word in DESIGN), []).append(config)
    return [configs[len(configs) // 2] for configs in found.values()]


def compiled(op: Indexer, problem: IndexerProblem, config: Config) -> Kernel:
    return compile_source(render(op, problem, config), op.arguments(problem, config), problem.silicon)


# -- rewriting --------------------------------------------------------------------------------------------------

MODULE = """\
.version 8.8
.target sm_120a
.address_size 64
.visible .entry kernel(.param .u64 to) {{
\t.reg .pred %p<2>;
\t.reg .b64 %rd<6>;
\tld.param.b64 %rd1, [to];
\tld.global.v2.b64 {{%rd2, %rd3}}, [%rd1];
\tsetp.eq.b64 %p1, %rd2, 0;
\t{instruction}
\tst.global.b64 [%rd1], %rd4;
\tret;
}}
"""


@pytest.mark.parametrize(
    ("name", "modifiers", "sources"),
    [
        ("mul", "", 2),
        ("add", "", 2),
        ("sub", "", 2),
        ("mul", ".rn", 2),
        ("add", ".rz.ftz", 2),
        ("sub", ".rn.ftz", 2),
        ("fma", ".rn", 3),
        ("fma", ".rn.ftz", 3),
        ("fma", ".rz", 3),
    ],
)
def test_packed_operations_become_two_scalar_ones(name: str, modifiers: str, sources: int) -> None:
    operands = ", ".join(("%rd2", "%rd3", "%rd2")[:sources])
    text = MODULE.format(instruction=f"{name}{modifiers}.f32x2 \t%rd4, {operands};")
    rewritten = hopper_ptx(text)
    lines = [line.strip() for line in rewritten.splitlines()]
    for half in ("%lo", "%hi"):
        assert f"{name}{modifiers}.f32 " + ", ".join(f"{half}{n}" for n in range(sources + 1)) + ";" in lines
    assert "mov.b64 {%lo1, %hi1}, %rd2;" in lines
    assert "mov.b64 {%lo2, %hi2}, %rd3;" in lines
    assert "mov.b64 %rd4, {%lo0, %hi0};" in lines
    assert "f32x2" not in rewritten
    assert assemble(rewritten)


def test_the_result_may_be_a_source() -> None:
    text = unpack_f32x2("add.f32x2 %rd4, %rd4, %rd4;")
    assert text.index("}, %rd4;") < text.index("mov.b64 %rd4,")


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
def test_a_guard_stays_with_the_result(guard: str) -> None:
    text = hopper_ptx(MODULE.format(instruction=f"{guard} mul.rn.f32x2 %rd4, %rd2, %rd3;"))
    assert f"{guard} mov.b64 %rd4, {{%lo0, %hi0}};" in text
    assert text.count(guard) == 1
    assert assemble(text)


@pytest.mark.parametrize("name", ["max.f32", "min.f32", "max.NaN.f32", "min.ftz.NaN.f32"])
@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_the_extreme_of_three_becomes_two(name: str, guard: str) -> None:
    registers = ".reg .f32 %f<5>; mov.b64 {%f1, %f2}, %rd2; mov.b64 {%f3, %f4}, %rd3;"
    instruction = f"{registers} {guard}{name} %f4, %f1, %f2, %f4; mov.b64 %rd4, {{%f3, %f4}};"
    text = hopper_ptx(MODULE.format(instruction=instruction))
    assert f"{name} %first, %f1, %f2;" in text and f"{guard}{name} %f4, %first, %f4;" in text
    assert assemble(text)
    # Of two values it is what every architecture has.
    assert f"{name} %f4, %f1, %f2;" in hopper_ptx(MODULE.format(instruction=f"{registers} {name} %f4, %f1, %f2;"))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("guard", ["", "@!%p1 "])
def test_fp8_becomes_bf16_by_way_of_f16(kind: str, guard: str) -> None:
    registers = ".reg .b16 %rs<3>; .reg .b32 %r<3>; mov.b64 {%r1, %r2}, %rd2; mov.b32 {%rs1, %rs2}, %r1;"
    instruction = f"{registers} {guard}cvt.rn.bf16x2.{kind}x2 %r2, %rs1; mov.b64 %rd4, {{%r1, %r2}};"
    text = hopper_ptx(MODULE.format(instruction=instruction))
    # The upper half of a pair is named first.
    assert f"cvt.rn.f16x2.{kind}x2 %both, %rs1;" in text and f"{guard}cvt.rn.bf16x2.f32 %r2, %wide1, %wide0;" in text
    assert assemble(text)


def test_other_text_stays() -> None:
    text = "\tfma.rn.f32 \t%r1, %r2, %r3, %r4;\n\tmov.b64 \t%rd1, {%r1, %r2};\n"
    assert unpack_f32x2(text) == text


def test_what_has_no_counterpart_is_refused() -> None:
    with pytest.raises(CompileError, match=r"^neg\.f32x2 has no scalar form"):
        hopper_ptx(MODULE.format(instruction="neg.f32x2 %rd4, %rd2;"))
    with pytest.raises(CompileError, match=r"0 \.target lines"):
        hopper_ptx("")
    with pytest.raises(CompileError, match=r"^ptxas: .*'tcgen05.+sm_90a.* \(line 10\)$"):
        assemble(hopper_ptx(MODULE.format(instruction="tcgen05.wait::ld.sync.aligned;")))


# -- the indexer's kernels --------------------------------------------------------------------------------------


def test_every_design_assembles(indexer: Indexer, card: Device) -> None:
    problem = indexer.problem(16, card.silicon)
    configs = designs(indexer, problem, card)
    assert len(configs) >= 16
    packed = 0
    for config in configs:
        kernel = compiled(indexer, problem, config)
        original = kernel.compiled["kernel"].asm["ptx"]
        assert ".target sm_120" in original, config
        packed += original.count("f32x2")
        launcher = retarget(kernel)["kernel"]
        ptx = launcher.asm["ptx"]
        assert "f32x2" not in ptx and "sm_120" not in ptx and ".target sm_90a" in ptx, config
        assert launcher.kernel != kernel.compiled["kernel"].kernel
        assert kernel.compiled["kernel"].asm["ptx"] == original
    assert packed


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_defaults_of_mla_decode_assemble(card: Device, heads: int) -> None:
    op = ops.get("mla_decode")
    problem = op.problem(16, card.silicon, heads=heads)
    config = op.default(problem, card)
    launchers = retarget(compile_source(render(op, problem, config), op.arguments(problem, config), card.silicon))
    assert launchers.keys() == {"kernel", "combine"}
    assert all(".target sm_90a" in launcher.asm["ptx"] for launcher in launchers.values())


def test_the_binary_is_for_hopper(indexer: Indexer, card: Device, tmp_path: Any) -> None:
    problem = indexer.problem(16, card.silicon)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(retarget(compiled(indexer, problem, indexer.default(problem, card)))["kernel"].kernel)
    done = subprocess.run([str(nvidia_tools() / "cuobjdump"), "-sass", str(path)], capture_output=True, text=True)
    assert "code for sm_90a" in done.stdout
    assert "sm_120" not in done.stdout


@pytest.mark.parametrize("load", ["pointer", "tma"])
def test_block_scaled_is_refused(indexer: Indexer, card: Device, load: str) -> None:
    problem = indexer.problem(16, card.silicon)
    config = next(c for c in designs(indexer, problem, card, "block_scaled") if c["load"] == load)
    with pytest.raises(CompileError, match=r"^block-scaled MMA can't be run as sm_90a"):
        retarget(compiled(indexer, problem, config))


# -- on a Hopper GPU --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_defaults_are_right(indexer: Indexer, card: Device, rows: int) -> None:
    problem = indexer.problem(rows, card.silicon)
    verdict, _ = emulate(indexer, problem, indexer.default(problem, card), WIDTH)
    assert verdict.ok, verdict


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_every_design_is_right(indexer: Indexer, problem: IndexerProblem, card: Device) -> None:
    """64 rows: enough tiles that every schedule with a loop comes to it, also past the direct tile of hybrid."""
    for config in designs(indexer, problem, card):
        verdict, _ = emulate(indexer, problem, config, WIDTH)
        print(f"error {verdict.error:.1e}: {config}")
        assert verdict.ok, (config, verdict)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_lost_wait_is_seen(
    indexer: Indexer, problem: IndexerProblem, card: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that can't fail shows nothing: without the wait for its copies, a kernel must be found wrong."""
    config = next(c for c in designs(indexer, problem, card) if tuple(c[word] for word in DESIGN[:3]) == LOOPED)
    assert emulate(indexer, problem, config, WIDTH)[0].ok

    def without_waits(ptx: str) -> str:
        text, waits = re.subn(r"cp\.async\.wait_group\s+\d+;", "", hopper_ptx(ptx))
        assert waits
        return text

    monkeypatch.setattr("dsv4tune.codegen.retarget.hopper_ptx", without_waits)
    assert not emulate(indexer, problem, config, WIDTH)[0].ok


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_the_width_of_a_server_is_right(indexer: Indexer, card: Device) -> None:
    problem = indexer.problem(16, card.silicon)
    verdict, _ = emulate(indexer, problem, indexer.default(problem, card), indexer.width(1 << 20, 0))
    assert verdict.ok, verdict
