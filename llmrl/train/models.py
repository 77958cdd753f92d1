"""Loads model and tokenizer: a folder, a hub name, another recipe's newest checkpoint, or a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from llmrl.data.llm.templates import find_template
from llmrl.errors import ConfigError, DataError
from llmrl.run.checkpoint import CHECKSUMS, check_files, latest_checkpoint
from llmrl.run.run_dir import RunDir
from llmrl.train.settings import ModelSource, TinyModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_model", "load_tokenizer", "loading_options", "meta_model", "resolve_model"]

T = TypeVar("T")


def resolve_model(model: str | TinyModelSettings, *, runs: Path) -> str | TinyModelSettings:
    """``latest:RECIPE`` as the newest checkpoint of that recipe below ``runs``, a run's folder as its last one.

    Raises  DataError if there is none
    """
    if isinstance(model, TinyModelSettings):
        return model
    if RunDir(Path(model)).config.exists():
        if (checkpoint := latest_checkpoint(Path(model))) is None:
            raise DataError(f"model {model}: the run must have left a checkpoint: there is none.")
        return str(checkpoint)
    if not model.startswith("latest:"):
        return model
    recipe = model.removeprefix("latest:")
    found = []
    for config in runs.glob("*/config.yaml"):
        run = RunDir(config.parent)
        try:
            same = run.read_info().get("recipe") == recipe
        except ConfigError:
            continue
        if same and (checkpoint := latest_checkpoint(run.path)):
            found.append((checkpoint.stat().st_mtime, checkpoint))
    if not found:
        raise DataError(
            f"model {model}: a run of {recipe} with a checkpoint must be in {runs}/: there is none; make one with "
            f"llmrl sft {recipe}, or say model=FOLDER."
        )
    return str(max(found)[1])


def load_tokenizer(config: ModelSource, *, runs: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of ``config.model``, with the chat template of the run and a padding id.

    Raises  DataError if it cannot be loaded; TemplateError for an unknown template; ConfigError for one beside another
            that is registered for the model
    """
    if isinstance(config.model, TinyModelSettings):
        from llmrl.testing import tiny_tokenizer

        tokenizer = tiny_tokenizer()
    else:
        from transformers import AutoTokenizer

        tokenizer = _loaded(AutoTokenizer.from_pretrained, resolve_model(config.model, runs=runs))
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    asked = config.chat_template
    row = find_template(tokenizer, **({} if asked is None else {"template" if "{%" in asked else "name": asked}))
    if row.name != "tokenizer":  # saved with every checkpoint, whose path does not name the model
        tokenizer.chat_template = row.jinja
    if (taken := find_template(tokenizer)).jinja != row.jinja:
        raise ConfigError(
            f"chat_template: a run has one template: got {row.name!r}, and {taken.name!r} is registered for models of "
            f"the name {tokenizer.name_or_path!r}; leave out chat_template, or the keyword."
        )
    return tokenizer


def load_model(
    config: ModelSource, tokenizer: PreTrainedTokenizerBase, *, runs: Path, checked: bool = False
) -> PreTrainedModel:
    """The model of ``config.model``, float32, on the CPU, in evaluation mode.

    A folder with checksums must be as it was written, unless that was ``checked`` before.

    Raises  DataError if it cannot be loaded
    """
    if isinstance(config.model, TinyModelSettings):
        from llmrl.testing import tiny_model

        return tiny_model(tokenizer, seed=config.seed, **config.model.model_dump())
    from transformers import AutoModelForCausalLM

    source = resolve_model(config.model, runs=runs)
    if not checked and (Path(source) / CHECKSUMS).exists():
        check_files(Path(source))
    options = loading_options(config)
    model = _loaded(AutoModelForCausalLM.from_pretrained, source, dtype=torch.float32, **options).eval()
    model.get_output_embeddings().in_float32 = config.model_options.float32_head
    return model


def loading_options(config: ModelSource) -> dict[str, Any]:
    """The arguments of transformers' ``from_pretrained`` and ``from_config`` that ``model_options`` asks for."""
    asked = config.model_options.attn_implementation
    return {} if asked is None else {"attn_implementation": asked}


def meta_model(config: ModelSource, tokenizer: PreTrainedTokenizerBase, *, runs: Path) -> PreTrainedModel:
    """The model of ``config.model`` on the meta device, without weights.

    Raises  DataError if its configuration cannot be read, or lacks what ``model_options`` asks for
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        if isinstance(config.model, TinyModelSettings):
            from llmrl.testing import tiny_model

            return tiny_model(tokenizer, **config.model.model_dump())
        source = resolve_model(config.model, runs=runs)

        def build(source: str, **options: Any) -> PreTrainedModel:
            sizes = AutoConfig.from_pretrained(source, **options)
            return AutoModelForCausalLM.from_config(sizes, dtype=torch.float32, **loading_options(config))

        return _loaded(build, source)


def _loaded(load: Callable[..., T], source: str, **options: Any) -> T:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of the weights: it would be the only line of a run that is not ours
    try:
        return load(source, trust_remote_code=False, **options)  # None would ask, on a terminal
    except Exception as error:  # of every library that reads a file there
        raise DataError(f"model {source}: cannot be loaded: {error or type(error).__name__}") from error
