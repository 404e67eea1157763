"""What a server pays: imports, starts, and calls beyond the launch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import serving
import torch

from dsv4tune.runtime import kernels, plugin, startup

HEAVY = ("optuna", "pandas", "typer", "sqlite_utils", "sqlalchemy")


def measured(statements: str) -> dict[str, object]:
    """Run in a new interpreter that has torch and triton already; seconds, and heavy modules that were imported."""
    code = (
        "import json, sys, time, torch, triton\n"
        f"started = time.perf_counter()\n{statements}\n"
        "spent = time.perf_counter() - started\n"
        f"print(json.dumps({{'s': spent, 'heavy': [m for m in {HEAVY!r} if m in sys.modules]}}))"
    )
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_importing_the_runtime_is_light() -> None:
    found = min((measured("import dsv4tune.runtime") for _ in range(2)), key=lambda one: str(one["s"]))
    assert found["heavy"] == [] and float(str(found["s"])) < 0.2


@pytest.mark.slow
def test_its_functions_need_nothing_that_only_tuning_does() -> None:
    names = "prepare, paged_mqa_logits, sparse_mla_decode"
    found = measured(f"from dsv4tune.runtime import {names}\nimport dsv4tune.runtime.plugin as p\np.register()")
    assert found["heavy"] == []


def test_a_start_without_an_entry_is_short(database: Path) -> None:
    """208 shapes, a database of another card's trials."""
    import time

    from dsv4tune.runtime.wanted import server

    for rows in (1, 2, 4):
        serving.write_entry(database, rows=rows)
    unknown = dataclasses.replace(serving.DEVICES["rtx-5090"].silicon, sm_count=160)
    wanted = server(1 << 20).wanted(unknown, ("indexer", "mla_decode"))
    assert len(wanted) == 208
    rules = startup.rules_here("measured", wanted[0].problem.silicon, {"indexer": "tilelang"})
    startup.choose(wanted, rules, database, pytest.fail)
    started = time.perf_counter()
    prepared = startup.make_ready(startup.choose(wanted, rules, database, pytest.fail), rules, serving.FakeMachine())
    assert time.perf_counter() - started < 0.5
    assert prepared.found == {}
    assert len(startup.lines(prepared.choices)) == 4


@pytest.mark.parametrize("kernel", ["indexer", "mla_decode"])
def test_a_call_is_one_dictionary_access(kernel: str, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And launches what it finds, once; nothing is read, compiled or chosen."""
    serving.write_entry(database, kernel)
    launched: list[object] = []
    machine = serving.FakeMachine()
    plugin.prepare_runner(serving.model_runner(), [serving.ROWS], machine)
    machine.launched = lambda job, arguments: launched.append(job)
    asked: list[object] = []
    find = kernels.TABLE.find

    def counted(key: Any) -> Any:
        asked.append(key)
        return find(key)

    monkeypatch.setattr(kernels.TABLE, "find", counted)
    for name in ("choose", "make_ready"):
        monkeypatch.setattr(startup, name, pytest.fail)
    if kernel == "indexer":
        plugin.indexer(pytest.fail, *serving.indexer_arguments(serving.indexer_call()))
    else:
        plugin.mla_decode(pytest.fail, **serving.mla_words())
    assert len(asked) == 1 and len(launched) == 1


def test_calls_under_fake_tensors_need_no_memory(database: Path) -> None:
    """Metadata is all that a call looks at: no copy to the host, which a capture would not survive."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    serving.write_entry(database)
    machine = serving.FakeMachine()
    plugin.prepare_runner(serving.model_runner(), [serving.ROWS], machine)
    machine.launched = lambda job, arguments: None
    arguments = serving.indexer_arguments(serving.indexer_call())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        assert plugin.indexer(pytest.fail, *fake).shape == (serving.ROWS, serving.WIDTH)
