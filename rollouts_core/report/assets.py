"""Style and scripts of the report, and the policy by which a browser runs them and nothing else.

Not here: the data (embedded.py). Scripts are allowed by their hashes, so no other script runs, not even markup that got
into the page by mistake; nothing can be loaded and nothing can be sent, also when the page is a file. A served page may
ask its own server alone.
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
"""The policy stands within so much of a page's start."""


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
"""Reads blocks of data and runs scripts that are stored as such; nothing happens in a browser that cannot unpack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """The parts of a report besides its data."""

    style: Markup
    script: Markup
    policy: Markup


@cache
def viewer_script() -> str:
    """The views of the report, without comments and indentation, which would take 2 kB of each report."""
    lines = (line.strip() for line in _read("viewer.js").splitlines())
    return "\n".join(line for line in lines if not line.startswith(("//", "/**")))


@cache
def live_script() -> str:
    """The loader of a served page, which follows a run."""
    return _read("live.js")


@cache
def plot_script() -> str:
    """uPlot, which draws curves; MIT, see uplot/LICENSE."""
    return PLOT_SCRIPT.read_text(encoding="utf-8").strip()


@cache
def compare_script() -> str:
    """The views of a comparison of runs, beside those of the report."""
    return _read("compare.js")


def compare_style() -> str:
    """The style of a comparison of runs, beside that of the report."""
    return _read("compare.css")


def make_assets(page_style: str, *more_scripts: str, is_served: bool = False) -> Assets:
    """The assets of a page.

    Args:
        page_style: CSS that every page of the project has.
        more_scripts: scripts that the page may run beside those of the report.
        is_served: the page asks its server for blocks, and for itself again.
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


def hash_source(text: str) -> str:
    """The expression that allows an inline element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def viewer_style() -> str:
    """The style of the views that need scripts."""
    return PLOT_STYLE.read_text(encoding="utf-8") + _read("viewer.css")


def asset_blocks() -> dict[str, bytes]:
    """Scripts and style of the views as compressed blocks: they would take a third of a small report."""
    texts = {"viewer": viewer_script(), "plot": plot_script(), "style": viewer_style()}
    return {name: pack_text(text) for name, text in texts.items()}


def find_policy(page: str) -> str:
    """The policy that a report states, as a header; one without any script for a report that states none."""
    found = POLICY.search(page[:POLICY_CHARS])
    return found[1] if found else "default-src 'none'; style-src 'unsafe-inline'; script-src 'none'"


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
