"""What the main job does around the search: memory that is too small, a budget that is spent, who is the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import make_problem
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.render import cache_folder
from dsv4tune.tools import measure, peers
from dsv4tune.tools.cli import app
from dsv4tune.tools.evaluate import Pools
from dsv4tune.tools.executor import Answer
from dsv4tune.tools.measure import PeerTimes, Setup
from dsv4tune.tools.tune import fitting, timed_baseline
from dsv4tune.tools.workers import Pool


def pools(answer: Any) -> Any:
    """Stands in for the worker processes: `answer(function, *arguments)`."""
    return SimpleNamespace(judges=SimpleNamespace(ask=answer, ask_each=lambda *job: [answer(*job)]))


@pytest.fixture
def setup() -> Setup:
    problem, card = make_problem(512, "h200")
    return Setup(problem, Profile(262_208, (262_208, 128, 32_768), (1.0, 2.0, 3.0)), card, 0)


def test_lengths_that_do_not_fit_are_left_out_by_name(setup: Setup) -> None:
    op = ops.get("indexer")
    needs = {n: op.memory_needed(setup.problem, setup.profile, n) for n in setup.profile.lengths}
    said: list[str] = []
    free = int(needs[32_768] * 1.2)
    kept = fitting(op, setup, pools(lambda *_: Answer(None, "ok", free)), said.append)
    assert kept.profile.lengths == (128, 32_768) and kept.profile.weights == (2.0, 3.0)
    assert said == [f"live length 262208 left out: {needs[262_208]} B of GPU memory needed, {free} B free"]
    assert fitting(op, setup, pools(lambda *_: Answer(None, "ok", 1 << 60)), said.append) is setup
    with pytest.raises(ValueError, match=f"takes {needs[128]} B of GPU memory, 1000 B are free"):
        fitting(op, setup, pools(lambda *_: Answer(None, "ok", 1000)), said.append)
    with pytest.raises(ValueError, match="the GPU can't be used: no driver"):
        fitting(op, setup, pools(lambda *_: Answer(None, "raised", reason="no driver")), said.append)


def test_a_server_kernel_that_is_not_installed_is_no_baseline(setup: Setup) -> None:
    said: list[str] = []

    def missing(function: Any, *arguments: Any) -> Answer:
        assert function is measure.peer_job
        return Answer(None, "ok", PeerTimes("ModuleNotFoundError: No module named 'deep_gemm'"))

    baseline, references = timed_baseline(setup, pools(missing), said.append)
    assert baseline is None and references["deep_gemm"]["install"] == peers.PEERS["deep_gemm"].install
    assert len(said) == 1 and "Install it with: pip install" in said[0]


def test_the_baseline_is_the_servers_even_where_a_reference_is_faster(setup: Setup) -> None:
    def timed(function: Any, _setup: Setup, name: str) -> Answer:
        us = {"deep_gemm": 4.0, "tilelang": 3.0}.get(name)
        if us is None:
            return Answer(None, "died", reason="device fault")
        return Answer(None, "ok", PeerTimes(None, f"{name} 1", {n: us for n in setup.profile.lengths}, 1e-4))

    said: list[str] = []
    baseline, references = timed_baseline(setup, pools(timed), said.append)
    assert baseline is not None and baseline.name == "deep_gemm" and baseline.times_us[128] == 4.0
    assert references["tilelang"]["version"] == "tilelang 1"
    assert references["torch_sm120"]["missing"] == "device fault" and said == []


def test_compilers_and_judges_share_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing SGLang sets the cache folder of its process where none is set: each variant was compiled twice."""
    for given, wanted in (("/somewhere", "/somewhere"), ("", str(cache_folder() / "triton"))):
        monkeypatch.setenv("TRITON_CACHE_DIR", given)
        for on_gpu in (True, False):
            made = Pools.of(2, on_gpu)
            for pool in (made.compilers, made.judges):
                assert isinstance(pool, Pool) and pool.environment["TRITON_CACHE_DIR"] == wanted


def test_a_spent_budget_ends_every_problem(tmp_path: Path) -> None:
    arguments = ["search", "--kernel", "indexer", "--target", "sm_120", "--rows", "64,1,16", "--budget", "0s"]
    result = CliRunner().invoke(app, [*arguments, "--db", str(tmp_path / "tuned.db"), "--json"])
    found = json.loads(result.stdout)["results"]
    assert result.exit_code == 1 and [one["problem"]["rows"] for one in found] == [64, 1, 16]
    assert all(one["status"] == "budget" and one["best"] is None and one["tried"] == 0 for one in found)
