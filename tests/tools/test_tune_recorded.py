"""A whole search on an H200 that is not here: its jobs answer from a recorded space, all else is the real thing."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import recording_jobs
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tools import evaluate, measure, recording
from dsv4tune.tools.cli import app
from dsv4tune.tools.efforts import EFFORTS
from dsv4tune.tools.measure import Compiled, Measured, PeerTimes, Setup, Timed
from dsv4tune.tools.progress import Lines
from dsv4tune.tools.recording import Recording
from dsv4tune.tools.timing import ROUNDS
from dsv4tune.tools.tune import Request, tune_all

RECORDINGS = Path("benchmarks/h200/recordings")


@lru_cache(maxsize=2)
def recorded(name: str) -> Recording:
    return recording.read(RECORDINGS / f"{name}.jsonl.gz")


class Gpu:
    """The jobs of a search, answered from a recording; `faster` multiplies the times of all candidates."""

    def __init__(self, name: str, faster: float = 1.0) -> None:
        self.space, self.faster = recorded(name), faster
        self.measured: list[Config] = []
        self.finals: list[list[Config]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("import_job", "session_job"):
            monkeypatch.setattr(evaluate, name, recording_jobs.nothing_job)
        monkeypatch.setattr(evaluate, "compile_job", self.compile_job)
        monkeypatch.setattr(evaluate, "device_job", self.device_job)
        for name in ("memory_job", "peer_job", "final_job"):
            monkeypatch.setattr(measure, name, getattr(self, name))

    def memory_job(self) -> int:
        return 1 << 40

    def peer_job(self, setup: Setup, name: str) -> PeerTimes:
        own = self.space.header.baseline
        if own is None or name != own[0]:
            return PeerTimes("not recorded")
        record = next(r for r in self.space.records.values() if r.us)
        return PeerTimes(None, own[1], {n: passes[0][0] for n, passes in record.baseline_us.items()}, 1e-4)

    def compile_job(self, problem: Any, config: Config) -> Compiled:
        record = self.space.records[config]
        assert record.report is not None
        return Compiled(render(ops.get(problem.op), problem, config).sha, record.report, record.code)

    def device_job(self, setup: Setup, config: Config, baseline: str | None, halving: bool) -> Measured:
        assert baseline == (self.space.header.baseline or ("",))[0]
        self.measured.append(config)
        us, beside = self._rounds(config)
        return Timed(Verdict(1e-7), us, beside).measured()

    def final_job(self, setup: Setup, configs: list[Config], baseline: str | None, rounds: int) -> Any:
        self.finals.append(list(configs))
        each = {config: self._rounds(config, rounds // ROUNDS) for config in configs}
        return {config: us for config, (us, _) in each.items()}, each[configs[0]][1]

    def _rounds(self, config: Config, times: int = 1) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        record = self.space.measured(config)
        us = {n: [us * self.faster for us in passes[0]] * times for n, passes in record.us.items()}
        return us, {n: passes[0] * times for n, passes in record.baseline_us.items()}


def request(db: Path, kernel: str, **changes: Any) -> Request:
    values: dict[str, Any] = {
        **{"kernel": kernel, "rows": [64], "max_context": 1 << 20, "draft_tokens": 0, "options": {}, "on_gpu": True},
        **{"device": DEVICES["h200"], "effort": EFFORTS["normal"], "budget_s": None, "seed": 0, "sampler": "guided"},
        **{"jobs": None, "db": db, "site": recording_jobs.Site()},
    }
    return Request(**{**values, **changes})


@pytest.mark.parametrize(("kernel", "name"), [("indexer", "indexer_r64"), ("mla_decode", "mla_decode_h8_r64")])
def test_a_search_finds_the_best_holds_its_final_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, name: str
) -> None:
    said: list[str] = []
    gpu, db = Gpu(name), tmp_path / "tuned.db"
    gpu.install(monkeypatch)
    (result,) = tune_all([request(db, kernel)], Lines(said.append))
    best = result["best"]
    assert result["status"] == "complete" and 40 < result["tried"] <= 96, said
    assert result["trials"]["total"] == result["trials"]["ok"] == result["tried"]
    scores = gpu.space.scores()
    winner = next(config for config in scores if dict(config) == best["config"])
    assert scores[winner] <= 1.02 * min(scores.values()) and best["final"]["place"] == 1 and best["final"]["won"]
    assert [len(one) for one in gpu.finals] == [4] and any(line.startswith("final of 4, 27 rounds") for line in said)
    # Equal kernels were measured once.
    kernels = {gpu.space.measured(config).config for config in gpu.measured}
    assert len(kernels) == len(gpu.measured) <= result["tried"]
    # A server takes it.
    arguments = ["explain", "--db", str(db), "--device", "h200", "--rows", "64", "--kernel", kernel, "--json"]
    explained = json.loads(CliRunner().invoke(app, arguments).stdout)
    chosen = [one["chosen"]["config"] for one in explained["results"] if (one["chosen"] or {}).get("origin") == str(db)]
    assert chosen == [best["config"]], explained
    # The same command finds nothing left to do, and a larger effort goes on.
    (again,) = tune_all([request(db, kernel)], Lines(said.append))
    assert again["tried"] == 0 and again["best"] == best and len(gpu.finals) == 1
    known = len(gpu.measured)
    (more,) = tune_all([request(db, kernel, effort=EFFORTS["full"])], Lines(said.append))
    assert more["tried"] > 0 and more["trials"]["total"] == result["tried"] + more["tried"]
    assert len(set(gpu.measured)) == len(gpu.measured) > known and len(gpu.finals) == 2


def test_a_server_that_is_as_fast_keeps_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best candidate is 2 % faster: less than the margin."""
    said: list[str] = []
    gpu, db = Gpu("indexer_r64"), tmp_path / "tuned.db"
    gpu.faster = 0.98 / min(gpu.space.scores().values())
    gpu.install(monkeypatch)
    (result,) = tune_all([request(db, "indexer")], Lines(said.append))
    assert result["best"]["final"]["won"] is False and 0.97 < result["best"]["score"] < 1.0
    assert any("not faster than deep_gemm by 3%" in line and line.endswith("that stays") for line in said), said


def test_other_rows_start_with_its_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, db = Gpu("indexer_r64"), tmp_path / "tuned.db"
    gpu.install(monkeypatch)
    quick = EFFORTS["quick"]
    (first,) = tune_all([request(db, "indexer", effort=quick)], Lines(lambda line: None))
    gpu.measured.clear()
    tune_all([request(db, "indexer", effort=quick, rows=[72])], Lines(lambda line: None))
    assert first["best"]["config"] in [dict(config) for config in gpu.measured[:3]]
