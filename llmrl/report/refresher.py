"""Rewrites the report of a run while it trains, in a process of low priority."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from llmrl.report.page import write_report

PAUSE_S = 30.0  # minimum between two pages
SHARE = 0.01  # of one core, at most, for writing pages
DEADLINE_S = 300.0
_SCRIPT = (
    "import os, sys, time; os.nice(5); from llmrl.report import write_report; write_report(sys.argv[1]); "
    "print(time.process_time())"
)


class ReportRefresher(AbstractContextManager):
    """Keeps ``<run>/report.html`` up to date; used as a context manager around the steps.

    `refresh` starts a process of lower priority that writes a page: at most every `PAUSE_S`, never two at a time, and
    so rarely that pages take no more than `SHARE` of a core. On exit, this process writes the last page. A page that
    cannot be written gives a warning, once per reason.
    """

    def __init__(self, run_dir: Path, warn: Callable[[str], None]):
        self.path = run_dir / "report.html"
        self._run_dir, self._warn = run_dir, warn
        self._process: subprocess.Popen[str] | None = None
        self._began = time.monotonic()
        self._next = self._began + PAUSE_S
        self._warned: set[str] = set()

    def refresh(self) -> None:
        """Starts the next page if it is due; call it after each step."""
        if self._process is not None and not self._finished(self._process):
            return
        if time.monotonic() < self._next:
            return
        self._began = time.monotonic()
        self._next = self._began + PAUSE_S
        # -P: a file in the working directory, such as json.py, must not be imported instead of a module.
        command = [sys.executable, "-P", "-c", _SCRIPT, str(self._run_dir)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(command, text=True, errors="replace", **pipes)
        except OSError as error:
            self._tell(str(error))

    def _finished(self, process: subprocess.Popen[str]) -> bool:
        """Collects the result of a process that has ended; kills one that is past its deadline."""
        if process.poll() is None:
            if time.monotonic() > self._began + DEADLINE_S:
                process.kill()
            return False
        output, errors = process.communicate()
        self._process = None
        if process.returncode == 0:
            self._next = max(self._next, self._began + float(output.split()[-1]) / SHARE)
        elif process.returncode < 0:
            self._tell(f"its process ended by signal {-process.returncode}")
        else:
            self._tell((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        return True

    def _tell(self, fault: str) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            self._warn(f"{self.path} was not written: {fault}; llmrl report {self._run_dir} tries again.")

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:  # it may have read older steps and must not write last
            self._process.kill()
            self._process.communicate()
            self._process = None
        try:
            write_report(self._run_dir)
        except Exception as error:  # a page that fails must not end the run
            self._tell(f"{type(error).__name__}: {error}")
