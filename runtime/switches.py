"""Every environment variable that a server reads; docs/environment.md has them in one table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4tune.tuned.selector import Policy

KERNELS = ("indexer", "mla_decode")
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class Switches:
    """What the user decided.

    Attributes:
        kernels: those that may be replaced.
        policy: what evidence an entry needs.
        database: read before the shipped entries.
        target: compute capability to assume where no driver tells; "" for none.
        jobs: compiler processes, 0 for one a core.
        rank_s: seconds that ranks wait for one another.
        insist: kernels that replace whatever backend another variable picks.
        notes: a line for each value that makes no sense.
    """

    kernels: tuple[str, ...] = KERNELS
    policy: Policy = "measured"
    database: Path | None = None
    target: str = ""
    jobs: int = 0
    rank_s: float = 60.0
    insist: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def read(environment: Mapping[str, str] | None = None) -> Switches:
    """The variables of this process; one that makes no sense keeps its default."""
    env = os.environ if environment is None else environment
    notes: list[str] = []
    words = [word.strip().lower() for word in env.get("DSV4TUNE_DISABLE", "").split(",")]
    kernels = () if any(word in _ON for word in words) else tuple(name for name in KERNELS if name not in words)
    notes += [
        f"DSV4TUNE_DISABLE={env['DSV4TUNE_DISABLE']}: '{word}' is not 0, 1 or one of {', '.join(KERNELS)}; left alone"
        for word in words
        if word not in (*_OFF, *_ON, *KERNELS)
    ]
    insist: tuple[str, ...] = ()
    mma = env.get("SGLANG_SM120_MMA_INDEXER", "").strip().lower()
    if mma in _ON:
        insist = ("indexer",)
    elif mma in _OFF[1:]:
        kernels = tuple(name for name in kernels if name != "indexer")
    elif mma:
        notes.append(f"SGLANG_SM120_MMA_INDEXER={mma} is not 0 or 1; taken as unset")
    policy = env.get("DSV4TUNE_POLICY", "measured").strip().lower()
    if policy not in ("measured", "strict", "predicted"):
        notes.append(f"DSV4TUNE_POLICY={policy} is not measured, strict or predicted; taken as measured")
        policy = "measured"
    from dsv4tune.tuned.reader import default_path

    return Switches(
        kernels=kernels,
        policy=policy,  # type: ignore[arg-type]
        database=default_path(),
        target=env.get("DSV4TUNE_TARGET", ""),
        jobs=int(_number(env, "DSV4TUNE_JOBS", 0, notes)),
        rank_s=_number(env, "DSV4TUNE_RANK_SECONDS", 60.0, notes),
        insist=insist,
        notes=tuple(notes),
    )


def _number(env: Mapping[str, str], name: str, default: float, notes: list[str]) -> float:
    try:
        value = float(env.get(name, default))
        if 0 <= value < 86400:
            return value
    except ValueError:
        pass
    notes.append(f"{name}={env[name]} is no number of 0 or more; taken as {default:g}")
    return default
