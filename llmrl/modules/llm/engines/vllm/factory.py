"""Builds the parts of a `VLLMEngine` from user arguments: its core, the model's configuration, its stop ids."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from llmrl.concurrency.environment import environment
from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm import compat
from llmrl.modules.llm.engines.vllm.core import Core
from llmrl.modules.llm.engines.vllm.in_process import InProcessCore
from llmrl.modules.llm.engines.vllm.pool import PoolCore
from llmrl.modules.llm.engines.vllm.server import ServerCore
from llmrl.modules.llm.engines.vllm.subprocess import SubprocessCore
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.vision import save_processor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_core(
    model: Any,
    *,
    tokenizer: Any,
    own_process: bool,
    devices: Sequence[int] | None,
    options: Mapping[str, Any],
    waits: Mapping[str, float],
) -> Core:
    """The core for ``model``; arguments as in `VLLMEngine`. ``waits`` are those of `ServerCore`."""
    if devices is not None:
        if not devices or len(set(devices)) != len(devices):
            raise ConfigError(f"VLLMEngine: devices must be different GPUs, at least one: got {list(devices)}.")
        own_process, options = True, {"tensor_parallel_size": len(devices), **options}
    is_url = isinstance(model, list | tuple) or (isinstance(model, str) and model.startswith(("http://", "https://")))
    if is_url or not isinstance(model, (str, Path, nn.Module)):
        if options or own_process:
            raise ConfigError(
                f"VLLMEngine: {', '.join(options) or 'own_process'} can only be set when the engine is built: an LLM "
                "or a server has its settings already."
            )
        if is_url:
            return ServerCore(model, **waits) if isinstance(model, str) else PoolCore(model, **waits)
        if not hasattr(model, "llm_engine"):
            raise ConfigError(
                "VLLMEngine: model must be a folder or hub name, a Hugging Face model, a vllm.LLM or a server's URL: "
                f"got {type(model).__name__}."
            )
        compat.load_vllm()
        compat.check_head_size(model.llm_engine.model_config)
        return InProcessCore(model, owned=False)
    if isinstance(model, nn.Module):
        with _saved(model, tokenizer) as folder:  # vLLM reads the folder only while it is built
            options = {"dtype": _dtype_name(model.dtype), "skip_tokenizer_init": tokenizer is None, **options}
            return _build(folder, own_process, devices, options)
    config = config_of(model, str(model))
    dtype = getattr(config, "dtype", None)
    options = options if dtype is None else {"dtype": _dtype_name(dtype), **options}
    build = partial(_build, own_process=own_process, devices=devices, options=options)
    if config is not None:
        return build(str(model))
    if not own_process:
        compat.load_vllm()  # first, so that a missing vLLM is not reported as a missing model
    # No configuration was found, but vLLM reads formats that Transformers does not, so let it try.
    return loaded(lambda path, **_: build(path), str(model), setting="VLLMEngine: model")


def _build(path: str, own_process: bool, devices: Sequence[int] | None, options: Mapping[str, Any]) -> Core:
    build = partial(compat.build, path, own_process=own_process, options=options)
    with visible(devices):
        return SubprocessCore(build) if own_process else InProcessCore(build(), owned=True)


def visible(devices: Sequence[int] | None) -> AbstractContextManager[None]:
    """Limits processes started inside the block to these GPUs, given by their numbers in this process."""
    if devices is None:
        return nullcontext()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = before.split(",") if before else None  # if this process sees only some GPUs, its number 0 is own[0]
    numbers = (str(number) if own is None else own[number] for number in devices)
    return environment("CUDA_VISIBLE_DEVICES", ",".join(numbers))


def config_of(model: Any, path: str) -> PretrainedConfig | None:
    """The Hugging Face configuration; None if it is not readable here, as for a server on another machine."""
    if isinstance(model, nn.Module):
        return model.config
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def eos_ids(given: int | Sequence[int] | None, model: Any, path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response: the given ones, or else the model's, or else the tokenizer's."""
    if given is None:
        from transformers import GenerationConfig

        settings = getattr(model, "generation_config", None)
        if not isinstance(model, nn.Module):
            with suppress(OSError, ValueError):
                settings = GenerationConfig.from_pretrained(path)
        for source in (settings, config_of(model, path), tokenizer):
            given = getattr(source, "eos_token_id", None) if given is None else given
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _saved(model: nn.Module, tokenizer: Any) -> Iterator[str]:
    """A temporary folder with the model and the tokenizer; written on every rank, without progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    # In a process group Transformers saves only on rank 0, but each rank's engine reads its own folder.
    on_rank_0_only = hasattr(model, "should_save_on_this_rank")
    with tempfile.TemporaryDirectory(prefix="llmrl-vllm-") as folder:
        logging.disable_progress_bar()
        if on_rank_0_only:
            model.should_save_on_this_rank = lambda is_main_process: True
        try:
            weights = model.state_dict()  # gathering sharded ones is a collective: pass such a model as files
            model.save_pretrained(
                folder,
                state_dict={
                    name: value.full_tensor() if hasattr(value, "full_tensor") else value
                    for name, value in weights.items()
                },
            )
        finally:
            if on_rank_0_only:
                del model.should_save_on_this_rank
            if shown:
                logging.enable_progress_bar()
        if tokenizer is not None:
            save_processor(tokenizer, folder)
        yield folder
