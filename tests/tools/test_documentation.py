"""Pins that the documentation site builds without a mistake, needs no other host, and has the whole reference.

Without it a page would call a font server, a link would lead nowhere, or a new setting would be missing from the
reference.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rollouts_core
from rollouts.flows.form import load_pipeline
from rollouts.flows.shown_settings import settings_of
from tests.flows.test_cli import SURFACE
from tests.kit.chromium import chromium
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
LOADING = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?([^\"'\s>]+)")


@pytest.fixture(scope="module")
def documentation() -> ModuleType:
    """tools/documentation.py, which finds its neighbour by the path of scripts."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return import_module("documentation")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built as `make docs` builds it."""
    built = subprocess.run([sys.executable, "tools/documentation.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return SITE


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    loaded = [(page.name, url) for page in site.rglob("*.html") for url in LOADING.findall(page.read_text())]
    assert len(loaded) > 200
    assert [(name, url) for name, url in loaded if re.match(r"(\w+:)?//", url)] == []
    sheets = [sheet.read_text() for sheet in site.rglob("*.css")]
    assert [url for text in sheets for url in re.findall(r"url\(['\"]?((?:https?:)?//[^)]+)", text)] == []


def test_each_page_lies_as_markdown_beside_its_html_and_in_the_index(site: Path) -> None:
    pages = {page.relative_to(site) for page in site.rglob("*.html")} - {Path("404.html")}
    assert [page for page in pages if not (site / page).with_suffix(".md").is_file()] == []
    index = (site / "llms.txt").read_text()
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S", index, re.MULTILINE)
    assert {"index.md", "reference/settings.md", "tutorials/first_run.md", "faults.md"} < set(listed)
    assert [place for place in listed if not (site / place).is_file()] == []
    assert index.startswith("# rollouts\n\n> ")


def test_the_reference_has_every_setting(site: Path, tmp_path: Path) -> None:
    sections = re.split(r"^## ", (site / "reference/settings.md").read_text(), flags=re.MULTILINE)
    keys = {
        section.partition("\n")[0].split(",")[0].strip("`[]"): set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
        for section in sections
    }
    names = [each.name for each in settings_of(load_pipeline(write_small_pipeline(tmp_path)))]
    assert len(names) > 150
    missing = [
        name for name in names if name.rpartition(".")[2] not in keys[name.rpartition(".")[0] or "Top of the file"]
    ]
    assert missing == []


def test_the_reference_has_every_command_with_its_options(site: Path) -> None:
    page = (site / "reference/commands.md").read_text()
    for name, options in SURFACE.items():
        section = page[page.index(f"### `rollouts {name}`") :].partition("\n### ")[0]
        assert [each for each in options if f"`{each}`" not in section.replace("\\|", "|")] == [], name


def test_the_reference_has_every_public_name_and_many_errors(site: Path) -> None:
    headings = re.findall(r"^## `(\w+)`$", (site / "reference/python.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rollouts_core.__all__)
    errors = (site / "reference/errors.md").read_text()
    assert "reward\\_fn and rewards exclude each other: add reward\\_fn to the rewards" in errors
    assert "backend = jax is set but JAX is not installed" in errors and errors.count("\n| `") > 300


def test_the_reference_says_what_fits_and_how_long_a_link_takes(site: Path) -> None:
    sizes = (site / "reference/sizes.md").read_text()
    assert "| Qwen3-32B | all weights | 8 | does not fit | |" in sizes
    assert "| Qwen2.5-1.5B | all weights | 1 | 1 GPU, 29 GiB each | 1 engine, 5 GiB per GPU, in turns" in sizes
    assert "| Qwen3-8B | 16.4 GB | 1.3 | 13.1 | 131.0 | 0.17 GB | 98 GB |" in sizes


def test_the_search_works_in_a_file_of_the_disk(site: Path) -> None:
    with chromium() as browser:
        from playwright.sync_api import expect  # missing on some users' machines, where chromium() skips

        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.get_by_role("button", name="Search").first.click()
        page.get_by_role("combobox").press_sequentially("over_sampling_factor")
        expect(page.get_by_role("listbox")).to_contain_text("Settings", timeout=30_000)
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.parametrize(
    ("html", "mistake"),
    [
        ('<a href="other.html">', "page.html links to other.html, but the site has no such file"),
        ('<a href="#there">', "page.html links to #there, but the page has no such heading"),
        ('<a href="#here">', ""),
        ('<a href="https://example.com/">', ""),
        ('<script src="//cdn.example/a.js">', "page.html loads //cdn.example/a.js, a file of another host"),
        ('<link href="https://fonts.example/a.css">', "page.html loads https://fonts.example/a.css, a file of"),
    ],
)
def test_a_mistake_in_a_page_is_found(documentation: ModuleType, tmp_path: Path, html: str, mistake: str) -> None:
    (tmp_path / "page.html").write_text(f'<h1 id="here">Here</h1>{html}')
    found = list(documentation.broken_links(tmp_path))
    assert len(found) == bool(mistake) and all(each.startswith(mistake) for each in found)


def test_a_page_without_an_entry_in_the_navigation_is_found(
    documentation: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(documentation.missing_in_navigation()) == []
    monkeypatch.setattr(documentation, "navigation", lambda: [{"Home": "index.md"}, {"Guides": ["gone.md"]}])
    found = list(documentation.missing_in_navigation())
    assert any(each.startswith("faults.md is not in the navigation: ") for each in found)
    assert "`nav` in zensical.toml has gone.md, but there is no such page: correct or remove the entry" in found
