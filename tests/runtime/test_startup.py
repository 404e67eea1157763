"""A start's checks: each text once, on tensors that texts share, and never convicted by what another one did."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import serving
from serving import WIDTH, FakeMachine, compute

from dsv4tune.codegen import ops
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.runtime import prepare, startup
from dsv4tune.runtime.compilers import Job

#: Rows and tile of three texts, whose small problem is one.
ROWS = {8: 64, 16: 128, 24: 256}


@pytest.fixture
def problems(database: Path) -> list[Any]:
    for rows, block in ROWS.items():
        config = serving.config_of("indexer", rows).with_(block_t=block, num_warps=4 if block < 256 else 8)
        serving.write_entry(database, rows=rows, config=dict(config))
    return [serving.problem_of("indexer", rows) for rows in ROWS]


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose reference was computed."""
    calls: list[Any] = []
    real = Indexer.expect

    def expect(op: Indexer, problem: Any, call: Any) -> Any:
        calls.append(call)
        return real(op, problem, call)

    monkeypatch.setattr(Indexer, "expect", expect)
    return calls


def ready(problems: list[Any], launched: Callable[[Job, Sequence[Any]], None] = compute) -> list[str]:
    """The reason of each choice, "" for a variant."""
    return [choice.reason for choice in prepare(problems, WIDTH, machine=FakeMachine(launched=launched))]


def test_texts_of_one_small_problem_share_their_calls(problems: list[Any], expected: list[Any]) -> None:
    texts = set()

    def launched(job: Job, arguments: Sequence[Any]) -> None:
        texts.add(job.source.sha)
        compute(job, arguments)

    assert ready(problems, launched) == ["", "", ""]
    assert len(texts) == 3 and len(expected) == startup.CHECKED_CALLS


def test_a_kernel_that_spoils_its_inputs_convicts_no_other(problems: list[Any], expected: list[Any]) -> None:
    def spoiling(job: Job, arguments: Sequence[Any]) -> None:
        compute(job, arguments)
        if job.config["block_t"] == ROWS[8]:
            names = [argument.name for argument in ops.get("indexer").arguments(job.problem, job.config)["kernel"]]
            arguments[names.index("weights")].zero_()

    assert ready(problems, spoiling) == ["", "", ""]
    assert len(expected) == 2 * startup.CHECKED_CALLS


def test_a_wrong_text_is_refused_and_those_after_it_are_not(problems: list[Any]) -> None:
    def wrong(job: Job, arguments: Sequence[Any]) -> None:
        if job.config["block_t"] != ROWS[16]:
            compute(job, arguments)

    first, second, third = ready(problems, wrong)
    assert first == third == "" and second.startswith("failed its check: case 'mixed 0': row")


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_wait_while_kernels_load(problems: list[Any], enabled: bool) -> None:
    seen = set()

    def launched(job: Job, arguments: Sequence[Any]) -> None:
        seen.add(gc.isenabled())
        compute(job, arguments)

    if not enabled:
        gc.disable()
    try:
        assert ready(problems, launched) == ["", "", ""]
        assert seen == {False} and gc.isenabled() == enabled
    finally:
        gc.enable()
