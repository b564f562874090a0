"""Convert a growing completion to text piece by piece. Text that was returned never changes later.

Not here: following a completion (served.py), thoughts and tool calls in the text (data/dialects.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Converts the tokens of a completion to text as they arrive.

    The stream holds back the bytes of an incomplete character, and text that may be the beginning of a stop string.

    Args:
        stops: the completion's stop strings. The beginning of a stop string is held back, because the final text may
            omit the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoding = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._num_tokens = 0
        self._sent = ""
        self._held = ""

    def read(self, token_ids: Sequence[int]) -> str:
        """Return the text that is new since the last call. `token_ids` are all tokens so far."""
        for token_id in token_ids[self._num_tokens :]:
            self._held += self._decoding.step(self._tokenizer, token_id) or ""
        self._num_tokens = len(token_ids)
        num_shown = len(self._held) - count_held(self._held, self._stops)
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        self._sent += shown
        return shown

    def finish(self, text: str) -> str:
        """Return the part of the final text that `read` has not returned yet."""
        return text.removeprefix(self._sent) if text.startswith(self._sent) else self._held


def count_held(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    return next(
        (size for size in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-size:]) for s in stops)), 0
    )
