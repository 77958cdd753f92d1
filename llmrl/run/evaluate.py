"""``llmrl eval RUN``: greedy answers of a checkpoint to the held-out problems of the run's own task."""

from __future__ import annotations

import json
import time
from pathlib import Path

from llmrl.errors import ConfigError
from llmrl.modules.llm.policies import TransformersWrapper
from llmrl.run.checkpoint import check_files
from llmrl.run.console import format_duration, print_summary
from llmrl.train.distributed import Session
from llmrl.train.evaluation import Evaluator
from llmrl.train.models import load_model, load_tokenizer
from llmrl.train.settings import GRPOConfig, SFTConfig
from llmrl.train.tasks import Task, eval_rows

__all__ = ["run"]


def run(run_dir: Path, *, command: str, config: SFTConfig | GRPOConfig, checkpoint: Path, as_json: bool = False) -> int:
    """Prints the score of ``checkpoint``, as one JSON object if so asked, and returns 0.

    Raises  ConfigError if the run's settings name no task or no problems to measure on; DataError if the checkpoint is
            not as it was written
    """
    if command == "reward":
        raise ConfigError(f"llmrl eval: a reward model is measured while it trains: llmrl show {run_dir}")
    rows = None if config.env is None else eval_rows(config.env, config.eval)
    if config.env is None or rows is None:
        setting = "env" if config.env is None else "eval.dataset"
        raise ConfigError(f"llmrl eval: the {command} run {run_dir.name} has no held-out problems; say {setting}=...")
    check_files(checkpoint)
    with Session(config) as session:
        source = config.model_copy(update={"model": str(checkpoint), "lora": None})  # merged
        tokenizer = load_tokenizer(source, runs=run_dir.parent)
        model = load_model(source, tokenizer, session, runs=run_dir.parent, checked=True)
        policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history")
        started = time.perf_counter()
        task = Task(config.env, tokenizer)
        evaluator = Evaluator(session, policy, task, rows, config.eval)
        score = evaluator.run()
        seconds = time.perf_counter() - started
        task.close()
    if not session.is_first:
        return 0
    if as_json:
        result = {
            "run": str(run_dir),
            "checkpoint": checkpoint.name,
            "env": config.env.name,
            "split": config.eval.split,
            "rows": len(rows),
            "failed": evaluator.failed,
            "mean": score,
            **({} if evaluator.call_rate is None else {"call_rate": evaluator.call_rate}),
        }
        print(json.dumps(result))
        return 0
    lost = f" · scoring failed on {evaluator.failed}" if evaluator.failed else ""
    print_summary(
        session.console,
        [evaluator.summary, f"{len(rows)} problems{lost}", format_duration(seconds)],
        files=str(checkpoint),
    )
    return 0
