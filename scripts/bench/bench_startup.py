"""Times start-up as the user sees it: help, a config error, an import, the first training step.

    python scripts/bench/bench_startup.py [--repeats 15] [--no-runs]

Each figure is the wall time of a fresh interpreter, the fastest of the repeats. `import llmrl` is the time beyond that
of an interpreter that does nothing. The first training step is timed from the start of the command to the step's line
in metrics.jsonl, including the evaluation before training. GRPO starts from a random model of the recipe's size, which
never ends an answer by itself and is therefore slower to evaluate than a trained one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import Row, benchmark
from timing import best

COMMAND = [sys.executable, "-c", "import sys; from llmrl.commands.cli import main; sys.exit(main())"]  # as installed
MISTAKE = ["grpo", "sums_grpo", "group_sise=4"]
LOADED = """
import contextlib, io, sys
from llmrl.commands.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(sys.argv[1:])
print(sum(name in sys.modules for name in ("torch", "transformers", "tensordict", "vllm", "ray", "accelerate")))
"""
TINY_MODEL = """
import sys
from llmrl.testing import tiny_model, tiny_tokenizer
tokenizer = tiny_tokenizer()
tokenizer.save_pretrained(sys.argv[1])
tiny_model(tokenizer, hidden_size=160, layers=4, heads=4).save_pretrained(sys.argv[1])
"""


def call(*command: str, code: int = 0) -> None:
    """Runs a command, which must exit with ``code``."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(f"bench_startup: {' '.join(command)} exited with {done.returncode}:\n{done.stderr}")


def heavy_modules(*arguments: str) -> int:
    """Counts the packages slow to import that a command has loaded."""
    command = [sys.executable, "-c", LOADED, *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def first_step(*arguments: str, limit_s: float = 120.0) -> float:
    """Seconds from the start of a training command to the first line of its metrics; the run is then ended."""
    with tempfile.TemporaryDirectory() as runs, (Path(runs) / "log").open("w") as log:
        metrics = Path(runs) / "bench" / "metrics.jsonl"
        command = [*COMMAND, *arguments, "--runs", runs, "--name", "bench"]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - start > limit_s:
                    said = Path(log.name).read_text()
                    raise RuntimeError(f"bench_startup: no training step from {' '.join(arguments)}:\n{said}")
                time.sleep(0.02)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


def main(repeats: int, no_runs: bool) -> list[Row]:
    bare, imported, shown, refused = best(
        lambda: call(sys.executable, "-c", "pass"),
        lambda: call(sys.executable, "-c", "import llmrl"),
        lambda: call(*COMMAND, "--help"),
        lambda: call(*COMMAND, *MISTAKE, code=2),
        repeats=repeats,
    )
    rows = [
        Row("llmrl --help", shown / 1e3, 0.3, "s"),
        Row("a config error", refused / 1e3, 0.3, "s"),
        Row("import llmrl, beyond bare python", (imported - bare) / 1e3, 0.1, "s"),
        Row("heavy modules loaded by --help", heavy_modules("--help"), 0, ""),
        Row("heavy modules loaded by a config error", heavy_modules(*MISTAKE), 0, ""),
    ]
    if not no_runs:
        with tempfile.TemporaryDirectory() as model:
            call(sys.executable, "-c", TINY_MODEL, model)
            for name, command in (
                ("llmrl sft sums_sft", ["sft", "sums_sft"]),
                ("llmrl grpo sums_grpo", ["grpo", "sums_grpo", f"model={model}"]),
            ):
                rows.append(Row(f"{name}, until its first step", min(first_step(*command) for _ in range(2)), 15, "s"))
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, repeats=15, no_runs=(False, "leave out the two training commands"))
