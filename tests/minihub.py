"""A small Hugging Face hub on localhost: the part of the HTTP API that huggingface_hub uses to find
and load models.

with MiniHub() as hub:
    hub.publish("org/name", folder)                      # or gated=True, private=True,
                                                         revision="refs/pr/1"
    ...                                                  # HF_ENDPOINT=hub.url
    hub.downloads()                                      # names of the files that were fetched
"""

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = "hf_minihub"
_REPO = r"([^/]+(?:/[^/]+)?)"  # the oldest repos have no namespace


class Request(NamedTuple):
    method: str
    path: str  # without the query
    range: str | None


class MiniHub(ThreadingHTTPServer):
    """The server; runs in a thread from construction to `close`.

    log: requests.  down: a status for all answers.  drops: number of requests that get no answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, Path]] = {}  # branch, tag, refs/pr/N and commit -> folder
        self.gated: set[str] = set()  # files only with the token
        self.private: set[str] = set()  # nothing without the token, as if the repo did not exist
        self.log: list[Request] = []
        self.closed = False
        self.down: int | None = None
        self.drops = 0
        self.cuts: dict[str, list[int]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering, also on open connections, as if the network were down."""
        self.closed = True
        self.shutdown()
        self.server_close()

    def publish(
        self,
        repo_id: str,
        folder: Path,
        *,
        revision: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Serve `folder` as one revision of `repo_id`; returns its commit."""
        commit = commit_of(folder)
        self.repos.setdefault(repo_id, {}).update({revision: folder, commit: folder})
        self.gated |= {repo_id} if gated else set()
        self.private |= {repo_id} if private else set()
        return commit

    def cut(self, file: str, *after_bytes: int) -> None:
        """Break the connection in the next GETs of `file`, each after the given number of bytes."""
        self.cuts[file] = list(after_bytes)

    def downloads(self) -> list[str]:
        """Names of the files that were fetched completely or in part, each once, in order; without
        mere look-ups.
        """
        fetched = [
            request.path
            for request in self.log
            if request.method == "GET" and "/resolve/" in request.path
        ]
        return list(dict.fromkeys(re.sub(r"^.*/resolve/[^/]+/", "", path) for path in fetched))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: the hub has its own log."""

    def do_GET(self) -> None:
        hub: Any = self.server
        if hub.closed:
            self.close_connection = True
            return
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.log.append(Request(self.command, path, self.headers.get("range")))
        if hub.drops:
            hub.drops -= 1
            self.close_connection = True
        elif hub.down is not None:
            self.answer(hub.down, error="down")
        elif found := re.fullmatch(rf"/api/models/{_REPO}/refs", path):
            if self.find(hub, found[1], "main"):
                names = [
                    name
                    for name in hub.repos[found[1]]
                    if not re.fullmatch(r"refs/.*|\w{40}", name)
                ]
                branches = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0"}
                    for name in names
                ]
                self.answer(
                    200, json.dumps({"branches": branches, "tags": [], "converts": []}).encode()
                )
        elif found := re.fullmatch(rf"/api/models/{_REPO}(?:/revision/(.+))?", path):
            if folder := self.find(hub, found[1], found[2] or "main"):
                files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
                siblings = [
                    {"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size}
                    for file in files
                ]
                info = {
                    "_id": "0",
                    "id": found[1],
                    "sha": commit_of(folder),
                    "tags": [],
                    "siblings": siblings,
                }
                self.answer(200, json.dumps(info).encode())
        elif found := re.fullmatch(rf"/{_REPO}/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
            if folder := self.find(hub, found[1], found[2], is_file=True):
                self.send_file(hub, folder, found[3])
        else:
            self.answer(404, error="no such route")

    do_HEAD = do_GET

    def find(
        self, hub: MiniHub, repo_id: str, revision: str, *, is_file: bool = False
    ) -> Path | None:
        """The files of a revision.  Without access, it answers with the hub's error and returns
        None.
        """
        authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if repo_id not in hub.repos or (repo_id in hub.private and not authorized):
            self.answer(404 if authorized else 401, error="RepoNotFound")
        elif repo_id in hub.gated and is_file and not authorized:
            self.answer(401, error="GatedRepo")
        elif revision not in hub.repos[repo_id]:
            self.answer(404, error="RevisionNotFound")
        else:
            return hub.repos[repo_id][revision]
        return None

    def send_file(self, hub: MiniHub, folder: Path, name: str) -> None:
        commit = {"X-Repo-Commit": commit_of(folder)}
        if not (folder / name).is_file():
            self.answer(404, error="EntryNotFound", **commit)
            return
        content = (folder / name).read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
            **commit,
        }
        size = len(content)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if part:
            start = int(part[1])
            stop = min(int(part[2]) + 1 if part[2] else size, size)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            content = content[start:stop]
        cuts = hub.cuts.get(name) if self.command == "GET" else None
        self.answer(206 if part else 200, content, cuts.pop(0) if cuts else None, **headers)

    def answer(
        self,
        status: int,
        content: bytes = b"",
        cut: int | None = None,
        *,
        error: str = "",
        **headers: str,
    ) -> None:
        """cut: the connection breaks after so many bytes."""
        self.send_response(status)
        errors = {"X-Error-Code": error, "X-Error-Message": error} if error else {}
        for name, value in (headers | errors | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            self.close_connection = self.close_connection or cut is not None


def commit_of(folder: Path) -> str:
    """40 hex digits: every published folder is one commit."""
    return hashlib.sha1(str(folder).encode()).hexdigest()
