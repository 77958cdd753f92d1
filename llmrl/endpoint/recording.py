"""`RecordingEndpoint`: agents that speak to an OpenAI-compatible server, and the rows that their calls become."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from llmrl.concurrency.shared_exclusive_lock import SharedExclusiveLock
from llmrl.endpoint.agents import Seat
from llmrl.endpoint.calls import CallGraph, Train, make_rows
from llmrl.endpoint.chat import BadRequestError
from llmrl.endpoint.server import Endpoint, Record
from llmrl.errors import ConfigError
from llmrl.modules.llm.conversation import Message, SampledTurn, TurnSampler
from llmrl.modules.llm.engines.base import Engine, SamplingParams
from llmrl.modules.llm.policies.batching import BatchingEngine
from llmrl.modules.llm.policies.columns import refuse_reserved
from llmrl.modules.llm.rendering import Renderer


class Rollout(CallGraph):
    """An agent's attempt at a task: the row of the data, and the calls made with its key."""

    def __init__(self, row: Mapping[str, Any], group: int, seed: int | None, by_session: bool) -> None:
        super().__init__(seed)
        self.by_session = by_session
        self.row, self.group = row, group
        self.record: list[dict[str, Any]] = []  # of its calls, when it is finished


class RecordingEndpoint(Endpoint):
    """Records the sampled ids of agents whose code stays as it is: they get ``base_url`` and a rollout's key.

    engine     any `Engine`; one that answers one call at a time is wrapped in a `BatchingEngine`
    tokenizer  of the engine's model, or a `Renderer` with another template
    params     of sampling; requests cannot change its distribution: one that differs is overridden and counted
    train      which calls become rows: see `CallGraph.leaves`
    max_tokens of a conversation: see `TurnSampler`
    modes      returns a context in which the engine is called, such as autocast: it is called by several threads
    settings   more arguments of `Endpoint`

    A sampled id is trained exactly once, and never tokenised again. docs/agents.md has an example.
    """

    fixed = True

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        params: SamplingParams | None = None,
        train: Train = "main",
        max_tokens: int | None = None,
        modes: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **settings: Any,
    ) -> None:
        if train not in ("main", "all", "longest"):
            raise ConfigError(f"RecordingEndpoint: train must be main, all or longest: got {train!r}.")
        renderer = tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer)
        if not engine.concurrent and not isinstance(engine, BatchingEngine):
            engine = BatchingEngine(engine, expected=lambda: len(self._rollouts))
        self.train, self._modes = train, modes
        self._sampling = SharedExclusiveLock("RecordingEndpoint")
        self._rollouts: dict[str, Rollout] = {}
        self._lock = threading.Lock()
        super().__init__(TurnSampler(renderer, engine, params, max_tokens=max_tokens), **settings)

    @property
    def base_url(self) -> str:
        """For clients: the environment variable OPENAI_BASE_URL."""
        return f"{self.url}/v1"

    def begin(
        self,
        row: Mapping[str, Any] | None = None,
        *,
        group: int = 0,
        seed: int | None = None,
        by_session: bool = False,
    ) -> str:
        """A new rollout's key. ``group``: number of the prompt's draw, which advantages are relative to.

        ``seed`` of its answers, see `CallGraph`
        ``row``  of the data; its columns are those of the rollout's rows
        ``by_session``: calls with different X-Session-ID never continue each other: they are of several agents
        Raises   DataError for a column that has the name of another entry
        """
        refuse_reserved(row or {}, "RecordingEndpoint.begin")
        key = f"sk-llmrl-{secrets.token_hex(16)}"
        with self._lock:
            self._rollouts[key] = Rollout(row or {}, group, seed, by_session)
        return key

    def rollout(self, key: str) -> Rollout:
        """The calls so far. Raises ConfigError for a key that is not one of a rollout in progress."""
        try:
            return self._rollouts[key]
        except KeyError:
            raise ConfigError(f"RecordingEndpoint: {key[:16]!r}... must be the key of a rollout in progress.") from None

    def finish(self, key: str, reward: float, seats: Mapping[str, Seat] | None = None) -> TensorDict | None:
        """Ends a rollout: later calls with its key are refused.

        ``seats``  those that are trained, by session: the rows of each have its reward. None: all, with ``reward``
        Returns    its rows [N], see `make_rows`; None if it made no call that is trained
        """
        rollout = self.rollout(key)
        with self._lock:
            del self._rollouts[key]
        kept = [(call, Seat("", reward)) for call in rollout.leaves(self.train)]
        if seats is not None:
            kept = [(call, seat) for name, seat in seats.items() for call, _ in kept if call.asked.session == name]
        leaves = [call.turn for call, _ in kept]
        rollout.record = rollout.describe([call for call, _ in kept], self.train)
        trained = {id(turn) for leaf in leaves for turn in leaf.path() if not turn.is_chosen}
        rollout.counters.update({"trained": len(trained), "rows": len(leaves)})
        self.count({**rollout.counters})  # a copy: an answer in progress may be added to it
        return self.rows_of(rollout, leaves, [seat for _, seat in kept]) if leaves else None

    def rows_of(self, rollout: Rollout, leaves: Sequence[SampledTurn], seats: Sequence[Seat]) -> TensorDict:
        """The rows of paths that end with ``leaves``, each of a seat, as those of the rollout."""
        tokenizer, plain = self.sampler.renderer.tokenizer, self.sampler.params.truncates
        given = {"seats": seats, "named": rollout.by_session, "group": rollout.group, "row": rollout.row}
        return make_rows(leaves, tokenizer, plain=plain, **given)

    def paused(self) -> AbstractContextManager[None]:
        """Context in which nothing is sampled: answers in progress are waited for, and later requests are held."""
        return self._sampling.holding(object(), math.inf, "a pause")

    def check_key(self, key: str) -> None:
        if key not in self._rollouts:
            raise BadRequestError(
                "the API key must be that of a rollout in progress.", status=401, code="invalid_api_key"
            )

    def sample(
        self, key: str, session: str, messages: list[dict[str, Any]] | Tensor, **options: Any
    ) -> tuple[list[SampledTurn], Record]:
        rollout = self._open(key)
        with self._sampling.holding("answers", math.inf, "an answer"), self._modes():
            session = session if rollout.by_session else ""
            asked, turns = rollout.sample(self.sampler, messages, session=session, **options)

        def record(said: Sequence[Message]) -> None:
            for turn, message in zip(turns, said, strict=True):
                rollout.add(asked, turn, message)

        return turns, record

    def prompt(self, key: str, messages: list[dict[str, Any]], tools: Any) -> Tensor:
        return self._open(key).prompt(self.sampler, messages, tools=tools)

    def _open(self, key: str) -> Rollout:
        if (rollout := self._rollouts.get(key)) is None:  # it ended while this request waited
            raise BadRequestError("the rollout of this API key has ended.", status=401, code="invalid_api_key")
        return rollout
