"""The teacher of a run, before any weights are loaded: where it is, and that it has the policy's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm.server import served_model
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.rendering import Renderer, text_tokenizer
from llmrl.objectives.llm.grpo import GRPOLoss
from llmrl.objectives.llm.teacher import Demonstrations
from llmrl.run.model_names import resolve_model
from llmrl.train.algorithms import load_algorithm
from llmrl.train.settings.grpo import GRPOConfig
from llmrl.train.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = TypeVar("Config", bound=GRPOConfig)


def resolve_teacher(config: Config, runs: Path) -> Config:
    """The settings with the teacher's folder in place of a run's. Raises ConfigError for distillation without one."""
    options = config.teacher
    if options is None or not options.is_loaded:
        return config
    name = _setting(config)
    if not options.source:
        raise ConfigError(
            f"{name}: must name the teacher: got none; set it to a folder, a hub name, a run, or the "
            "http://host:port of a vLLM server."
        )
    return config.with_teacher(resolve_model(options.source, runs=runs, setting=name))


def check_teacher(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for an algorithm that has no place for a teacher, or if the teacher has other tokens, or ends
    and begins a text with other ids.

    The ids that the student sampled are scored as they are. Only rows of the embedding beyond the tokens, which pad
    models of one family to different sizes, may differ.
    """
    if config.teacher is None:
        return
    from transformers import AutoTokenizer

    name, source = _setting(config), config.teacher.source
    algorithm = load_algorithm(config.algorithm or config.ALGORITHM)[0]
    if not issubclass(algorithm.loss, GRPOLoss):
        raise ConfigError(
            f"{name}: the loss must be GRPOLoss or a subclass, which adds a teacher's divergence: got "
            f"{algorithm.loss.__name__} of {algorithm.__name__}; leave it out."
        )
    if not (config.teacher.is_loaded or config.teacher.is_server):
        return
    own = text_tokenizer(tokenizer)
    if config.teacher.is_server:
        served = served_model(source)
        source = served.get("root") or served["id"]
    other = loaded(AutoTokenizer.from_pretrained, source, setting=name)
    mine, theirs = own.get_vocab(), other.get_vocab()
    if mine != theirs:
        odd = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
        shown = ", ".join(f"{token!r} ({mine.get(token)} and {theirs.get(token)})" for token in odd[:3])
        raise ConfigError(
            f"{name}: {config.teacher.source} must have the student's vocabulary: got {len(theirs)} tokens, "
            f"expected {len(mine)}; {len(odd)} have another id, such as {shown}; take a teacher of the same family."
        )
    for token in ("bos_token", "eos_token"):
        if (got := getattr(other, token)) != (expected := getattr(own, token)):
            raise ConfigError(
                f"{name}: {config.teacher.source} must have the student's {token}: got {got!r}, expected "
                f"{expected!r}; it would never write what ends the student's turns."
            )


def read_demonstrations(
    config: GRPOConfig, task: Task, prompts: Sequence[Mapping[str, Any]], context: int | None
) -> Demonstrations | None:
    """What the teacher reads in place of these prompts; None without a demonstration. ``context``: of the model.

    Raises  DataError for a row without one; ConfigError for a model that reads images, and for what is too long
    """
    options, renderer = config.teacher, Renderer(task.processor)
    if options is None or options.demonstration is None:
        return None
    who, most = f"{config.TEACHER_SECTION}.demonstration", config.sampling.max_tokens
    if renderer.vision is not None:
        raise ConfigError(f"{who}: is for models that read text alone: got one that reads images; leave it out.")
    shown = task.prompts_with(options.demonstration, prompts, who)
    found = Demonstrations(renderer, shown, column=options.demonstration, text=options.demonstration_text)
    if context is not None and found.longest + most > context:
        raise ConfigError(
            f"{who}: prompt, demonstration and answer must be at most {context} tokens, what the model reads: got "
            f"{found.longest} and sampling.max_tokens {most}; leave the longest rows out."
        )
    return found


def _setting(config: GRPOConfig) -> str:
    """The name of the setting that names the teacher."""
    return config.TEACHER_SECTION if config.grpo.teacher else f"{config.TEACHER_SECTION}.{config.teacher.TEACHER}"
