"""What one database knows goes to another: the same bytes again, the better evidence first, all or nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exports import make_entry, measured
from fakes import make_trial
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsv4tune.codegen import ops
from dsv4tune.codegen.space import Config
from dsv4tune.tools.cli import app
from dsv4tune.tuned import files, share
from dsv4tune.tuned.records import Entry, Environment, Trial
from dsv4tune.tuned.store import Filter, Store

DATA = Path(__file__).parents[1] / "data" / "share"
HERE = Environment(dsv4tune="0", triton="3.9.0", ptxas="13.0", torch="2.13.0")
ELSEWHERE = Environment(dsv4tune="0", triton="3.6.0", ptxas="12.8", torch="2.11.0")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running one, whichever is installed."""
    for module in ("share", "store"):
        monkeypatch.setattr(f"dsv4tune.tuned.{module}.triton_version", lambda: "3.9.0")


def run(*arguments: Any, input: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def export(path: Path, *trials: Trial) -> Path:
    entries = [Entry.of(trial) for trial in trials]
    files.write(str(path), files.text_of(sorted(entries, key=lambda e: e.problem_key)))
    return path


def fill(path: Path, *trials: Trial) -> None:
    store = Store(path)
    store.add_all(trials)
    store.close()


def best(path: Path, rows: int = 8) -> Trial:
    store = Store(path, create=False)
    found = store.best(measured(rows).problem_key)
    store.close()
    assert found is not None
    return found


# -- from one to another ----------------------------------------------------------------------------------------


def test_export_import_export_gives_the_same_bytes(db: Path, tmp_path: Path) -> None:
    fill(db, *(measured(rows, 1.1 + rows / 100) for rows in (1, 8, 16)), make_trial(rows=2, error=1e-7))
    # A predicted one must be of this version's source too.
    a, b, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "other.db"
    assert run("export", "--db", db, "--problem", "rows=8", "-o", b).exit_code == 0
    store = Store(db)
    store.delete([4])
    store.close()
    assert run("export", "--db", db, "-o", a).exit_code == 0
    assert run("import", a, "--yes", "--db", other).exit_code == 0
    assert run("export", "--db", other).stdout == a.read_text()
    done = run("diff", db, a)
    assert done.exit_code == 0, done.stdout + done.stderr
    again = run("import", a, "--yes", "--db", other)
    assert "0 entries stored now" in again.stdout and "3 known already" in again.stdout


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_files_are_indented_as_by_json_itself(value: Any) -> None:
    assert files._indented(value, "\n") == json.dumps(value, indent=1, sort_keys=True)


def test_import_shows_first_and_does_nothing_without_a_word(db: Path, tmp_path: Path) -> None:
    file = export(tmp_path / "a.json", measured(8), measured(16))
    shown = run("import", file, "--db", db)
    assert shown.exit_code == 0 and "2 entries would be stored: 2 new" in shown.stdout
    assert "nothing was written: --yes does it" in shown.stderr and not db.exists()
    assert json.loads(run("import", file, "--yes", "--json", "--db", db).stdout)["new"] == 2
    assert run("import", file, "--db", db, "--json").exit_code == 0


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_entries_of_one_problem_are_weighed_one_after_another(
    at_once: int, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "_AT_ONCE", at_once)
    folder = tmp_path / "cards"
    folder.mkdir()
    export(folder / "a.json", *(measured(rows, 1.2) for rows in (8, 16, 64)))
    export(folder / "b.json", measured(8, 1.3), measured(16, 1.1), measured(64, 1.2))
    done = json.loads(run("import", folder, "--yes", "--json", "--db", db).stdout)
    assert {name: done[name] for name in ("new", "better", "kept", "known")} == {
        "new": 3,
        "better": 1,
        "kept": 1,
        "known": 1,
    }
    assert Store(db, create=False).total() == 5 and best(db) == measured(8, 1.3, imported=str(folder / "b.json"))
    again = json.loads(run("import", folder, "--yes", "--json", "--db", db).stdout)
    assert again["known"] == 6 and Store(db, create=False).total() == 5


def test_sharing_loads_no_torch(db: Path, tmp_path: Path) -> None:
    file = export(tmp_path / "a.json", measured(8))
    code = (
        "import sys\n"
        "from dsv4tune.tools.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'triton', 'optuna'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (("import", file, "--yes", "--db", db), ("export", "--db", db, "-o", tmp_path / "b.json")):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    assert (tmp_path / "b.json").read_bytes() == file.read_bytes()


def test_a_bad_entry_leaves_the_database_as_it_was(db: Path, tmp_path: Path) -> None:
    fill(db, measured(64))
    file = tmp_path / "a.json"
    bad = {**make_entry(16), "score": 0.01}
    file.write_text(json.dumps({"schema_version": 2, "entries": [make_entry(8), bad]}))
    done = run("import", file, "--yes", "--db", db)
    assert done.exit_code == 2 and "entries[1].score" in done.stderr and done.stderr.count("\n") == 1
    assert Store(db, create=False).total() == 1


def test_a_folder_and_a_url_and_stdin(db: Path, tmp_path: Path) -> None:
    import fsspec

    folder = tmp_path / "cards"
    (folder / "mine").mkdir(parents=True)
    export(folder / "mine" / "indexer.json", measured(8))
    export(folder / "more.json", measured(16))
    assert "2 new" in run("import", folder, "--yes", "--db", db).stdout
    assert run("export", "--db", db, "-o", "memory://cards/all.json").exit_code == 0
    assert fsspec.filesystem("memory").cat("/cards/all.json").decode() == run("export", "--db", db).stdout
    for place in ("memory://cards/all.json", "memory://cards"):
        assert "2 known already" in run("import", place, "--yes", "--db", db).stdout
    text = (folder / "more.json").read_text()
    assert "1 new" in run("import", "-", "--yes", "--db", tmp_path / "b.db", input=text).stdout
    missing = run("import", "memory://nothing/x.json", "--yes", "--db", db)
    assert missing.exit_code == 2 and missing.stderr.count("\n") == 1


def test_filters(db: Path, tmp_path: Path) -> None:
    fill(db, *(measured(rows) for rows in (8, 16, 64)))

    def rows(*arguments: str) -> list[int]:
        text = run("export", "--db", db, *arguments).stdout
        return [e["problem"]["rows"] for e in json.loads(text)["entries"]]

    assert rows() == [16, 64, 8]
    assert rows("--problem", "rows=8") == [8] and rows("--problem", "rows=8 heads=16") == []
    assert rows("--device", "rtx-pro-6000") == [16, 64, 8] and rows("--device", "rtx-5090") == []
    assert rows("--target", "sm_90") == [] and rows("--kernel", "mla_decode") == []
    for option, value in (("--kernel", "x"), ("--device", "x"), ("--target", "sm_1"), ("--device", "here")):
        done = run("export", "--db", db, option, value)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
    listed = json.loads(run("list", "--db", db, "--rows", 16, "--json").stdout)
    assert [one["problem"]["rows"] for one in listed] == [16]
    assert len(json.loads(run("show", "--db", db, "--kernel", "indexer", "--json").stdout)["results"]) == 3


# -- who wins ---------------------------------------------------------------------------------------------------

FAR: dict[str, Any] = {"environment": ELSEWHERE}
#: The least of evidence last; speed says nothing between kinds.
KINDS: list[tuple[str, Trial]] = [
    ("measured here, slow", measured(8, 1.05, **FAR)),
    ("same Triton, fast", measured(8, 1.3, environment=HERE, imported="a.json")),
    ("same Triton, slow", measured(8, 1.2, environment=HERE, imported="a.json")),
    ("other Triton, fast", measured(8, 1.9, imported="a.json", **FAR)),
    ("other Triton, slow", measured(8, 1.8, imported="a.json", **FAR)),
    ("predicted", make_trial(rows=8, score=0.1)),
]


def test_better_evidence_wins_then_the_faster(db: Path) -> None:
    dice = random.Random(0)
    for number in range(20):
        some = sorted(dice.sample(range(len(KINDS)), 3))
        path = db.with_name(f"{number}.db")
        fill(path, *(KINDS[i][1] for i in dice.sample(some, 3)))
        found = best(path)
        assert found == KINDS[some[0]][1]
        # Files are merged by the same order.
        ordered = sorted((KINDS[i][1] for i in some), key=lambda t: share.standing(Entry.of(t), t.here, "3.9.0"))
        assert ordered[0] == found


def test_both_stay_in_the_history(db: Path, tmp_path: Path) -> None:
    mine, theirs = measured(8, 1.1, environment=ELSEWHERE), measured(8, 1.9, environment=HERE)
    fill(db, mine)
    done = run("import", export(tmp_path / "a.json", theirs), "--yes", "--db", db)
    assert "1 for the history" in done.stdout
    assert best(db) == mine and Store(db, create=False).total() == 2
    faster = measured(16, 1.5, imported="x")
    fill(db, faster)
    done = run("import", export(tmp_path / "b.json", measured(16, 1.6)), "--yes", "--db", db)
    assert "1 better" in done.stdout and "was measured, 0.667 of tilelang" in done.stdout


def test_merge_takes_the_better_and_names_the_other(tmp_path: Path) -> None:
    a = export(tmp_path / "a.json", measured(8, 1.1), measured(16, 1.5))
    b = export(tmp_path / "b.json", measured(8, 1.2), measured(64, 1.5))
    done = run("merge", a, b, "-o", tmp_path / "c.json")
    assert done.exit_code == 0 and "gives way to measured, 0.833" in done.stderr
    assert done.stderr.endswith(f"wrote {tmp_path / 'c.json'}: 3 entries\n")
    merged = json.loads((tmp_path / "c.json").read_text())["entries"]
    assert {e["problem"]["rows"]: round(1 / e["score"], 2) for e in merged} == {8: 1.2, 16: 1.5, 64: 1.5}
    run("merge", b, a, "-o", tmp_path / "d.json")
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "d.json").read_bytes()


def test_diff(tmp_path: Path) -> None:
    a = export(tmp_path / "a.json", measured(8, 1.1), measured(16, 1.5))
    b = export(tmp_path / "b.json", measured(8, 1.2), measured(64, 1.5))
    done = run("diff", a, b)
    assert done.exit_code == 1
    assert [line[0] for line in done.stdout.splitlines()] == ["-", "+", "~"]
    found = json.loads(run("diff", a, b, "--json").stdout)
    assert list(found["changed"][0]["fields"]) == ["score", "times_us", "final"]
    assert run("diff", a, a).exit_code == 0 and run("diff", a, tmp_path / "none.json").exit_code == 2


# -- prune ------------------------------------------------------------------------------------------------------


def test_prune_never_takes_a_winner(db: Path) -> None:
    default = Config(measured(8).config)
    other = default.with_(num_warps=2)
    old = "2020-01-01T00:00:00+00:00"
    new = "2999-01-01T00:00:00+00:00"
    keep = [
        measured(8, 1.5, finished_at=old),
        measured(8, 1.1, environment=ELSEWHERE, finished_at=old),  # the best of another compiler
        measured(8, 1.2, other, finished_at=old),  # the best for 16 rows
        measured(16, 1.5, other, finished_at=old),
        measured(8, 1.01, finished_at=new),
    ]
    lose = [
        measured(64, 1.1, default.with_(programs_per_sm=3), finished_at=old),
        make_trial(rows=8, status="wrong", score=None, finished_at=old),
    ]
    fill(db, *keep, *lose, measured(64, 1.4, finished_at=old))
    shown = run("prune", "--db", db)
    assert "2 of 8 trials" in shown.stdout and Store(db, create=False).total() == 8
    before = [best(db, rows) for rows in (8, 16, 64)]
    assert run("prune", "--db", db, "--yes").exit_code == 0
    assert Store(db, create=False).total() == 6 and [best(db, rows) for rows in (8, 16, 64)] == before
    assert run("prune", "--db", db.with_name("none.db")).exit_code == 2


# -- the format -------------------------------------------------------------------------------------------------


def test_the_published_schema_is_the_one_that_is_read() -> None:
    assert files.published(files.VERSION) == files.schema()
    assert sorted(files.published_versions()) == list(files.VERSIONS)


@pytest.mark.parametrize("version", files.VERSIONS)
def test_every_version_still_imports(version: int, db: Path) -> None:
    """A file as that version wrote it, but for the hashes: the kernels' text has moved on since."""
    data = json.loads((DATA / f"v{version}.json").read_text())
    assert data["schema_version"] == version
    for entry in data["entries"]:
        problem = ops.problem_from_json(entry["problem"])
        config = Config({w: entry["config"][w] for w in ops.get(problem.op).words})
        from dsv4tune.codegen.render import render

        entry["source_sha"] = render(ops.get(problem.op), problem, config).sha
    file = db.with_name("old.json")
    file.write_text(json.dumps(data))
    done = run("import", file, "--yes", "--db", db)
    assert done.exit_code == 0 and f"{len(data['entries'])} new" in done.stdout
    # And goes out as the newest.
    assert json.loads(run("export", "--db", db).stdout)["schema_version"] == files.VERSION


def test_a_filter_takes_whole_words() -> None:
    key = measured(8).problem_key
    assert Filter("indexer", 8, "sm_120", 188, 101_376, ("heads=64",)).matches(key)
    for other in (Filter("mla_decode"), Filter(rows=80), Filter(words=("heads=6",)), Filter(sm_count=18)):
        assert not other.matches(key)
