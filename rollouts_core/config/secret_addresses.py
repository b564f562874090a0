"""Refuse settings that have a secret in an address, because settings are stored with runs, shown in reports and sent to
trackers.

    https://user:PASSWORD@host    https://host/v1?api_key=SECRET    https://host/x?X-Amz-Signature=SECRET
    https://hooks.slack.com/services/T0/B0/SECRET    https://dl.host/SECRET/python/simple/

A part of a path counts as a secret if it mixes lower-case letters, capitals and digits, like most keys. Hexadecimal ids
are permitted, because account numbers and commits look the same. Addresses of webhooks are refused as a whole. Paths of
buckets and folders are permitted. Queries without a secret, such as `?api-version=2024-06-01`, are permitted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote

SECRET_NAME = re.compile(
    r"(?<!max)token(?!s$|iz)|secret|passw|passphrase|pwd|signature|credential|apikey|accesskey|auth(?!or(?!i[sz]))"
    r"|bearer|jwt|session|cookie|(?<!sort)key$|^(sig|sas|code|pass|pw)$"
)
"""Matches names of a query's parameters that contain a secret. The names are first reduced to lower-case letters and
digits. Words such as author and tokenizer do not match."""
RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9])[\w.~+/=%-]{24,}")
"""Matches a text that may be a key: 24 or more characters, with letters and digits."""
SEPARATORS = re.compile(r"[-_./]+")
KEY_PIECE = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9]).{16,}")
"""Matches a part of a key between separators. Words in the names of models and deployments are shorter."""
MIN_MEAN_PIECE = 8
"""Smallest mean length of the parts between separators at which a text may be a key. Keys in base64 have few
separators."""
COMMIT_NAME = re.compile(r"revision|rev|commit|sha|ref")
COMMIT = re.compile(r"[0-9a-f]{40}")
USER_SCHEMES = ("ssh", "sftp")
"""Last parts of schemes, such as ssh in git+ssh. Addresses like git+ssh://git@host may contain a login name, but no
password."""
WEB_SCHEMES = ("http", "https")
"""Last parts of the schemes of web services. Only their paths are checked, because other paths are names that the owner
of a bucket or folder chose."""
LOGIN = re.compile(r"[^\s/@:]+:[^\s/@]+@[\w.-]+(:\d+)?(/\S*)?")
"""Matches an address without a scheme that contains a user and a password."""
WEBHOOK = re.compile(
    r"https?://(hooks\.slack(-gov)?\.com/(services|workflows|triggers)/\S|(\w+\.)?discord(app)?\.com/api/(v\d+/)?webhooks/\S"
    r"|api\.telegram\.org/(file/)?bot\d|[\w.-]+\.webhook\.office\.com/\S|chat\.googleapis\.com/v1/spaces/\S"
    r"|hooks\.zapier\.com/\S|maker\.ifttt\.com/\S+/key/\S|events\.pagerduty\.com/integration/\S)",
    re.IGNORECASE,
)
"""Matches addresses of webhooks. A webhook accepts messages without a key, so its whole address is secret."""
TOKEN_PREFIX = re.compile(r"(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|pypi-|AKIA|ASIA|AIza|eyJ)[\w.~+=-]{12,}")
"""Matches keys that begin like those of well-known services."""
QUERY = re.compile(r"[^?\s]*\?\S+=\S*")
"""Matches a word with a query, as in `host/path?name=value`, with or without a scheme."""
_ADVICE = (
    "but settings are stored with runs and shown in reports: remove it, and name the environment variable with the "
    "key in api_key_variable if the setting has one"
)


def refuse_secrets(value: Any) -> None:  # Any: unchecked input
    """Raise ValueError if a text, or a text in a list, has an address with a secret.

    The message does not repeat the secret.
    """
    for text in _texts_in(value):
        if LOGIN.fullmatch(text):
            raise ValueError(f"the address contains a user or password, {_ADVICE}")
        for word in text.split() if "://" in text or "?" in text else ():
            scheme, scheme_end, address = word.partition("://")
            login, is_login, _ = re.split(r"[/?#]", address, maxsplit=1)[0].rpartition("@")
            if is_login and (":" in login or not scheme.endswith(USER_SCHEMES)):
                raise ValueError(f"the address contains a user or password, {_ADVICE}")
            if scheme_end or QUERY.fullmatch(word):
                _check_query(address or word)
            if scheme.endswith(WEB_SCHEMES):
                _check_path(word, address)


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
        is_commit = COMMIT_NAME.fullmatch(plain) and COMMIT.fullmatch(content)
        if SECRET_NAME.search(plain) or _is_like_a_key(name) or (_is_like_a_key(content) and not is_commit):
            raise ValueError(f"the query of the address contains a key or password, {_ADVICE}")


def _check_path(word: str, address: str) -> None:
    parts = [unquote(part) for part in re.split(r"[?#]", address, maxsplit=1)[0].split("/")[1:]]
    if WEBHOOK.match(word) or any(TOKEN_PREFIX.search(part) or _is_dense(part) for part in parts):
        raise ValueError(f"the path of the address contains a key or password, {_ADVICE}")


def _is_like_a_key(text: str) -> bool:
    """Return True if a text may be a key: it is long, has letters and digits, and does not consist of short words."""
    if not RANDOM.fullmatch(text):
        return False
    return _is_dense(text) or any(KEY_PIECE.fullmatch(piece) for piece in SEPARATORS.split(text))


def _is_dense(text: str) -> bool:
    """Return True if a text mixes lower-case letters, capitals and digits, and has few separators."""
    pieces = [piece for piece in SEPARATORS.split(text) if piece]
    is_mixed = RANDOM.fullmatch(text) and all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]"))
    return bool(is_mixed) and sum(map(len, pieces)) >= MIN_MEAN_PIECE * len(pieces)
