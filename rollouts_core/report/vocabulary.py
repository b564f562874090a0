"""Read the text of each token from a checkpoint's tokenizer.json, so that a page can show tokens.

This module does not tokenize, import the tokenizer, or run code of the checkpoint.

A token of a byte-level vocabulary may be a part of a character. A byte that is not valid UTF-8 by itself becomes a lone
surrogate, U+DC80 to U+DCFF, like in Python's `surrogateescape`. The page joins such bytes of neighbouring tokens to
characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTES = re.compile("[\udc80-\udcff]+")
MAX_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The text of each token id."""

    texts: dict[int, str] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    """Ids that mark turns and ends of texts. Some engines leave all special ids out of responses, other engines only
    `ends`."""
    ends: frozenset[int] = frozenset()
    """The special ids that end or pad a text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens without special tokens. An id without a text becomes U+FFFD."""
        said = "".join(self.texts.get(token, "\ufffd") for token in tokens if token not in self.special)
        return join_bytes(said)

    def decode_raw(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, including special tokens except `ends`."""
        return join_bytes("".join(self.texts.get(token, "\ufffd") for token in tokens if token not in self.ends))

    def only(self, tokens: Iterable[int]) -> dict[str, Any]:  # Any: JSON
        """The texts of these tokens and the special ids among them, as JSON."""
        known = sorted(token for token in set(tokens) if token in self.texts)
        return {
            "texts": {str(token): self.texts[token] for token in known},
            "special": [token for token in known if token in self.special],
            "ends": [token for token in known if token in self.ends],
        }


def load_vocabulary(directory: Path) -> Vocabulary:
    """The vocabulary of a model's folder; empty if tokenizer.json is missing or has an unknown format."""
    path = directory / "tokenizer.json"
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            return Vocabulary()
        names = path.with_name("tokenizer_config.json")
        config = json.loads(names.read_text(encoding="utf-8")) if names.is_file() else {}
        return read_vocabulary(json.loads(path.read_text(encoding="utf-8")), config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Vocabulary()


def read_vocabulary(tokenizer: dict[str, Any], config: dict[str, Any]) -> Vocabulary:  # Any: JSON
    pieces = tokenizer["model"]["vocab"]
    numbered = enumerate(piece for piece, _ in pieces) if isinstance(pieces, list) else _by_id(pieces)
    named = json.dumps([tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")])
    is_byte_level = '"ByteLevel"' in named
    texts = {number: _bytes_text(piece) if is_byte_level else _piece_text(piece) for number, piece in numbered}
    added: Sequence[dict[str, Any]] = tokenizer.get("added_tokens") or ()  # Any: JSON
    texts |= {int(each["id"]): str(each["content"]) for each in added}
    special = frozenset(int(each["id"]) for each in added if each.get("special"))
    ends = {each["content"] if isinstance(each, dict) else each for each in map(config.get, ("eos_token", "pad_token"))}
    return Vocabulary(texts=texts, special=special, ends=frozenset(each for each in special if texts[each] in ends))


def _by_id(pieces: dict[str, int]) -> Iterable[tuple[int, str]]:
    return ((number, piece) for piece, number in pieces.items())


def _bytes_text(piece: str) -> str:
    """The text of a byte-level piece, in which each character represents a byte."""
    try:
        return bytes(_BYTE_OF[each] for each in piece).decode("utf-8", "surrogateescape")
    except KeyError:
        return piece


def _piece_text(piece: str) -> str:
    if found := BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)]).decode("utf-8", "surrogateescape")
    return piece.replace(SPACE, " ")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary represents. Source: GPT-2, `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def join_bytes(text: str) -> str:
    """The text with runs of byte surrogates decoded to characters. Invalid bytes become U+FFFD."""
    return BYTES.sub(lambda run: run[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace"), text)


_BYTE_OF = _byte_characters()
