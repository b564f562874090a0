"""Fetch files from an object store, or send pieces of files there, by presigned URLs; on a node, without credentials.

The node's side of direct.py. Runs as `node_transfer.py VERB DIRECTORY`; standard library only and one file,
because it is sent to nodes by content. Each verb reads one JSON object from standard input and prints one;
`{"error": sentence}` with exit code 1 when it gives up.

    fetch DIRECTORY    {"probe_s", "limit_s", "files": [{"path", "size", "url"}]}                 {"num_bytes"}
    send DIRECTORY     {"probe_s", "limit_s", "pieces": [{"path", "offset", "length", "url"}]}    {"etags"}, in order

Several pieces are under way at a time, and little of each is in memory. One that broke is tried again, when fetched
from where it broke. Whether the content is right is not looked at here (receiver.py, and the store's own digests).

A URL is a secret as long as it lives: it comes on standard input, and no sentence repeats what follows its "?".
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
"""A file is fetched in pieces of this size."""
ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
ANSWER_TIMEOUT_S = 30.0
"""So long a connection may be silent."""
_READ_BYTES = 256 << 10
_MAX_REASON_CHARS = 200
_MAX_ANSWER_BYTES = 4096
_PASSING_STATUSES = (408, 429)
_PASSING_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest", "Throttling", "ThrottlingException")
"""What S3 says with status 400 of a piece that did not arrive whole, or of too many requests."""

ResultT = TypeVar("ResultT")
# Any: JSON
JsonObject = dict[str, Any]


class TransferError(Exception):
    """It is given up; the message says why, without any URL."""


class Limit:
    """When all streams stop: at a deadline, or when one of them gave up."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._is_over = threading.Event()
        self._reason = ""

    def check(self) -> None:
        """Return if there is something left to try."""
        if self._is_over.is_set():
            raise TransferError(self._reason)
        if time.monotonic() > self._deadline:
            raise self.give_up(f"it takes longer than {self._limit_s:g} s")

    def give_up(self, reason: str) -> TransferError:
        """The error to raise; every other stream ends with it, too. The first reason counts."""
        self._reason = self._reason or reason
        self._is_over.set()
        return TransferError(self._reason)

    def pause(self, seconds: float) -> None:
        """Wait, unless it is over."""
        self._is_over.wait(seconds)


def main(argv: list[str]) -> int:
    """Carry out one verb; see the head of this file."""
    verb, directory = argv[1], Path(argv[2])
    answer: JsonObject = {}
    try:
        request = json.loads(sys.stdin.buffer.read())
        wanted = request["files" if verb == "fetch" else "pieces"]
        if wanted:
            check_reachable(wanted[0]["url"], request["probe_s"])
        limit = Limit(request["limit_s"])
        if verb == "fetch":
            answer = {"num_bytes": fetch_files(wanted, directory, limit)}
        else:
            answer = {"etags": send_pieces(wanted, directory, limit)}
    except TransferError as error:
        answer = {"error": str(error)}
    except OSError as error:  # of files here: what a connection raises is sorted where it is used
        answer = {"error": f"{error.filename}: {error.strerror}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


def check_reachable(url: str, probe_s: float) -> None:
    """Return if the store answers anything at all, within this time.

    Asked in a thread, because neither the search for an address nor several addresses in turn have a limit.
    """
    problems: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(without_query(url), method="HEAD"), timeout=probe_s).close()
            problems.append("")
        except urllib.error.HTTPError:  # it refuses whoever has no signature, so it is there
            problems.append("")
        except (OSError, http.client.HTTPException, ValueError) as error:
            problems.append(describe(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(probe_s)
    problem = problems[0] if problems else f"no answer within {probe_s:g} s"
    if problem:
        raise TransferError(f"{host_of(url)} cannot be reached: {problem}")


# ── fetching ──


def fetch_files(files: Sequence[JsonObject], directory: Path, limit: Limit) -> int:
    """Write every file below the directory; returns how many bytes that were."""
    calls: list[Callable[[], None]] = []
    for file in files:
        path, size = directory / file["path"], int(file["size"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as output:
            output.truncate(size)
        for start in range(0, size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, size)
            calls.append(partial(fetch_piece, file["url"], path, start, end, size, limit))
    carry_out(calls, limit)
    return sum(int(file["size"]) for file in files)


def fetch_piece(url: str, path: Path, start: int, end: int, size: int, limit: Limit) -> None:
    """Fetch the bytes of an object from `start` up to `end` into their place in the file."""
    at = start

    def fetch_rest(output: BinaryIO) -> None:
        nonlocal at
        request = urllib.request.Request(url, headers={"Range": f"bytes={at}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            expected = f"bytes {at}-{end - 1}/{size}"
            if answer.status != 206 or answer.headers["Content-Range"] != expected:
                raise limit.give_up(f"{host_of(url)} has no {size} bytes of {path.name}")
            while at < end:
                limit.check()
                chunk = answer.read(min(_READ_BYTES, end - at))
                if not chunk:
                    raise ConnectionError("the connection ended too early")
                write_at(output, chunk, at, limit)
                at += len(chunk)

    with path.open("r+b") as output:
        tried_again(lambda: fetch_rest(output), url, limit)
        os.fsync(output.fileno())


def write_at(output: BinaryIO, chunk: bytes, at: int, limit: Limit) -> None:
    """Write all of it; a disk that is full is no failure that passes."""
    written = 0
    try:
        while written < len(chunk):
            written += os.pwrite(output.fileno(), chunk[written:], at + written)
    except OSError as error:
        raise limit.give_up(f"{output.name}: {error.strerror}") from error


# ── sending ──


def send_pieces(pieces: Sequence[JsonObject], directory: Path, limit: Limit) -> list[str]:
    """Send pieces of files below the directory; returns the entity tags that the store gave them."""
    return carry_out([partial(send_piece, piece, directory, limit) for piece in pieces], limit)


def send_piece(piece: JsonObject, directory: Path, limit: Limit) -> str:
    """The entity tag of a piece that is in the store now."""
    url, length = piece["url"], int(piece["length"])
    headers = {"Content-Length": str(length), "Content-Type": "application/octet-stream"}

    def send(source: BinaryIO) -> str:
        source.seek(int(piece["offset"]))
        content = read_piece(source, length, limit)
        request = urllib.request.Request(url, data=content, headers=headers, method="PUT")
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.headers["ETag"])

    with (directory / piece["path"]).open("rb") as source:
        return tried_again(lambda: send(source), url, limit)


def read_piece(source: BinaryIO, length: int, limit: Limit) -> Iterator[bytes]:
    """The next bytes of a file, in chunks."""
    while length:
        limit.check()
        chunk = source.read(min(_READ_BYTES, length))
        if not chunk:
            raise limit.give_up(f"{source.name} is shorter than it was")
        length -= len(chunk)
        yield chunk


# ── calls ──


def carry_out(calls: Sequence[Callable[[], ResultT]], limit: Limit) -> list[ResultT]:
    """The results of calls, some of which are under way at a time; where one fails the others stop."""
    with ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="transfer") as pool:
        try:
            return [future.result() for future in [pool.submit(call) for call in calls]]
        finally:
            limit.give_up("another piece failed")


def tried_again(call: Callable[[], ResultT], url: str, limit: Limit) -> ResultT:
    """What a call returns, which is made again when it failed in a way that may pass."""
    reason = ""
    for attempt in range(ATTEMPTS):
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
    raise limit.give_up(f"{host_of(url)}: {reason}")


def code_of(error: urllib.error.HTTPError) -> str:
    """The store's own word for what is wrong; the rest of what it says may repeat the URL."""
    said = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        said = error.read(_MAX_ANSWER_BYTES)
    code = re.search(rb"<Code>(\w+)</Code>", said)
    return code.group(1).decode() if code else ""


def describe(error: Exception) -> str:
    """Why a connection failed."""
    reason = str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
    return re.sub(r"\?\S*", "?...", reason)[:_MAX_REASON_CHARS] or type(error).__name__


def host_of(url: str) -> str:
    """Whom a URL asks."""
    return without_query(url).partition("://")[2].partition("/")[0]


def without_query(url: str) -> str:
    """The URL without what makes it a secret."""
    return url.partition("?")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
