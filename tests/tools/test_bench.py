"""The bench: what it reads, what it concludes, and on a GPU that its rows are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4tune.codegen import devices
from dsv4tune.codegen.ops.indexer import Indexer
from dsv4tune.tools import bench, peers
from dsv4tune.tools.cli import app

SHAPES = [
    {"name": "two", "kind": "decode", "width": 2048, "live": 128, "rows": 2},
    {"name": "mix", "kind": "ragged", "width": 2048, "live": [0, 65, 2048]},
    {"name": "drafts", "kind": "verify", "width": 2048, "live": [700, 701, 900, 901], "share": 2},
]


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    return path


def test_shapes_from_a_file(shapes: Path) -> None:
    two, mix, drafts = bench.read_shapes(shapes)
    assert two.live == (128, 128) and two.owner == (0, 1)
    assert mix.live == (0, 65, 2048) and mix.rows == 3 and mix.positions == 2113
    assert drafts.owner == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no list of shapes"),
        ("3", "is no list of shapes"),
        ('[{"name": "x"}]', "is no list of shapes"),
        ('[{"name": "x", "kind": "other", "width": 128, "live": [1]}]', "is not decode"),
        ('[{"name": "x", "kind": "decode", "width": 128, "live": [129]}]', "must lie in"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    result = CliRunner().invoke(app, ["bench", "--kernel", "indexer", "--shapes", str(path)])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernel", "indexr"], "unknown kernel"),
        (["--kernel", "indexer", "--peers", "nobody"], "unknown peer 'nobody': use one of all, none, deep_gemm"),
        (["--kernel", "indexer", "--shapes", "/nowhere.json"], "No such file"),
    ],
)
def test_bad_words(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "--kernel", "indexer"])
    assert result.exit_code == 2 and "there is no GPU here" in result.stderr


def test_ratios_are_over_each_peer_and_the_better_server_kernel() -> None:
    def row(kind: str, **us: float) -> dict[str, object]:
        return {"shape": {"kind": kind}, "us": us}

    result = {
        "rows": [
            row("decode", tuned=1.0, deep_gemm=2.0, tilelang=4.0),
            row("ragged", tuned=2.0, deep_gemm=4.0, tilelang=1.0),
            row("prefill", tuned=9.0, deep_gemm=1.0),
            row("decode", deep_gemm=1.0),
        ]
    }
    found = bench.ratios(result)
    assert found["deep_gemm"] == {"geometric_mean": 2.0, "worst": 2.0, "shapes": 2}
    assert found["tilelang"] == {"geometric_mean": 1.4142, "worst": 0.5, "shapes": 2}
    assert found["better server kernel"] == {"geometric_mean": 1.0, "worst": 0.5, "shapes": 2}
    assert bench.ratios(result, ["prefill"])["deep_gemm"]["geometric_mean"] == 0.1111


def test_every_peer_says_how_to_get_it() -> None:
    for name in peers.named("indexer", "all"):
        peer = peers.PEERS[name]
        assert peer.name == name and "pip install" in peer.install
    assert peers.named("indexer", "none") == []
    servers = {name: peers.baseline("indexer", card.silicon) for name, card in devices.DEVICES.items()}
    assert {name: server and server.name for name, server in servers.items()} == {
        "rtx-pro-6000": "tilelang",
        "rtx-5090": "tilelang",
        "gb10": "tilelang",
        "h100": "deep_gemm",
        "h200": "deep_gemm",
        "b200": "deep_gemm",
        "rtx-4090": None,
    }


@pytest.mark.gpu
def test_rows_are_measured(indexer: Indexer, shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "--kernel", "indexer", "--peers", "none", "--shapes", str(shapes), "-o", str(out), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    assert result["copy_gb_per_s"] > 100 and result["environment"]["triton"]
    assert [row["shape"]["name"] for row in result["rows"]] == ["two", "mix", "drafts"]
    for row in result["rows"]:
        assert {"default", "page_grid"} <= set(row["us"])
        for name, us in row["us"].items():
            assert 0.5 < us < 500 and row["error"][name] < 1e-3 and row["spread"][name] < 0.5
    assert result["rows"][1]["top512"]["default"] == 1.0
