"""Refuse settings with addresses that carry secrets: settings are kept with runs, shown in reports, sent to trackers.

    https://user:PASSWORD@host    https://host/v1?api_key=SECRET    https://host/x?X-Amz-Signature=SECRET

Other queries are kept: services want `?api-version=2024-06-01`. Not here: keys by variables (rollouts_core/keys.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

SECRET_NAME = re.compile(
    r"token(?!s$)|secret|passw|passphrase|pwd|signature|credential|apikey|accesskey|auth|bearer|jwt|session|cookie"
    r"|key$|^(sig|sas|code|pass|pw)$"
)
"""In the name of a query's part, in small letters and digits alone."""
RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9])[\w.~+/=%-]{24,}")
"""A text of that many characters, with letters and digits, is taken for a key, whatever its name."""
LOGIN = re.compile(r"[^\s/@:]+:[^\s/@]+@[\w.-]+(:\d+)?(/\S*)?")
"""An address without its scheme, with user and password."""
QUERY = re.compile(r"[^?\s]*\?\S+=\S*")
"""A word with a query, with or without a scheme before it."""
_ADVICE = (
    "and settings are kept with runs and shown in reports: leave it out, and name the environment variable with the "
    "key as api_key_variable if the setting has one"
)


def refuse_secrets(value: Any) -> None:  # Any: unchecked input
    """Raise ValueError for an address with a secret in a text or a list of texts; nothing of it is repeated."""
    for text in _texts_in(value):
        if LOGIN.fullmatch(text):
            raise ValueError(f"the address holds a user or password, {_ADVICE}")
        for word in text.split() if "://" in text or "?" in text else ():
            _, scheme_end, address = word.partition("://")
            if scheme_end and "@" in re.split(r"[/?#]", address, maxsplit=1)[0]:
                raise ValueError(f"the address holds a user or password, {_ADVICE}")
            if scheme_end or QUERY.fullmatch(word):
                _check_query(address or word)


def _texts_in(value: Any) -> Iterator[str]:  # Any: unchecked input
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each) if isinstance(each, str) else ()


def _check_query(address: str) -> None:
    _, mark, query = address.replace("#", "?").partition("?")
    pairs = parse_qsl(query.replace("?", "&").replace(";", "&"), keep_blank_values=True) if mark else []
    for name, content in pairs:
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        if SECRET_NAME.search(plain) or RANDOM.fullmatch(content) or RANDOM.fullmatch(name):
            raise ValueError(f"the query of the address holds a key or password, {_ADVICE}")
