"""The ops, by the name that ``--kernel`` takes. A new op is registered here and nowhere else."""

from __future__ import annotations

from typing import Any

from dsv4tune.codegen.op import Op
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.codegen.ops.mla_decode import MlaDecode
from dsv4tune.codegen.problem import Problem
from dsv4tune.codegen.words import unknown

OPS: dict[str, Op[Any, Any]] = {op.name: op for op in (Indexer(), MlaDecode())}


def get(name: str) -> Op[Any, Any]:
    """The op called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in OPS:
        raise unknown("kernel", name, OPS)
    return OPS[name]


def problem_from_json(data: dict[str, Any]) -> Problem:
    return get(str(data.get("op"))).problem_from_json(data)  # type: ignore[no-any-return]
