"""Runs the parts of scripts/gpu_check, each in a process of its own with a time limit, and prints one line per figure.

    scripts/gpu_check [PART...] [--small] [--json FILE] [--seconds N]
    scripts/gpu_check --bundle FOLDER

Exits with 1 if a figure misses its limit or a part fails; docs/gpu.md explains the lines.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scripts.gpu.bundle import bundle
from scripts.gpu.figures import Figure, constants

LIMITS_S = {  # of each part, for a slow disk or processor; on an idle machine they take about half of it
    "machine": 60,
    "tests": 180,
    "head": 90,
    "memory": 150,
    "sft": 150,
    "grpo": 100,
    "decode": 90,
    "transfer": 100,
    "engine": 240,
    "run": 150,
}
MARK = "llmrl-figure "  # begins the lines of a part's output that are figures
LAST_LINES = 60  # of a part's other output, kept for its failure


def run_part(name: str, command: list[str], limit_s: float) -> Iterator[Figure]:
    """The figures that a command prints, as they are measured. If it fails, the last one says why."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    others: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(command, **pipes, text=True, errors="replace", process_group=0) as process:
        deadline = Deadline(process.pid, limit_s)
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    yield Figure(**json.loads(line.removeprefix(MARK)))
                else:
                    others.append(line.rstrip())
            if code := process.wait():
                late = f"still running after {limit_s:.0f} s"
                yield Figure.failed(name, late if deadline.passed else reason(others, code))
                print("\n".join(others), file=sys.stderr, flush=True)
        finally:
            deadline.stop()
            end(process.pid)  # and what it started


class Deadline:
    """After ``seconds`` has a process say where it is, and kills it with all that it started."""

    def __init__(self, process: int, seconds: float):
        self.passed, self._process = False, process
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _ring(self, *_: object) -> None:
        self.passed = True
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGABRT)  # faulthandler then writes the stacks of its threads
        time.sleep(1)
        end(self._process)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def reason(lines: deque[str], code: int) -> str:
    """The last line of a traceback, or the signal that ended the process."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    errors = [line for line in lines if line and not line[0].isspace() and ("Error" in line or "Exception" in line)]
    return (errors or [line for line in lines if line] or [f"exit code {code}"])[-1][:300]


def write(path: Path, figures: list[Figure], seconds: float) -> None:
    document = {"figures": [figure.as_json() for figure in figures], "seconds": round(seconds, 1)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def check(names: list[str], total_s: float, path: Path, options: list[str]) -> int:
    figures: list[Figure] = []
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part ends too

    def add(figure: Figure) -> None:
        figures.append(figure)
        print(figure, flush=True)

    try:
        for name in names:
            left = total_s - (time.monotonic() - begun)
            if left < min(30, LIMITS_S[name] / 2):
                add(Figure.skipped(name, f"no time left of {total_s:.0f} s: scripts/gpu_check {name}"))
                continue
            started = time.monotonic()
            command = [sys.executable, "-m", "scripts.gpu.check", name, "--in-this-process", *options]
            for figure in run_part(name, command, min(LIMITS_S[name], left)):
                add(figure)
            print(f"      {name}: {time.monotonic() - started:.0f} s", flush=True)
            write(path, figures, time.monotonic() - begun)
    except KeyboardInterrupt:
        add(Figure.failed("gpu_check", "interrupted"))
    write(path, figures, time.monotonic() - begun)
    if lines := constants(figures):
        print("\nfor the memory plan (llmrl/train/planning/memory.py):", *lines, sep="\n  ")
    verdicts = [figure.verdict for figure in figures]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in ("PASS", "FAIL", "SKIP"))
    print(f"\n{counts} in {time.monotonic() - begun:.0f} s; {path}")
    return int("FAIL" in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all by default: {', '.join(LIMITS_S)}")
    parser.add_argument("--small", action="store_true", help="small sizes, which are the default without a GPU")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="gpu_check.json")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all parts together: 600")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="download the packages for a bare machine")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(LIMITS_S):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts: {', '.join(LIMITS_S)}")
    if arguments.bundle:
        return bundle(arguments.bundle)
    if not arguments.in_this_process:
        options = ["--small"] if arguments.small else []
        return check(arguments.parts or list(LIMITS_S), arguments.seconds, arguments.json, options)

    faulthandler.enable()  # before imports, which may be what takes long
    from scripts.gpu import engine_parts, parts
    from scripts.gpu.context import Context

    for figure in (parts.PARTS | engine_parts.PARTS)[arguments.parts[0]](Context(arguments.small)):
        print(MARK + json.dumps(vars(figure)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
