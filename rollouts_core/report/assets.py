"""The report's style sheets and scripts, and the Content-Security-Policy that lets a browser run only these scripts.

The policy allows scripts by their hashes. Markup that is inserted into the page by mistake therefore cannot run as a
script. A report can neither load nor send anything, even when a browser opens it as a file. Only a page that a server
delivers may send requests, and only to that server.

Not here: the data (embedded.py).
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

from rollouts_core.report.packed import pack_text

FOLDER = Path(__file__).parent
PLOT_SCRIPT = FOLDER / "uplot" / "uPlot.iife.min.js"
PLOT_STYLE = FOLDER / "uplot" / "uPlot.min.css"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"<>\n]*)">')
POLICY_CHARS = 2000
"""Number of characters at the page's start within which the Content-Security-Policy must stand."""


HIDING_STYLE = "[hidden] { display: none !important; }"
LOADER = """"use strict";
window.loadBlock = async (name) => {
  const element = document.getElementById(`data-${name}`);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};
window.runBlock = async (name) => {
  const script = document.createElement("script");
  script.textContent = await window.loadBlock(name);
  document.head.append(script);
};
if (typeof DecompressionStream !== "undefined") window.runBlock("viewer");
"""
"""JavaScript that decompresses the page's blocks and runs the scripts among them, if the browser has
DecompressionStream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """The style sheet, the script and the Content-Security-Policy of a page."""

    style: Markup
    script: Markup
    policy: Markup


@cache
def viewer_script() -> str:
    """The script of the report's views. Comments and indentation are removed, which saves 2 kB per report."""
    lines = (line.strip() for line in _read("viewer.js").splitlines())
    return "\n".join(line for line in lines if not line.startswith(("//", "/**")))


@cache
def refresh_script() -> str:
    """The script by which a served page updates itself."""
    return _read("refresh.js")


@cache
def live_script() -> str:
    """The script by which a run's page updates itself, and loads blocks from its server."""
    return refresh_script() + _read("live.js")


@cache
def plot_script() -> str:
    """uPlot, which draws curves; MIT, see uplot/LICENSE."""
    return PLOT_SCRIPT.read_text(encoding="utf-8").strip()


@cache
def compare_script() -> str:
    """The script of a page that compares runs, which is added to the script of the report's views."""
    return _read("compare.js")


def compare_style() -> str:
    """The CSS of a page that compares runs, which is added to the CSS of all pages."""
    return _read("compare.css")


def make_assets(page_style: str, *more_scripts: str, is_served: bool = False) -> Assets:
    """The assets of a page.

    Args:
        page_style: CSS that every page of the project has.
        more_scripts: scripts that the page may run in addition to those of the report.
        is_served: True if the page requests its blocks, and new versions of itself, from its server.
    """
    style, loader = page_style + HIDING_STYLE, live_script() if is_served else LOADER
    scripts = (loader, viewer_script(), plot_script(), *more_scripts)
    assert "</" + "script" not in loader and "</" + "style" not in style.lower()
    policy = (
        f"default-src 'none'; script-src {' '.join(map(hash_source, scripts))}; "
        f"style-src {hash_source(style)} {hash_source(viewer_style())}; base-uri 'none'; form-action 'none'"
    )
    policy += "; connect-src 'self'" if is_served else ""
    return Assets(style=Markup(style), script=Markup(loader), policy=Markup(policy))


def make_list_assets(page_style: str) -> Assets:
    """The assets of the list of runs, which has a form and updates itself from its server."""
    style, script = page_style + HIDING_STYLE, refresh_script()
    policy = (
        f"default-src 'none'; script-src {hash_source(script)}; style-src {hash_source(style)}; base-uri 'none'; "
        "form-action 'self'; connect-src 'self'"
    )
    return Assets(style=Markup(style), script=Markup(script), policy=Markup(policy))


def hash_source(text: str) -> str:
    """The expression for the Content-Security-Policy that allows an inline element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def viewer_style() -> str:
    """The style of the views that need scripts."""
    return PLOT_STYLE.read_text(encoding="utf-8") + _read("viewer.css")


def asset_blocks() -> dict[str, bytes]:
    """The views' scripts and CSS as compressed blocks. Uncompressed scripts would make up a third of a small report."""
    texts = {"viewer": viewer_script(), "plot": plot_script(), "style": viewer_style()}
    return {name: pack_text(text) for name, text in texts.items()}


def find_policy(page: str) -> str:
    """The Content-Security-Policy in a page's head, as an HTTP header. For a page without a policy, the result forbids
    all scripts."""
    found = POLICY.search(page[:POLICY_CHARS])
    return found[1] if found else "default-src 'none'; style-src 'unsafe-inline'; script-src 'none'"


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
