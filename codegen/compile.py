"""Source -> Kernel by Triton's own compiler, for the GPU here or for a named target, with its resource report."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4tune.codegen.op import Argument, Op
from dsv4tune.codegen.problem import Problem, Silicon
from dsv4tune.codegen.render import Source, cache_folder, render
from dsv4tune.codegen.space import Config


class CompileError(Exception):
    """The compiler refused a variant; the first line of its message."""


@dataclass(frozen=True)
class Report:
    """What a compiled variant takes; of several kernels, the most that any of them does.

    Attributes:
        registers: a thread's.
        stack_bytes: a thread's local memory, spills and indexed arrays together.
        spill_bytes: bytes that one thread stores to and loads from spilled registers.
        shared_bytes: a program's shared memory, static and dynamic.
        mma: the matrix instruction, by its PTX name; "" if there is none.
        native_fp8: whether that instruction takes e4m3 operands.
        async_copy: "tma", "cp.async" or "".
        instructions: machine instructions in the binaries.
        seconds: time the compiler took, next to none where its cache had it.
        binary: SHA-256 of the machine code.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    mma: str
    native_fp8: bool
    async_copy: str
    instructions: int
    seconds: float
    binary: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def refusal(self, silicon: Silicon) -> str | None:
        """Why this binary can't be launched on that silicon, or None."""
        if self.shared_bytes > silicon.shared_bytes:
            return (
                f"needs {self.shared_bytes} B of shared memory, {silicon.target} allows {silicon.shared_bytes} B "
                "a program"
            )
        return None


@dataclass(frozen=True)
class Kernel:
    """A compiled variant: Triton's object for each kernel of its module, and the seconds that the compiler took."""

    source: Source
    compiled: Mapping[str, Any]
    seconds: float

    @cached_property
    def report(self) -> Report:
        """What it takes; read off the binary when first asked for, because who only launches it need not wait."""
        return _report(list(self.compiled.values()), self.seconds)

    @cached_property
    def code(self) -> str:
        """SHA-256 of what the machine runs and how it is launched, without what only debuggers read: configs of one
        code and one launch plan are one kernel, however different their words."""
        return _code(self.compiled)


def cache_environment() -> dict[str, str]:
    """Where Triton keeps its binaries, for the environment of every process that compiles or launches.

    They must agree, or a variant is compiled again where it is launched; and importing SGLang, as timing its kernels
    does, moves Triton's cache of that process unless the variable is set.
    """
    return {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(cache_folder() / "triton")}


def compile_source(source: Source, arguments: Mapping[str, Sequence[Argument]], silicon: Silicon) -> Kernel:
    """Compile one variant; Triton's cache answers for a text that it has seen.

    Raises:
        CompileError: the compiler refused it.
    """
    started = time.perf_counter()
    try:
        module = source.load()
        compiled = {name: _compile(source, module, name, taken, silicon) for name, taken in arguments.items()}
    except Exception as error:
        raise CompileError(first_line(error)) from error
    return Kernel(source, compiled, time.perf_counter() - started)


def _compile(source: Source, module: ModuleType, name: str, arguments: Sequence[Argument], silicon: Silicon) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    function = getattr(module, name)
    # For the key of its cache Triton would read the syntax trees of the kernel and of all that it calls, which takes
    # longer than all else where the cache has it. A rendered module calls nothing outside but Triton's own functions,
    # whose release is in the key anyway.
    with contextlib.suppress(AttributeError):  # it is no public name
        function.hash = f"{source.sha} {name}"
    divisible = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments) if a.aligned}
    signature = {a.name: a.type for a in arguments}
    if isinstance(function, GluonJITFunction):
        # Gluon's descriptors carry the shared-memory layout of their box.
        described = {k: t for k, t in signature.items() if t.startswith("tensordesc")}
        signature |= {k: f"{t[:-1]},{module.SHARED.value!r}>" for k, t in described.items()}
        ast = GluonASTSource(fn=function, signature=signature, constexprs={}, attrs=divisible)
    else:
        ast = ASTSource(fn=function, signature=signature, attrs=divisible)
    # Triton 3.9 announces another default for fused multiply-add: say which one is meant.
    options = {**module.OPTIONS[name], "enable_fp_fusion": True}
    return triton.compile(ast, target=GPUTarget("cuda", silicon.arch, 32), options=options)


def compile_config(op: Op[Any, Any], problem: Problem, config: Config) -> Kernel:
    """Render one config and compile it for the problem's silicon.

    Raises:
        CompileError: the compiler refused it.
    """
    return compile_source(render(op, problem, config), op.arguments(problem, config), problem.silicon)


def first_line(error: BaseException) -> str:
    """An exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# -- the code ---------------------------------------------------------------------------------------------------

#: Of Triton's words, those by which its launcher launches a binary.
_LAUNCHED = ("shared", "num_warps", "num_ctas", "launch_pdl", "launch_cooperative_grid", "global_scratch_size")


def _code(compiled: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name, one in compiled.items():
        launched = [(word, getattr(one.metadata, word, None)) for word in _LAUNCHED]
        found.update(f"{name} {launched} {getattr(one.metadata, 'tensordesc_meta', None)}\n".encode())
        for section in _sections(one.asm["cubin"]):
            found.update(section)
    return found.hexdigest()


#: ELF64: an entry of the section table, and where a file's header says where that table is and how long.
_SECTION, _TABLE_AT, _TABLE_SIZE = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<40xQ"), struct.Struct("<58xHHH")
_NOBITS = 8


def _sections(cubin: bytes) -> list[bytes]:
    """Name, kind, length and bytes of each section that is not a debugger's.

    Lines of the source are what two binaries of the same instructions differ by; where a section lies in the file
    says nothing. What is unknown is kept: at worst two that are the same count as different.
    """
    (at,), (size, count, names) = _TABLE_AT.unpack_from(cubin), _TABLE_SIZE.unpack_from(cubin)
    table = [_SECTION.unpack_from(cubin, at + number * size) for number in range(count)]
    found = []
    for name_at, kind, flags, _, start, length, *_ in table:
        start_of_name = table[names][4] + name_at
        name = cubin[start_of_name : cubin.index(b"\0", start_of_name)]
        if b"debug" not in name:
            head = b"\n%s %d %d %d\n" % (name, kind, flags, length)
            found.append(head + (b"" if kind == _NOBITS else cubin[start : start + length]))
    return found


# -- the report -------------------------------------------------------------------------------------------------

_MMA = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def _report(compiled: Sequence[Any], seconds: float) -> Report:
    ptx = "".join(one.asm["ptx"] for one in compiled)
    usage = [_usage(one.asm["cubin"]) for one in compiled]
    names = _MMA.findall(ptx)
    mma = max(set(names), key=names.count) if names else ""
    copy = "tma" if "cp.async.bulk" in ptx else "cp.async" if "cp.async" in ptx else ""
    # Registers can only spill to the stack, so the assembler is asked again only where there is one.
    spilling = [one for one, (_, stack) in zip(compiled, usage, strict=True) if stack]
    return Report(
        registers=max(registers for registers, _ in usage),
        stack_bytes=max(stack for _, stack in usage),
        spill_bytes=max((_spills(one.asm["ptx"], one.metadata.target.arch) for one in spilling), default=0),
        # All that Triton uses it asks for at launch. What cuobjdump prints besides, 1,024 B for some targets, is the
        # system's own share of an SM, which the limit for a program already leaves out.
        shared_bytes=max(one.metadata.shared for one in compiled),
        mma=mma,
        native_fp8="e4m3" in mma or "f8f6f4" in mma,
        async_copy=copy,
        instructions=sum(1 for line in ptx.splitlines() if line.startswith("\t") and line.endswith(";")),
        seconds=round(seconds, 3),
        binary=hashlib.sha256(b"".join(one.asm["cubin"] for one in compiled)).hexdigest(),
    )


@lru_cache(maxsize=1)
def nvidia_tools() -> Path:
    """Triton's wheel carries the assembler and the object dumper."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def ptxas_version(arch: int) -> str:
    return _ptxas_version(_ptxas(arch))


@lru_cache(maxsize=2)
def _ptxas_version(path: Path) -> str:
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def _ptxas(arch: int) -> Path:
    return nvidia_tools() / ("ptxas-blackwell" if arch >= 100 else "ptxas")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        dumper = [str(nvidia_tools() / "cuobjdump"), "-res-usage", f.name]
        text = subprocess.run(dumper, capture_output=True, text=True, timeout=60).stdout
    found = _USAGE.search(text)
    if found is None:
        raise CompileError("cuobjdump printed no resource usage for the compiled kernel")
    registers, stack, local = (int(n) for n in found.groups())
    return registers, max(stack, local)


def _spills(ptx: str, arch: int) -> int:
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(_ptxas(arch)), "-v", f"--gpu-name={target.group(1)}", str(path), "-o", str(path) + ".cubin"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
    return max((int(a) + int(b) for a, b in _SPILLS.findall(text)), default=0)
