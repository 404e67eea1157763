"""Run another architecture's kernel on an sm_90 GPU: the PTX that Triton made for it, assembled for sm_90a.

What runs is the schedule, the addressing and the synchronisation that the other card gets. It says nothing of the
speed there, nor of the rounding of that card's own matrix instructions.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from dsv4tune.codegen.compile import CompileError, Kernel, nvidia_tools

#: Hopper's architecture with the features that are its own.
TARGET = "sm_90a"

_PACKED = re.compile(
    r"(?P<guard>@!?%\w+\s+)?\b(?P<name>mul|add|sub|fma)(?P<modifiers>(?:\.\w+)*)\.f32x2\s+(?P<operands>[^;]+);"
)
_OF_THREE = re.compile(
    r"(?P<guard>@!?%\w+\s+)?\b(?P<name>(?:max|min)(?:\.ftz)?(?:\.NaN)?\.f32)\s+(?P<operands>[^;,]+(?:,[^;,]+){3});"
)
_FP8_TO_BF16 = re.compile(
    r"(?P<guard>@!?%\w+\s+)?\bcvt\.rn\.bf16x2\.(?P<kind>e[45]m[32])x2\s+(?P<target>%\w+),\s*(?P<source>%\w+);"
)
_TARGET_LINE = re.compile(r"^\.target\s+sm_\w+", re.MULTILINE)
_ERROR = re.compile(r"(?:, (?P<line>line \d+))?\s*; (?:error|fatal)\s*: (?P<text>.+)")


def retarget(kernel: Kernel) -> dict[str, Any]:
    """The kernels of a variant with machine code for sm_90a, launched as its ``compiled`` are.

    Raises:
        CompileError: it uses what sm_90 has no counterpart of.
    """
    return {name: _retargeted(compiled) for name, compiled in kernel.compiled.items()}


def _retargeted(compiled: Any) -> Any:
    ptx = hopper_ptx(compiled.asm["ptx"])
    cubin = assemble(ptx)
    # Triton's own object with another binary: its loader and launcher read nothing that depends on the architecture.
    launcher = copy.copy(compiled)
    launcher.asm = type(launcher.asm)(ptx=ptx, cubin=cubin)
    launcher.kernel = cubin
    # The copy must not launch, or unload, what the original may have loaded.
    launcher.module = launcher.function = launcher._run = launcher._module_pid = None
    return launcher


def hopper_ptx(ptx: str) -> str:
    """The same module for sm_90a.

    Raises:
        CompileError: it has instructions that can't be rewritten.
    """
    if "kind::mx" in ptx:
        raise CompileError(f"block-scaled MMA can't be run as {TARGET}, which has no such instruction")
    text = _FP8_TO_BF16.sub(_by_f16, _OF_THREE.sub(_two_by_two, unpack_f32x2(ptx)))
    text, targets = _TARGET_LINE.subn(f".target {TARGET}", text)
    if targets != 1:
        raise CompileError(f"PTX with {targets} .target lines: expected one")
    return text


def unpack_f32x2(ptx: str) -> str:
    """Every packed float operation as two scalar ones on the halves of its 64-bit registers: equal to the bit.

    Raises:
        CompileError: one is of another kind than mul, add, sub and fma.
    """
    text = _PACKED.sub(_scalars, ptx)
    left = re.search(r"[\w.]+\.f32x2\b", text)
    if left is not None:
        raise CompileError(f"{left[0]} has no scalar form here")
    return text


def _scalars(packed: re.Match[str]) -> str:
    target, *sources = (operand.strip() for operand in packed["operands"].split(","))
    numbers = range(1, len(sources) + 1)
    lines = [f".reg .f32 %lo<{len(sources) + 1}>, %hi<{len(sources) + 1}>;"]
    lines += [f"mov.b64 {{%lo{n}, %hi{n}}}, {source};" for n, source in zip(numbers, sources, strict=True)]
    for half in ("%lo", "%hi"):
        operands = ", ".join(f"{half}{n}" for n in (0, *numbers))
        lines.append(f"{packed['name']}{packed['modifiers']}.f32 {operands};")
    # Only the result is visible outside the braces, so only it needs the guard.
    lines.append(f"{packed['guard'] or ''}mov.b64 {target}, {{%lo0, %hi0}};")
    return "{\n\t" + "\n\t".join(lines) + "\n\t}"


def _two_by_two(extreme: re.Match[str]) -> str:
    """The largest or least of three values, which sm_100 and newer have an instruction for; exact in any order."""
    target, *sources = (operand.strip() for operand in extreme["operands"].split(","))
    guard, name = extreme["guard"] or "", extreme["name"]
    lines = [".reg .f32 %first;", f"{name} %first, {sources[0]}, {sources[1]};"]
    return "{\n\t" + "\n\t".join([*lines, f"{guard}{name} {target}, %first, {sources[2]};"]) + "\n\t}"


def _by_f16(conversion: re.Match[str]) -> str:
    """Two fp8 values to bf16, which sm_100 and newer do at once: every one of them is exact in f16 and in bf16."""
    guard, source = conversion["guard"] or "", conversion["source"]
    lines = [
        ".reg .b32 %both;",
        ".reg .f16 %half<2>;",
        ".reg .f32 %wide<2>;",
        f"cvt.rn.f16x2.{conversion['kind']}x2 %both, {source};",
        "mov.b32 {%half0, %half1}, %both;",
        *(f"cvt.f32.f16 %wide{n}, %half{n};" for n in (0, 1)),
        f"{guard}cvt.rn.bf16x2.f32 {conversion['target']}, %wide1, %wide0;",
    ]
    return "{\n\t" + "\n\t".join(lines) + "\n\t}"


def assemble(ptx: str) -> bytes:
    """Machine code for sm_90a.

    Raises:
        CompileError: the assembler's first error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        path.write_text(ptx)
        # The newer assembler: the PTX version of a Blackwell target may be past the one that Triton keeps for Hopper.
        command = [str(nvidia_tools() / "ptxas-blackwell"), f"-arch={TARGET}", str(path), "-o", str(cubin)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"ptxas: {error}"[:300]) from error
        if done.returncode != 0:
            raise CompileError(f"ptxas: {_first_error(done.stderr) or f'status {done.returncode}'}"[:300])
        return cubin.read_bytes()


def _first_error(stderr: str) -> str:
    """Without the temporary file's name."""
    found = _ERROR.search(stderr)
    if found is None:
        return stderr.strip().split("\n")[0]
    return found["text"] + (f" ({found['line']})" if found["line"] else "")
