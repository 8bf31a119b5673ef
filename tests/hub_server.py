"""A server with the routes of the Hugging Face hub that downloads and uploads use.

Model information, trees, `resolve` with a redirect for large files, gated and private models, and
connections that break in the middle of a file. And processes that use it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> its files, where they are not `files`."""
    messages: list[str] = field(default_factory=list)

    def files_at(self, commit: str) -> dict[str, bytes]:
        return self.trees.get(commit, self.files)

    def commit(self, revision: str) -> str | None:
        known = self.revisions.get(revision)
        return known or (revision if revision in self.revisions.values() else None)


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_secret"
    reader: str = "hf_reader"
    """A token that may not write."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> the content of an LFS file."""
    asked: list[str] = field(default_factory=list)
    meanwhile: bytes | None = None
    """A file that somebody else commits while the next model is uploaded."""
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

        def do_PUT(self) -> None:
            content = self.body()
            digest = hashlib.sha256(content).hexdigest()
            hub.asked.append(f"PUT {urlsplit(self.path).path}")
            assert self.path == f"/lfs/{digest}"
            hub.objects[digest] = content
            self.send(200, b"", {})

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"POST {path}")
            given = self.headers.get("authorization")
            body = self.body()
            if given not in {f"Bearer {hub.token}", f"Bearer {hub.reader}"}:
                self.refuse(401, "Unauthorized", head=False)
            elif path == "/api/validate-yaml":
                self.send_json({"errors": [], "warnings": []})
            elif given != f"Bearer {hub.token}":
                self.refuse(403, "Forbidden", head=False)
            elif path == "/api/repos/create":
                self.create(json.loads(body))
            else:
                self.receive(path, body)

        def body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def create(self, wanted: dict[str, Any]) -> None:
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in hub.repositories:
                self.send_json({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
                return
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            hub.repositories[name] = Repository({}, {"main": "0" * 40}, private=private)
            self.send_json({"url": f"{hub.url}/{name}"})

        def receive(self, path: str, body: bytes) -> None:
            found = re.fullmatch(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:\.git)?/(.+)", path)
            assert found, path
            repository, what = hub.repositories[found[1]], found[2]
            if what == "info/lfs/objects/batch":
                objects = [self.lfs(one) for one in json.loads(body)["objects"]]
                self.send_json({"transfer": "basic", "objects": objects})
            elif what.startswith("preupload/"):
                files = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["size"] > LARGE else "regular",
                        "shouldIgnore": False,
                    }
                    for one in json.loads(body)["files"]
                ]
                self.send_json({"files": files})
            elif what.startswith("commit/"):
                branch = what.removeprefix("commit/")
                if hub.meanwhile is not None:
                    repository.files = {**repository.files, "head.safetensors": hub.meanwhile}
                    repository.revisions[branch] = hashlib.sha1(hub.meanwhile).hexdigest()
                    hub.meanwhile = None
                parent = json.loads(body.splitlines()[0])["value"].get("parentCommit")
                if parent not in (None, repository.revisions[branch]):
                    self.refuse(412, "PreconditionFailed", head=False)
                    return
                commit = self.commit(repository, branch, body)
                shown = {"commitUrl": f"{hub.url}/{found[1]}/commit/{commit}", "commitOid": commit}
                self.send_json({**shown, "success": True, "hookOutput": ""})
            else:
                self.refuse(404, "NotFound", head=False)

        def lfs(self, wanted: dict[str, Any]) -> dict[str, Any]:
            known = wanted["oid"] in hub.objects
            upload = {"upload": {"href": f"{hub.url}/lfs/{wanted['oid']}"}}
            return {**wanted, **({} if known else {"actions": upload})}

        def commit(self, repository: Repository, branch: str, body: bytes) -> str:
            files = dict(repository.files_at(repository.revisions[branch]))
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    repository.messages.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
                else:
                    assert line["key"] == "lfsFile", line["key"]
                    files[value["path"]] = hub.objects[value["oid"]]
            digest = hashlib.sha256(repr((branch, sorted(files.items()))).encode())
            commit = digest.hexdigest()[:40]
            repository.revisions[branch] = commit
            repository.trees[commit] = files
            if branch == "main":
                repository.files = files
            return commit

        def send_json(self, value: Any, status: int = 200) -> None:
            self.send(status, json.dumps(value).encode(), {"content-type": "application/json"})

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
                files = repository.files_at(commit)
                rows = [hub.entry(path, content) for path, content in files.items()]
                self.send(200, json.dumps(rows).encode(), {"content-type": "application/json"})
            else:
                siblings = [{"rfilename": path} for path in repository.files_at(commit)]
                shown = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
                shown |= {"gated": repository.gated, "private": repository.private, "tags": []}
                self.send(200, json.dumps(shown).encode(), {"content-type": "application/json"})

        def send_file(self, repository: Repository, commit: str, path: str, *, head: bool) -> None:
            if path not in repository.files_at(commit):
                self.refuse(404, "EntryNotFound", head=head)
                return
            content = repository.files_at(commit)[path]
            digest = hashlib.sha256(content).hexdigest()
            headers = {"x-repo-commit": commit, "etag": f'"{digest[:40]}"'}
            if len(content) > LARGE:
                headers |= {"x-linked-etag": f'"{digest}"', "x-linked-size": str(len(content))}
                headers["location"] = f"{hub.cdn}/cdn/{digest}"
                self.send(302, b"", headers)
            else:
                self.send(200, content, headers, head=head)

        def send_content(self, digest: str, *, head: bool) -> None:
            trees = [t for r in hub.repositories.values() for t in (r.files, *r.trees.values())]
            every = [one for tree in trees for one in tree.values()]
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


FORKS = """
import json, os, sys
from bertkit.errors import BertkitError
{answer}
assert "huggingface_hub" not in sys.modules, "it reads the environment when it is imported"
for line in sys.stdin:
    environment, arguments = json.loads(line)
    if os.fork():
        os.wait()
        continue
    os.environ.update(environment)
    try:
        shown = answer(*arguments)
    except BertkitError as error:
        shown = {{"code": error.code, "message": str(error)}}
    print(json.dumps(shown), flush=True)
    os._exit(0)
"""


def without_hub() -> dict[str, str]:
    """The environment of this process without the settings of the hub."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**mine, "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def forked_answers(answer: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield a function that calls `answer` of a script, each time in a process of its own.

    Its first argument is the environment; the processes are forks, so that the imports of the
    script are made once.
    """
    command = [sys.executable, "-c", FORKS.format(answer=answer)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=without_hub()
    ) as process:

        def ask(environment: dict[str, str], *arguments: Any) -> dict[str, Any]:
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps([environment, arguments]) + "\n")
            process.stdin.flush()
            return dict(json.loads(process.stdout.readline()))

        yield ask
        process.kill()
