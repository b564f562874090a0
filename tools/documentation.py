"""Build the documentation site, which needs no other host: `make docs`.

    python tools/documentation.py [SITE]      SITE is build/site

Not here: the texts of the reference (reference.py), the navigation and the looks (zensical.toml).

    docs/, README.md, ... --stage--> build/docs --zensical--> build/site --finish--> + Markdown copies, llms.txt
    code --reference.py------------------^                                 --check--> links, anchors, other hosts

The reference is written here instead of being committed: a setting, option or public name has its text in the code
alone, and a change of the code needs no second change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import reference

ROOT = Path(__file__).parent.parent
STAGED, SITE = ROOT / "build/docs", ROOT / "build/site"
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
NOT_FOUND = "404.html"
"""A server shows this page for any address, so its links begin at the root of the site."""
SOURCES = "source"
"""Folder of the pages that show the files of the code to which pages link."""
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".js": "javascript"}
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Tags by which a browser loads a file, with the attribute that names it."""


def main(site: Path) -> int:
    """Stage, build, finish and check the site; print each mistake."""
    if site != SITE:
        sys.exit(f"documentation.py: zensical.toml names {SITE.relative_to(ROOT)} as site_dir, found {site}")
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "zensical.toml"]
    if failed := subprocess.run(command, cwd=ROOT, check=False).returncode:
        return failed
    finish()
    mistakes = [*missing_in_navigation(), *broken_links(SITE)]
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    return int(bool(mistakes))


def stage() -> None:
    """Write every page of the site as Markdown to `build/docs`."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGED, ignore=lambda folder, names: [name for name in names if ".md" in name])
    shown: set[str] = set()
    pages = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    for page in sorted({*pages, *ROOT_PAGES}):
        write(place_of(page), with_places((ROOT / page).read_text(encoding="utf-8"), page, shown))
    for name, render in reference.PAGES.items():
        write(f"reference/{name}.md", render())
    for path in sorted(shown | {file for folder in shown for file in files_of_folder(folder)}):
        write(place_of(path), page_of_source(path))


def write(place: str, text: str) -> None:
    """Write a page below `build/docs`."""
    path = STAGED / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def place_of(path: str) -> str:
    """The place in the site of a file of the repository: of a page, of a picture, or of code."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCES}/{path}.md"


def with_places(text: str, page: str, shown: set[str]) -> str:
    """The text of a page with its links as places in the site; adds the code to which it links to `shown`."""

    def replace(found: re.Match[str]) -> str:
        link = found[0]
        path, mark, anchor = link.partition("#")
        if "://" in link or not path:
            return link
        target = os.path.normpath(PurePosixPath(page).parent / path)
        place = place_of(target)
        if place.startswith(f"{SOURCES}/") and (ROOT / target).exists():
            shown.add(target)
        return os.path.relpath(place, PurePosixPath(place_of(page)).parent) + mark + anchor

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def files_of_folder(path: str) -> list[str]:
    """The files of code in a folder that a page links to."""
    folder = ROOT / path
    if not folder.is_dir():
        return []
    found = (each for each in sorted(folder.rglob("*")) if each.suffix in LANGUAGES)
    return [each.relative_to(ROOT).as_posix() for each in found]


def page_of_source(path: str) -> str:
    """A page that shows a file of code, or lists those of a folder. The search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        names = [file.removeprefix(f"{path}/") for file in files_of_folder(path)]
        return head + "".join(f"- [{name}]({name}.md)\n" for name in names)
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{head}````{language}\n{(ROOT / path).read_text(encoding='utf-8')}````\n"


def finish() -> None:
    """Put the Markdown of each page beside its HTML, and an index of all of them at the root."""
    for page in STAGED.rglob("*.md"):
        shutil.copyfile(page, SITE / page.relative_to(STAGED))
    (SITE / "llms.txt").write_text(index_for_programs(), encoding="utf-8")


def navigation() -> list[Any]:  # Any: nested lists and tables of TOML
    """The navigation of zensical.toml."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return list(project["nav"])


def pages_of(entries: Any) -> Iterator[str]:  # Any: nested lists and tables of TOML
    """The pages of a part of the navigation, in order."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        entries = list(entries.values())
    if isinstance(entries, list):
        for entry in entries:
            yield from pages_of(entry)


def index_for_programs() -> str:
    """`llms.txt`: every page with its title and first sentence, in the form of llmstxt.org."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}", ""]
    for entry in project["nav"]:
        [(title, entries)] = entry.items()
        lines += [f"## {title}", ""]
        for place in pages_of(entries):
            heading, about = title_and_sentence((STAGED / place).read_text(encoding="utf-8"))
            lines.append(f"- [{heading}]({place}): {about}")
        lines.append("")
    return "\n".join(lines)


def title_and_sentence(text: str) -> tuple[str, str]:
    """The title of a page and the first sentence of its text, without links and pictures."""
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    assert heading is not None, "every page has a title"
    paragraphs = re.split(r"\n\s*\n", FENCE.sub("", text[heading.end() :]))
    prose = [each for each in paragraphs if each[:1].strip() and each[0] not in "#|!>-"]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join((prose or [""])[0].split()))
    return heading[1], re.split(r"(?<=\.) ", plain)[0].rstrip(":")


def missing_in_navigation() -> Iterator[str]:
    """A sentence for each page that no entry of the navigation leads to."""
    there = {page.relative_to(STAGED).as_posix() for page in STAGED.rglob("*.md")}
    listed = set(pages_of(navigation()))
    for page in sorted(there - listed):
        if not page.startswith(f"{SOURCES}/"):
            yield f"{page} is not in the navigation: add it to `nav` in zensical.toml"
    for page in sorted(listed - there):
        yield f"`nav` in zensical.toml has {page}, but there is no such page: correct or remove the entry"


class Page(HTMLParser):
    """The ids of a page, the places that its links name, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if LOADED.get(tag, "") in values:
            self.loaded.append(values[LOADED[tag]])
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def broken_links(site: Path) -> Iterator[str]:
    """A sentence for each link that leads nowhere, and for each file of another host that a page loads."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for url in page.loaded:
            if urlsplit(url).netloc:
                yield f"{name} loads {url}, a file of another host: put the file below docs/"
        for url in dict.fromkeys([*page.loaded, *page.links]):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            folder = site if name == NOT_FOUND else path.parent
            place = unquote(parts.path).removeprefix("/" if name == NOT_FOUND else "")
            target = Path(os.path.normpath(folder / place)) if place else path
            if not target.is_file():
                yield f"{name} links to {url}, but the site has no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name} links to {url}, but the page has no such heading"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else SITE))
