"""A Hugging Face hub on this machine: what of its HTTP API `huggingface_hub` and `datasets` use to read repositories.

Not here: pushing, accounts, large-file storage. Routes and headers are those of the hub's own API documentation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]
"""The files of a commit by their paths in the repository."""


@dataclass(slots=True, kw_only=True)
class Hub:
    """Repositories of datasets and models, the models that it gives to nobody else, and every request that was made."""

    url: str
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    """Per repository its commits, by their hashes."""
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Per repository the commits of its branches and tags."""
    gated: set[str] = field(default_factory=set)
    """Models whose terms only who has the token has accepted."""
    token: str = "hf_of_who_accepted"
    requests: list[str] = field(default_factory=list)
    num_sent_bytes: int = 0
    """Of the bodies of its answers."""

    def commit(self, repo: str, files: Files, *, ref: str = "main") -> str:
        """Add a commit that `ref` names from now on; returns its hash."""
        content = "".join(f"{path}\0{hashlib.sha1(data).hexdigest()}\n" for path, data in sorted(files.items()))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(repo, {})[sha] = files
        self.refs.setdefault(repo, {})[ref] = sha
        return sha

    def find(self, repo: str, revision: str) -> tuple[str, Files] | None:
        """The commit that a revision means, with its files."""
        sha = self.refs.get(repo, {}).get(revision, revision)
        files = self.commits.get(repo, {}).get(sha)
        return None if files is None else (sha, files)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """An empty hub on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]  # the handler has no other way to it
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]  # set by serve_hub
        hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        match path.strip("/").split("/"):
            case ["api", "datasets", owner, name]:
                self._describe(hub, f"{owner}/{name}", "main")
            case ["api", "datasets", owner, name, "revision", *revision]:
                self._describe(hub, f"{owner}/{name}", "/".join(revision))
            case ["api", "datasets", owner, name, "tree", revision, *folder]:
                self._list(hub, f"{owner}/{name}", revision, "/".join(folder))
            case ["datasets", owner, name, "resolve", revision, *file]:
                self._send_file(hub, f"{owner}/{name}", revision, "/".join(file))
            case ["api", "models", owner, name, *_] | [owner, name, "resolve", *_] if not self._shows(
                hub, f"{owner}/{name}"
            ):
                self._refuse_model(hub, f"{owner}/{name}")
            case ["api", "models", owner, name]:
                self._describe(hub, f"{owner}/{name}", "main")
            case ["api", "models", owner, name, "revision", *revision]:
                self._describe(hub, f"{owner}/{name}", "/".join(revision))
            case ["api", "models", owner, name, "tree", revision, *folder]:
                self._list(hub, f"{owner}/{name}", revision, "/".join(folder))
            case [owner, name, "resolve", revision, *file]:
                self._send_file(hub, f"{owner}/{name}", revision, "/".join(file))
            case _:
                self._send(404, b'{"error": "not found"}')

    def _shows(self, hub: Hub, repo: str) -> bool:
        has_token = self.headers.get("Authorization") == f"Bearer {hub.token}"
        return repo in hub.commits and (repo not in hub.gated or has_token)

    def _refuse_model(self, hub: Hub, repo: str) -> None:
        """A gated model is shown to exist; one that is private is not, and looks as one that does not exist."""
        code = "GatedRepo" if repo in hub.gated else "RepoNotFound"
        self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": code})

    def _describe(self, hub: Hub, repo: str, revision: str) -> None:
        if found := self._find(hub, repo, revision):
            sha, files = found
            siblings = [{"rfilename": path, "size": len(files[path])} for path in sorted(files)]
            self._send_json(
                {"id": repo, "sha": sha, "private": False, "tags": [], "downloads": 0, "siblings": siblings}
            )

    def _list(self, hub: Hub, repo: str, revision: str, folder: str) -> None:
        if not (found := self._find(hub, repo, revision)):
            return
        _, files = found
        prefix = f"{folder}/" if folder else ""
        is_recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        inside = [path for path in sorted(files) if path.startswith(prefix)]
        if folder and not inside:
            self._send(404, b'{"error": "not found"}', {"X-Error-Code": "EntryNotFound"})
            return
        folders = {f"{prefix}{path[len(prefix) :].split('/')[0]}" for path in inside if "/" in path[len(prefix) :]}
        entries = [_folder(path) for path in sorted(folders)]
        entries += [_file(path, files[path]) for path in inside if is_recursive or "/" not in path[len(prefix) :]]
        self._send_json(entries)

    def _send_file(self, hub: Hub, repo: str, revision: str, path: str) -> None:
        if not (found := self._find(hub, repo, revision)):
            return
        sha, files = found
        if path not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        etag = hashlib.sha1(files[path]).hexdigest()
        self._send(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"})

    def _find(self, hub: Hub, repo: str, revision: str) -> tuple[str, Files] | None:
        found = hub.find(repo, revision)
        if found is None:
            code = "RevisionNotFound" if repo in hub.commits else "RepoNotFound"
            self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})
        return found

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        whole, start = len(body), 0
        if status == 200 and (asked := self.headers.get("Range")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) if last else whole - 1
            status, body = 206, body[start : end + 1]
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{whole}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            hub: Hub = self.server.hub  # type: ignore[attr-defined]  # set by serve_hub
            hub.num_sent_bytes += len(body)
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def _file(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _folder(path: str) -> dict[str, object]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
