"""Blocks of data inside an HTML file: JSON or text, compressed, as the content of a script element that never runs.

Not here: what the blocks hold (embedded.py), how the page reads them (viewer.js).

    <script type="text/plain" id="data-index">H4sIAAAAAAAC...</script>

Base64 has no `<`, so no text in a block can end its element.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from markupsafe import Markup

PAGE_LEVEL = 9


def pack_json(value: Any, *, level: int = PAGE_LEVEL) -> bytes:  # Any: JSON
    """The value as compressed JSON, the same bytes for the same value."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return pack_text(text, level=level)
    except UnicodeEncodeError:  # half of an emoji, or bytes of a vocabulary: UTF-8 has none, escapes do
        return pack_text(json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False), level=level)


def pack_text(text: str, *, level: int = PAGE_LEVEL) -> bytes:
    """The text compressed, the same bytes for the same text."""
    return gzip.compress(text.encode(), level, mtime=0)


def embedded_size(packed: bytes) -> int:
    """Bytes that a compressed block takes in the page."""
    return (len(packed) + 2) // 3 * 4 + 60


def data_block(name: str, packed: bytes) -> Markup:
    """The element that holds a compressed block."""
    encoded = base64.b64encode(packed).decode()
    return Markup(f'<script type="text/plain" id="data-{name}">{encoded}</script>\n')
