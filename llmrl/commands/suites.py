"""``llmrl eval RUN --suite lm_eval:TASK|inspect:FILE``: tasks of lm-evaluation-harness and of Inspect.

They run in a process of their own, as their users start them, and ask the checkpoint through its server, so what they
measure is theirs: prompts, limits, scores.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from llmrl.commands.serve import serving
from llmrl.concurrency.processes import signal_group
from llmrl.errors import ConfigError, RolloutError
from llmrl.optional import check_installed
from llmrl.report.intervals import interval
from llmrl.run.console import format_duration, print_summary, warn
from llmrl.train.settings.model import ModelSource

_MODEL = "llmrl"  # the name by which they ask for it
_SILENT_S = 3600.0  # without a request; a download of data comes first
_AT_ONCE = 256  # requests that the server answers at the same time
_SUITES = {"lm_eval": ("lm_eval", "lm-eval[api]"), "inspect": ("inspect_ai", "inspect-ai openai")}  # module, for pip


def evaluate_suites(
    run_dir: Path, config: ModelSource, checkpoint: Path, suites: Sequence[str], *, temperature: float, as_json: bool
) -> int:
    """Prints what each suite measures, a line or a JSON object for each of its tasks, and returns 0. What the programs
    write stays in the run's folder ``suites``.

    ``suites``  "lm_eval:TASK" or "inspect:FILE", which may be followed by arguments of that program

    Raises  ConfigError for another suite; MissingDependencyError without its package; RolloutError if it fails
    """
    asked = [_read(suite) for suite in suites]
    sampling = {"temperature": temperature, "max_new_tokens": config.eval.max_tokens}
    most = min(config.eval.batch_size, _AT_ONCE)
    source = config.model_copy(update={"model": str(checkpoint), "lora": None})  # merged
    with serving(source, sampling, runs=run_dir.parent, checked=True, model=_MODEL, port=0) as (session, endpoint):
        if session.world_size > 1:
            raise ConfigError("--suite  one process asks one server: start llmrl eval without torchrun")
        for kind, words in asked:
            clock, before = time.perf_counter(), endpoint.counters.copy()
            names = (run_dir / "suites" / f"{kind}-{number}" for number in count(1))
            folder = next(name for name in names if not name.exists())
            folder.mkdir(parents=True)
            _call(kind, words, f"{endpoint.url}/v1", most, folder, requests=lambda: endpoint.counters["requests"])
            found = list(_results(kind, folder))
            refused = (endpoint.counters - before)["refused"]
            if not found:
                raise RolloutError(f"llmrl eval: {shlex.join([kind, *words])} must write results: there are none.")
            for measured in found:
                about = {
                    "run": str(run_dir),
                    "checkpoint": checkpoint.name,
                    "suite": kind,
                    **measured,
                    "files": str(folder),
                }
                if as_json:
                    print(json.dumps(about | {"refused": refused}))
                    continue
                seconds = format_duration(time.perf_counter() - clock)
                scores = [_in_words(name, score) for name, score in measured["metrics"].items()]
                lost = [f"{measured['failed']} failed"] if measured.get("failed") else []
                headline = [f"{measured['task']} {' · '.join(scores)}", f"{measured['rows']} rows", *lost, seconds]
                limits = f"temperature {temperature:g} unless it asks for another · answers of at most "
                limits += f"{config.eval.max_tokens} tokens (eval.max_tokens)"
                print_summary(session.console, headline, facts=[("sampling", limits)], files=str(folder))
            if refused and not as_json:
                warn(session.console, f"the server refused {refused} requests of {kind}: its output says why.")
    return 0


def _read(suite: str) -> tuple[str, list[str]]:
    kind, _, rest = suite.partition(":")
    words = shlex.split(rest)
    if kind not in _SUITES or not words:
        raise ConfigError(f"--suite  must be lm_eval:TASK or inspect:FILE: got {suite!r}")
    module, packages = _SUITES[kind]
    check_installed(module, packages=packages, used_by=f"--suite {kind}")
    return kind, words


def _call(kind: str, words: Sequence[str], url: str, most: int, folder: Path, *, requests: Callable[[], int]) -> None:
    """Runs the program; what it prints goes to stderr. Raises RolloutError if it fails, or asks nothing for too long:
    ``requests`` counts what it has asked.
    """
    command = [sys.executable, "-m", _SUITES[kind][0]]
    if kind == "lm_eval":
        model = f"model={_MODEL},base_url={url}/chat/completions,num_concurrent={most},timeout=3600"
        command += ["run", "--model", "local-chat-completions", "--model_args", model, "--apply_chat_template"]
        command += ["--output_path", str(folder), "--tasks", *words]
    else:
        command += ["eval", words[0], "--model", f"openai/{_MODEL}", "--max-connections", str(most)]
        command += ["--log-dir", str(folder), "--log-format", "json", *words[1:]]
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "any"}
    process = subprocess.Popen(command, stdout=2, env=environment, start_new_session=True)
    asked, last = requests(), time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - last < _SILENT_S:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(1.0, _SILENT_S))
            if requests() != asked:
                asked, last = requests(), time.monotonic()
        is_silent = process.poll() is None
    finally:
        signal_group(process.pid, signal.SIGKILL)  # also what it has left behind
        process.wait()
    if is_silent:
        raise RolloutError(
            f"llmrl eval: {shlex.join([kind, *words])} must ask the model or end: for {_SILENT_S:g} s it did neither; "
            "its output says what it waits for."
        )
    if process.returncode:
        raise RolloutError(
            f"llmrl eval: {shlex.join([kind, *words])} must end without an error: it ended with {process.returncode}, "
            "and its output says why."
        )


def _results(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What was measured on each task: "task", "rows", "failed", and "metrics", each with its value and interval."""
    for path in sorted(folder.rglob("results_*.json" if kind == "lm_eval" else "*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        yield from _of_lm_eval(found) if kind == "lm_eval" else _of_inspect(found)


def _of_lm_eval(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task, values in found["results"].items():
        rows = found.get("n-samples", {}).get(task, {}).get("effective", values.get("sample_len"))
        metrics = {}
        for key, value in values.items():
            name, comma, filtered = key.partition(",")
            if comma and not name.endswith("_stderr") and isinstance(value, int | float):
                label = name if filtered == "none" else f"{name}/{filtered}"
                metrics[label] = _score(value, values.get(f"{name}_stderr,{filtered}"), rows)
        yield {"task": task, "rows": rows, "metrics": metrics}


def _of_inspect(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    task = found["eval"]["task"]
    if found["status"] != "success":
        reason = (found.get("error") or {}).get("message", found["status"])
        raise RolloutError(f"llmrl eval: the task {task} of inspect must end with success: {reason}")
    results, metrics = found["results"], {}
    for score in results["scores"]:
        values = {name: metric["value"] for name, metric in score["metrics"].items()}
        error = values.pop("stderr", None)
        metrics |= {
            f"{score['name']}/{name}": _score(value, error, score["scored_samples"]) for name, value in values.items()
        }
    failed = results["total_samples"] - results["completed_samples"]
    yield {"task": task, "rows": results["total_samples"], "failed": failed, "metrics": metrics}


def _score(value: float, error: Any, rows: int | None) -> dict[str, Any]:
    """A value with its 95% interval, where there is a standard error: of a mean that of `llmrl.report.intervals`."""
    if not isinstance(error, int | float) or not rows:
        return {"value": value, "interval": None}
    return {"value": value, "interval": interval(value, error * math.sqrt(rows - 1), rows)}


def _in_words(name: str, score: dict[str, Any]) -> str:
    bounds = "" if score["interval"] is None else " [{:.3f}, {:.3f}]".format(*score["interval"])
    return f"{name} {score['value']:.3f}{bounds}"
