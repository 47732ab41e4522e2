"""A loopback server that speaks as much of the hub's API as an import needs, and misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED, GATED_TOKEN = "Org/Gated", "hf_good"


@dataclass
class FakeHub:
    """A running server.

    Args:
        repositories: id -> directory.
        cut: file name -> bytes after which the connection is closed, once.
        lie: file names that arrive with another last byte.
    """

    repositories: dict[str, Path]
    cut: dict[str, int] = field(default_factory=dict)
    lie: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range

    def __enter__(self) -> FakeHub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            return None

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _allowed(self, repo: str) -> bool:
            if repo not in hub.repositories:
                self._error(404, "RepoNotFound")
                return False
            if repo == GATED and self.headers.get("Authorization") != f"Bearer {GATED_TOKEN}":
                self._error(403, "GatedRepo")
                return False
            return True

        def _reply(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                return self._info(match[1], match[2])
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(match[1], match[3])
            return self._error(404, "EntryNotFound")

        do_HEAD = do_GET

        def _info(self, repo: str, revision: str | None) -> None:
            if not self._allowed(repo):
                return
            if revision not in (None, "main", COMMIT):
                return self._error(404, "RevisionNotFound")
            siblings = []
            for file in sorted(hub.repositories[repo].iterdir()):
                entry: dict[str, Any] = {"rfilename": file.name, "size": file.stat().st_size}
                if file.suffix == ".safetensors":
                    digest = hashlib.sha256(file.read_bytes()).hexdigest()
                    entry["lfs"] = {"sha256": digest, "size": file.stat().st_size, "pointerSize": 134}
                siblings.append(entry)
            info = {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": ["license:mit"], "private": False}
            body = json.dumps(info).encode()
            self._reply(body, {"Content-Type": "application/json", "Content-Length": str(len(body))})

        def _file(self, repo: str, name: str) -> None:
            if not self._allowed(repo):
                return
            body = (hub.repositories[repo] / name).read_bytes()
            if name in hub.lie:
                body = body[:-1] + bytes([body[-1] ^ 1])
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start, status = 0, 200
            if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                start, status = int(match[1]), 206
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            headers["Content-Length"] = str(len(body) - start)
            if self.command == "GET" and name in hub.cut:
                end = hub.cut.pop(name)
                self._reply(body[start:end], headers, status)
                self.close_connection = True
                return
            self._reply(body[start:], headers, status)

    return Handler
