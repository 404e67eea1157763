"""Searches on the recorded spaces that lie in benchmarks: no GPU, and the bars that samplers are held to."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4tune.tools import recording
from dsv4tune.tools.cli import app
from dsv4tune.tools.efforts import EFFORTS
from dsv4tune.tools.recording import Record, Recording
from dsv4tune.tools.replay import Replay, Replayed, _median_of_chance, agreement, figures, told

RECORDINGS = Path("benchmarks/h200/recordings")


@lru_cache(maxsize=4)
def replay(name: str) -> Replay:
    return Replay(recording.read(RECORDINGS / f"{name}.jsonl.gz"))


@pytest.fixture
def mla() -> Replay:
    return replay("mla_decode_h8_r64")


@pytest.mark.parametrize("name", [path.name.removesuffix(".jsonl.gz") for path in sorted(RECORDINGS.iterdir())])
@pytest.mark.parametrize("in_flight", [1, 16])
def test_the_default_sampler_is_near_the_optimum_soon(name: str, in_flight: int) -> None:
    """Without the default config to start from; a bar says nothing where much of the space is near."""
    found = figures(replay(name), "guided", 5, in_flight)
    needed = found["evaluations_to_3_percent"]
    if found["within_3_percent"] <= 0.02:
        assert needed["of_the_space"] <= 0.10 and needed["of_chance"] <= 0.6, found


def test_a_walk_is_its_seeds(mla: Replay) -> None:
    walks = [mla.walk("guided", seed, 4) for seed in (1, 1, 2)]
    assert walks[0] == walks[1] != walks[2]
    assert len(set(walks[0])) == len(walks[0]) >= 68 and not mla.near.isdisjoint(walks[0])


def test_chance_is_what_random_takes(mla: Replay) -> None:
    """In the median of many walks; by count, one near kernel of two is drawn first half of the times."""
    assert _median_of_chance(2, 1) == 1 and _median_of_chance(3, 1) == 2 and _median_of_chance(10, 10) == 1
    found = figures(mla, "random", 60)["evaluations_to_3_percent"]
    assert 0.5 < found["median"] / found["by_chance"] < 1.6


def test_twins_cost_nothing() -> None:
    """Configs of one kernel are measured once: an indexer's space has fewer kernels than configs."""
    indexer = replay("indexer_r64")
    assert len(indexer.kernels) == 467 < len(indexer.space.valid()) == 589
    twin = next(r for r in indexer.recording.records.values() if r.same_as is not None)
    evaluator = Replayed(indexer.recording, 0, 2)
    for config in (twin.config, twin.same_as):
        assert config is not None
        evaluator.submit(config)
    (first,), (second,) = evaluator.collect(0.0), evaluator.collect(0.0)
    assert evaluator.walked == [twin.same_as] and first[1] == second[1]


def test_repeated_searches_agree(mla: Replay) -> None:
    found = agreement(mla, "guided", EFFORTS["normal"], 6, 16)
    assert found["same_or_within_2_percent"] >= 0.95 and found["over_the_optimum"]["worst"] <= 1.03
    assert found["stands_for_the_servers"] == 1.0


def test_halving_saves_time_and_loses_nothing(mla: Replay) -> None:
    whole, halved = (
        agreement(mla, "guided", replace(EFFORTS["normal"], halving=halving), 4, 16) for halving in (False, True)
    )
    assert halved["timed_ms"]["median"] < 0.7 * whole["timed_ms"]["median"]
    assert halved["over_the_optimum"]["worst"] <= 1.02 * whole["over_the_optimum"]["worst"]


def changed(mla: Replay, change: Callable[[Record], Record | None]) -> Recording:
    records = {config: change(record) for config, record in mla.recording.records.items()}
    return Recording(mla.recording.header, {c: r for c, r in records.items() if r is not None})


def test_a_recording_of_half_a_space_is_refused(mla: Replay) -> None:
    lost = next(iter(mla.recording.records))
    with pytest.raises(ValueError, match=r"1 configs of the space were not recorded.*dsv4tune record"):
        Replay(changed(mla, lambda record: None if record.config == lost else record))


def test_unusable_configs_are_part_of_a_space(mla: Replay) -> None:
    best = min(mla.scores, key=lambda config: mla.scores[config])

    def spoil(record: Record) -> Record:
        return replace(record, status="failed", us={}, baseline_us={}) if record.config == best else record

    spoiled = Replay(changed(mla, spoil))
    assert spoiled.best > mla.best and best in spoiled.kernels and best not in spoiled.near
    assert not spoiled.near.isdisjoint(spoiled.walk("guided", 0, 1))


def failed(record: Record) -> Record:
    return replace(record, status="failed", us={}, baseline_us={})


def test_a_twin_that_ends_late_stands_for_its_own_kernel() -> None:
    """Not for the one that was measured last, which may be of no use."""
    indexer = replay("indexer_r64")
    wanted = next(r.same_as for r in indexer.recording.records.values() if r.same_as is not None)
    one = Replay(changed(indexer, lambda r: r if wanted in (r.config, r.same_as) else failed(r)))
    effort = replace(EFFORTS["normal"], trials=1 << 20, patience=None, references=False)
    found = one.search("random", effort, 0, 1, default=False)
    assert found.winner == wanted and found.over == 1.0


def test_a_space_or_a_search_without_a_usable_config_is_one_line(mla: Replay) -> None:
    with pytest.raises(ValueError, match="no config has times"):
        Replay(changed(mla, failed))
    best = min(mla.scores, key=lambda config: mla.scores[config])
    one = Replay(changed(mla, lambda r: r if r.config == best else failed(r)))
    with pytest.raises(ValueError, match="a search of 1 kernels found none that is usable"):
        one.search("random", replace(EFFORTS["quick"], trials=1), 0, 1, default=False)


def test_a_walk_that_never_arrives_counts_as_the_whole_space(mla: Replay) -> None:
    far = sorted(mla.scores, key=lambda config: -mla.scores[config])[:3]
    near = min(mla.scores, key=lambda config: mla.scores[config])
    found = told(mla, [far, far, [*far, near]])
    needed = found["evaluations_to_3_percent"]
    assert needed["never"] == 2 and needed["median"] == len(mla.kernels) and needed["low"] < needed["median"]
    assert found["fraction_of_optimum_after"]["20%"]["worst"] == 1.0 == mla.fraction([near])
    assert mla.fraction([]) == 0.0


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_tells_people_and_machines_the_same() -> None:
    file = str(RECORDINGS / "mla_decode_h8_r64.jsonl.gz")
    arguments = ["replay", file, "--repeats", "3", "--effort", "quick", "--in-flight", "8"]
    told = CliRunner().invoke(app, arguments)
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert told.exit_code == 0 and result["file"] == file and result["searches"]["effort"] == "quick"
    needed = result["evaluations_to_3_percent"]["median"]
    assert f"within 3 % after {needed:g} (" in told.stdout and "340 different kernels" in told.stdout
    both = json.loads(CliRunner().invoke(app, ["replay", file, file, "--repeats", "1", "--json"]).stdout)
    assert len(both["results"]) == 2 and both["results"][0] == both["results"][1]


def test_what_is_no_recording_is_one_line(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\x1f\x8b\x08", gzip.compress(b'{"recording": 2}\n'), gzip.compress(b"[1]\n")):
        file = tmp_path / "space.jsonl.gz"
        file.write_bytes(content)
        result = CliRunner().invoke(app, ["replay", str(file)])
        assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert f"{file} is no recording of `dsv4tune record`" in result.stderr, result.stderr
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "none.gz")])
    assert result.exit_code == 2 and "No such file" in result.stderr


@pytest.fixture
def lines() -> list[bytes]:
    """A recording's header and two of its configs."""
    return gzip.decompress((RECORDINGS / "mla_decode_h8_r64.jsonl.gz").read_bytes()).splitlines(keepends=True)[:3]


@pytest.mark.parametrize("times", [{"1": [[1.0]]}, [["a"]], [[0.0]], [[]], [], 5])
def test_times_that_are_none_are_no_recording(tmp_path: Path, lines: list[bytes], times: Any) -> None:
    record = json.loads(lines[1])
    us = times if isinstance(times, dict) else {length: times for length in record["us"]}
    file = tmp_path / "space.jsonl.gz"
    file.write_bytes(gzip.compress(lines[0] + json.dumps({**record, "us": us}).encode() + b"\n"))
    with pytest.raises(recording.RecordingError, match="no recording"):
        recording.read(file)


def test_a_foreign_header_is_no_recording(tmp_path: Path, lines: list[bytes]) -> None:
    head, file = json.loads(lines[0]), tmp_path / "space.jsonl.gz"
    for bad in (b"[" * 100_000, json.dumps({**head, "device": {**head["device"], "bandwidth": "x"}}).encode()):
        file.write_bytes(gzip.compress(bad + b"\n"))
        with pytest.raises(recording.RecordingError, match="no recording"):
            recording.read(file)


def test_a_bit_that_fell_over_spoils_a_recording(tmp_path: Path, lines: list[bytes]) -> None:
    """Whether it can't be unpacked, or can and fails its checksum; what then looks cut off may pass."""
    sound, file, kinds = gzip.compress(b"".join(lines), mtime=0), tmp_path / "space.jsonl.gz", set()
    for at in range(20, len(sound), 7):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        try:
            recording.read(file)
        except recording.RecordingError as error:
            kinds.add(type(error.__cause__))
    assert {zlib.error, gzip.BadGzipFile} <= kinds
