"""``llmrl watch``: serves the report of a run to this machine alone, updated every few seconds."""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from llmrl.errors import ConfigError, LLMRLError
from llmrl.report.page import as_json, page, report_data
from llmrl.report.rollouts import rollouts_data
from llmrl.report.run_files import read_run
from llmrl.run.run_dir import RunDir

HOST = "127.0.0.1"
SHARE = 0.01  # of a core, while the page is open, for the numbers and again for the rollouts


class ReportServer(ThreadingHTTPServer):
    """Serves two addresses below a random path: the page, and ``data``, its numbers.

    It reads the run's folder and writes nothing; requests with another host name in them, which pages of other sites
    send by rebinding a name to this machine, are refused.

    Raises  ConfigError if the port cannot be used
    """

    daemon_threads = True
    allow_reuse_address = True  # of a server that has just ended; one that listens is still an error

    def __init__(self, run_dir: Path, port: int = 0):
        self.run_dir = run_dir
        self.token = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._parts: dict[str, Any] = {}
        self._read: dict[str, tuple[Any, ...]] = {}  # for each part, the state of the files that was read last
        self._next = {"report": 0.0, "rollouts": 0.0}
        self._made: dict[str, str] = {}
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = "is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else f"cannot be used: {error}"
            raise ConfigError(
                f"llmrl watch  port {port} {why}; choose another with --port, or leave it out for a free one"
            ) from error
        self.hosts = {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}
        self.url = f"http://{HOST}:{self.server_port}/{self.token}/"

    def content(self, name: str) -> tuple[str, str] | None:
        """The type and the text of ``""`` (the page) or ``"data"``; None for any other name.

        Its numbers are read again when the files have changed, but not so often that it takes more than `SHARE` of a
        core; its rollouts likewise, and therefore more rarely.
        """
        if name not in ("", "data"):
            return None
        with self._lock:
            try:
                # | and not or: both parts are looked at, also if the first has changed.
                if self._read_part("report") | self._read_part("rollouts"):
                    clock = time.thread_time()
                    self._made = {"": page(*self._parts.values(), live=True), "data": as_json(self._parts)}
                    self._next["report"] += (time.thread_time() - clock) / SHARE
            except (LLMRLError, OSError) as error:  # it may be whole again the next time
                return "text/plain", f"{error}\n"
        return ("text/html" if name == "" else "application/json"), self._made[name]

    def _read_part(self, part: str) -> bool:
        """True if the part has been read again."""
        found = _changes(self.run_dir)
        if found == self._read.get(part) or time.monotonic() < self._next[part]:
            return False
        clock = time.thread_time()
        read = report_data(read_run(self.run_dir)) if part == "report" else rollouts_data(self.run_dir)
        self._parts[part], self._read[part] = read, found
        self._next[part] = time.monotonic() + (time.thread_time() - clock) / SHARE
        return True


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30  # seconds without a byte
    server_version, sys_version = "llmrl", ""

    def do_GET(self) -> None:
        asked = re.fullmatch("/([^/?]*)/([^/?]*)", self.path)
        token, name = asked.groups() if asked else ("", "")
        # In constant time: the token cannot be guessed letter by letter.
        known = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, "text/plain", "llmrl watch answers to its own address only\n")
        elif not known or (content := self.server.content(name)) is None:
            self._answer(404, "text/plain", "not found\n")
        else:
            self._answer(200 if content[0] != "text/plain" else 503, *content)

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing for a request."""


def watch(run: RunDir, *, port: int) -> int:
    """Serves until Ctrl-C, at a low priority; a run that trains on this machine goes first."""
    os.nice(10)
    with ReportServer(run.path, port) as server:
        print(f"watch     {server.url}", flush=True)
        print(f"          {run.path}, read only; Ctrl-C ends this page and not the run", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("watch     ended", flush=True)
    return 0


def _changes(run_dir: Path) -> tuple[Any, ...]:
    """Times and sizes of the run's files: they differ when it has written something."""
    found: list[Any] = []
    for name in ("metrics.jsonl", "run.json", "config.yaml", "rollouts"):
        try:
            status = (run_dir / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return tuple(found)
