"""What the main job does around the search: memory that is too small, a budget that is spent, who is the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import make_problem, make_trial
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.render import cache_folder, render
from dsv4tune.codegen.space import Config
from dsv4tune.tools import measure, peers, tune
from dsv4tune.tools.cli import app
from dsv4tune.tools.efforts import EFFORTS
from dsv4tune.tools.evaluate import Pools, environment
from dsv4tune.tools.executor import Answer
from dsv4tune.tools.measure import PeerTimes, Setup
from dsv4tune.tools.search import Result
from dsv4tune.tools.tune import Budget, fitting, timed_baseline
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned.records import Range, Trial
from dsv4tune.tuned.selector import shipped_near
from dsv4tune.tuned.store import Store


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


def test_a_budget_is_shared_by_those_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("dsv4tune.tools.tune.time.monotonic", lambda: clock.now)
    budget = Budget(120.0, 3)
    assert budget.next() == 140.0
    clock.now = 110.0  # it ended early: the others have more
    assert budget.next() == 165.0
    clock.now = 165.0
    assert budget.next() == 220.0 and not budget.spent
    clock.now = 220.0
    assert budget.spent
    few = Budget(50.0, 40)
    assert few.next() == 240.0
    clock.now = 265.0
    assert few.next() == 270.0 and Budget(None, 2).next() is None and not Budget(None, 2).spent


def test_a_budget_says_how_far_it_goes_and_where_it_is() -> None:
    budget = Budget(60.0, 40)
    assert budget.reached == 3 and Budget(None, 40).reached == 40 and Budget(5.0, 40).reached == 1
    budget.next()
    budget.next()
    assert budget.place == "2 of 40: "
    alone = Budget(None, 1)
    alone.next()
    assert alone.place == ""


def test_a_spent_budget_ends_every_problem(tmp_path: Path) -> None:
    arguments = ["search", "--kernel", "indexer", "--target", "sm_120", "--rows", "64,1,16", "--budget", "0s"]
    result = CliRunner().invoke(app, [*arguments, "--db", str(tmp_path / "tuned.db"), "--json"])
    found = json.loads(result.stdout)["results"]
    assert result.exit_code == 1 and [one["problem"]["rows"] for one in found] == [64, 1, 16]
    assert all(one["status"] == "budget" and one["best"] is None and one["tried"] == 0 for one in found)


def test_a_search_begins_with_what_is_known(tmp_path: Path) -> None:
    """The default, the winners of the nearest rows, and on a GPU what is shipped; each of them is a config of today."""
    problem, card = make_problem(64, "h200")
    op, store = ops.get("indexer"), Store(tmp_path / "tuned.db")
    valid = op.space(problem, card).valid()
    near = make_trial(valid[5], rows=32, device="h200")
    store.add(near)
    for on_gpu in (True, False):
        request = SimpleNamespace(device=card, on_gpu=on_gpu, effort=EFFORTS["normal"])
        first = tune._first(op, problem, store, cast(Any, request))
        known = [Config(entry.config) for entry in shipped_near(problem)] if on_gpu else []
        assert first == [op.default(problem, card), valid[5], *known, op.reference_config(problem, card)]
        assert set(first) <= set(valid) and len(known) == (3 if on_gpu else 0)


def tried(rows: int, config: Config | None = None) -> Trial:
    """A prediction that a search without a GPU makes today."""
    problem, card = make_problem(rows, "rtx-pro-6000")
    op = ops.get("indexer")
    config = config or op.default(problem, card)
    profile = op.profile(problem, 262_208)
    return make_trial(
        config,
        rows,
        source_sha=render(op, problem, config).sha,
        range=Range(**profile.to_json()),
        times_us=dict.fromkeys(profile.lengths, 3.0),
        environment=environment(problem.silicon.arch, False),
    )


class Outcomes:
    """Stands in for one problem's search: it ends as the list says, in turn."""

    def __init__(self, *statuses: str) -> None:
        self.statuses, self.searched = list(statuses), 0

    def __call__(self, op: Any, problem: Any, profile: Any, request: Any, store: Any, *others: Any) -> dict[str, Any]:
        self.searched += 1
        ended = Result(status=self.statuses.pop(0), tried=1)
        return tune._result(op, problem, profile, store, ended, None, {}, 1.0)


def test_ctrl_c_leaves_problems_without_a_config_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "tuned.db")
    for rows in (1, 4):  # 1 is searched before Ctrl-C, 4 has an entry from an earlier day
        store.add(tried(rows))
    store.close()
    outcomes = Outcomes("complete", "interrupted")
    monkeypatch.setattr(tune, "_tune_one", outcomes)
    arguments = ["search", "--device", "rtx-pro-6000", "--rows", "1,2,4,8", "--db", str(tmp_path / "tuned.db")]
    like = ["--like", "python -m sglang.launch_server --model-path /nowhere --tp 8"]
    result = CliRunner().invoke(app, [*arguments, *like, "--json"])
    found = json.loads(result.stdout)["results"]
    assert result.exit_code == 1 and outcomes.searched == 2
    assert [one["status"] for one in found] == ["complete", *["interrupted"] * 15]
    assert [one["problem"]["rows"] for one in found if one["best"] is not None] == [1, 4]

    outcomes.statuses += ["complete", "interrupted"]
    text = CliRunner().invoke(app, [*arguments, *like])
    assert "interrupted: 13 of 16 problems not begun; the same command goes on with them" in text.stdout
    assert text.stdout.count("nothing usable") == 1  # of the one that was begun
    assert text.stderr.count("predicting for") == 1 and "16 problems, one after another\n" in text.stderr
    outcomes.statuses += ["interrupted"]
    text = CliRunner().invoke(app, [*arguments, *like, "--budget", "40s"])
    assert "16 problems, one after another; the budget, 20 s each at the least, may end after 2 of them" in text.stderr


def test_a_search_that_nothing_improves_says_why_it_ended(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuned.db")
    problem, card = make_problem(64, "rtx-pro-6000")
    effort = EFFORTS["normal"]
    assert effort.patience is not None
    for config in list(ops.get("indexer").space(problem, card).valid())[: effort.patience + 1]:
        store.add(tried(64, config))
    store.close()
    arguments = ["search", "--kernel", "indexer", "--device", "rtx-pro-6000"]
    result = CliRunner().invoke(app, [*arguments, "--db", str(tmp_path / "tuned.db")])
    ended = (
        f"ended: nothing better by 1% in the last {effort.patience} candidates; --trials {2 * effort.trials} tries on"
    )
    assert ended in result.stderr
    assert "complete: 0 tried" in result.stdout
