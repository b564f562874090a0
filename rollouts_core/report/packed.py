"""Embed compressed JSON or text in an HTML file, as the content of a script element that the browser never runs.

    <script type="text/plain" id="data-index">H4sIAAAAAAAC...</script>

The content is base64, which has no `<`. No text in a block can therefore end the element.

Not here: the content of the blocks (embedded.py), the decoding in the page (viewer.js).
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from markupsafe import Markup

PAGE_LEVEL = 9


def pack_json(value: Any, *, level: int = PAGE_LEVEL) -> bytes:  # Any: JSON
    """The value as compressed JSON. Equal values give equal bytes."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return pack_text(text, level=level)
    except UnicodeEncodeError:  # lone surrogates (half of an emoji, bytes of a vocabulary) need JSON escapes
        return pack_text(json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False), level=level)


def pack_text(text: str, *, level: int = PAGE_LEVEL) -> bytes:
    """The text as compressed bytes. Equal texts give equal bytes."""
    return gzip.compress(text.encode(), level, mtime=0)


def embedded_size(packed: bytes) -> int:
    """The number of bytes that a compressed block takes in the page."""
    return (len(packed) + 2) // 3 * 4 + 60


def data_block(name: str, packed: bytes) -> Markup:
    """The HTML element that holds a compressed block."""
    encoded = base64.b64encode(packed).decode()
    return Markup(f'<script type="text/plain" id="data-{name}">{encoded}</script>\n')
