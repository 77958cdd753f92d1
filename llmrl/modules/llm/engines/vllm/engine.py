"""``VLLMEngine``: generation and scoring by vLLM, behind the same four methods as every engine.

This file holds what is the same wherever vLLM runs: seeds, checks, plain log-probs, versions. What is built from what a
user gives is in ``building``, requests to an engine of this machine in ``local``, to a server in ``server``, what
depends on vLLM's version in ``adapter``.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmrl.concurrency.shared_exclusive_lock import Gate
from llmrl.errors import ConfigError, RolloutError, ShapeError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import Generation, SamplingParams
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.factory import backend_of, config_of, eos_ids, make_core
from llmrl.modules.llm.engines.vllm.transfer import NothingLoadedError, Settings
from llmrl.modules.llm.engines.vllm.weight_spec import WeightGroups, WeightLayout, WeightSet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["VLLMEngine"]

_SHORTEST_WAIT_S = 600.0  # without timeout_s; and one second for every token that a row may have


class VLLMEngine:
    """An ``Engine`` over vLLM.

    model          a folder or hub name; a Hugging Face model, which is copied; a ``vllm.LLM``; or the URL of a server
                   started by ``vllm serve``
    tokenizer      of a model given as a module: without one, stop strings are refused
    own_process    True: the engine's core runs in a process of its own, so that it and the trainer share neither the
                   interpreter nor the default process group, and calls of several threads run at the same time. False:
                   here, one call at a time
    eos_token_ids  ids that end a response and are part of it; the model's generation settings by default
    seed           of the generator that hands out row seeds where a call brings none
    timeout_s      longest that a call may take, in seconds; None: 600, and one more for every token that its longest
                   row may have
    connect_s      of a server: longest that its first answer may take
    silence_s      of a server: longest that it may leave ``/health`` unanswered while it is asked for more
    weight_backend how weights reach an engine in another process: "shared_memory" (the default), "nccl" or "ipc", or a
                   `SharedMemory`, `NCCL` or `CudaIPC` with settings
    options        arguments of ``vllm.LLM``, when one is built. ``dtype`` is the checkpoint's own unless given (vLLM
                   would turn float32 into bfloat16)

    *Log-probs* are those of the distribution that was sampled from. Where truncation or a penalty changed that, the
    drawn ids are scored once more, one prefill each, for the plain ones beside them. An engine or server that reports
    raw log-probs (``logprobs_mode``) can do neither, and only samples at temperature 1 without truncation.
    *Seeds*: a row is a function of its prompt, seed and weights, up to rounding that depends on the batch. *Order* of
    truncation: vLLM cuts by min-p before top-k and top-p, the other engines after.
    *Length*: prompt and response share ``max_length``; a response that reaches it ends as LENGTH.
    *Threads*: any number may call. An update waits for the calls that are under way, later ones wait for the update:
    all rows of a call are of one version.
    *Failures*: a call ends in an error within seconds when the process or the server that it waits for dies, and at its
    deadline otherwise. `restart` begins a new process. A server that was started again no longer has the weights that
    it was sent: calls end in an error until it is sent some.

    In this process (``own_process=False``) a default process group of one is open until ``close``, so only one such
    engine can live at a time, and none beside a trainer's group.

    Raises  MissingDependencyError  vllm is not installed, or lacks something that is needed
            ConfigError             a setting that cannot be, a model whose heads vLLM cannot compute on a CPU
    """

    takes_groups = True  # of weights, one after the other

    def __init__(
        self,
        model: str | Path | PreTrainedModel | Any,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        own_process: bool = False,
        eos_token_ids: int | Sequence[int] | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
        connect_s: float = 30.0,
        silence_s: float = 7.0,
        weight_backend: str | Settings | None = None,
        **options: Any,
    ) -> None:
        self.weight_backend = backend_of(weight_backend)
        for name, seconds in (("timeout_s", timeout_s), ("connect_s", connect_s), ("silence_s", silence_s)):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"VLLMEngine: {name} must be positive: got {seconds}.")
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._make_core = partial(make_core, tokenizer, own_process, timeout_s, connect_s, silence_s, options)
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else lambda: model  # for a restart
        self.core = self._make_core(model)
        self.version = 0
        self._was_updated = False
        self._gate = Gate()
        self._layout: WeightLayout | None = None
        self._half_loaded = False
        self._has_adapter = False
        try:
            self._config: PretrainedConfig | None = config_of(model, self.core.model)
            self.eos_token_ids = eos_ids(eos_token_ids, model, self.core.model, tokenizer)
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
        self.check(params)
        if seeds is None:
            seeds = torch.randint(1 << 62, (len(prompts),), generator=self._generator).tolist()
        if len(seeds) != len(prompts):
            raise ShapeError(f"VLLMEngine: one seed per prompt: got {len(seeds)} for {len(prompts)} prompts.")
        rows = self._rows(prompts, "a prompt", 1)
        end = self._end(params.max_new_tokens)
        with self._gate.holding("requests", end, "generating"):
            self._check_serving()
            version = self.version
            if not rows:
                return Generation([], [], [] if params.truncates else None, [], version)
            drawn = self.core.draw(rows, params, [_mixed(seed) for seed in seeds], self.eos_token_ids, end=end)
            plain = None
            if params.truncates:
                full = [row + answer.ids.tolist() for row, answer in zip(rows, drawn, strict=True)]
                scores = self.core.score(full, params.scoring_temperature, end=end)
                plain = [score[len(row) :] for score, row in zip(scores, rows, strict=True)]
        home = prompts[0].device
        return Generation(
            [answer.ids.to(home) for answer in drawn],
            [answer.log_probs.to(home) for answer in drawn],
            None if plain is None else [row.to(home) for row in plain],
            [answer.reason for answer in drawn],
            version,
        )

    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """float32[T_i] per sequence: [t] = log p(token t | tokens before t), [0] = 0, and 0 where ``masks[i]`` is
        False. A server scores at temperature 1 only.
        """
        if temperature != 1.0 and not self.core.scores_any_temperature:
            raise ConfigError(
                f"VLLMEngine: a server scores at temperature 1 only: got {temperature}; score with the trainer's model."
            )
        rows = self._rows(sequences, "a sequence", 0)
        end = self._end(max(map(len, rows), default=0))
        with self._gate.holding("requests", end, "scoring"):
            self._check_serving()
            scores = self.core.score(rows, temperature, end=end) if rows else []
        scores = [score.to(sequence.device) for score, sequence in zip(scores, sequences, strict=True)]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def _end(self, num_tokens: int) -> float:
        return time.monotonic() + (_SHORTEST_WAIT_S + num_tokens if self.timeout_s is None else self.timeout_s)

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

    def update_weights(
        self,
        weights: Mapping[str, Tensor] | WeightGroups | None,
        *,
        version: int,
        backend: str | Settings | None = None,
    ) -> None:
        """Loads a complete set of weights, empties the prefix cache, then moves the version.

        Names are those of the Hugging Face model's ``state_dict()``; of tied weights one name is enough. All of them
        are checked before the first one is loaded, and until then the old version goes on serving. Should it fail in
        the middle, nothing is served until a whole set was loaded. Calls that are under way end first.

        weights  all of them, or groups that are made one after the other (`weight_groups`, `merged_weights`); of those
                 every one is made, whatever happens: other ranks take part in that
        backend  for this update; by default ``weight_backend``
        Raises  DeadlineError where they do not within ``timeout_s``: nothing was updated
                WeightSyncError  naming what is unknown, missing, misshapen, tied but different
                UnsupportedError where a server was not started so that it takes weights, or the engine takes adapters
                ConfigError      for a backend that this engine has no use for
        """
        if weights is None:
            raise WeightSyncError("VLLMEngine: weights must be given: vLLM holds its own copy of the model.")
        settings = self.weight_backend if backend is None else backend_of(backend)
        with _drained(weights) as weights:
            self.core.check_backend(settings)
            checked = self._checked(weights)
            end = self._end(0)
            with self._gate.holding(object(), end, f"loading version {version}", self._make_way):
                self._load(checked, version, end, settings)

    def update_adapter(self, folder: str | Path, *, version: int) -> None:
        """What is drawn from now on is drawn with the LoRA adapter in ``folder``, as peft saves it (`adapter_folder`);
        the folder is not needed afterwards. For an engine that was built with ``enable_lora=True``.

        Answers cached for a prompt are those of one adapter, so nothing old is taken for new.

        Raises  WeightSyncError where vLLM refuses it: the one before goes on serving
                UnsupportedError for an engine without ``enable_lora``
        """
        end = self._end(0)
        with self._gate.holding(object(), end, f"loading adapter {version}", self._make_way):
            self.core.load_adapter(Path(folder), version=version, end=end)
            self._half_loaded, self._has_adapter = False, True
            self.version = version

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """Names that a set of weights may hold and need not: buffers that the model makes by itself."""
        return frozenset() if self._config is None else self._known_layout().unsaved_buffers

    def _checked(self, weights: Mapping[str, Tensor] | WeightGroups) -> WeightSet:
        return self._known_layout().weight_set(weights)

    def _known_layout(self) -> WeightLayout:
        if self._layout is None:
            if self._config is None:
                raise WeightSyncError(
                    f"VLLMEngine: the configuration of {self.core.model!r} must be readable here to check weights "
                    "before they are loaded: it is not."
                )
            self._layout = WeightLayout(self._config)
        return self._layout

    def _make_way(self) -> None:
        """What is done about calls that are under way when new weights have come: nothing, they are waited for."""

    def _load(self, checked: WeightSet, version: int, end: float, backend: Settings | None) -> None:
        was_half_loaded, self._half_loaded = self._half_loaded, True
        try:
            self.core.load(checked, version=version, end=end, backend=backend)
        except (NotImplementedError, NothingLoadedError):
            self._half_loaded = was_half_loaded
            raise
        except Exception as error:
            raise WeightSyncError(
                f"VLLMEngine: version {version} was checked but could not be loaded: {type(error).__name__}: {error}; "
                "nothing is served until a whole set of weights is."
            ) from error
        self._half_loaded, self._was_updated = False, True
        self.version = version

    def restart(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Ends the engine that was built here, dead or alive, and builds a new one, which serves once it has `version`.

        weights  of `version`, as in `update_weights`. Needed where the engine was ever given some: no copy is kept here
        Raises   WeightSyncError where they are needed and not given, UnsupportedError for an engine or a server that
                 was not built here: nothing has changed then
        """
        if not self.core.owned:
            raise UnsupportedError(
                f"VLLMEngine: only an engine that was built here can be restarted: {self.core.model} belongs to "
                "whoever started it."
            )
        if self._was_updated and weights is None:
            raise WeightSyncError(
                f"VLLMEngine: restart needs the weights of version {self.version}: they are not kept here; pass the "
                "trainer's state_dict()."
            )
        if (model := self._model()) is None:
            raise WeightSyncError("VLLMEngine: restart needs the model that the engine was built from: it is gone.")
        checked = None if weights is None else self._checked(weights)
        core, self.core = self.core, _Closed("restart() did not come to its end")
        core.close()
        end = self._end(0)
        with self._gate.holding(object(), end, "restarting"):
            self.core = self._make_core(model)
            self._half_loaded = self._has_adapter  # which is gone, and must be given again
            if checked is not None:
                self._load(checked, self.version, end, self.weight_backend)

    def _check_serving(self) -> None:
        if self._half_loaded:
            raise RolloutError(
                "VLLMEngine: the weights must be whole: the last update broke off in the middle, or the engine was "
                "restarted without its adapter; update them again."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that it draws the same seeds: the generator and the version."""
        return {"generator": self._generator.get_state(), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self.version = state["version"]

    def close(self) -> None:
        """Ends an engine that was built here, with its processes and threads. A second call does nothing."""
        core, self.core = self.core, _Closed("close() was called")
        core.close()


@contextmanager
def _drained(weights: Mapping[str, Tensor] | WeightGroups) -> Iterator[Mapping[str, Tensor] | WeightGroups]:
    """Groups that are all made by the end of the block; weights that are there anyway as they are."""
    if isinstance(weights, Mapping):
        yield weights
        return
    passing = _Passing(weights)
    try:
        yield passing
    finally:
        for _ in passing:
            pass


class _Passing:
    """One pass through groups, which goes on where it was left."""

    def __init__(self, groups: WeightGroups) -> None:
        self.metadata = groups.metadata
        self._groups = iter(groups)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return self._groups


class _Closed:
    """What a closed engine asks: everything but closing is an error."""

    owned = True

    def __init__(self, why: str) -> None:
        self._why = why

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RolloutError(f"VLLMEngine: the engine must be open: {self._why}.")


def _mixed(seed: int) -> int:
    """The seed that vLLM is given: torch's CPU generator looks at 32 bits of it, so all bits must reach those."""
    digest = hashlib.blake2b((seed % (1 << 64)).to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
