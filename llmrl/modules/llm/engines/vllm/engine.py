"""``VLLMEngine``: generation and scoring by vLLM, behind the same four methods as every engine.

This file holds what is the same wherever vLLM runs: seeds, checks, plain log-probs, versions. Requests to an engine of
this machine are in ``local``, to a server in ``server``, what depends on vLLM's version in ``adapter``.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmrl.errors import ConfigError, RolloutError, ShapeError, WeightSyncError
from llmrl.modules.llm.engines.base import Generation, SamplingParams
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.layout import WeightLayout
from llmrl.modules.llm.engines.vllm.local import LocalCore
from llmrl.modules.llm.engines.vllm.server import ServerCore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """An ``Engine`` over vLLM.

    model          a folder or hub name; a Hugging Face model, which is copied; a ``vllm.LLM``; or the URL of a server
                   started by ``vllm serve``
    tokenizer      of a model given as a module: without one, stop strings are refused
    own_process    True: the engine's core runs in a process of its own, so that it and the trainer share neither the
                   interpreter nor the default process group. False: here
    eos_token_ids  ids that end a response and are part of it; the model's generation settings by default
    seed           of the generator that hands out row seeds where a call brings none
    timeout_s      of a server: longest wait for one answer
    options        arguments of ``vllm.LLM``, when one is built. ``dtype`` is the checkpoint's own unless given (vLLM
                   would turn float32 into bfloat16)

    *Log-probs* are those of the distribution that was sampled from. Where truncation or a penalty changed that, the
    drawn ids are scored once more, one prefill each, for the plain ones beside them. An engine or server that reports
    raw log-probs (``logprobs_mode``) can do neither, and only samples at temperature 1 without truncation.
    *Seeds*: a row is a function of its prompt, seed and weights, up to rounding that depends on the batch. *Order* of
    truncation: vLLM cuts by min-p before top-k and top-p, the other engines after.
    *Length*: prompt and response share ``max_length``; a response that reaches it ends as LENGTH.

    In this process (``own_process=False``) a default process group of one is open until ``close``, so only one such
    engine can live at a time, and none beside a trainer's group; on a CPU vLLM also pins memory to its node.

    Raises  MissingDependencyError  vllm is not installed, or lacks something that is needed
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | Any,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        own_process: bool = False,
        eos_token_ids: int | Sequence[int] | None = None,
        seed: int | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.core = _make_core(model, tokenizer, own_process, timeout_s, options)
        self.version = 0
        self._layout: WeightLayout | None = None
        self._half_loaded = False
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        try:
            self._config: PretrainedConfig | None = _config_of(model, self.core.model)
            self.eos_token_ids = _eos_ids(eos_token_ids, model, self.core.model, tokenizer)
        except BaseException:
            self.close()
            raise

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its response together: one less than ``max_model_len``, the room that vLLM wants
        for scoring what it has generated.
        """
        return self.core.max_length

    # --- generation ---------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for options that this engine cannot honour; a wrapper asks when it is built."""
        adapter.request(params, stop_token_ids=())
        if params.stop_strings and not self.core.reads_text:
            raise ConfigError("VLLMEngine: stop_strings need tokenizer= at construction, to read what was drawn.")
        plain = params.scoring_temperature == 1.0 and not params.truncates
        if not self.core.processed and not plain:
            raise ConfigError(
                "VLLMEngine: this engine reports log-probs of the raw logits, so sampling must be at temperature 1 "
                "without truncation or penalty: start it with logprobs_mode='processed_logprobs' (vllm serve "
                "--logprobs-mode processed_logprobs)."
            )
        if params.truncates and params.scoring_temperature != 1.0 and not self.core.scores_any_temperature:
            raise ConfigError(
                f"VLLMEngine: a server cannot say the plain log-probs of a truncated distribution at temperature "
                f"{params.temperature}: use temperature 1, or leave truncation and penalty out."
            )

    def generate(
        self, prompts: Sequence[Tensor], params: SamplingParams, *, seeds: Sequence[int] | None = None
    ) -> Generation:
        """Samples one response per prompt.

        prompts  int64[P_i] each, not empty
        seeds    one int per prompt, or None for fresh ones from the engine's generator
        Raises   ShapeError, ConfigError; RolloutError where vLLM fails, DeadlineError where a server does not answer
        """
        self._check_serving()
        self.check(params)
        if seeds is None:
            seeds = torch.randint(1 << 62, (len(prompts),), generator=self._generator).tolist()
        if len(seeds) != len(prompts):
            raise ShapeError(f"VLLMEngine: one seed per prompt: got {len(seeds)} for {len(prompts)} prompts.")
        rows = self._rows(prompts, "a prompt", 1)
        if not rows:
            return Generation([], [], [] if params.truncates else None, [], self.version)
        drawn = self.core.draw(rows, params, [_mixed(seed) for seed in seeds], self.eos_token_ids)
        plain = None
        if params.truncates:
            full = [row + answer.ids.tolist() for row, answer in zip(rows, drawn, strict=True)]
            scores = self.core.score(full, params.scoring_temperature)
            plain = [score[len(row) :] for score, row in zip(scores, rows, strict=True)]
        home = prompts[0].device
        return Generation(
            [answer.ids.to(home) for answer in drawn],
            [answer.log_probs.to(home) for answer in drawn],
            None if plain is None else [row.to(home) for row in plain],
            [answer.reason for answer in drawn],
            self.version,
        )

    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """float32[T_i] per sequence: [t] = log p(token t | tokens before t), [0] = 0, and 0 where ``masks[i]`` is
        False. A server scores at temperature 1 only.
        """
        self._check_serving()
        if temperature != 1.0 and not self.core.scores_any_temperature:
            raise ConfigError(
                f"VLLMEngine: a server scores at temperature 1 only: got {temperature}; score with the trainer's model."
            )
        rows = self._rows(sequences, "a sequence", 0)
        scores = self.core.score(rows, temperature) if rows else []
        scores = [score.to(sequence.device) for score, sequence in zip(scores, sequences, strict=True)]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def _rows(self, tensors: Sequence[Tensor], what: str, room: int) -> list[list[int]]:
        for row, tensor in enumerate(tensors):
            if tensor.ndim != 1 or not tensor.numel():
                raise ShapeError(f"VLLMEngine: {what} is a non-empty int64[T]: got {tuple(tensor.shape)} in row {row}.")
            if len(tensor) + room > self.max_length:
                raise ShapeError(
                    f"VLLMEngine: {what} must have at most {self.max_length - room} tokens (max_model_len="
                    f"{self.max_length + 1}): got {len(tensor)} in row {row}."
                )
        return [tensor.tolist() for tensor in tensors]

    # --- weights and state --------------------------------------------------------------------------------------------

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Loads a complete set of weights, empties the prefix cache, then moves the version.

        Names are those of the Hugging Face model's ``state_dict()``; of tied weights one name is enough. All of them
        are checked before the first one is loaded, and until then the old version goes on serving. Should vLLM itself
        fail in the middle, nothing is served until a whole set was loaded.

        Raises  WeightSyncError  naming what is unknown, missing, misshapen, tied but different
                UnsupportedError where a server was not started so that it takes weights, or vLLM cannot load them: on
                a CPU the experts of a mixture
        """
        if weights is None:
            raise WeightSyncError("VLLMEngine: weights must be given: vLLM holds its own copy of the model.")
        if self._layout is None:
            if self._config is None:
                raise WeightSyncError(
                    f"VLLMEngine: the configuration of {self.core.model!r} must be readable here to check weights "
                    "before they are loaded: it is not."
                )
            self._layout = WeightLayout(self._config)
        checked = self._layout.checked(weights)
        was_half_loaded, self._half_loaded = self._half_loaded, True
        try:
            self.core.load(checked, version=version)
        except NotImplementedError:
            self._half_loaded = was_half_loaded
            raise
        except Exception as error:
            raise WeightSyncError(
                f"VLLMEngine: version {version} was checked but could not be loaded: {type(error).__name__}: {error}; "
                "nothing is served until a whole set of weights is."
            ) from error
        self._half_loaded = False
        self.version = version

    def _check_serving(self) -> None:
        if self._half_loaded:
            raise RolloutError(
                "VLLMEngine: the weights must be whole: the last update broke off in the middle; update them again."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that it draws the same seeds: the generator and the version."""
        return {"generator": self._generator.get_state(), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self.version = state["version"]

    def close(self) -> None:
        """Ends an engine that was built here, with its processes and threads. A second call does nothing."""
        core, self.core = self.core, _Closed()
        core.close()


class _Closed:
    """What a closed engine asks: everything but closing is an error."""

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RolloutError("VLLMEngine: the engine must be open: close() was called.")


def _mixed(seed: int) -> int:
    """The seed that vLLM is given: torch's CPU generator looks at 32 bits of it, so all bits must reach those."""
    digest = hashlib.blake2b((seed % (1 << 64)).to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --- construction -----------------------------------------------------------------------------------------------------


def _make_core(
    model: Any, tokenizer: Any, own_process: bool, timeout_s: float, options: Mapping[str, Any]
) -> LocalCore | ServerCore:
    is_url = isinstance(model, str) and model.startswith(("http://", "https://"))
    if is_url or not isinstance(model, (str, Path, nn.Module)):
        if options or own_process:
            raise ConfigError(
                f"VLLMEngine: {', '.join(options) or 'own_process'} can only be set where the engine is built: an LLM "
                "or a server has its settings already."
            )
        return ServerCore(model, timeout_s=timeout_s) if is_url else LocalCore(_checked_llm(model), owned=False)
    if isinstance(model, nn.Module):
        with tempfile.TemporaryDirectory(prefix="llmrl-vllm-") as folder:  # vLLM reads it while it is built
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            own = {"dtype": _name(model.dtype), "skip_tokenizer_init": tokenizer is None}
            return LocalCore(adapter.build(folder, own_process=own_process, options=own | options), owned=True)
    dtype = getattr(_config_of(model, str(model)), "dtype", None)
    own = {} if dtype is None else {"dtype": _name(dtype)}
    return LocalCore(adapter.build(str(model), own_process=own_process, options=own | options), owned=True)


def _checked_llm(model: Any) -> Any:
    if not hasattr(model, "llm_engine"):
        raise ConfigError(
            "VLLMEngine: model must be a folder or hub name, a Hugging Face model, a vllm.LLM or a server's URL: got "
            f"{type(model).__name__}."
        )
    adapter.load_vllm()
    return model


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _config_of(model: Any, path: str) -> PretrainedConfig | None:
    """The Hugging Face configuration; None where a server has its model elsewhere."""
    if isinstance(model, nn.Module):
        return model.config
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _eos_ids(given: int | Sequence[int] | None, model: Any, path: str, tokenizer: Any) -> tuple[int, ...]:
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
    return eos if eos is not None else getattr(_config_of(model, path), "eos_token_id", None)
