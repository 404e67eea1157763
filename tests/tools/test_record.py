"""A whole space on file: what is measured, what is not, and that nothing finished is lost."""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretend_gpu
import pytest
import recording_jobs
import sabotage
from recording_jobs import CARD, Bench, Crash, Site, time_of
from typer.testing import CliRunner

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.compile import cache_environment
from dsv4tune.codegen.problem import Profile
from dsv4tune.codegen.space import Config
from dsv4tune.tools import evaluate, record, recording, sites
from dsv4tune.tools.cli import app
from dsv4tune.tools.evaluate import Pools
from dsv4tune.tools.measure import compile_job
from dsv4tune.tools.progress import Lines, Watcher
from dsv4tune.tools.recording import Record, Recording, RecordingError
from dsv4tune.tools.timing import ROUNDS
from dsv4tune.tools.workers import Pool


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 configs, of which those that differ in `num_stages` alone are one machine code and one launch plan."""
    words = {"schedule": "split", "load": "pointer", "dot": "fp8", "operand_order": "kq"}
    recording_jobs.narrow(monkeypatch, lambda config: all(config[word] == value for word, value in words.items()))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench()
    recording_jobs.install(monkeypatch, found)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "space.jsonl.gz"


def request(file: Path, **changes: Any) -> record.Request:
    return replace(record.Request("indexer", 64, 1 << 20, 0, {}, CARD, True, file=file, site=Site()), **changes)


def run(file: Path, **changes: Any) -> dict[str, Any]:
    return record.record(request(file, **changes), Watcher())


def valid() -> list[Config]:
    op = ops.get("indexer")
    return op.space(op.problem(64, CARD.silicon), CARD).valid()


def twins(config: Config) -> list[Config]:
    return [c for c in valid() if c.with_(num_stages=0) == config.with_(num_stages=0)]


def test_a_space_is_recorded(bench: Bench, file: Path) -> None:
    result = run(file)
    found = recording.read(file)
    configs = valid()
    assert set(found.records) == set(configs) and len(configs) == 80
    groups = {config.with_(num_stages=0) for config in configs}
    own = [r for r in found.records.values() if r.same_as is None]
    assert len(own) == len(groups) < len(configs)
    # One of each machine code and plan, in an order of its own; the second pass backwards; each compiled once.
    first, second = bench.measured[: len(own)], bench.measured[len(own) :]
    assert {config.with_(num_stages=0) for config in first} == groups
    assert second == first[::-1] == [r.config for r in own][::-1]
    assert first != [config for config in configs if config in first] and Counter(bench.compiled) == Counter(configs)
    for r in found.records.values():
        assert r.status == "ok" and r.report is not None and r.code and r.error == 1e-7
        if r.same_as is not None:
            assert found.records[r.same_as].same_as is None and r.config in twins(r.same_as) and not r.us
        score = statistics.geometric_mean(time_of(r.config) + n / 2e6 for n in found.header.profile.lengths) / 4
        assert found.score(r.config) == pytest.approx(score, rel=1e-3)
    assert all(r.passes == 2 and all(len(times) == 2 for times in r.us[128]) for r in own)
    assert {tuple(times) for r in own for times in r.baseline_us[128]} == {(4.0, 4.0)}
    header = found.header
    assert (header.valid, header.wanted, header.baseline) == (80, 80, ("deep_gemm", "1"))
    assert header.warnings == ("clocks held down",) and header.device == CARD and header.environment["triton"]
    best = min(configs, key=time_of)
    assert result["status"] == "complete" and result["recorded"] == 80 and result["file"] == str(file)
    assert result["statuses"] == {"ok": 80, "refused": 0, "wrong": 0, "failed": 0, "timeout": 0}
    assert result["measured"] == [len(own)] * 2 and result["same_as_another"] == 80 - len(own)
    assert result["codes"] == len({config.with_(num_stages=0, splits=0) for config in configs})
    assert time_of(Config(result["best"]["config"])) == time_of(best)
    near = [config for config in configs if time_of(config) <= 1.03 * time_of(best)]
    assert result["near_best"] == len(near) > len(twins(best))


def test_what_goes_wrong_is_part_of_the_space(bench: Bench, file: Path) -> None:
    configs = valid()
    alone = [next(c for c in configs if c["splits"] == splits) for splits in (2, 4, 8, 16)]
    orders = dict(zip(alone, ("wrong", "hang", "fault", "shared"), strict=True))
    for config, order in orders.items():
        # Whichever of one machine code is met first: it is the same machine code.
        bench.orders |= dict.fromkeys(twins(config), order)
    refused = next(c for c in configs if c not in bench.orders)
    bench.orders[refused] = "compile"
    result = run(file)
    records = recording.read(file).records
    expected = {
        "wrong": ("wrong", "case 'one': NaN"),
        "hang": ("timeout", "no answer in 30 s"),
        "fault": ("failed", "RuntimeError: device fault"),
        "shared": ("refused", "needs 1048576 B of shared memory, sm_90 allows 232448 B a program"),
        "compile": ("failed", "compile: CompileError: no such layout"),
    }
    for config, r in records.items():
        status, reason = expected.get(bench.orders.get(config, ""), ("ok", ""))
        assert (r.status, r.reason) == (status, reason), r
        assert r.error == (1e-7 if status == "ok" else None) and bool(r.report) == (config != refused)
    # Each machine code went wrong once, and nothing that did was tried in the second pass.
    assert all(sum(bench.measured.count(c) for c in twins(config)) == 1 for config in alone[:3])
    assert all(bench.measured.count(c) == 0 for c in (*twins(alone[3]), refused))
    for config in alone[:3]:
        group = [records[c] for c in twins(config)]
        assert [r.same_as is None for r in group].count(True) == 1
    counts = Counter(r.status for r in records.values())
    assert result["statuses"] == counts and counts["ok"] < 80 and result["status"] == "complete"


@pytest.mark.parametrize("order", ["wrong", "hang", "fault"])
def test_what_goes_wrong_in_the_second_pass_does_not_count(bench: Bench, file: Path, order: str) -> None:
    group = twins(min(valid(), key=time_of))
    assert len(group) > 1
    bench.orders = dict.fromkeys(group, f"later {order}")
    result = run(file)
    found = recording.read(file)
    for config in group:
        r = found.records[config]
        assert r.status != "ok" and r.reason.startswith("pass 2: ") and not r.us
        assert found.score(config) is None
    assert Config(result["best"]["config"]) not in group
    assert result["statuses"]["ok"] == 80 - len(group)


def test_after_a_crash_it_goes_on_from_there(
    bench: Bench, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the last line was cut off; and what comes out is what comes of one run."""
    recording_jobs.narrow(monkeypatch, lambda c: c["block_t"] == 128 and c["heads_per_step"] == 64)
    bench.orders = dict.fromkeys(twins(valid()[5]), "wrong") | {valid()[9]: "shared"}
    whole = tmp_path / "whole.jsonl.gz"
    run(whole)
    once = len(bench.measured)
    for after in (1, once // 2, once - 1):
        bench.measured.clear()
        bench.crash_after = after
        with pytest.raises(Crash):
            run(file)
        appended, kept = file.read_bytes(), recording.read(file)
        bench.crash_after = None
        # All of the last line's bytes, a few within it, and one or two of its head.
        last = appended.rindex(b"\x1f\x8b\x08")
        cuts = {len(appended), len(appended) - 1, last + 12, last + 2, last + 1} if after == once // 2 else {last + 100}
        for cut in cuts:
            file.write_bytes(appended[:cut])
            rest = recording.read(file).records
            assert len(kept.records) - 1 <= len(rest) <= len(kept.records)
            bench.measured.clear()
            bench.compiled.clear()
            assert run(file)["status"] == "complete"
            done = sum(max(r.passes, r.status == "wrong" and r.same_as is None) for r in rest.values())
            assert len(bench.measured) == once - done
            assert not set(bench.compiled) & set(rest)
            assert file.read_bytes() == whole.read_bytes()
        file.unlink()


def test_a_file_without_one_whole_record_is_read(bench: Bench, file: Path) -> None:
    bench.crash_after = 0
    with pytest.raises(Crash):
        run(file)
    header = file.read_bytes()
    for number in range(1, 20):
        file.write_bytes(header + b"\x1f\x8b\x08\0\0\0\0\0\0\xff\xab\xd5\xcb\xcf\x4b\x55\xb2\x52"[:number])
        assert recording.read(file).records == {}
    file.write_bytes(header[: len(header) // 2])
    with pytest.raises(RecordingError, match="is no recording"):
        recording.read(file)


def test_ctrl_c_keeps_what_was_measured(bench: Bench, file: Path) -> None:
    bench.crash_after, bench.crash = 11, KeyboardInterrupt
    result = run(file)
    assert result["status"] == "interrupted" and result["measured"] == [11] and result["best"] is not None
    assert 11 <= len(recording.read(file).records) < 80
    bench.crash_after = None
    assert run(file)["status"] == "complete" and not list(file.parent.glob(".*"))


def test_the_budget_ends_a_run_and_the_next_goes_on(bench: Bench, file: Path) -> None:
    result = run(file, budget_s=0.0)
    assert (result["status"], result["recorded"], result["best"]) == ("budget", 0, None)
    assert run(file, passes=1)["measured"] == [len(bench.measured)]
    before = len(bench.measured)
    again = run(file, passes=1)
    assert again["status"] == "complete" and len(bench.measured) == before
    assert run(file, passes=3)["measured"] == [before] * 3


def test_progress_is_told_in_lines(bench: Bench, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LINE_S", 0.0)
    said: list[str] = []
    record.record(request(file), Lines(said.append))
    assert said[0].endswith(f": 0 of 80 configs are in {file}")
    lines = [re.fullmatch(r"pass (\d) of 2: (\d+)/(\d+) configs, [\d.]+/s, .* left", line) for line in said[1:]]
    numbers = [(int(line[1]), int(line[2]), int(line[3])) for line in lines if line is not None]
    assert len(numbers) == len(said) - 1 and numbers[0] == (1, 1, 80) and numbers[79] == (1, 80, 80)
    assert numbers[-1][0] == 2 and numbers[-1][1] == numbers[-1][2] < 80


# -- with processes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_goes_wrong_costs_one_config(monkeypatch: pytest.MonkeyPatch, bench: Bench, file: Path) -> None:
    recording_jobs.narrow(monkeypatch, lambda config: config["block_t"] == 256)
    for name in ("compile_job", "rounds_job"):
        monkeypatch.setattr(record, name, getattr(sabotage, name))
    for name in ("import_job", "session_job"):
        monkeypatch.setattr(evaluate, name, getattr(sabotage, name))
    expected = {
        "hang in compile": ("timeout", "compile: no answer in 5 s"),
        "crash in compile": ("failed", "compile: its process ended with signal SIGSEGV"),
        "hang": ("timeout", "no answer in 5 s"),
        "crash": ("failed", "its process ended with signal SIGSEGV"),
        "poison": ("failed", "device fault: an illegal memory access"),
    }
    orders = dict(zip(valid(), expected, strict=False))
    how: dict[str, Any] = {"environment": sabotage.orders(orders), "prepare_s": 60}
    site = Site(made=lambda: Pools(Pool(2, 5.0, **how), Pool(2, 5.0, **how), True))
    result = run(file, site=site)
    assert result["status"] == "complete" and result["recorded"] == 16 and not multiprocessing.active_children()
    for config, r in recording.read(file).records.items():
        status, reason = expected.get(orders.get(config, ""), ("ok", ""))
        assert r.status == status and r.reason.startswith(reason), r
        assert r.passes == (2 if status == "ok" else 0)


@pytest.mark.slow
def test_real_kernels_with_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch, bench: Bench, file: Path) -> None:
    """Real compilers for an sm_120 card, and what they made run by the interpreter between made-up events."""
    card = pretend_gpu.CARD
    words = {"block_t": 64, "splits": 32, "num_warps": 4}
    recording_jobs.narrow(monkeypatch, lambda c: all(c[w] == v for w, v in words.items()) and c["num_stages"] in (3, 4))
    monkeypatch.setattr(record, "compile_job", compile_job)
    monkeypatch.setattr(record, "rounds_job", pretend_gpu.rounds_job)
    indexer = type(ops.get("indexer"))
    monkeypatch.setattr(indexer, "profile", lambda *_: Profile(320, (64, 320), (1.0, 1.0)))
    interpret = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    site = Site((card,), lambda: Pools(Pool(1, 300, cache_environment()), Pool(1, 300, interpret), True))
    result = run(file, site=site, device=card, rows=3)
    assert result["status"] == "complete" and result["statuses"]["ok"] == result["recorded"] == 2, result
    first, same = recording.read(file).records.values()
    assert first.us == first.baseline_us == {length: [[125.0] * ROUNDS] * 2 for length in (64, 320)}
    assert first.error is not None and first.error < 1e-6 and first.report is not None and first.report.registers
    assert same.same_as == first.config and same.code == first.code and same.report != first.report and not same.us


@pytest.mark.gpu
def test_a_few_configs_on_a_real_gpu(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    here = devices.here()
    assert here is not None
    words = {"block_t": (64,), "splits": (32,), "num_warps": (4,), "num_stages": (2, 3, 4)}
    recording_jobs.narrow(monkeypatch, lambda config: all(config[word] in values for word, values in words.items()))

    def measured(passes: int) -> dict[str, Any]:
        wanted = record.Request("indexer", 4, 1 << 15, 0, {}, here, True, passes=passes, file=file)
        return record.record(wanted, Watcher())

    first = measured(1)
    assert first["status"] == "complete" and first["statuses"]["ok"] == 3 and first["measured"] == [2]
    second = measured(2)
    assert second["measured"] == [2, 2] and second["best"] is not None
    found = recording.read(file)
    assert found.header.profile.lengths == (128, 2048, 8256) and found.header.device.silicon == here.silicon
    for r in found.records.values():
        assert r.status == "ok" and r.error is not None and r.error < 1e-2
        if r.same_as is None:
            assert {len(times) for passes in r.us.values() for times in passes} == {ROUNDS}
            assert all(0 < us < 1e3 for passes in r.us.values() for times in passes for us in times)
            assert set(r.baseline_us) == (set(r.us) if found.header.baseline is not None else set())
    # The two that differ in nothing but three or four buffers.
    (same,) = [r for r in found.records.values() if r.same_as is not None]
    assert same.same_as is not None and {same.config["num_stages"], same.same_as["num_stages"]} == {3, 4}


# -- what is no such recording ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 16}, r"with problem indexer .* rows=64 .*, not indexer .* rows=16 .*: name another file with -o$"),
        ({"max_context": 1 << 17}, r"with range 128, 2048, 32768, 262208 of 262208, not .*: name another file"),
    ],
)
def test_a_file_of_something_else_is_left_alone(
    bench: Bench, file: Path, changes: dict[str, Any], message: str
) -> None:
    run(file, passes=1)
    before, measured = file.read_bytes(), len(bench.measured)
    with pytest.raises(ValueError, match=message):
        run(file, **changes)
    assert file.read_bytes() == before and len(bench.measured) == measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {"triton": "3.0.1"}}, r"with Triton 3\.0\.1, not \d"),
        ({"baseline": None}, r"with baseline none, not deep_gemm 1"),
        ({"words": ("dialect",)}, r"with words dialect, not dialect schedule"),
    ],
)
def test_nor_is_one_of_another_environment(bench: Bench, file: Path, change: dict[str, Any], message: str) -> None:
    run(file, budget_s=0.0)
    recording.write(file, Recording(replace(recording.read(file).header, **change), {}))
    with pytest.raises(ValueError, match=message):
        run(file)


def test_a_record_goes_through_the_file(bench: Bench, file: Path) -> None:
    run(file, budget_s=0.0)
    config = valid()[0]
    record_ = Record(config, "timeout", "no answer", seconds=(0.5, 30.0))
    recording.append(file, record_)
    assert recording.read(file).records == {config: record_}


# -- the command ------------------------------------------------------------------------------------------------


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["record", "--kernel", "indexer", *[str(a) for a in arguments]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_120"], "record measures, and there is no GPU here: run it on the machine that has one"),
        (["--kernel", "indexr"], "unknown kernel 'indexr': did you mean 'indexer'?"),
        (["--rows", "0"], "--rows must be at least 1, not 0"),
        (["--budget", "soon"], "--budget takes a time such as 90s"),
        (["--context", "1G"], "--context takes whole numbers above 0"),
        (["--heads", "8"], "--heads says nothing to kernel 'indexer': leave it out"),
        (["--gpus", "0"], "--gpus names GPUs to measure on, and there is none here"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = command(*arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert result.stderr.startswith("dsv4tune: ") and result.stderr.count("\n") == 1 and result.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "Local", lambda gpus: Site())


@pytest.mark.usefixtures("h200")
def test_a_gpu_of_other_silicon_does_not_do(bench: Bench, file: Path) -> None:
    result = command("--device", "rtx-5090", "-o", file)
    assert result.exit_code == 2 and not file.exists()
    assert (
        "record measures, and there is no rtx-5090 (sm_120) here: run it on the machine that has one" in result.stderr
    )


@pytest.mark.usefixtures("h200")
def test_a_file_that_can_not_be_written_costs_no_time(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes")
    for name, message in (
        ("none/space.gz", f"folder {tmp_path}/none does not exist: create it"),
        ("notes.txt", f"{tmp_path}/notes.txt is no recording of `dsv4tune record`"),
        (".", "Is a directory"),
    ):
        result = command("-o", tmp_path / name)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not bench.compiled and (tmp_path / "notes.txt").read_text() == "my notes"


@pytest.mark.usefixtures("h200")
def test_the_command_says_what_the_file_holds(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("--json", "--passes", 1, "--quiet")
    assert found.exit_code == 0 and found.stderr == ""
    result = json.loads(found.stdout)
    assert result["file"] == "indexer_rows64_sm_90.jsonl.gz" and Path(result["file"]).exists()
    assert result["recorded"] == 80 and result["yardstick"] == "deep_gemm"
    text = command("--passes", 1).stdout
    assert "complete: 80 of 80 configs (80 ok)" in text and "within 3% of it" in text
    assert "of deep_gemm: dialect=triton schedule=split" in text and text.endswith(f"in {result['file']}\n")
    bench.orders = dict.fromkeys(valid(), "fault")
    none = command("-o", "faults.gz", "--json")
    assert none.exit_code == 1 and json.loads(none.stdout)["best"] is None
    assert "nothing usable" in command("-o", "faults.gz").stdout
