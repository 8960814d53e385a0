"""A small Hugging Face hub on localhost: the part of the HTTP API that huggingface_hub uses to find and load models.

with MiniHub() as hub:
    hub.publish("org/name", folder)                      # or gated=True, private=True, revision="refs/pr/1"
    ...                                                  # HF_ENDPOINT=hub.url
    hub.downloads()                                      # names of the files that were fetched
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_minihub"


@dataclass
class Repo:
    """One model.  revisions: branch, tag or refs/pr/N -> its folder of files.  history: every folder ever published."""

    revisions: dict[str, Path] = field(default_factory=dict)
    history: list[Path] = field(default_factory=list)
    gated: bool = False
    private: bool = False

    def folder(self, revision: str) -> Path | None:
        """The files of a branch, a tag or a commit."""
        commits = {commit_of(folder): folder for folder in self.history}
        return self.revisions.get(revision) or commits.get(revision)


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # without the query
    query: dict[str, list[str]]
    range: str | None
    authorized: bool


class MiniHub:
    """The server; runs in a thread from construction to `close`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.log: list[Request] = []
        self.closed = False
        self.down: int | None = None  # a status for all answers
        self.drops = 0  # number of requests for which the connection closes without an answer
        self._cuts: dict[str, list[int]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> MiniHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering, also on open connections, as if the network were down."""
        self.closed = True
        self._server.shutdown()
        self._server.server_close()

    def publish(
        self, repo_id: str, folder: Path, *, revision: str = "main", gated: bool = False, private: bool = False
    ) -> str:
        """Serve `folder` as one revision of `repo_id`; returns its commit.

        gated: files only with the token.  private: nothing without the token, as if the repo did not exist.
        """
        repo = self.repos.setdefault(repo_id, Repo())
        repo.revisions[revision] = folder
        repo.history.append(folder)
        repo.gated, repo.private = gated, private
        return commit_of(folder)

    def cut(self, file: str, *after_bytes: int) -> None:
        """Break the connection in the next GETs of `file`, each after the given number of bytes."""
        self._cuts[file] = list(after_bytes)

    def next_cut(self, file: str) -> int | None:
        cuts = self._cuts.get(file)
        return cuts.pop(0) if cuts else None

    def downloads(self) -> list[str]:
        """Names of the files that were fetched completely or in part, each once, in order; without mere look-ups."""
        fetched = [request for request in self.log if request.method == "GET" and "/resolve/" in request.path]
        return list(dict.fromkeys(re.sub(r"^.*/resolve/[^/]+/", "", request.path) for request in fetched))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: MiniHub

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: the hub has its own log."""

    def do_GET(self) -> None:
        if self.hub.closed:
            self.close_connection = True
            return
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), urllib.parse.parse_qs(url.query)
        authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
        request = Request(self.command, path, query, self.headers.get("range"), authorized)
        self.hub.log.append(request)
        if self.hub.drops:
            self.hub.drops -= 1
            self.close_connection = True
            return
        if self.hub.down is not None:
            self.fail(self.hub.down, "", "down")
            return
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, path):
                answer(self, request, *match.groups())
                return
        self.fail(404, "", "minihub has no such route")

    do_HEAD = do_GET

    # --- routes

    def info(self, request: Request, repo_id: str, revision: str | None) -> None:
        revision = revision or "main"
        if (folder := self.find(request, repo_id, revision)) is None:
            return
        repo = self.hub.repos[repo_id]
        siblings = [
            {"rfilename": name, "size": path.stat().st_size} if "blobs" in request.query else {"rfilename": name}
            for name, path in files(folder)
        ]
        self.send_json(
            {
                "_id": "0", "id": repo_id, "sha": commit_of(folder), "private": repo.private,
                "gated": "manual" if repo.gated else False, "tags": [],
                "siblings": siblings,
            }
        )  # fmt: skip

    def refs(self, request: Request, repo_id: str) -> None:
        if self.find(request, repo_id, "main") is None:
            return
        repo = self.hub.repos[repo_id]
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit_of(folder)}
            for name, folder in repo.revisions.items()
            if not name.startswith("refs/")
        ]
        self.send_json({"branches": branches, "tags": [], "converts": []})

    def resolve(self, request: Request, repo_id: str, revision: str, name: str) -> None:
        folder = self.find(request, repo_id, revision, is_file=True)
        if folder is None:
            return
        path = folder / name
        commit = commit_of(folder)
        if not path.is_file():
            self.fail(404, "EntryNotFound", "Entry not found", commit=commit)
            return
        size = path.stat().st_size
        start, stop = 0, size
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or ""):
            start, stop = int(part[1]), min(int(part[2]) + 1 if part[2] else size, size)
        self.send_response(206 if part else 200)
        self.send_header("ETag", f'"{etag(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            content = path.read_bytes()[start:stop]
            cut = self.hub.next_cut(name)
            self.wfile.write(content if cut is None else content[:cut])
            if cut is not None:
                self.close_connection = True

    # --- answers

    def find(self, request: Request, repo_id: str, revision: str, *, is_file: bool = False) -> Path | None:
        """The files of a revision.  Without access, it answers with the hub's error and returns None."""
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not request.authorized):
            self.fail(404 if request.authorized else 401, "RepoNotFound", "Invalid username or password.")
        elif repo.gated and is_file and not request.authorized:
            self.fail(401, "GatedRepo", f"Access to model {repo_id} is restricted.")
        elif (folder := repo.folder(revision)) is None:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return folder
        return None

    def fail(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


_REPO = r"([^/]+(?:/[^/]+)?)"  # the oldest repos have no namespace
_ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"/api/models/{_REPO}/refs", _Handler.refs),
    (rf"/api/models/{_REPO}(?:/revision/(.+))?", _Handler.info),
    (rf"/{_REPO}/resolve/(refs/pr/\d+|[^/]+)/(.+)", _Handler.resolve),
)


def commit_of(folder: Path) -> str:
    """40 hex digits: every published folder is one commit."""
    return hashlib.sha1(str(folder).encode()).hexdigest()


def files(folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def etag(path: Path) -> str:
    return _sha256(path, path.stat().st_mtime_ns)


@cache
def _sha256(path: Path, _modified: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
