"""On-policy distillation: ``llmrl distill sums_distill distill.teacher=runs/RUN``.

The loop is that of ``grpo.py``: the student answers, and `Distill` (llmrl/objectives/llm/distill.py) compares each of
its tokens with what a teacher would have written there. Before any weights are loaded, this file compares vocabularies.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before torch is imported: the command reports bad settings without it, and prepares for it
    from llmrl.commands.cli import main

    sys.exit(main(["distill", *sys.argv[1:]]))

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.rendering import text_tokenizer
from llmrl.recipes import grpo
from llmrl.run.model_names import resolve_model
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_tokenizer
from llmrl.train.run import Run, run_recipe
from llmrl.train.settings.algorithms import DistillConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["plan", "run"]
SETTINGS = "llmrl.train.settings.algorithms:DistillConfig"
ABOUT = "train a model towards a teacher, on its own answers"


def train(config: DistillConfig, session: Session, run: Run) -> None:
    config = with_teacher(config, run.runs)
    check_vocabulary(config, load_tokenizer(run.source, runs=run.runs))
    grpo.train(config, session, run)


def plan(config: DistillConfig, *, runs: Path, **options: Any) -> list[tuple[str, str]]:
    config = with_teacher(config, runs)
    check_vocabulary(config, load_tokenizer(config, runs=runs))
    return grpo.plan(config, runs=runs, **options)


run = partial(run_recipe, train)


def with_teacher(config: DistillConfig, runs: Path) -> DistillConfig:
    """The settings with the teacher's folder in place of a run's. Raises ConfigError without a teacher."""
    options = config.distill
    if not options.teacher:
        raise ConfigError(
            "distill.teacher: must name the teacher: got none; set it to a folder, a hub name, a run, or the "
            "http://host:port of a vLLM server."
        )
    if not options.is_server:
        found = resolve_model(options.teacher, runs=runs, setting="distill.teacher")
        options = options.model_copy(update={"teacher": found})
    return config.model_copy(update={"distill": options})


def check_vocabulary(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError if the teacher has other tokens, or ends and begins a text with other ids.

    The ids that the student sampled are scored as they are. Only rows of the embedding beyond the tokens, which pad
    models of one family to different sizes, may differ.
    """
    from transformers import AutoTokenizer

    options, own = config.distill, text_tokenizer(tokenizer)
    source = options.teacher
    if options.is_server:
        served = served_model(source)
        source = served.get("root") or served["id"]
    other = loaded(AutoTokenizer.from_pretrained, source, setting="distill.teacher")
    mine, theirs = own.get_vocab(), other.get_vocab()
    if mine != theirs:
        odd = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
        shown = ", ".join(f"{token!r} ({mine.get(token)} and {theirs.get(token)})" for token in odd[:3])
        raise ConfigError(
            f"distill.teacher: {options.teacher} must have the student's vocabulary: got {len(theirs)} tokens, "
            f"expected {len(mine)}; {len(odd)} have another id, such as {shown}; take a teacher of the same family."
        )
    for name in ("bos_token", "eos_token"):
        if (got := getattr(other, name)) != (expected := getattr(own, name)):
            raise ConfigError(
                f"distill.teacher: {options.teacher} must have the student's {name}: got {got!r}, expected "
                f"{expected!r}; it would never write what ends the student's turns."
            )
