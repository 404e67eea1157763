"""SGLang's functions that a plugin hooks: which architecture uses which, and where each version keeps them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Capability majors: Hopper, data-centre Blackwell, and the Blackwell of workstations and GB10.
_DATACENTRE, _SM120 = (9, 10), (12,)
_ALL = (*_DATACENTRE, *_SM120)


@dataclass(frozen=True)
class Target:
    """One function of a server.

    Attributes:
        kernel: ours that may answer in its place, or "" for the model runner's own.
        name: of the kernel behind it, as entries name their baseline.
        module, attribute: where it lies; `attribute` may be a class's method.
        majors: capability majors whose servers call it.
        needs: modules that importing its module takes, besides SGLang's own.
    """

    kernel: str
    name: str
    module: str
    attribute: str
    majors: tuple[int, ...]
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}"

    def missing(self) -> str | None:
        """Why it can't be hooked, or None; reads the module's source and imports only its parents."""
        try:
            for needed in self.needs:
                if importlib.util.find_spec(needed) is None:
                    return f"{needed} is not installed"
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError, AttributeError) as error:
            return f"{self.module} is not there ({error})"
        if spec is None or spec.origin is None:
            return f"{self.module} is not there"
        if not has_function(Path(spec.origin).read_text(errors="replace"), self.attribute):
            return f"{self.module} has no {self.attribute}"
        return None


def has_function(source: str, attribute: str) -> bool:
    """Whether a module's text defines (or, for a package of compiled functions, names) it."""
    owner, _, name = attribute.rpartition(".")
    if owner:
        return bool(re.search(rf"^class {owner}\b", source, re.M) and re.search(rf"^    def {name}\b", source, re.M))
    return bool(re.search(rf"^\s*def {name}\b|^\s+{name},|import .*\b{name}\b", source, re.M))


_OPS = "sglang.kernels.ops.attention"
_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_RUNNER = "sglang.srt.model_executor.model_runner"
RUNNER = Target("", "", _RUNNER, "ModelRunner.init_cuda_graphs", _ALL)
#: A role switch of a disaggregated server captures through this one.
LATER = Target("", "", _RUNNER, "ModelRunner.ensure_decode_cuda_graphs", _ALL)
TILELANG = Target(
    "indexer", "tilelang", f"{_OPS}.dsa.tilelang_kernel", "tilelang_fp8_paged_mqa_logits", _SM120, ("tilelang",)
)
TORCH_SM120 = Target("indexer", "torch_sm120", _INDEXER, "fp8_paged_mqa_logits_torch_sm120", _SM120)
TORCH = Target("indexer", "torch", _INDEXER, "fp8_paged_mqa_logits_torch", _DATACENTRE)
DEEP_GEMM = Target("indexer", "deep_gemm", "deep_gemm", "fp8_paged_mqa_logits", _ALL)
FLASH_MLA_SM120 = Target("mla_decode", "flashinfer", f"{_OPS}.flash_mla_sm120", "flash_mla_with_kvcache_sm120", _SM120)
FLASH_MLA = Target(
    "mla_decode", "flash_mla", f"{_OPS}.flash_mla_interface", "flash_mla_with_kvcache", _DATACENTRE, ("flash_mla",)
)
#: Up to SGLang 0.5.20 and later ones until they had the module above.
OLDER_FLASH_MLA = Target(
    "mla_decode", "flash_mla", "sgl_kernel.flash_mla", "flash_mla_with_kvcache", _DATACENTRE, ("sgl_kernel",)
)
TARGETS = (RUNNER, LATER, TILELANG, TORCH_SM120, TORCH, DEEP_GEMM, FLASH_MLA_SM120, FLASH_MLA, OLDER_FLASH_MLA)

#: The kernels that a server runs unless its user picks others.
_DEFAULTS = {
    9: {"indexer": "deep_gemm", "mla_decode": "flash_mla"},
    10: {"indexer": "deep_gemm", "mla_decode": "flash_mla"},
    12: {"indexer": "tilelang", "mla_decode": "flashinfer"},
}


def baselines(arch: int) -> Mapping[str, str]:
    """The server's default kernel by op, for capability `arch` (120); empty where none is known."""
    return _DEFAULTS.get(arch // 10, {})


def usable(arches: Sequence[int], kernels: Sequence[str]) -> tuple[list[Target], list[str]]:
    """What is to be hooked for these capabilities, and a line for each target that is missing."""
    majors = {arch // 10 for arch in arches}
    found, missing = [], {}
    for target in TARGETS:
        if majors.isdisjoint(target.majors) or (target.kernel and target.kernel not in kernels):
            continue
        if target is OLDER_FLASH_MLA and FLASH_MLA in found:
            continue
        why = target.missing()
        if why is None:
            found.append(target)
        else:
            missing[target] = f"{target.path}: {why}"
    # Neither is in every version, which is no fault.
    missing.pop(LATER, None)
    missing.pop(FLASH_MLA if OLDER_FLASH_MLA in found else OLDER_FLASH_MLA, None)
    return found, list(missing.values())


def active(arch: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The kernel that a server with these variables runs for each op; SGLang has set its defaults by then."""
    found = dict(baselines(arch))
    if not found:
        return found

    def on(name: str) -> bool:
        return environment.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")

    if on("SGLANG_OPT_USE_TILELANG_INDEXER"):
        found["indexer"] = "tilelang"
    elif on("SGLANG_OPT_USE_AITER_INDEXER"):
        found["indexer"] = "aiter"
    elif on("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"):
        found["indexer"] = "torch_sm120" if arch // 10 in _SM120 else "torch"
    else:
        found["indexer"] = "deep_gemm"
    if arch // 10 in _SM120:
        found["mla_decode"] = {"triton": "sglang_triton", "torch": "sglang_torch"}.get(
            environment.get("SGLANG_SM120_FLASHMLA_BACKEND", "flashinfer").strip().lower(), "flashinfer"
        )
    return found


#: The variables that pick one of those, by op, for whoever wonders why a kernel stays.
VARIABLES = {
    "indexer": ("SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"),
    "mla_decode": ("SGLANG_SM120_FLASHMLA_BACKEND",),
}
