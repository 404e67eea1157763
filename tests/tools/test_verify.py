"""Entries of others, measured here: one set of processes, each result at once, and nothing finished is lost."""

from __future__ import annotations

import io
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import recording_jobs
import sabotage
from exports import measured
from fakes import RESOURCES, make_problem
from recording_jobs import Inline, Site
from rich.console import Console
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.compile import Report
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.render import render
from dsv4tune.codegen.space import Config
from dsv4tune.tools import evaluate, executor, measure, progress, verify
from dsv4tune.tools.cli import app
from dsv4tune.tools.evaluate import Pools
from dsv4tune.tools.executor import Unusable
from dsv4tune.tools.measure import Compiled, Measured, PeerTimes, Setup, Timing
from dsv4tune.tools.progress import Lines, Watcher
from dsv4tune.tools.verify import Outcome, Request, Verified
from dsv4tune.tools.workers import Pool
from dsv4tune.tuned import files
from dsv4tune.tuned.records import Entry, Trial, triton_version
from dsv4tune.tuned.store import Filter, Store

CARD = DEVICES["rtx-pro-6000"]


@dataclass
class Gpu:
    """The jobs of a verification in this process, with what happened in order: the job's first letters and its rows.

    Attributes:
        orders: what goes wrong with the entries of so many rows: ``wrong``, ``fault``, ``inputs`` or ``interrupt``.
        speed: times as fast as the server's kernel.
    """

    orders: dict[int, str] = field(default_factory=dict)
    speed: float = 1.5
    baseline: bool = True
    free: int = 1 << 40
    events: list[str] = field(default_factory=list)
    sites: int = 0

    def pools(self) -> Pools:
        self.sites += 1
        return Pools(Inline("the compiler"), Inline("the GPU"), True)

    @property
    def site(self) -> Site:
        return Site((CARD,), self.pools)

    def measured(self) -> list[int]:
        return [int(event.split()[1]) for event in self.events if event.startswith("measure")]

    def memory_job(self) -> int:
        return self.free

    def session_job(self, setup: Setup) -> None:
        self.events.append(f"inputs {setup.problem.rows}")
        if self.orders.get(setup.problem.rows) == "inputs":
            raise Unusable("out of memory")

    def peer_job(self, setup: Setup, name: str) -> PeerTimes:
        self.events.append(f"{name} {setup.problem.rows}")
        if not self.baseline:
            return PeerTimes("not installed")
        return PeerTimes(None, "1", dict.fromkeys(setup.profile.lengths, 6.0), 1e-4)

    def compile_job(self, problem: Any, config: Config) -> Compiled:
        self.events.append(f"compile {problem.rows}")
        sha = render(ops.get("indexer"), problem, config).sha
        return Compiled(sha, Report(**RESOURCES.model_dump()), config.key)

    def device_job(self, setup: Setup, config: Config, baseline: str | None, halving: bool) -> Measured:
        rows = setup.problem.rows
        match self.orders.get(rows):
            case "interrupt":
                raise KeyboardInterrupt
            case "fault":
                raise RuntimeError("device fault")
            case "wrong":
                return Measured(Verdict(float("inf"), "row 3"), {})
        self.events.append(f"measure {rows}")
        beside = None if baseline is None else 6.0
        return Measured(Verdict(1e-7), {n: Timing(6.0 / self.speed, 0.01, beside) for n in setup.profile.lengths})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(evaluate, "import_job", recording_jobs.nothing_job)
    for module, names in (
        (evaluate, ("session_job", "compile_job", "device_job")),
        (verify, ("compile_job",)),
        (measure, ("memory_job", "peer_job")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(found, name))
    monkeypatch.setattr(executor, "REST_S", 0.01)
    return found


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Entries for 8, 16 and 64 rows."""
    return export(tmp_path / "a.json", *(measured(rows, 1.9) for rows in (8, 16, 64)))


def export(path: Path, *trials: Trial) -> Path:
    entries = [Entry.of(trial) for trial in trials]
    files.write(str(path), files.text_of(sorted(entries, key=lambda e: str(e.problem["rows"]).zfill(4))))
    return path


def run(
    gpu: Gpu, file: Path | None, db: Path, watch: Watcher | None = None, tell: Any = lambda result: None, **changes: Any
) -> Outcome:
    request = Request(None if file is None else str(file), db, site=gpu.site)
    return verify.verify(replace(request, **changes), watch or Watcher(), tell)


def statuses(outcome: Outcome) -> list[str]:
    return [result.status for result in outcome.results]


def stored(db: Path) -> list[tuple[Any, str]]:
    store = Store(db, create=False)
    found: list[tuple[Any, str]] = [
        (trial.problem["rows"], trial.status) for trial in store.trials() if not trial.imported
    ]
    store.close()
    return found


# -- one run ----------------------------------------------------------------------------------------------------


def test_one_set_of_processes_measures_all_problems(gpu: Gpu, file: Path, db: Path) -> None:
    outcome = run(gpu, file, db)
    assert outcome.holds and statuses(outcome) == ["ok"] * 3 and gpu.sites == 1
    assert gpu.measured() == [8, 16, 64] and stored(db) == [(8, "ok"), (16, "ok"), (64, "ok")]
    assert outcome.results[0].found == "0.667 of tilelang" and outcome.results[0].said.startswith("measured, 0.526")
    # A judge takes over the next problem's inputs, and times beside the server's kernel alone.
    assert [e for e in gpu.events if not e.startswith("comp")] == [
        f"{what} {rows}" for rows in (8, 16, 64) for what in ("tilelang", "inputs", "measure")
    ]


def test_what_comes_next_is_compiled_before_the_gpu_is_free(gpu: Gpu, file: Path, db: Path) -> None:
    run(gpu, file, db)
    assert gpu.events.index("compile 16") < gpu.events.index("measure 8")
    assert gpu.events.index("compile 64") < gpu.events.index("measure 16")
    # As many ahead as there are compilers, not the whole file.
    assert gpu.events.index("compile 64") > gpu.events.index("measure 8")


def test_each_result_is_told_and_stored_before_the_next_is_measured(gpu: Gpu, file: Path, db: Path) -> None:
    seen = []

    def tell(result: Verified) -> None:
        seen.append((result.problem_key, gpu.measured(), stored(db)))

    run(gpu, file, db, tell=tell)
    assert seen == [
        (measured(rows).problem_key, [8, 16, 64][:n], [(8, "ok"), (16, "ok"), (64, "ok")][:n])
        for n, rows in enumerate((8, 16, 64), 1)
    ]


def test_progress_counts_entries_and_knows_no_best(
    gpu: Gpu, file: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    lines: list[str] = []
    run(gpu, file, db, Lines(lines.append))
    counts = [line for line in lines if "entries, " in line]
    assert counts[0].startswith("1/3 entries, ") and counts[-1].startswith("3/3 entries, ")
    assert all(line.endswith(" left") for line in counts) and "best" not in "".join(lines)


def test_entries_of_one_problem_share_its_inputs(gpu: Gpu, tmp_path: Path, db: Path) -> None:
    problem, card = make_problem(8)
    configs = ops.get("indexer").space(problem, card).valid()
    folder = tmp_path / "cards"
    folder.mkdir()
    for number, config in enumerate((configs[0], configs[50], configs[50])):
        export(folder / f"{number}.json", measured(8, 1.9 + number, config))
    outcome = run(gpu, folder, db)
    assert statuses(outcome) == ["ok"] * 3
    assert gpu.measured() == [8, 8] and gpu.events.count("inputs 8") == gpu.events.count("tilelang 8") == 1


def test_a_missing_baseline_is_said_once(gpu: Gpu, file: Path, db: Path) -> None:
    gpu.baseline = False
    lines: list[str] = []
    outcome = run(gpu, file, db, Lines(lines.append))
    assert outcome.holds and outcome.results[2].found.endswith("of byte floor")
    assert sum("no baseline: tilelang can't run here" in line for line in lines) == 1


# -- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "status", "reason"), [("wrong", "wrong", "row 3"), ("fault", "failed", "RuntimeError: device fault")]
)
def test_what_goes_wrong_costs_one_entry_and_is_not_followed(
    gpu: Gpu, file: Path, db: Path, order: str, status: str, reason: str
) -> None:
    assert CliRunner().invoke(app, ["import", str(file), "--yes", "--db", str(db)]).exit_code == 0
    gpu.orders = {16: order}
    outcome = run(gpu, file, db)
    assert statuses(outcome) == ["ok", status, "ok"] and not outcome.holds and gpu.sites == 1
    assert reason in outcome.results[1].reason
    store = Store(db, create=False)
    best = store.best(measured(8).problem_key)
    assert best is not None and best.here and best.score == pytest.approx(1 / 1.5, abs=1e-6)
    # It stays in the history.
    assert store.best(measured(16).problem_key) is None and store.total() == 6
    assert any(f"verified here: {reason}" in trial.reason for trial in store.trials())


@pytest.mark.parametrize(("order", "followed"), [("wrong", False), ("fault", True)])
def test_an_own_winner_that_computes_wrongly_now_is_not_followed(
    gpu: Gpu, file: Path, db: Path, order: str, followed: bool
) -> None:
    """A fault may be the machine's; a wrong result is the config's, with this driver or that."""
    assert run(gpu, file, db).holds
    gpu.orders = {16: order}
    assert not run(gpu, file, db, again=True).holds
    store = Store(db, create=False)
    assert (store.best(measured(16).problem_key) is not None) is followed
    assert store.best(measured(8).problem_key) is not None
    store.close()


def test_inputs_that_can_not_be_made_cost_one_problem(gpu: Gpu, file: Path, db: Path) -> None:
    """Or nobody would get past it: each run would end where the one before did."""
    gpu.orders = {16: "inputs"}
    outcome = run(gpu, file, db)
    assert statuses(outcome) == ["ok", "untried", "ok"] and outcome.status == "complete" and not outcome.holds
    assert "out of memory" in outcome.results[1].reason and gpu.measured() == [8, 64]
    # It says nothing of the entry.
    assert stored(db) == [(8, "ok"), (64, "ok")] and gpu.sites == 2


def test_a_gpu_that_is_gone_ends_it_with_what_there_is(gpu: Gpu, file: Path, db: Path) -> None:
    gpu.orders = {16: "inputs", 64: "inputs"}
    told: list[Verified] = []
    with pytest.raises(ValueError, match="the GPU can't be used here: out of memory"):
        run(gpu, file, db, tell=told.append)
    assert [result.status for result in told] == ["ok", "untried"] and stored(db) == [(8, "ok")]


def test_what_does_not_fit_the_gpu_is_untried(gpu: Gpu, file: Path, db: Path) -> None:
    gpu.free = 1000
    outcome = run(gpu, file, db)
    assert statuses(outcome) == ["untried"] * 3 and gpu.sites == 1 and "of GPU memory" in outcome.results[0].reason
    assert not gpu.measured() and stored(db) == []


# -- going on ---------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(gpu: Gpu, file: Path, db: Path) -> None:
    gpu.orders = {16: "interrupt"}
    outcome = run(gpu, file, db)
    assert (outcome.status, outcome.entries, statuses(outcome)) == ("interrupted", 3, ["ok"]) and not outcome.holds
    assert stored(db) == [(8, "ok")]
    gpu.orders = {}
    lines: list[str] = []
    rest = run(gpu, file, db, Lines(lines.append))
    assert gpu.measured() == [8, 16, 64] and rest.holds and [r.earlier for r in rest.results] == [True, False, False]
    assert str(rest.results[0]).startswith(
        f"{measured(8).problem_key}: measured here earlier, 0.667 of tilelang; it said"
    )
    assert "1 of 3 entries were found right here before; --again measures them" in lines
    # No process is started for nothing.
    sites = gpu.sites
    assert run(gpu, file, db).holds and gpu.sites == sites and len(gpu.measured()) == 3
    assert run(gpu, file, db, again=True).holds and gpu.measured() == [8, 16, 64] * 2


def test_the_budget_ends_it(gpu: Gpu, file: Path, db: Path) -> None:
    outcome = run(gpu, file, db, budget_s=0.0)
    assert outcome.status == "budget" and not outcome.results and not gpu.measured()
    assert run(gpu, file, db, budget_s=600.0).status == "complete"


def test_what_the_database_chooses_is_measured_where_it_came_from_elsewhere(gpu: Gpu, file: Path, db: Path) -> None:
    assert CliRunner().invoke(app, ["import", str(file), "--yes", "--db", str(db)]).exit_code == 0
    outcome = run(gpu, None, db, only=Filter(rows=16))
    assert outcome.holds and gpu.measured() == [16]
    assert [r.earlier for r in run(gpu, None, db).results].count(True) == 1
    assert sorted(gpu.measured()) == [8, 16, 64]


@pytest.mark.parametrize(
    "change",
    [
        lambda trial: {"source_sha": "b" * 64},
        lambda trial: {"environment": trial.environment.model_copy(update={"triton": "3.0.1"})},
        lambda trial: {"range": trial.range.model_copy(update={"lengths": [128], "weights": [1.0]})},
        lambda trial: {"imported": "a.json"},
        lambda trial: {"provenance": "predicted"},
        lambda trial: {"status": "pruned"},
        lambda trial: {"status": "wrong", "reason": "row 3"},
        lambda trial: {"config": dict(make_other(trial))},
    ],
)
def test_only_what_answers_the_same_question_is_not_asked_again(
    gpu: Gpu, tmp_path: Path, db: Path, change: Callable[[Trial], dict[str, Any]]
) -> None:
    file, mine = export(tmp_path / "a.json", measured(8, 1.9)), measured(8, 1.4)
    mine = mine.model_copy(
        update={"environment": mine.environment.model_copy(update={"triton": triton_version()}), "final": None}
    )
    store = Store(db)
    store.add(mine.model_copy(update=change(mine)))
    assert not run(gpu, file, db).results[0].earlier and gpu.measured() == [8]
    # The latest word counts: what was right once and wrong since is tried again.
    store.add(mine)
    assert run(gpu, file, db).results[0].earlier and gpu.measured() == [8]
    store.add(mine.model_copy(update={"status": "wrong", "reason": "row 3"}))
    store.close()
    assert not run(gpu, file, db).results[0].earlier and gpu.measured() == [8, 8]


def make_other(trial: Trial) -> Config:
    problem, card = make_problem(8)
    return next(c for c in ops.get("indexer").space(problem, card).valid() if dict(c) != trial.config)


# -- with processes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_goes_wrong_costs_one_entry(
    gpu: Gpu, tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("import_job", "session_job", "compile_job", "device_job"):
        monkeypatch.setattr(evaluate, name, getattr(sabotage, name))
    monkeypatch.setattr(verify, "compile_job", sabotage.compile_job)
    monkeypatch.setattr(verify, "fitting", lambda op, setup, pools, say: setup)
    monkeypatch.setattr(verify, "timed_baseline", lambda *_, **__: (None, {}))
    expected = {
        8: ("", "ok", ""),
        16: ("crash", "failed", "its process ended with signal SIGSEGV"),
        32: ("crash in compile", "failed", "compile: its process ended with signal SIGSEGV"),
        64: ("poison", "failed", "device fault: an illegal memory access"),
        128: ("", "ok", ""),
        256: ("", "ok", ""),
    }
    valid = [set(ops.get("indexer").space(*make_problem(rows)).valid()) for rows in expected]
    configs = dict(zip(expected, sorted(set.intersection(*valid), key=lambda config: config.key), strict=False))
    file = export(tmp_path / "a.json", *(measured(rows, 1.9, config) for rows, config in configs.items()))
    how: dict[str, Any] = {"environment": sabotage.orders({configs[r]: o for r, (o, _, _) in expected.items()})}
    how["prepare_s"] = 60
    gpu.pools = lambda: Pools(Pool(1, 20.0, **how), Pool(1, 20.0, **how), True)  # type: ignore[method-assign]
    outcome = run(gpu, file, db)
    assert not multiprocessing.active_children()
    assert [(r.status, r.reason[:20]) for r in outcome.results] == [(s, why[:20]) for _, s, why in expected.values()]
    store = Store(db, create=False)
    processes = {trial.problem["rows"]: trial.warnings for trial in store.trials() if trial.status == "ok"}
    store.close()
    assert processes[128] == processes[256] != processes[8]


# -- the command ------------------------------------------------------------------------------------------------


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *[str(a) for a in arguments]])


@pytest.fixture
def here(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4tune.codegen.devices.here", lambda: CARD)
    monkeypatch.setattr("dsv4tune.tools.sites.Local.pools", lambda *_: gpu.pools())


@pytest.mark.usefixtures("here")
def test_the_command_tells_and_goes_on(gpu: Gpu, file: Path, db: Path) -> None:
    gpu.orders = {16: "interrupt"}
    done = command(file, "--db", db, "--quiet")
    assert done.exit_code == 1 and done.stderr == ""
    first, last = done.stdout.splitlines()
    assert first.startswith(f"{measured(8).problem_key}: measured here, 0.667 of tilelang; it said measured, 0.526 of")
    assert last == "interrupted: 1 of 3 entries done; the same command goes on with the others"
    again = command(file, "--db", db, "--again", "--budget", "0s").stdout
    assert again == "budget: 0 of 3 entries done; without --again the same command leaves out what was found right\n"
    gpu.orders = {64: "wrong"}
    done = command(file, "--db", db, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and (found["status"], found["entries"]) == ("complete", 3)
    assert [(r["status"], r["earlier"]) for r in found["results"]] == [("ok", True), ("ok", False), ("wrong", False)]
    assert ": wrong: row 3; it said measured" in done.stderr
    gpu.orders = {}
    done = command(file, "--db", db)
    assert done.exit_code == 0 and done.stdout.count("measured here earlier") == 2 and done.stdout.count("\n") == 3
    assert "2 of 3 entries were found right here before" in done.stderr
    assert command(file, "--db", db, "--budget", "soon").exit_code == 2


@pytest.mark.usefixtures("here")
def test_entries_of_other_silicon_are_left_out(file: Path, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4tune.codegen.devices.here", lambda: DEVICES["h200"])
    done = command(file, "--db", db)
    assert done.exit_code == 2 and "nothing to verify on the h200 here" in done.stderr and not db.exists()
    assert "3 entries are for other silicon" in done.stderr


def test_without_a_gpu_it_is_a_clear_line(file: Path, db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4tune.codegen.devices.here", lambda: None)
    done = command(file, "--db", db)
    assert done.exit_code == 2 and "verify measures, and there is no GPU here" in done.stderr and not db.exists()


def test_results_do_not_run_into_the_bar_of_a_terminal(
    gpu: Gpu, file: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stdout is the terminal that the bar is drawn on, the bar is gone while a line is written."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    out = io.StringIO()
    with progress.Terminal(Console(file=out, force_terminal=True, width=160)) as terminal:
        run(gpu, file, db, terminal, lambda result: out.write(f"{result}\n"))
    text = out.getvalue()
    assert "3/3 entries" in text and "verifying indexer" in text and "nothing usable" not in text
    told = text.split("; it said ")
    assert len(told) == 4
    for part in told[1:]:
        # What follows a result is drawn under it; nothing goes up and erases before the next picture is there.
        assert part.index("\x1b[?25l") < part.index("verifying") < part.index("\x1b[1A")
    for part in told[:-1]:
        # And what stands before one is erased: the bar's last line is not above it.
        assert part.rindex("\x1b[2K") > part.rindex("entries, ")
