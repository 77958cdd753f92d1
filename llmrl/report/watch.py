"""``llmrl watch``: serves the report of a run to this machine only, updated every few seconds."""

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
SHARE = 0.01  # of a core while the page is open, for the numbers and the rollouts each


class ReportServer(ThreadingHTTPServer):
    """Serves two addresses below a random path: the page, and ``data``, its numbers.

    It reads the run's folder and writes nothing. It refuses requests with another host name, which pages of other sites
    could send by DNS rebinding.

    Raises  ConfigError if the port cannot be used
    """

    daemon_threads = True
    allow_reuse_address = True  # after a server that has just ended; a port in use is still an error

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

        Reads the numbers again when the files have changed, but no more often than `SHARE` of a core allows. The same
        holds for the rollouts, which take longer and so are read less often.
        """
        if name not in ("", "data"):
            return None
        with self._lock:
            try:
                # | instead of or: both parts must be read, also if the first has changed.
                if self._read_part("report") | self._read_part("rollouts"):
                    clock = time.thread_time()
                    self._made = {"": page(*self._parts.values(), live=True), "data": as_json(self._parts)}
                    self._next["report"] += (time.thread_time() - clock) / SHARE
            except (LLMRLError, OSError) as error:  # the next read may succeed
                return "text/plain", f"{error}\n"
        return ("text/html" if name == "" else "application/json"), self._made[name]

    def _read_part(self, part: str) -> bool:
        """Reads a part again if it has changed and its turn has come; True if it was read."""
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
    timeout = 30  # seconds without data
    server_version, sys_version = "llmrl", ""

    def do_GET(self) -> None:
        asked = re.fullmatch("/([^/?]*)/([^/?]*)", self.path)
        token, name = asked.groups() if asked else ("", "")
        # Compared in constant time: timing must not reveal the token letter by letter.
        known = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, "text/plain", "llmrl watch answers only to its own address\n")
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
    """Serves until Ctrl-C, at a low priority, so that a run that trains on this machine has precedence."""
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
    """Times and sizes of the run's files: they change when the run has written something."""
    found: list[Any] = []
    for name in ("metrics.jsonl", "run.json", "config.yaml", "rollouts"):
        try:
            status = (run_dir / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return tuple(found)
