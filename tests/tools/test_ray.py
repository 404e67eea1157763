"""Searching on a Ray cluster of two nodes, both on this machine; one of them is killed in mid-search."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import ray_facts

from dsv4tune.codegen.devices import DEVICES
from dsv4tune.tools.ray_pool import RayCluster
from dsv4tune.tools.tune import choose_device
from dsv4tune.tuned.store import Store, StoreError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of a core and a GPU each, which is there by word only; the head has neither."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path("src").resolve()), str(Path(jobs.__file__).parent)]))
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", found.address)
        nodes = [found.add_node(num_cpus=1, num_gpus=1, env_vars={"NODE_GPU": name}) for name in ("h200", "b200")]
        yield found, nodes
        found.shutdown()


def test_a_job_runs_on_gpus_of_its_own_kind(cluster: Any) -> None:
    said: list[str] = []
    site = RayCluster(said.append, ray_facts.of_node)
    try:
        assert set(site.devices()) == {DEVICES["h200"], DEVICES["b200"]} and said == []
        assert choose_device("h200", None, site) == (DEVICES["h200"], True)
        assert choose_device(None, "sm_120", site) == (DEVICES["rtx-pro-6000"], False)
        pools = site.pools(None, DEVICES["h200"], True, said.append)
        assert said == ["on 1 Ray nodes: 1 processes compile, 1 check or measure"]
        # What is compiled and what is measured meet on one machine.
        seats = [*pools.judges.seats, *pools.compilers.seats]
        assert [seat.card for seat in seats] == ["GPU-h200", ""] and len({seat.host for seat in seats}) == 1
        # A job that takes its process along is one job there, too.
        pools.judges.prepare(jobs.pid)
        before = pools.judges.ask(jobs.pid)
        assert before.kind == "ok" and before.seat.card == "GPU-h200" and before.seat.host
        crashed = pools.judges.ask(jobs.crash)
        assert crashed.kind == "died" and "SIGSEGV" in crashed.reason
        assert pools.judges.ask(jobs.refuse, "no").reason == "ValueError: no"
        assert pools.judges.ask(jobs.variable, "NODE_GPU").value == "h200"
        pools.close()
    finally:
        ray.shutdown()


def stored(db: Path) -> int:
    if not db.exists():
        return 0
    with contextlib.suppress(StoreError), contextlib.closing(Store(db, create=False)) as store:
        return store.total()
    return 0


def test_a_lost_node_costs_a_search_nothing_that_was_finished(cluster: Any, tmp_path: Path) -> None:
    cluster, nodes = cluster
    db = tmp_path / "tuned.db"
    command = [sys.executable, "-m", "dsv4tune.tools.cli", "search", "--kernel", "indexer", "--target", "sm_120"]
    command += ["--trials", "24", "--lengths", "128", "--executor", "ray", "--db", str(db), "--json"]
    search = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # At most four are under way at once: whatever the lost node did then, it is asked for more.
    while search.poll() is None and stored(db) < 1:
        time.sleep(0.05)
    assert stored(db) < 12
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    out, said = search.communicate(timeout=120)
    assert search.returncode == 0, said
    assert out.count("\n") == 1, out
    result = json.loads(out)
    assert result["status"] == "complete" and result["tried"] == result["trials"]["ok"] == 24, said
    assert any("can't be used any more" in line and "the node is lost" in line for line in said.splitlines()), said
    configs = [tuple(sorted(trial.config.items())) for trial in Store(db, create=False).trials()]
    assert len(set(configs)) == len(configs) == 24
