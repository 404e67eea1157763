"""Measuring on a real GPU: failing candidates leave no memory behind; the command end to end."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pools import answers

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops.indexer import Indexer, IndexerProblem
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tools.measure import Setup, device_job
from dsv4tune.tools.workers import Pool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def setup(indexer: Indexer) -> Setup:
    gpu = devices.here()
    assert gpu is not None
    return Setup(indexer.problem(4, gpu.silicon), Profile(8448, (128, 8448), (1.0, 1.0)), gpu, 0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool(1, limit_s=60)
    yield found
    found.close()


def default(indexer: Indexer, setup: Setup) -> Config:
    assert isinstance(setup.problem, IndexerProblem)
    return indexer.default(setup.problem, setup.device)


def test_failing_candidates_leave_no_memory_behind(indexer: Indexer, setup: Setup, pool: Pool) -> None:
    import gpu_jobs

    config = default(indexer, setup)
    pool.submit("good", device_job, setup, config, None)
    pool.submit("before", gpu_jobs.allocated)
    for number in range(50):
        pool.submit(number, gpu_jobs.fail_with_memory, setup, config)
    pool.submit("after", gpu_jobs.allocated)
    found = answers(pool)
    assert all(found[n].kind == "raised" for n in range(50))
    assert found["after"].value <= found["before"].value + (1 << 24)


def test_the_command_measures_stores_and_resumes(tmp_path: Path) -> None:
    db = tmp_path / "tuned.db"

    def run(trials: int) -> dict[str, object]:
        command = [sys.executable, "-m", "dsv4tune.tools.cli", "search", "--kernel", "indexer", "--rows", "4"]
        command += ["--max-context", "32k", "--trials", str(trials), "--db", str(db), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    first = run(4)
    assert first["status"] == "complete" and first["tried"] == 4
    best = first["best"]
    assert isinstance(best, dict) and best["provenance"] == "measured" and best["checked_by"] == "gpu"
    assert set(best["measured_us"]) == {"128", "2048", "8256"}
    again = run(6)
    assert again["tried"] == 2
    configs = [row[0] for row in sqlite3.connect(db).execute("select config from trial where final >= 0")]
    assert len(configs) == len(set(configs)) == 6
