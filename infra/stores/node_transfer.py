"""Download files from an object store, or upload pieces of files, by presigned URLs.

This program is the node's side of direct.py. The program runs on a node as `node_transfer.py VERB DIRECTORY`, without
credentials. The program is one file and uses only the standard library, because its text is sent to nodes. Each verb
reads one JSON object from standard input and prints one JSON object. If a verb fails, the program prints `{"error":
sentence}` and exits with code 1.

    fetch DIRECTORY    {"probe_s", "limit_s", "files": [{"path", "size", "url"}]}                 {"num_bytes"}
    send DIRECTORY     {"probe_s", "limit_s", "pieces": [{"path", "offset", "length", "url"}]}    {"etags"}, in order

Several pieces are transferred in parallel, each with little memory. A broken transfer is retried; a retried download
continues after the received bytes. receiver.py verifies downloads, and the publication verifies uploads.

A URL is a secret while it is valid. The program therefore reads URLs from standard input, and omits everything after
the "?" from error messages.
"""

import contextlib
import http.client
import json
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

NUM_STREAMS = 8
PIECE_BYTES = 32 << 20
"""Size in bytes of the pieces in which files are downloaded."""
_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
ANSWER_TIMEOUT_S = 30.0
"""Seconds without data after which a connection counts as broken."""
_READ_BYTES = 256 << 10
_MAX_REASON_CHARS = 200
_MAX_ANSWER_BYTES = 4096
_PASSING_STATUSES = (408, 429)
_PASSING_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "Throttling", "ThrottlingException")
"""Error codes of S3 that come with status 400 for incomplete pieces and for too many requests."""

ResultT = TypeVar("ResultT")
# Any: JSON
JsonObject = dict[str, Any]


class _TransferError(Exception):
    """The program gave up a transfer. The error's text says why, and contains no URL."""


class Limit:
    """Stops all streams at a deadline, or when one stream gives up."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._is_over = threading.Event()
        self._reason = ""

    def check(self) -> None:
        """Raise _TransferError with the reason if one stream has given up or the deadline is over."""
        if self._is_over.is_set():
            raise _TransferError(self._reason)
        if time.monotonic() > self._deadline:
            raise self.give_up(f"it took longer than {self._limit_s:g} s")

    def give_up(self, reason: str) -> _TransferError:
        """Stop all streams, and return the error to raise. If several streams give up, the first reason counts."""
        self._reason = self._reason or reason
        self._is_over.set()
        return _TransferError(self._reason)

    def pause(self, seconds: float) -> None:
        """Wait. Returns at once when all streams stop."""
        self._is_over.wait(seconds)


def main(argv: list[str]) -> int:
    verb, directory = argv[1], Path(argv[2])
    answer: JsonObject = {}
    try:
        request = json.loads(sys.stdin.buffer.read())
        wanted = request["files" if verb == "fetch" else "pieces"]
        if wanted:
            _check_reachable(wanted[0]["url"], request["probe_s"])
        limit = Limit(request["limit_s"])
        if verb == "fetch":
            answer = {"num_bytes": _fetch_files(wanted, directory, limit)}
        else:
            answer = {"etags": send_pieces(wanted, directory, limit)}
    except _TransferError as error:
        answer = {"error": str(error)}
    except OSError as error:  # an error of a local file, as `retried` converts connection errors
        answer = {"error": f"{error.filename}: {error.strerror}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


def _check_reachable(url: str, probe_s: float) -> None:
    """Raise _TransferError unless the store answers within `probe_s` seconds, with any status.

    The request runs in a thread, because name lookups and attempts at several addresses have no common time limit.
    """
    problems: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(_without_query(url), method="HEAD"), timeout=probe_s).close()
            problems.append("")
        except urllib.error.HTTPError:  # the store refuses the request without a signature, so it is reachable
            problems.append("")
        except (OSError, http.client.HTTPException, ValueError) as error:
            problems.append(describe(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(probe_s)
    problem = problems[0] if problems else f"no answer within {probe_s:g} s"
    if problem:
        raise _TransferError(f"{_host_of(url)} cannot be reached: {problem}")


# ── fetching ──


def _fetch_files(files: Sequence[JsonObject], directory: Path, limit: Limit) -> int:
    """Download every file to its path below the directory. Returns the number of downloaded bytes."""
    calls: list[Callable[[], None]] = []
    for file in files:
        path, size = directory / file["path"], int(file["size"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as output:
            output.truncate(size)
        for start in range(0, size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, size)
            calls.append(partial(_fetch_piece, file["url"], path, start, end, size, limit))
    _carry_out(calls, limit)
    return sum(int(file["size"]) for file in files)


def _fetch_piece(url: str, path: Path, start: int, end: int, size: int, limit: Limit) -> None:
    at = start

    def fetch_rest(output: BinaryIO) -> None:
        nonlocal at
        request = urllib.request.Request(url, headers={"Range": f"bytes={at}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            expected = f"bytes {at}-{end - 1}/{size}"
            if answer.status != 206 or answer.headers["Content-Range"] != expected:
                raise limit.give_up(f"{_host_of(url)} does not have {size} bytes of {path.name}")
            while at < end:
                limit.check()
                chunk = answer.read(min(_READ_BYTES, end - at))
                if not chunk:
                    raise ConnectionError("the connection ended too early")
                _write_at(output, chunk, at, limit)
                at += len(chunk)

    with path.open("r+b") as output:
        retried(lambda: fetch_rest(output), url, limit)
        os.fsync(output.fileno())


def _write_at(output: BinaryIO, chunk: bytes, at: int, limit: Limit) -> None:
    """Write the whole chunk. A write error, such as a full disk, ends all streams."""
    written = 0
    try:
        while written < len(chunk):
            written += os.pwrite(output.fileno(), chunk[written:], at + written)
    except OSError as error:
        raise limit.give_up(f"{output.name}: {error.strerror}") from error


# ── sending ──


def send_pieces(pieces: Sequence[JsonObject], directory: Path, limit: Limit) -> list[str]:
    """Upload pieces of files below the directory. Returns the pieces' entity tags in the store."""
    return _carry_out([partial(_send_piece, piece, directory, limit) for piece in pieces], limit)


def _send_piece(piece: JsonObject, directory: Path, limit: Limit) -> str:
    url, length = piece["url"], int(piece["length"])
    headers = {"Content-Length": str(length), "Content-Type": "application/octet-stream"}

    def send(source: BinaryIO) -> str:
        source.seek(int(piece["offset"]))
        content = _read_piece(source, length, limit)
        request = urllib.request.Request(url, data=content, headers=headers, method="PUT")
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.headers["ETag"])

    with (directory / piece["path"]).open("rb") as source:
        return retried(lambda: send(source), url, limit)


def _read_piece(source: BinaryIO, length: int, limit: Limit) -> Iterator[bytes]:
    while length:
        limit.check()
        chunk = source.read(min(_READ_BYTES, length))
        if not chunk:
            raise limit.give_up(f"{source.name} has become shorter")
        length -= len(chunk)
        yield chunk


# ── calls ──


def _carry_out(calls: Sequence[Callable[[], ResultT]], limit: Limit) -> list[ResultT]:
    """Run calls, several in parallel, and return their results. If one call fails, the other calls stop."""
    with ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="transfer") as pool:
        try:
            return [future.result() for future in [pool.submit(call) for call in calls]]
        finally:
            limit.give_up("another piece failed")


def retried(call: Callable[[], ResultT], url: str, limit: Limit) -> ResultT:
    """Return the result of a call. The call is retried after temporary failures."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            limit.pause(FIRST_PAUSE_S * 2.0**attempt)
        limit.check()
        try:
            return call()
        except urllib.error.HTTPError as error:
            code = code_of(error)
            reason = f"status {error.code} {code}".rstrip()
            if error.code < 500 and error.code not in _PASSING_STATUSES and code not in _PASSING_CODES:
                break
        except (ValueError, http.client.InvalidURL) as error:
            reason = describe(error)
            break
        except (OSError, http.client.HTTPException) as error:
            reason = describe(error)
    raise limit.give_up(f"{_host_of(url)}: {reason}")


def code_of(error: urllib.error.HTTPError) -> str:
    """Return the store's error code. The rest of the store's answer is dropped, because it may repeat the secret
    URL."""
    said = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        said = error.read(_MAX_ANSWER_BYTES)
    code = re.search(rb"<Code>(\w+)</Code>", said)
    return code.group(1).decode() if code else ""


def describe(error: Exception) -> str:
    reason = str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    return re.sub(r"\?\S*", "?...", reason)[:_MAX_REASON_CHARS] or type(error).__name__


def _host_of(url: str) -> str:
    return _without_query(url).partition("://")[2].partition("/")[0]


def _without_query(url: str) -> str:
    return url.partition("?")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
