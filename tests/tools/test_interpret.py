"""Every design through Triton's interpreter, and kernels with one fault each, which it must not let through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pools import answers

from dsv4tune.codegen.devices import DEVICES, Device
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.space import Config
from dsv4tune.tools.measure import interpret_job
from dsv4tune.tools.workers import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(2, 120, {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"})
    yield found
    found.close()


def designs(op: Indexer, problem: IndexerProblem, card: Device) -> list[Config]:
    words = ("schedule", "load", "operand_order", "block_t", "heads_per_step")
    found: dict[Any, Config] = {}
    for config in op.space(problem, card).valid():
        if op.unchecked(config) is None:
            found.setdefault(tuple(config[word] for word in words), config)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "clean"), [(1, False), (64, False), (64, True)])
def test_every_design_is_right(indexer: Indexer, pool: Pool, rows: int, clean: bool) -> None:
    card = DEVICES["rtx-pro-6000"]
    problem = indexer.problem(rows, card.silicon, clean=clean)
    configs = designs(indexer, problem, card)
    assert len(configs) >= 30
    wanted = configs if rows == 64 and not clean else configs[::4]
    for config, answer in answers(pool, {c: (interpret_job, problem, c) for c in wanted}).items():
        assert answer.kind == "ok" and answer.value.ok, (config, answer)
        assert answer.value.error < 1e-6


FAULTS = {
    "no relu": ("tl.maximum(product, 0.0)", "product"),
    "weights of another head": ("weights + row.to(tl.int64) * HEADS", "weights + 1 + row.to(tl.int64) * HEADS"),
    "scale forgotten": ("score *= scale", "score *= 1.0"),
    "first page twice": ("tl.load(table_row + index,", "tl.load(table_row + index * 0,"),
    "stale pages followed": ("mask=index * PAGE < length, other=0)", "other=0)"),
    "one tile too few": ("last = tl.minimum(tl.cdiv(length, BLOCK_T)", "last = tl.minimum(length // BLOCK_T"),
    "one tile too many": ("(direct * BLOCK_T < length)", "(direct * BLOCK_T <= length)"),
    "next row's columns": ("logits_row + token", "logits_row + token + 64"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found(indexer: Indexer, pool: Pool, fault: str) -> None:
    import faulty

    card = DEVICES["rtx-pro-6000"]
    problem = indexer.problem(64, card.silicon)
    config = indexer.default(problem, card)
    answer = answers(pool, {fault: (faulty.interpret, problem, config, *FAULTS[fault])})[fault]
    # What follows a stale entry may also crash its process: that is no pass either.
    assert answer.kind in ("raised", "died") or (answer.kind == "ok" and not answer.value.ok), answer
