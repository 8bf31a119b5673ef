"""A server with the routes of the Hugging Face hub that downloads and uploads use.

Model information, trees, `resolve` with a redirect for large files, gated and private models, and
connections that break in the middle of a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 10_000
"""Files of more bytes are LFS files, which are answered by a redirect."""


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str | None:
        known = self.revisions.get(revision)
        return known or (revision if revision in self.revisions.values() else None)


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secret"
    asked: list[str] = field(default_factory=list)
    break_after: int = 0
    """The next large file ends after so many bytes."""
    url: str = ""
    cdn: str = ""
    """Another host, as large files have."""

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        row = {"type": "file", "path": path, "oid": digest[:40], "size": len(content)}
        if len(content) > LARGE:
            row["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 100}
        return row


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            self.answer(head=False)

        def answer(self, *, head: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/cdn/(\w+)", path):
                self.send_content(found[1], head=head)
                return
            api = re.fullmatch(
                r"/api/models/([\w.-]+(?:/[\w.-]+)?)(?:/(revision|tree)/(.+))?", path
            )
            file = re.fullmatch(r"/([\w.-]+(?:/[\w.-]+)?)/resolve/([^/]+)/(.+)", path)
            name = api[1] if api else file[1] if file else ""
            repository = hub.repositories.get(name)
            allowed = self.headers.get("authorization") == f"Bearer {hub.token}"
            if repository is None or (repository.private and not allowed):
                self.refuse(401 if not allowed else 404, "RepoNotFound", head=head)
            elif repository.gated and not allowed and file:
                self.refuse(403, "GatedRepo", head=head)
            elif (commit := repository.commit((api[3] if api else file[2]) or "main")) is None:  # type: ignore[index]
                self.refuse(404, "RevisionNotFound", head=head)
            elif file:
                self.send_file(repository, commit, file[3], head=head)
            elif api and api[2] == "tree":
                rows = [hub.entry(path, content) for path, content in repository.files.items()]
                self.send(200, json.dumps(rows).encode(), {"content-type": "application/json"})
            else:
                siblings = [{"rfilename": path} for path in repository.files]
                shown = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
                shown |= {"gated": repository.gated, "private": repository.private, "tags": []}
                self.send(200, json.dumps(shown).encode(), {"content-type": "application/json"})

        def send_file(self, repository: Repository, commit: str, path: str, *, head: bool) -> None:
            if path not in repository.files:
                self.refuse(404, "EntryNotFound", head=head)
                return
            content = repository.files[path]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"x-repo-commit": commit, "etag": f'"{digest[:40]}"'}
            if len(content) > LARGE:
                headers |= {"x-linked-etag": f'"{digest}"', "x-linked-size": str(len(content))}
                headers["location"] = f"{hub.cdn}/cdn/{digest}"
                self.send(302, b"", headers)
            else:
                self.send(200, content, headers, head=head)

        def send_content(self, digest: str, *, head: bool) -> None:
            every = [one for r in hub.repositories.values() for one in r.files.values()]
            [content] = [one for one in every if hashlib.sha256(one).hexdigest() == digest][:1]
            first = int((self.headers.get("range") or "bytes=0-").split("=")[1].split("-")[0])
            headers = {"etag": f'"{digest}"', "accept-ranges": "bytes"}
            if first:
                headers["content-range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                hub.asked[-1] += f" from {first}"
            self.send(206 if first else 200, content[first:], headers, head=head, may_break=True)

        def refuse(self, status: int, code: str, *, head: bool) -> None:
            headers = {"x-error-code": code, "x-error-message": code}
            self.send(status, json.dumps({"error": code}).encode(), headers, head=head)

        def send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            *,
            head: bool = False,
            may_break: bool = False,
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if not head and may_break and hub.break_after:
                self.wfile.write(body[: hub.break_after])
                hub.break_after = 0
                self.close_connection = True
            elif not head:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
