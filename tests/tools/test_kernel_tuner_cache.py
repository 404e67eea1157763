"""Recordings as Kernel Tuner's caches: what it would read, and, where it is installed, what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4tune.tools import recording
from dsv4tune.tools.kernel_tuner_cache import convert, key, restriction, write
from dsv4tune.tools.recording import Recording

INDEXER = Path("benchmarks/h200/recordings/indexer_r64.jsonl.gz")


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """With one config that the compiler refused and one that was wrong."""
    found = recording.read(INDEXER)
    alone = [r for r in found.records.values() if r.same_as is None]
    twinned = {r.same_as for r in found.records.values()}
    refused, wrong = [r.config for r in alone if r.config not in twinned][:2]
    bare: dict[str, Any] = {"us": {}, "baseline_us": {}}
    found.records[refused] = replace(found.records[refused], status="refused", report=None, **bare)
    found.records[wrong] = replace(found.records[wrong], status="wrong", **bare)
    return found


@pytest.fixture(scope="module")
def cache(recorded: Recording) -> dict[str, Any]:
    return convert(recorded)


def test_every_recorded_config_is_there(recorded: Recording, cache: dict[str, Any]) -> None:
    knobs = cache["tune_params"]
    assert list(knobs) == cache["tune_params_keys"] == list(recorded.header.words)
    assert len(cache["cache"]) == len(recorded.records) == 589
    for config in recorded.records:
        entry = cache["cache"][key(config, knobs)]
        assert {name: entry[name] for name in knobs} == dict(config)
        assert all(config[name] in values for name, values in knobs.items())
    used = {(name, value) for config in recorded.records for name, value in config.items()}
    assert {(name, value) for name, values in knobs.items() for value in values} == used


def test_scores_are_ours_and_a_twins_its_kernels(recorded: Recording, cache: dict[str, Any]) -> None:
    found = {config: cache["cache"][key(config, cache["tune_params"])] for config in recorded.records}
    assert {c: e["time"] for c, e in found.items() if "time" in e} == recorded.scores()
    twin = next(r for r in recorded.records.values() if r.same_as is not None)
    assert twin.same_as is not None and found[twin.config]["time"] == found[twin.same_as]["time"]


def test_what_failed_says_how(cache: dict[str, Any]) -> None:
    errors = [e for e in cache["cache"].values() if "__error__" in e]
    assert [e["__error__"] for e in errors] == ["CompilationFailedConfig", "RuntimeFailedConfig"]
    assert not any("time" in e for e in errors)


def test_the_restriction_lets_recorded_configs_through_and_no_other(cache: dict[str, Any]) -> None:
    valid = restriction(cache)
    assert all(valid(*(e[name] for name in cache["tune_params_keys"])) for e in cache["cache"].values())
    assert not valid(*(values[-1] for values in cache["tune_params"].values()))


def test_the_file_is_whole_json_in_its_form(recorded: Recording, cache: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    write(file, cache)
    assert json.loads(file.read_text()) == cache
    # Kernel Tuner takes any other end for that of a broken run and mends it.
    assert file.read_text()[-3:] == "}\n}"
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsv4tune.tools.kernel_tuner_cache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    assert run(INDEXER, "-o", file).returncode == 0
    assert len(json.loads(file.read_text())["cache"]) == 589
    file.unlink()
    bad = run("README.md", "-o", file)
    assert bad.returncode == 1 and not file.exists()
    assert "README.md is no recording" in bad.stderr and bad.stderr.count("\n") == 1


def test_kernel_tuner_reads_it_all(recorded: Recording, cache: dict[str, Any], tmp_path: Path) -> None:
    """Its whole walk in its simulation mode, in the form of its own JSON schema."""
    kernel_tuner = pytest.importorskip("kernel_tuner")
    jsonschema = pytest.importorskip("jsonschema")
    from constraint import FunctionConstraint
    from kernel_tuner.file_utils import get_t4_results, output_file_schema

    file = tmp_path / "cache.json"
    write(file, cache)
    knobs = cache["tune_params"]
    results, _ = kernel_tuner.tune_kernel(
        cache["kernel_name"],
        "",
        tuple(cache["problem_size"]),
        [],
        knobs,
        restrictions=[FunctionConstraint(restriction(cache))],
        strategy="brute_force",
        cache=str(file),
        simulation_mode=True,
        quiet=True,
    )
    assert {key(result, knobs) for result in results} == set(cache["cache"])
    told = get_t4_results(results, knobs)
    jsonschema.validate(told, output_file_schema("results")[1])
    invalid = sorted(one["invalidity"] for one in told["results"] if one["invalidity"] != "correct")
    assert invalid == ["compile", "runtime"]
    assert min(one["time"] for one in results if "time" in one) == min(recorded.scores().values())
