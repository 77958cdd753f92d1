"""A server that ``vllm serve`` started, reached by its URL alone: token ids go in, ids and log-probs come out.

One request per row, because a request has one seed; they run at once, so the server batches them continuously. Only
``/v1/completions`` is needed for that. Weights go in through what the server offers in its development mode.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from llmrl.errors import ConfigError, DeadlineError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm.engines.base import SamplingParams
from llmrl.modules.llm.engines.vllm import adapter
from llmrl.modules.llm.engines.vllm.adapter import Drawn
from llmrl.modules.llm.engines.vllm.local import weight_file
from llmrl.modules.llm.engines.vllm.worker import EXTENSION

__all__ = ["ServerCore", "served_model"]

_MAX_CONNECTIONS = 256
T = TypeVar("T")


def served_model(url: str, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """What ``/v1/models`` says of the first model: its "id", its folder or hub name "root", its "max_model_len"."""
    connections = _Connections(url, timeout_s)
    try:
        return connections.ask("GET", "/v1/models")["data"][0]
    finally:
        connections.close()


class ServerCore:
    """Requests to one server.

    timeout_s  longest wait for one answer

    What cannot be had over HTTP is refused: scoring at another temperature than 1 (the server scores prompts under the
    plain logits), and with it the plain log-probs of a truncated distribution at another temperature.
    """

    scores_any_temperature = False
    own_process = True
    reads_text = True  # the server has the tokenizer of its model

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._connections = _Connections(self.url, timeout_s)
        self._pool = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="llmrl-vllm-server")
        try:
            served = self._connections.ask("GET", "/v1/models")["data"][0]
            self.name = served["id"]
            self.model = served.get("root") or self.name
            self.max_length = int(served["max_model_len"]) - 1
            self.processed = self._answers_processed()
        except BaseException as error:
            self.close()
            if isinstance(error, (LookupError, TypeError, ValueError)) and not isinstance(error, ConfigError):
                raise ConfigError(
                    f"VLLMEngine: {self.url} must be a server started by vllm serve: its answers lack {error}."
                ) from error
            raise

    def _answers_processed(self) -> bool:
        """Whether log-probs are of the distribution sampled from. Where one token alone is allowed its log-prob is then
        0; under the plain logits at most one of two tokens can have that.
        """
        options = {"max_tokens": 1, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
        probes = [self._complete([1], {**options, "allowed_token_ids": [token]}) for token in (1, 2)]
        return all(_read_choice(choice).log_probs.item() == 0.0 for choice in probes)

    # --- requests -----------------------------------------------------------------------------------------------------

    def draw(
        self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int], stop_ids: Sequence[int]
    ) -> list[Drawn]:
        """One answer per prompt, in their order."""
        options = adapter.request(params, stop_token_ids=stop_ids)

        def one(row: int) -> Drawn:
            limit = min(options["max_tokens"], self.max_length - len(prompts[row]))
            return _read_choice(self._complete(prompts[row], {**options, "seed": seeds[row], "max_tokens": limit}))

        return self._all(one, len(prompts))

    def score(self, sequences: Sequence[list[int]], temperature: float) -> list[Tensor]:
        """float32[T_i] per sequence, at temperature 1."""

        def one(row: int) -> Tensor:
            choice = self._complete(sequences[row], {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
            pairs = zip(choice["prompt_logprobs"][1:], sequences[row][1:], strict=True)
            return torch.tensor([0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)])

        return self._all(one, len(sequences))

    def _complete(self, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.name, "prompt": prompt, "return_token_ids": True, "add_special_tokens": False} | options
        choice = self._connections.ask("POST", "/v1/completions", body)["choices"][0]
        if choice["prompt_token_ids"] != prompt:
            raise RolloutError(f"VLLMEngine: {self.url} must be asked what was sent: it read other prompt ids.")
        return choice

    def _all(self, one: Callable[[int], T], count: int) -> list[T]:
        futures = [self._pool.submit(one, row) for row in range(count)]
        try:
            return [future.result() for future in futures]  # every request has its own deadline
        finally:
            for future in futures:
                future.cancel()

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, weights: dict[str, Tensor], *, version: int) -> None:
        """Through a file in this machine's memory, between pausing and resuming the server."""
        del version
        known = self._connections.ask("GET", "/openapi.json")["paths"]
        needed = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache")
        if absent := [path for path in needed if path not in known]:
            raise UnsupportedError(
                f"VLLMEngine: {self.url} takes no weights ({', '.join(absent)} missing): start it on this machine as "
                f"VLLM_SERVER_DEV_MODE=1 vllm serve ... --worker-extension-cls {EXTENSION}."
            )
        answer = self._connections.ask("POST", "/collective_rpc", {"method": "llmrl_why_not_loadable"})
        if reason := answer["results"][0]:
            raise UnsupportedError(f"VLLMEngine: {self.url} takes no weights: {reason}. Nothing was updated.")
        self._connections.ask("POST", "/pause?mode=wait")
        try:
            with weight_file(weights) as path:
                call = {"method": "llmrl_load_file", "kwargs": {"path": path}}
                self._connections.ask("POST", "/collective_rpc", call)
            if not self._connections.ask("POST", "/reset_prefix_cache").get("success"):
                raise WeightSyncError(
                    f"VLLMEngine: {self.url} must empty its prefix cache after an update: it did not."
                )
        finally:
            self._connections.ask("POST", "/resume")

    def close(self) -> None:
        """Ends the connections; the server belongs to whoever started it."""
        self._pool.shutdown(cancel_futures=True)
        self._connections.close()


def _read_choice(choice: dict[str, Any]) -> Drawn:
    ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(ids) != len(values):
        raise RolloutError(f"VLLMEngine: there must be a log-prob per token: got {len(values)} for {len(ids)} tokens.")
    reason = adapter.stop_reason(choice["finish_reason"], choice.get("stop_reason"))
    return Drawn(torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), reason)


class _Connections:
    """One kept-alive connection per thread that asks."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"VLLMEngine: a server is given as http://host:port: got {url!r}.")
        self.url, self.timeout_s = url, timeout_s
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._mine = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded answer. Raises DeadlineError, ConfigError (what was asked is refused), RolloutError."""
        payload = None if body is None else json.dumps(body)
        for attempt in (1, 2):
            fresh = getattr(self._mine, "connection", None) is None
            try:
                status, text = self._exchange(method, path, payload)
                break
            except TimeoutError as error:
                self._drop()
                raise DeadlineError(
                    f"VLLMEngine: {self.url}{path} must answer within {self.timeout_s:g} s: it did not."
                ) from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if attempt == 2 or fresh:  # a server may close a connection that was idle; that is asked again, once
                    raise RolloutError(
                        f"VLLMEngine: {self.url}{path} must be reachable: {type(error).__name__}: {error}"
                    ) from error
        if status >= 400:
            kind = ConfigError if status < 500 else RolloutError
            raise kind(f"VLLMEngine: {self.url}{path} refused with {status}: {text[:500].decode(errors='replace')}")
        return json.loads(text) if text.strip() else {}

    def _exchange(self, method: str, path: str, payload: str | None) -> tuple[int, bytes]:
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = self._make(self._host, self._port, timeout=self.timeout_s)
            self._open.append(connection)
        headers = {} if payload is None else {"Content-Type": "application/json"}
        connection.request(method, self._prefix + path, body=payload, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _drop(self) -> None:
        connection, self._mine.connection = self._mine.connection, None
        connection.close()
        self._open.remove(connection)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
