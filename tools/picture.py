"""Take the picture of a report's first screen for README.md and the documentation: docs/pictures/report.png.

    make quickstart
    python tools/picture.py .rollouts/runs/quickstart-5793d50a

Needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent.parent / "docs/pictures/report.png"
SIZE = {"width": 1280, "height": 830}
MAX_BYTES = 200_000


def main(run: Path) -> None:
    """Open the report of a run and keep its first screen."""
    report = (run / "report.html").resolve()
    if not report.is_file():
        sys.exit(f"picture.py: {report} does not exist: name the folder of a finished run")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE["width"], "height": SIZE["height"]}, color_scheme="light")
        page.goto(report.as_uri(), wait_until="networkidle")
        page.get_by_role("link", name="Overview").wait_for()
        page.screenshot(path=PICTURE)
        browser.close()
    num_bytes = PICTURE.stat().st_size
    assert num_bytes <= MAX_BYTES, f"{PICTURE} has {num_bytes} bytes, more than {MAX_BYTES}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/picture.py RUN_FOLDER")
    main(Path(sys.argv[1]))
