"""A search on a Ray cluster of two nodes, both on this machine; one of them is killed in mid-search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest

from dsv4tune.tuned.store import Store

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of a core and a GPU each, which is there by word only; the head has neither."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(["src", str(Path(jobs.__file__).parent)]))
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", found.address)
        nodes = [found.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
        yield found, nodes
        found.shutdown()


def test_a_lost_node_costs_a_search_nothing_that_was_finished(cluster: Any, tmp_path: Path) -> None:
    cluster, nodes = cluster
    db = tmp_path / "tuned.db"
    command = [sys.executable, "-m", "dsv4tune.tools.cli", "search", "--kernel", "indexer", "--target", "sm_120"]
    command += ["--trials", "6", "--lengths", "128", "--executor", "ray", "--db", str(db), "--json"]
    search = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert search.stderr is not None
    said = []
    for line in search.stderr:
        said.append(line)
        if "6 trials stored" not in line and "/6 trials" in line and len(nodes) == 2:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    out = search.stdout.read() if search.stdout is not None else ""
    assert search.wait(60) == 0, said
    assert len(nodes) == 1, said
    assert out.count("\n") == 1, out
    result = json.loads(out)
    assert result["status"] == "complete" and result["tried"] == 6 and result["trials"]["ok"] == 6, said
    assert any("can't be used any more" in line and "the node is lost" in line for line in said), said
    configs = [tuple(sorted(trial.config.items())) for trial in Store(db, create=False).trials()]
    assert len(set(configs)) == len(configs) == 6
