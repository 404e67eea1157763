"""Pictures of the report for these documents, from the measurements under benchmarks/: ``make screenshots``."""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from pathlib import Path

from browser import chromium, launched, visit

from dsv4tune.codegen import models
from dsv4tune.runtime import wanted
from dsv4tune.tools.report import page
from dsv4tune.tuned.records import Trial
from dsv4tune.tuned.store import Store

ROOT = Path(__file__).absolute().parents[1]
CONTEXT = 1 << 20
#: File, width of the window, dark or not, what of the page: the element at the top, and the picture's height.
PICTURES = (
    ("report.png", 1280, False, "header", 1010),
    ("report-problems.png", 1280, False, "#indexer-nvidia-h200 h3:has-text('Problems')", 760),
    ("report-times.png", 1280, True, "#indexer-nvidia-h200 h3:has-text('Time against')", 960),
    ("report-search.png", 1280, False, "#indexer-nvidia-h200 h3:has-text('Search')", 1180),
    ("report-phone.png", 390, True, "header", 1000),
)


def write_database(path: Path) -> None:
    """Searches on an H200; see benchmarks/README.md."""
    store = Store(path)
    for name in ("indexer_captured", "mla_decode_captured"):
        with gzip.open(ROOT / f"benchmarks/h200/{name}.jsonl.gz", "rt") as lines:
            store.add_all(Trial.model_validate_json(line) for line in lines)
    store.close()


def main() -> None:
    if chromium() is None:
        sys.exit("no Chromium here: apt-get install chromium")
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, launched() as browser:
        os.chdir(work)  # the page names the database
        database, html = Path("tuned.db"), Path("report.html")
        write_database(database)
        benches = [ROOT / f"benchmarks/h200/{kernel}.json" for kernel in ("indexer", "mla_decode")]
        server = wanted.server(CONTEXT)
        request = page.Request(database, benches, None, server, CONTEXT, models.FLASH.layers)
        html.write_text(page.render(request, print), encoding="utf-8")
        for name, width, dark, element, height in PICTURES:
            with visit(browser, html, width, height, dark) as seen:
                assert not seen.complaints, seen.complaints
                top = seen.page.locator(element).first.evaluate("e => e.getBoundingClientRect().top")
                seen.page.evaluate(f"window.scrollTo({{top: {top} - 8, behavior: 'instant'}})")
                seen.page.screenshot(path=folder / name)
                print(f"wrote docs/images/{name}")


if __name__ == "__main__":
    main()
