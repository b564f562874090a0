"""A headless Chromium for tests of pages, and the views of one HTML file in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIMEOUT_MS = 20_000
Open = Callable[..., "Page"]


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser with these arguments. Skips the test if playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make install")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", *flags])
        yield browser
        browser.close()


@contextmanager
def views_of(path: Path, browser: Browser) -> Iterator[Open]:
    """A function that opens a view of a file. A request, an error, or a refused script fails the test."""
    faults: list[str] = []
    contexts = []

    def open_page(view: str = "", *, width: int = 1200, scheme: str = "light", scripts: bool = True) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
            java_script_enabled=scripts,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(f"file://{path}#{view}")
        if scripts:
            page.locator("body[data-shown]").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
