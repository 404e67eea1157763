"""The report: what it says of a database, what it refuses, and how it looks in a real browser."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import make_final, make_problem, make_trial
from pages import LENGTHS, RANGE, write_bench, write_searches
from typer.testing import CliRunner

from dsv4tune.codegen import devices, ops
from dsv4tune.codegen.models import FLASH, PRO, Model
from dsv4tune.codegen.words import written
from dsv4tune.runtime import wanted
from dsv4tune.runtime.wanted import Server
from dsv4tune.tools import like
from dsv4tune.tools.cli import app
from dsv4tune.tools.report import budget, collect, knobs, page, plots
from dsv4tune.tuned.records import Baseline
from dsv4tune.tuned.selector import shipped
from dsv4tune.tuned.store import Store


def report(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["report", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of measured searches for two row counts and a bench."""
    folder = tmp_path_factory.mktemp("report")
    write_searches(folder / "tuned.db")
    write_bench(folder / "bench.json")
    out = folder / "report.html"
    report("--db", folder / "tuned.db", "--bench", folder / "bench.json", "-o", out)
    return out


PRO_128K = "python3 -m sglang.launch_server --model V4-Pro --tp 8 --context-length 131072 --cuda-graph-max-bs 16"
#: Row counts as a server captures them.
CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a search of all captured sizes: one loses at its longest length, of one more nothing is usable."""
    folder = tmp_path_factory.mktemp("crowded")
    write_searches(folder / "tuned.db", rows=CAPTURED, trials=4, slower=(144,))
    write_searches(folder / "tuned.db", rows=CAPTURED[:10], trials=40)
    store = Store(folder / "tuned.db")
    store.add(make_trial(rows=3, status="wrong", score=None, error=0.5))
    store.close()
    out = folder / "report.html"
    report("--db", folder / "tuned.db", "-o", out)
    return out


def text_of(file: Path) -> str:
    """The page's words, without its scripts and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", file.read_text(encoding="utf-8"), flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_it_tells_what_was_tuned_and_what_is_missing(made: Path) -> None:
    text = text_of(made)
    assert "indexer on rtx-pro-6000" in text and "The server's own kernel here is tilelang" in text
    assert "60 trials: 59 ok, 1 failed." in text
    # 1 and 64 rows have the same best config, which so serves what lies between; the rest has none.
    assert "indexer: 12 of 52 covered" in text
    assert "dsv4tune search --kernel indexer --rows 72,144,288,512 --context 1M" in text
    assert "64 rows , 262,208 columns measured" in text and "dialect=triton schedule=persistent" in text
    # 21 layers of 1 row at 512 tokens: 3.0032 µs and nearly nothing on top after, times 1.2 before.
    assert "context saved µs 512 12.6" in text and "mla_decode c4: 21 layers, the server&#39;s own kernel, not" in text
    assert "on each rank, with 8 query heads and a context of up to 1M tokens" in text
    assert "torch" in text, "the bench's other kernels"
    assert "shipped with dsv4tune" in text and "h200" not in text.lower(), "what is known of this card, not of others"


def test_it_loads_nothing(made: Path) -> None:
    page = made.read_text(encoding="utf-8")
    tags = re.sub(r"(<script>).*?(</script>)", r"\1\2", page, flags=re.S)
    assert not re.search(r"<(script|img|link|iframe)[^>]*(src|href)=\"(?!data:)", tags)
    assert "default-src 'none'" in tags


def test_a_databases_name_may_be_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.db")
    write_searches(path, rows=(64,), trials=3)
    report("--db", path, "-o", tmp_path / "report.html")
    assert f"database: {tmp_path}/?.db" in text_of(tmp_path / "report.html")


def test_an_empty_database_still_shows_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "none.db"))
    result = report("-o", tmp_path / "report.html")
    assert "no database at" in result.stderr and result.stdout.startswith("wrote ")
    assert "indexer on NVIDIA H200" in text_of(tmp_path / "report.html")
    # All caches of the server's own heads, then of the next number of heads: alike stands together.
    part = (tmp_path / "report.html").read_text("utf-8").partition('<section id="mla-decode-nvidia-h200">')[2]
    heads = [int(n) for n in re.findall(r"<summary><b>(\d+) heads", part.partition("</section>")[0])]
    assert heads == sorted(heads) and heads.count(8) == 3 and len(set(heads)) > 1


def test_of_many_row_counts_losers_and_gaps_are_named(crowded: Path) -> None:
    text = text_of(crowded)
    assert "Slower than the server's own kernel at some length, by rows (1): 144" in text
    assert "Nothing usable found, by rows (1): 3" in text and "nothing usable in 1 trials" in text
    for name in ("144 rows", "3 rows"):
        (place,) = re.findall(f'<tr id="([^"]+)"><td><button[^>]*>{name}<', crowded.read_text("utf-8"))
        assert f'href="#{place}"' in crowded.read_text("utf-8")


def test_a_problem_without_a_usable_trial(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuned.db")
    store.add(make_trial(status="wrong", score=None, error=0.5))
    store.close()
    report("--db", tmp_path / "tuned.db", "-o", tmp_path / "report.html")
    assert "nothing usable in 1 trials" in text_of(tmp_path / "report.html")


def test_predictions_are_called_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuned.db")
    store.add(make_trial())
    store.close()
    report("--db", tmp_path / "tuned.db", "-o", tmp_path / "report.html")
    text = text_of(tmp_path / "report.html")
    assert "predicted 1.500 of byte floor" in text and "predicted only: the server's own kernel stays" in text
    assert "indexer: 0 of 52 covered" in text
    # Nothing is drawn where no time before is known, so no bars are spoken of.
    assert "not measured yet" in text and "there is no time before" in text and "pair of bars" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--db", "/nowhere/tuned.db"], "no database at /nowhere/tuned.db: run a search first"),
        (["--bench", "/nowhere/bench.json"], "no file /nowhere/bench.json: `dsv4tune bench -o` makes one"),
        (["--bench", __file__], "is no file of `dsv4tune bench -o`"),
        (["--layers", "c4"], "--layers takes numbers of layers such as c4=21,c128=20,none=2, not 'c4'"),
        (["--layers", "c4=\N{SUPERSCRIPT TWO}"], "--layers takes numbers"),
        (["--kernel", "indexr"], "did you mean 'indexer'"),
        (["--context", "long"], "--context takes whole numbers"),
        (["-o", "/nowhere/report.html"], "can't write /nowhere/report.html"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = report("-o", tmp_path / "report.html", *arguments, code=2)
    assert says in result.stderr.splitlines()[-1] and result.stdout == ""


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("kernel", "indexr"),
        ("environment", []),
        ("environment/device", None),
        ("warnings", None),
        ("copy_gb_per_s", "fast"),
        ("rows/0/shape", {}),
        ("rows/0/shape/live", None),
        ("rows/0/floor_us", "x"),
        ("rows/0/us", [1]),
        *(("rows/0/us/tuned", value) for value in ("x", None, 0, -1, math.nan, math.inf, 10**400)),
    ],
)
def test_a_bench_that_is_none_is_a_line(place: str, value: Any, made: Path, tmp_path: Path) -> None:
    bench = json.loads((made.parent / "bench.json").read_text())
    *way, last = place.split("/")
    at: Any = bench
    for word in way:
        at = at[int(word) if isinstance(at, list) else word]
    at[last] = value
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    result = report("--db", made.parent / "tuned.db", "--bench", tmp_path / "bench.json", "-o", tmp_path / "r", code=2)
    assert "is no file of `dsv4tune bench -o`" in result.stderr and result.stderr.count("\n") == 1


def test_a_bench_may_be_too_deep_or_hold_a_shape_without_times(made: Path, tmp_path: Path) -> None:
    bench = json.loads((made.parent / "bench.json").read_text())
    file = tmp_path / "bench.json"
    file.write_text("[" * 100_000)
    arguments = ("--db", made.parent / "tuned.db", "--bench", file, "-o", tmp_path / "r")
    assert "is no file of" in report(*arguments, code=2).stderr
    bench["rows"][0]["us"] = {}
    file.write_text(json.dumps(bench))
    report(*arguments)
    assert "64x128 decode" in text_of(tmp_path / "r")


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith(("plotly", "dsv4tune.tools.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = report("-o", tmp_path / "report.html", code=2)
    assert "pip install plotly" in result.stderr


# -- parts ------------------------------------------------------------------------------------------------------


def test_times_between_two_lengths_are_between_the_times() -> None:
    times = {100: 1.0, 10_000: 100.0}
    assert budget.between(times, 1) == 1.0 and budget.between(times, 10**6) == 100.0
    assert math.isclose(budget.between(times, 1000), 10.0)


def steps_of(
    server: Server, layers: Mapping[str, int], db: Path, card: str, *kernels: str, tokens: int = 1 << 20
) -> Any:
    found = collect.sections(db if db.exists() else None, [], None, print)
    steps = budget.steps(found, kernels or list(ops.OPS), layers, server, tokens, None)
    return [step for step in steps if step.device == card]


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a server would look too."""
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "tuned.db"))
    return tmp_path / "tuned.db"


def test_a_step_counts_each_kernel_once_and_only_this_servers_heads(db: Path) -> None:
    from serving import write_entry

    write_searches(db, rows=(3,), trials=3)
    write_entry(db, "mla_decode")

    def timed(model: Model, tp: int) -> list[tuple[str, int]]:
        server = wanted.server(1 << 20, tp, rows=[3], model=model)
        (step,) = steps_of(server, model.layers, db, "rtx-pro-6000")
        assert sum(part.layers for part in step.parts) == sum(model.layers.values()) + model.layers["c4"]
        return [(part.name, part.layers) for part in step.timed]

    assert timed(FLASH, 8) == [("indexer", 21), ("mla_decode c4", 21)]
    assert timed(FLASH, 4) == [("indexer", 21)]
    assert timed(PRO, 16) == [("indexer", 30)], "as many heads, and another width of c4"


def test_a_kernel_that_no_server_calls_has_no_step(db: Path) -> None:
    assert steps_of(wanted.server(1 << 20), FLASH.layers, db, "NVIDIA H200", "row_sum") == []


def test_a_step_is_what_this_server_decides(db: Path) -> None:
    """An entry for 1M of context serves no c128 layer of 128k, and no graph of 64 rows is captured here."""
    start = like.read(PRO_128K, devices.named("h200"))
    steps = steps_of(start.server, start.model.layers, db, "NVIDIA H200", tokens=start.context)
    assert steps and {step.rows for step in steps} <= {1, 2, 4, 8, 12, 16}
    for step in steps:
        assert step.contexts == (512, 8192, 131_072) and step.saves and not step.compared
        gets = {part.name: (part.gets, part.before) for part in step.parts}
        assert gets["mla_decode c128"] == ("the server's own kernel, not timed", None)
        assert {part.name for part in step.timed} == {"indexer", "mla_decode c4"}
    whole = steps_of(wanted.server(1 << 20), FLASH.layers, db, "NVIDIA H200")
    assert len(whole) > 20 and all(step.compared and step.contexts[-1] == 1 << 20 for step in whole)


def test_where_the_servers_own_kernel_stays_a_step_has_its_time_twice(db: Path) -> None:
    server = Baseline(name="tilelang", version="1", times_us={128: 4.0, 262_208: 1500.0})
    measured: dict[str, Any] = {"provenance": "measured", "yardstick": "tilelang", "baseline": server}
    store = Store(db)
    store.add_final([make_trial(rows=2, score=0.985, final=make_final(1, won=False), **measured)])
    store.add_all([make_trial(rows=rows, score=0.9, **measured) for rows in (8, 64)])
    store.close()
    lost, won = steps_of(wanted.server(1 << 20, rows=[2, 8]), FLASH.layers, db, "rtx-pro-6000", "indexer")
    assert lost.compared and lost.before(0) == lost.after(0) == 84.0 and lost.parts[0].gets == "the server's own kernel"
    assert won.compared and won.before(0) == 84.0 and won.after(0) == 63.0
    # The config of both neighbours serves 16 rows, at which it wasn't timed.
    assert steps_of(wanted.server(1 << 20, rows=[16]), FLASH.layers, db, "rtx-pro-6000", "indexer") == []


def test_a_prediction_for_a_silicon_stands_beside_what_was_measured_on_it(db: Path) -> None:
    """The word of our table and the driver's name are one card; what that card's server captures counts once."""
    found = [make_trial(rows=rows, device="h200") for rows in (1, 16)]
    store = Store(db)
    store.add_all(found)
    store.close()
    (section,) = collect.sections(db, [], "indexer", print)
    assert section.device.name == "NVIDIA H200" and section.trials == 2
    for kernel in ("indexer", "mla_decode"):
        assert {s.device.name for s in collect.sections(db, [], None, print) if s.kernel == kernel} == {"NVIDIA H200"}
    report("--kernel", "indexer", "-o", db.parent / "report.html")
    text = text_of(db.parent / "report.html")
    assert "of 52 captured call shapes with a measured entry A decode" in text
    assert "1 row, predicted" in text and "1 row, measured" in text


def test_of_several_cards_the_shapes_of_one_server_count(db: Path) -> None:
    report("--kernel", "indexer", "-o", db.parent / "report.html")
    assert "of 52 captured call shapes with a measured entry on NVIDIA H200" in text_of(db.parent / "report.html")


def test_one_card_alone(db: Path) -> None:
    out = db.parent / "report.html"
    store = Store(db)
    store.add(make_trial())
    store.close()
    report("--device", "h200", "--kernel", "indexer", "-o", out)
    text = text_of(out)
    assert "indexer on NVIDIA H200" in text and "rtx-pro-6000" not in text and "0 trials in the database" in text
    says = report("--device", "gb10", "--kernel", "mla_decode", "-o", out, code=2).stderr
    assert "nothing to report of gb10: run a search first" in says
    assert "did you mean 'gb10'" in report("--device", "gb1", "-o", out, code=2).stderr


def test_what_is_shipped_too_is_shown_once(db: Path) -> None:
    entry = next(e for e in shipped() if e.device.name == "rtx-pro-6000" and e.problem["op"] == "indexer")
    store = Store(db)
    store.add(entry.trial(""))
    store.close()
    (section,) = collect.sections(db, [], "indexer", print)
    assert [one.origin for one in section.studied if one.problem.key == entry.problem_key] == [str(db)]
    assert len(section.studied) > 1, "what else is shipped for this card"


def test_the_knob_that_decides_is_the_most_important(tmp_path: Path) -> None:
    write_searches(tmp_path / "tuned.db", rows=(64,), trials=80)
    (section,) = collect.sections(tmp_path / "tuned.db", [], "indexer", print)
    (one,) = [one for one in section.studied if one.trials]
    trials = [trial for _, trial in one.scored]
    assert len(trials) == 79, "the failed one says nothing"
    shares = knobs.importances(trials)
    assert next(iter(shares)) == "schedule" and math.isclose(sum(shares.values()), 1.0)
    assert knobs.importances(trials[:10]) == {}


def test_what_was_stopped_early_is_shown_too(tmp_path: Path) -> None:
    """Nearly all of a search on a GPU is. Its score of short lengths alone may be lower than the best one of all."""
    problem, card = make_problem(64)
    configs = ops.get("indexer").space(problem, card).valid()[:40]
    server = Baseline(name="tilelang", version="0.1.12", times_us=dict.fromkeys(LENGTHS, 5.0))
    common: dict[str, Any] = {"provenance": "measured", "yardstick": "tilelang", "range": RANGE, "baseline": server}
    whole = {LENGTHS[0]: 3.0, **dict.fromkeys(LENGTHS[1:], 4.5)}
    score = RANGE.profile.score(whole, server.times_us)
    store = Store(tmp_path / "tuned.db")
    store.add(make_trial(configs[0], 64, times_us=whole, score=score, **common))
    early: dict[str, Any] = {"status": "pruned", "times_us": {LENGTHS[0]: 3.3}, "score": 3.3 / 5.0, **common}
    store.add_all([make_trial(config, 64, **early) for config in configs[1:30]])
    store.add_all([make_trial(config, 64, **{**early, "score": 3.2 / 5.0}) for config in configs[30:]])
    store.close()
    (section,) = collect.sections(tmp_path / "tuned.db", [], "indexer", print)
    (one,) = [one for one in section.studied if one.trials]
    assert score > 3.3 / 5.0
    assert [t.score for _, t in one.scored][:2] == [pytest.approx(score), pytest.approx(1.1 * score)]
    shown = plots.history(one)
    assert shown is not None and "1 ok, 39 pruned" in shown.note
    assert [(t.name, len(t.x)) for t in shown.figure.data] == [("stopped early", 39), ("trial", 1), ("best so far", 2)]
    assert list(shown.figure.data[2].y) == 2 * [pytest.approx(score)]
    assert knobs.importances([t for _, t in one.scored]), "they say what to avoid"


def test_gaps_are_filled_by_few_searches() -> None:
    assert like.spread([72, 80, 100, 144, 200, 512]) == [72, 144, 512]
    assert like.spread([7]) == [7]
    assert written(1 << 20) == "1M" and written(131_072) == "128k" and written(1000) == "1000"


def test_cards_of_many_row_counts_span_them() -> None:
    def rows(cards: page.Cards) -> tuple[list[int], list[int]]:
        return [card.rows for card in cards.fixed], [card.rows for card in cards.picks]

    def made(counts: Sequence[int]) -> list[page.Card]:
        return [page.Card(count, "", None) for count in counts]

    assert rows(page._cards(made(range(1, 9)))) == ([*range(1, 9)], [])
    prompt = page.Card(4096, "", None, prompt=True)
    many = page._cards([*made(CAPTURED), prompt])
    assert rows(many)[0] == [1, 4, 16, 64, 256], "every second doubling"
    assert many.picked is not None and many.picked.rows == 512, "the last decode, no prompt"
    assert sorted([*rows(many)[0], *rows(many)[1]]) == [*CAPTURED, 4096], "each in one place"
    assert rows(page._cards(made(CAPTURED), 1))[0] == []
    alike = page._cards(made([64] * 9))
    assert rows(alike) == ([], [64] * 9) and alike.picked is alike.picks[0]


def test_figures_have_three_digits() -> None:
    shown = [page._us(v) for v in (None, 0.0056, 0.5, 3.456, 45.67, 12345.6)]
    assert shown == ["\N{EN DASH}", "0.006", "0.50", "3.46", "45.7", "12,346"]
    assert page._tokens(1_048_832) == "1M" and page._tokens(131_072) == "128k" and page._tokens(1000) == "1,000"


# -- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """Opens a file in a window of its own."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs Playwright")
    import browser

    if browser.chromium() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with browser.launched() as chromium:
        yield lambda file, **options: browser.visit(chromium, file, **options)


@pytest.fixture
def drawn(opened: Any, made: Path) -> Any:
    return lambda **options: opened(made, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_complaint(drawn: Any, width: int, dark: bool) -> None:
    with drawn(width=width, dark=dark) as visit:
        assert visit.complaints == []
        assert visit.overflow() <= 0, "the page is as wide as its window; only tables scroll"
        charts = visit.page.locator("div.chart:visible")
        assert charts.count() >= 12
        boxes = charts.evaluate_all(
            "all => all.map(e => e.querySelector('svg.main-svg').getBoundingClientRect().toJSON())"
        )
        for box in boxes:
            assert box["width"] > 200 or (width > 390 and box["width"] > 150)
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        text = visit.page.locator(".gtitle, .ytitle, .xtitle").first
        wanted = "rgb(230, 237, 243)" if dark else "rgb(27, 31, 36)"
        assert text.evaluate("e => getComputedStyle(e).fill") == wanted
        body = visit.page.locator("body").evaluate("e => parseFloat(getComputedStyle(e).fontSize)")
        assert body >= 15


@pytest.mark.slow
def test_it_follows_a_reader_who_turns_dark(drawn: Any) -> None:
    from playwright.sync_api import expect

    with drawn(width=1280) as visit:
        visit.page.emulate_media(color_scheme="dark")
        expect(visit.page.locator(".ytitle").first).to_have_css("fill", "rgb(230, 237, 243)")
        assert visit.complaints == []


@pytest.mark.slow
def test_many_row_counts_are_a_page_that_opens_fast(opened: Any, crowded: Path) -> None:
    with opened(crowded, width=1280) as visit:
        page = visit.page
        plots = page.locator("svg.main-svg:first-child")
        assert page.locator("div.chart").count() > 150 and plots.count() <= 30
        assert page.evaluate("document.body.scrollHeight") <= 15_000
        lines = page.locator(".brief > tbody > tr[id]")
        assert lines.count() == len(CAPTURED) + 1
        assert max(lines.evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")) < 40, "one line each"
        assert visit.overflow() <= 0 and visit.complaints == []


@pytest.mark.slow
def test_what_is_folded_opens_by_keyboard(opened: Any, crowded: Path) -> None:
    with opened(crowded, width=390) as visit:
        page = visit.page
        # A row count of one's choice: the chart of the one before makes place.
        pick = page.locator("h3:has-text('Time against') ~ .grid select.pick").first
        card = pick.locator("xpath=ancestor::div[@class='card']")
        assert pick.input_value() == "512 rows" and card.locator("svg.main-svg:first-child").count() == 1
        pick.focus()
        page.keyboard.press("ArrowUp")
        page.wait_for_selector("html[data-drawn]")
        assert pick.input_value() == "496 rows"
        seen = card.locator("div.picked:not([hidden]) svg.main-svg").first.bounding_box()
        assert seen["width"] > 200 and card.locator("div.picked:not([hidden])").count() == 1
        # A loser's line, and all that is known of it.
        page.locator("a:text-is('144')").press("Enter")
        line = page.locator("tr:target")
        head = page.locator(".bounded > table > thead").bounding_box()
        assert line.bounding_box()["y"] >= head["y"] + head["height"] - 1, "under the header that stays"
        line.locator("button").press("Enter")
        assert line.locator("button").get_attribute("aria-expanded") == "true"
        below = line.locator("xpath=following-sibling::tr[1]")
        assert below.is_visible() and "262,208 columns" in below.inner_text()
        assert visit.overflow() <= 0 and visit.complaints == []


@pytest.mark.slow
def test_a_closed_part_is_drawn_when_it_opens(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4TUNE_DB", str(tmp_path / "none.db"))
    report("-o", tmp_path / "report.html", "--kernel", "mla_decode")
    with opened(tmp_path / "report.html", width=1280) as visit:
        closed = visit.page.locator("details.family:not([open])").first
        assert closed.locator("div.chart").count() > 0
        assert visit.page.locator("details.family:not([open]) svg.main-svg").count() == 0
        closed.evaluate("e => e.id = 'part'")
        visit.page.locator("#part summary").press("Enter")
        visit.page.wait_for_selector("#part svg.main-svg")
        visit.page.wait_for_selector("html[data-drawn]")
        assert visit.page.locator("#part svg.main-svg").first.bounding_box()["width"] > 400
        assert visit.complaints == []
