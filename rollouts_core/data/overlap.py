"""Compare texts without regard to case and spaces: whole texts, user turns, and long runs of words."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rollouts_core.types import Message

NUM_WORDS = 13
"""Number of consecutive words that two texts rarely share by chance (GPT-3, arXiv:2005.14165, appendix C)."""
MIN_WORDS = 8
"""Texts with fewer words are ignored. Texts of `MIN_WORDS` to `NUM_WORDS` words are compared as a whole."""
PIECES = re.compile(r"\w+|[^\w\s]")
WORDS = re.compile(r"\w+")
ENDS = frozenset(".,;:!?")
TAGS = re.compile(r"<[^<>\s]{1,40}>|\[/?INST\]|\n")
"""Separators of turns in plain text: tags of chat templates, or line breaks."""
SPEAKER = re.compile(r"^\s*(?:user|human|question|problem|q)\s*[:\n]\s*", re.IGNORECASE)
FACTOR = np.uint64(0x9E3779B97F4A7C15)


def fold(text: str) -> str:
    """The text in lower case with single spaces, normal-width characters and no closing punctuation."""
    pieces = PIECES.findall(unicodedata.normalize("NFKC", text).casefold())
    last = len(pieces)
    while last and pieces[last - 1] in ENDS:
        last -= 1
    return " ".join(pieces[:last] or pieces)


def said_by_user(messages: Sequence[Message]) -> list[str]:
    """The texts of the user's messages; the texts of all messages if the user has none."""
    return [message["content"] for message in messages if message["role"] == "user"] or [
        message["content"] for message in messages
    ]


def key_of_turns(turns: Iterable[str]) -> str:
    """A text that is equal for conversations with equal turns after `fold`."""
    return json.dumps([fold(turn) for turn in turns])


def turns_of_text(text: str) -> Iterator[str]:
    """The parts of a plain text that may be a user turn: the whole text, parts between tags, and lines."""
    yield text
    between_tags = re.split(r"<[^<>\s]{1,40}>|\[/?INST\]", text)
    for part in [*between_tags, *TAGS.split(text)]:
        if part.strip():
            yield part
            yield SPEAKER.sub("", part)


class LongPhrases:
    """Index of the long runs of words in numbered texts. A run that occurs in several texts is ignored."""

    def __init__(self) -> None:
        self._number_of: dict[int, dict[int, int]] = {}
        """Length of a run in words -> hash of the run -> number of the text that contains it; 0 if several texts
        contain it."""

    def add(self, number: int, text: str) -> None:
        words = WORDS.findall(text.casefold())
        length = min(len(words), NUM_WORDS)
        if length < MIN_WORDS:
            return
        known = self._number_of.setdefault(length, {})
        for run in set(_hash_runs(words, length).tolist()):
            known[run] = number if known.get(run, number) == number else 0

    def find(self, text: str) -> dict[int, str]:
        """Numbers of the indexed texts that share a long run of words with `text`, each with one shared run."""
        words = WORDS.findall(text.casefold())
        found: dict[int, str] = {}
        for length, known in self._number_of.items():
            for place, run in enumerate(_hash_runs(words, length).tolist()):
                if number := known.get(run):
                    found.setdefault(number, " ".join(words[place : place + length]))
        return found


def _hash_runs(words: Sequence[str], length: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A hash of each run of `length` consecutive words, in order."""
    num_runs = max(0, len(words) - length + 1)
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).astype(np.uint64)
    runs = np.zeros(num_runs, np.uint64)
    for place in range(length):
        runs = runs * FACTOR + hashes[place : place + num_runs]
    return runs
