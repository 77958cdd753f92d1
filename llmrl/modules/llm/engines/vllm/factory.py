"""What a `VLLMEngine` is made from what a user gives: its core, the model's configuration, what ends a response."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from llmrl.errors import ConfigError, did_you_mean
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.in_process import LocalCore
from llmrl.modules.llm.engines.vllm.nccl_transfer import NCCL, CudaIPC
from llmrl.modules.llm.engines.vllm.server import ServerCore
from llmrl.modules.llm.engines.vllm.subprocess import AsyncCore
from llmrl.modules.llm.engines.vllm.transfer import Settings, SharedMemory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["backend_of", "config_of", "eos_ids", "make_core"]

_BACKENDS: dict[str, Settings] = {"shared_memory": SharedMemory(), "nccl": NCCL(), "ipc": CudaIPC()}


def make_core(
    tokenizer: Any,
    own_process: bool,
    timeout_s: float | None,
    connect_s: float,
    silence_s: float,
    options: Mapping[str, Any],
    model: Any,
) -> LocalCore | ServerCore:
    """Who answers: a server, an engine that is there, or one that is built here. Arguments as in `VLLMEngine`."""
    is_url = isinstance(model, str) and model.startswith(("http://", "https://"))
    if is_url or not isinstance(model, (str, Path, nn.Module)):
        if options or own_process:
            raise ConfigError(
                f"VLLMEngine: {', '.join(options) or 'own_process'} can only be set where the engine is built: an LLM "
                "or a server has its settings already."
            )
        if not is_url:
            return LocalCore(_checked_llm(model), owned=False)
        waits = {"connect_s": connect_s, "silence_s": silence_s} | (
            {} if timeout_s is None else {"timeout_s": timeout_s}
        )
        return ServerCore(model, **waits)

    def built(path: str, own: dict[str, Any]) -> LocalCore:
        build = partial(adapter.build, path, own_process=own_process, options=own | options)
        return AsyncCore(build) if own_process else LocalCore(build(), owned=True)

    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory(prefix="llmrl-vllm-") as folder:  # vLLM reads it while it is built
            with _no_progress_bars(), _saving_here(model):
                model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            return built(folder, {"dtype": _name(model.dtype), "skip_tokenizer_init": tokenizer is None})
    dtype = getattr(config_of(model, str(model)), "dtype", None)
    return built(str(model), {} if dtype is None else {"dtype": _name(dtype)})


def backend_of(given: str | Settings | None) -> Settings | None:
    """The way of sending weights that a name stands for. Raises ConfigError for a name that is none."""
    if not isinstance(given, str):
        return given
    if given not in _BACKENDS:
        raise ConfigError(
            f"VLLMEngine: weight_backend must be one of {', '.join(_BACKENDS)}: got {given!r}."
            f"{did_you_mean(given, _BACKENDS)}"
        )
    return _BACKENDS[given]


def config_of(model: Any, path: str) -> PretrainedConfig | None:
    """The Hugging Face configuration; None where a server has its model elsewhere."""
    if isinstance(model, nn.Module):
        return model.config
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def eos_ids(given: int | Sequence[int] | None, model: Any, path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response: those that are given, or the model's own, or the tokenizer's."""
    if given is None:
        given = _eos_of_model(model, path)
    if given is None:
        given = getattr(tokenizer, "eos_token_id", None)
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)


def _eos_of_model(model: Any, path: str) -> int | list[int] | None:
    from transformers import GenerationConfig

    if isinstance(model, nn.Module):
        settings = getattr(model, "generation_config", None)
    else:
        try:
            settings = GenerationConfig.from_pretrained(path)
        except (OSError, ValueError):
            settings = None
    eos = getattr(settings, "eos_token_id", None)
    return eos if eos is not None else getattr(config_of(model, path), "eos_token_id", None)


def _checked_llm(model: Any) -> Any:
    if not hasattr(model, "llm_engine"):
        raise ConfigError(
            "VLLMEngine: model must be a folder or hub name, a Hugging Face model, a vllm.LLM or a server's URL: got "
            f"{type(model).__name__}."
        )
    adapter.load_vllm()
    adapter.check_head_size(model.llm_engine.model_config)
    return model


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _saving_here(model: nn.Module) -> Iterator[None]:
    """In a process group Transformers saves on rank 0 alone; each rank's engine reads a folder of its own."""
    if not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    model.should_save_on_this_rank = lambda is_main_process: True
    try:
        yield
    finally:
        del model.should_save_on_this_rank


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """None of the Transformers library, which draws one for every file that it writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
