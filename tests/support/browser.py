"""A real browser for the report's tests and pictures: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

#: Without these Chromium asks servers of its maker at every start.
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """Its path, or None where it is not installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Visit:
    """An open page, and everything that its console or the network complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.complaints.append(r.url),
        )

    def overflow(self) -> int:
        """Pixels that the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=list(_QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, file: Path, width: int, height: int = 900, dark: bool = False) -> Iterator[Visit]:
    """The file in a window of its own, its charts drawn."""
    colours: Literal["dark", "light"] = "dark" if dark else "light"
    size: ViewportSize = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=colours, reduced_motion="reduce")
    try:
        context.set_default_timeout(120_000)  # the machine may be busy
        found = Visit(context.new_page())
        found.page.goto(file.absolute().as_uri())
        found.page.wait_for_selector("html[data-drawn]")
        yield found
    finally:
        context.close()
