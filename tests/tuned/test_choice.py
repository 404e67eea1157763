"""Who gets which entry, and why: exact, else one that serves a measured range of rows, else none."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import serving
from fakes import make_final, make_trial
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4tune.codegen import ops
from dsv4tune.codegen.devices import DEVICES
from dsv4tune.codegen.ops.indexer import refuse
from dsv4tune.codegen.space import Config
from dsv4tune.tuned.reader import Stored
from dsv4tune.tuned.records import Baseline, Entry, Environment, Range, Trial
from dsv4tune.tuned.selector import Book, Decision, Found, Policy, Rules, family
from dsv4tune.tuned.store import Store

CARD = serving.CARD
HERE = Environment(dsv4tune="0", triton="3.9.0", ptxas="13.0", torch="2")
ELSEWHERE = Environment(dsv4tune="0", triton="3.6.0", ptxas="12.8", torch="2")
WIDTH = 262_208
CONFIG = ops.get("indexer").default(serving.problem_of("indexer", 8), CARD)
#: Others that are usable at the same rows.
OTHERS = [
    config
    for config in ops.get("indexer").space(serving.problem_of("indexer", 8), CARD).valid()[::97]
    if all(refuse(serving.problem_of("indexer", rows), CARD, config) is None for rows in (16, 32))  # type: ignore[arg-type]
]
OTHER = OTHERS[0]


def rules(policy: Policy = "measured") -> Rules:
    return Rules(policy, {"indexer": "tilelang"}, "3.9.0", "13.0")


def entry(rows: int, score: float = 0.9, config: Config = CONFIG, **changes: Any) -> Entry:
    values = {
        "config": config,
        "provenance": "measured",
        "score": score,
        "yardstick": "tilelang",
        "baseline": Baseline(name="tilelang", version="1", times_us={128: 4.0, WIDTH: 1500.0}),
        "environment": HERE,
        **changes,
    }
    return Entry.of(make_trial(rows=rows, **values))


def choose(rows: int, *entries: Entry | Found, policy: Policy = "measured", width: int = WIDTH) -> Decision:
    book = Book(CARD.silicon, pytest.fail)
    found = [one if isinstance(one, Found) else Found(one, "mine.db") for one in entries]
    book.add(found)
    return book.choose(serving.problem_of("indexer", rows), width, rules(policy))


def test_exact_goes_first() -> None:
    other = OTHER
    found = choose(16, entry(8), entry(16, 0.95, other), entry(32))
    assert found.entry is not None and found.config == other and found.why == "exact" and found.origin == "mine.db"


def test_one_config_serves_the_rows_between_two_that_it_was_measured_at() -> None:
    found = choose(16, entry(8, 0.8), entry(32, 0.9))
    assert found.entry is not None and found.config == CONFIG
    # The worse end speaks for what lies between.
    assert found.entry.score == 0.9 and found.why == "the same config at 8 and 32 rows"


@pytest.mark.parametrize("rows", [4, 64])
def test_rows_outside_get_none(rows: int) -> None:
    found = choose(rows, entry(8), entry(32))
    assert found.entry is None and found.why == "entries are for 8, 32 rows, which don't enclose these"


def test_neighbours_are_the_nearest_that_were_tried() -> None:
    """A slow one between two fast ones is not passed over."""
    found = choose(12, entry(8), entry(16, 1.1), entry(32))
    assert found.entry is None and found.why == "no one config is usable at both 8 and 16 rows"
    assert "not faster than tilelang" in str(found.considered[0])


def test_predictions_don_t_stand_between_measurements() -> None:
    """As the shipped ones would, for whoever has searched for other rows on the card."""
    guess = {"provenance": "predicted", "baseline": None, "yardstick": "byte floor"}
    guesses = [Found(entry(rows, 1.5, OTHER, **guess), "shipped") for rows in (1, 12, 16, 64)]
    for rows in (12, 13):
        found = choose(rows, entry(8), entry(32), *guesses)
        assert found.entry is not None and found.why == "the same config at 8 and 32 rows"
    assert choose(64, entry(8), entry(32), *guesses).why.startswith("predicted, not measured")
    assert choose(48, entry(8), entry(32), *guesses).why == "entries are for 8, 32 rows, which don't enclose these"
    assert choose(13, *guesses).why == "entries are for 1, 12, 16, 64 rows, and predicted, not measured"
    assert choose(13, *guesses, policy="predicted").entry is not None


def test_configs_that_differ_serve_nothing_between_them() -> None:
    assert choose(12, entry(8), entry(16, config=OTHER)).entry is None


def test_prompts_say_nothing_of_decoding() -> None:
    causal = Range(width=WIDTH, lengths=[2048], weights=[1.0], causal=True)
    assert choose(64, entry(8), entry(128, range=causal)).entry is None
    assert choose(64, entry(8), entry(128)).entry is not None


def test_a_config_that_the_space_refuses_for_these_rows() -> None:
    """At most one resident program a row is no hybrid schedule."""
    found = choose(1000, entry(8), entry(2000))
    assert found.entry is None and any("config refused" in str(one) for one in found.considered)


def test_the_narrowest_range_that_holds_the_call(tmp_path: Path) -> None:
    """What was tried at lengths like the call's says more of it than what was tried at others too; of one file."""
    narrow = Range(width=4096, lengths=[128, 2048], weights=[1.0, 1.0])
    wide, near = entry(8, 0.6), entry(8, 0.9, OTHER, range=narrow, times_us={128: 2.7, 2048: 2.7})
    lost = near.model_copy(update={"final": make_final(1, won=False)})
    for found in ((wide, near), (near, wide)):
        assert choose(8, *found, width=4096).config == OTHER
        assert choose(8, *found, width=4160).config == CONFIG
    mine = [Found(one, "mine.db", here=True) for one in (wide, lost)]
    assert choose(8, *mine, width=4096).settled and choose(8, *mine, width=4160).config == CONFIG
    store = Store(tmp_path / "tuned.db")
    store.add_all([wide.trial(""), near.trial("")])
    store.close()
    book = Book.read(serving.CARD.silicon, tmp_path / "tuned.db", pytest.fail)
    for width, config in ((4096, OTHER), (4160, CONFIG)):
        assert book.choose(serving.problem_of("indexer", 8), width, rules("measured")).config == config
    book.close()


def test_a_wider_call_than_was_tried() -> None:
    found = choose(8, entry(8), width=WIDTH + 64)
    assert found.entry is None and found.why == "tried up to 262208 columns, asked for 262272"
    assert choose(8, entry(8), width=640).entry is not None


def test_the_running_compiler_goes_before_another_and_strict_takes_no_other() -> None:
    old, new = entry(8, 0.7, environment=ELSEWHERE), entry(8, 0.9, OTHER)
    found = choose(8, old, new)
    assert found.entry is not None and found.entry.score == 0.9 and found.why == "exact"
    found = choose(8, old)
    assert found.entry is not None and found.why == "exact, with Triton 3.6.0 and ptxas 12.8"
    found = choose(8, old, policy="strict")
    assert found.entry is None and "policy strict" in found.why


def test_the_users_database_goes_before_the_shipped_entries() -> None:
    shipped = Found(entry(8, 0.5, OTHER), "shipped")
    mine = Found(entry(8, 0.9), "mine.db")
    assert choose(8, mine, shipped).origin == "mine.db"
    # A shipped measurement goes before what only my database's cost model says.
    guess = Found(entry(8, 1.5, provenance="predicted", baseline=None, yardstick="byte floor"), "mine.db")
    assert choose(8, guess, shipped, policy="predicted").origin == "shipped"
    assert choose(8, guess, policy="predicted").origin == "mine.db"


def test_what_the_user_timed_as_slow_is_not_taken_from_the_shipped_entries() -> None:
    found = choose(8, Found(entry(8, 1.2), "mine.db"), Found(entry(8, 0.9), "shipped"))
    assert found.entry is None and "timed before, and not faster then" in str(found.considered[1])


def test_a_lost_final_is_the_last_word_here() -> None:
    """A candidate that was timed alone and did not reach the final is slower, however its score looks."""
    lost = Found(entry(16, 0.985, final=make_final(1, won=False)), "mine.db", here=True)
    alone, shipped = Found(entry(16, 0.98, OTHER), "mine.db", here=True), Found(entry(16, 0.9, OTHER), "shipped.json")
    found = choose(16, shipped, alone, lost)
    assert found.entry is None and "tilelang stayed in the search's final (0.985 of its time; 3% less" in found.why
    assert found.settled and not choose(17, lost, entry(32)).settled, "of other rows it says nothing"
    assert choose(24, lost, alone, Found(entry(32, 0.9, OTHER), "mine.db", here=True)).entry is None
    won = Found(entry(16, 0.9, final=make_final(1)), "mine.db", here=True)
    assert choose(16, shipped, alone, won).config == CONFIG
    # Elsewhere another server's figures count as such.
    elsewhere = Found(entry(16, 0.985, final=make_final(1, won=False)), "theirs.json")
    assert choose(16, shipped, elsewhere).config == OTHER


def test_silicon_decides_and_names_inform() -> None:
    known = entry(8)
    renamed = known.model_copy(update={"device": known.device.model_copy(update={"name": "RTX PRO 6000 Max-Q"})})
    assert choose(8, renamed).entry is not None
    book = Book(DEVICES["rtx-5090"].silicon, pytest.fail)
    book.add([Found(entry(8), "mine.db")])
    problem = ops.get("indexer").problem(8, DEVICES["rtx-5090"].silicon)
    assert book.choose(problem, WIDTH, rules()).why == "no entry for this silicon"


@pytest.mark.parametrize(
    ("heads", "page", "width", "missing", "there"),
    [
        (8, 2, 1088, "c128 layers at a context of about 128k", "c128 layers at a context of about 1M"),
        (8, 64, 1024, "8 heads", "16 heads"),
        (32, 64, 1024, "32 heads", "16 heads"),
        (4, 0, 0, "4 heads", "8 heads"),
        (8, 64, 2048, "c4 layers with 2048 columns", "c4 layers of DeepSeek-V4-Flash"),
    ],
)
def test_other_shapes_are_named(heads: int, page: int, width: int, missing: str, there: str) -> None:
    """In words that a server's owner knows, not by a tensor's columns."""
    op, card = ops.get("mla_decode"), DEVICES["h200"]
    problem = op.problem(64, card.silicon, heads=heads, extra_page_size=page, extra_width=width)
    with contextlib.closing(Book.read(card.silicon, None, pytest.fail)) as book:
        why = book.choose(problem, width, rules()).why
    assert why == f"no entry for {missing}: search for one (there are some for {there})"


def test_other_shapes_of_an_op_that_says_no_more_are_named_by_their_fields() -> None:
    op = ops.get("indexer")
    book = Book(DEVICES["rtx-pro-6000"].silicon, pytest.fail)
    book.add([Found(entry(8), "mine.db")])
    why = book.choose(op.problem(8, book.silicon, heads=32), WIDTH, rules()).why
    assert why == "no entry for heads=32: search for one (there are some for heads=64)"


@settings(deadline=None, max_examples=30)
@given(st.permutations(list(range(6))))
def test_the_order_of_entries_decides_nothing(order: list[int]) -> None:
    """Timings within noise of each other, and every rank picks the same."""
    entries = [entry(rows, 0.9, config) for rows in (8, 32) for config in OTHERS[:3]]
    first = [choose(rows, *entries) for rows in (8, 16)]
    again = [choose(rows, *(entries[i] for i in order)) for rows in (8, 16)]
    assert [one.config for one in first] == [one.config for one in again]


def usable(path: Path, tell: Any) -> list[Entry]:
    """Every usable entry of the indexer on this card."""
    of = family(serving.problem_of("indexer", 8))
    with contextlib.closing(Stored(path, tell)) as stored:
        return [entry for rows in stored.rows(of, True) for entry, _ in stored.entries(of, rows, 0, "3.9.0", "13.0")]


# -- the database -----------------------------------------------------------------------------------------------


def test_the_light_reader_reads_what_the_store_wrote(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    store = Store(path)
    for rows, score in ((8, 0.9), (8, 0.8), (16, 0.7)):
        store.add(make_trial(rows=rows, score=score))
    store.add(make_trial(rows=8, status="wrong", score=None))
    store.add(make_trial(rows=8, device="h200"))
    lines: list[str] = []
    found = usable(path, lines.append)
    assert [(one.problem["rows"], one.score) for one in found] == [(8, 0.8), (16, 0.7)] and lines == []
    best = store.best(serving.problem_of("indexer", 8).key)
    assert best is not None and found[0] == Entry.of(best)


def _some_trials(dice: random.Random) -> list[Trial]:
    """Of one problem: several configs, compilers, ranges and kinds of evidence, with equal scores among them."""
    guess = {"provenance": "predicted", "baseline": None, "yardstick": "byte floor"}
    wide = Range(width=WIDTH + 64, lengths=[128], weights=[1.0])
    trials = []
    for number in range(40):
        changes: dict[str, Any] = {
            "score": dice.choice([0.7, 0.8, 0.9, 0.995, 1.2]),
            "environment": dice.choice([HERE, ELSEWHERE]),
            "seed": number,
            **dice.choice([{}, {}, {"imported": "theirs.json"}, guess]),
        }
        one = entry(8, config=dice.choice(OTHERS), **{k: v for k, v in changes.items() if k in Entry.model_fields})
        over = dice.choice([one.range, wide])
        trials.append(one.trial("").model_copy(update={**changes, "range": over}))
    return trials


@pytest.mark.parametrize("policy", ["measured", "strict", "predicted"])
def test_what_is_read_in_order_decides_as_all_of_it_would(tmp_path: Path, policy: Policy) -> None:
    for seed in range(5):
        path, book = tmp_path / f"{policy}{seed}.db", Book(CARD.silicon, pytest.fail)
        store = Store(path)
        store.add_all(trials := _some_trials(random.Random(seed)))
        store.close()
        book.add(Found(Entry.of(trial), str(path), trial.here) for trial in trials)
        problem = serving.problem_of("indexer", 8)
        expected = book.choose(problem, WIDTH, rules(policy))
        with contextlib.closing(Stored(path, pytest.fail)) as stored:
            lazily = Book(CARD.silicon, pytest.fail, stored).choose(problem, WIDTH, rules(policy))
        assert lazily.entry is not None and lazily.entry == expected.entry and lazily.why == expected.why


def test_what_is_not_considered_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.db"
    store = Store(path)
    store.add_all(entry(8, 0.5 + n / 100, OTHERS[n % len(OTHERS)]).trial("") for n in range(40))
    store.close()
    read: list[str] = []

    def reads(text: str) -> Entry:
        read.append(text)
        return Entry.model_validate(json.loads(text))

    monkeypatch.setattr(Entry, "model_validate_json", reads)
    with contextlib.closing(Stored(path, pytest.fail)) as stored:
        book = Book(CARD.silicon, pytest.fail, stored)
        found = [book.choose(serving.problem_of("indexer", 8), WIDTH, rules()) for _ in range(2)]
    assert [one.entry.score for one in found if one.entry] == [0.5, 0.5] and len(read) == 1


def test_reading_changes_nothing_and_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    serving.write_entry(path)
    path.chmod(0o444)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(usable(path, pytest.fail)) == 1
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.endswith(("-wal", "-shm"))}
    assert after == {name: text for name, text in before.items() if not name.endswith(("-wal", "-shm"))}
    lines: list[str] = []
    assert usable(tmp_path / "none.db", lines.append) == []
    assert len(lines) == 1 and not (tmp_path / "none.db").exists()


def test_a_search_may_be_writing(tmp_path: Path) -> None:
    """A writer in the middle of its transaction: what it committed before is read."""
    path = tmp_path / "tuned.db"
    serving.write_entry(path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("delete from trial")
    assert len(usable(path, pytest.fail)) == 1
    writer.rollback()
    writer.close()


def test_the_reader_knows_the_stores_migrations() -> None:
    from dsv4tune.tuned import database, reader

    assert tuple(m.name for m in database.migrations._migrations) == reader.KNOWN
