"""`SelfPlayAgent`: games for several in which the policy plays all seats, each a conversation with the endpoint."""

from __future__ import annotations

import http.client
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from llmrl.concurrency.deadline import Outcome
from llmrl.endpoint.agents import AgentResult, Row
from llmrl.envs.llm.options import keywords_of
from llmrl.envs.llm.tasks.text_env import TextEnv
from llmrl.envs.llm.transforms.episodes import EPISODE, Observed
from llmrl.errors import LLMRLError, RolloutError
from llmrl.tools.runner import cut_text


class SelfPlayAgent:
    """Plays games of ``env_class``, as `Agent` runs a user's program. All players are the policy, in turn.

    A game says whose turn it is and, at its end, what each player earned: `Observed`. What a player is shown are its
    user's messages; its conversation is the session of its name.

    options  of `TextEnv.turns`; ``seats`` are the players that are trained, by name, or "all"
    Raises   ConfigError
    """

    by_session = True

    def __init__(self, env_class: type[TextEnv], options: Mapping[str, Any]) -> None:
        self._name, self._seats = env_class.NAME, options["seats"]
        self._max_chars = options.get("max_chars", 16000)
        self._make, self.close = env_class.games(**keywords_of(env_class.games, options))

    def call(self, base_url: str, key: str, row: Row, *, timeout_s: float, stopped: Callable[[], bool]) -> Outcome:
        """The outcome of one attempt, with an `AgentResult`; not ``done`` after ``timeout_s`` or if ``stopped``."""
        end, game, address = time.monotonic() + timeout_s, self._make(), urlsplit(base_url)
        chats: defaultdict[str, list[Any]] = defaultdict(partial(_begun, row.get("query")))
        try:
            with closing(http.client.HTTPConnection(address.hostname, address.port)) as connection:
                seen: Observed = game.start(**json.loads(row[EPISODE]))
                while not seen.done:
                    if stopped() or time.monotonic() >= end:
                        return Outcome()
                    if seen.player is None:
                        raise RolloutError(f"{self._name}: a game must say whose turn it is, in info['player'].")
                    chat = chats[seen.player]
                    chat.append({"role": "user", "content": cut_text(seen.text, self._max_chars)[0]})
                    chat.append(self._answer(connection, address.path, key, seen.player, chat, end))
                    seen = game.step(chat[-1]["content"] or "")
            return Outcome(self._result(seen, chats), done=True)
        except TimeoutError:
            return Outcome()
        except (LLMRLError, OSError, http.client.HTTPException) as error:
            return Outcome(error=f"{type(error).__name__}: {error}", done=True)
        finally:
            with suppress(LLMRLError):
                game.close()

    def _answer(
        self, connection: http.client.HTTPConnection, path: str, key: str, player: str, chat: Sequence[Any], end: float
    ) -> dict[str, Any]:
        connection.timeout = max(0.1, end - time.monotonic())
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        headers = {"Authorization": f"Bearer {key}", "X-Session-ID": player, "Content-Type": "application/json"}
        connection.request("POST", f"{path}/chat/completions", json.dumps({"messages": chat}), headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RolloutError(f"{self._name}: player {player} got no answer: {body.decode(errors='replace'):.500}")
        return json.loads(body)["choices"][0]["message"]

    def _result(self, seen: Observed, chats: Mapping[str, Any]) -> AgentResult:
        if not seen.rewards:
            raise RolloutError(f"{self._name}: a game must end with a reward for each player: it gave none.")
        named = list(seen.rewards) if self._seats == "all" else [str(seat) for seat in self._seats]
        if unknown := [name for name in named if name not in seen.rewards]:
            players = ", ".join(seen.rewards)
            raise RolloutError(f"{self._name}: env.options.seats must be of the players {players}: got {unknown[0]}.")
        result = AgentResult.of(seen.rewards, seats=named)
        metrics = {f"seat.{name}": reward for name, reward in result.metrics.items()}
        return result._replace(metrics={**metrics, "turns": sum(map(_num_answers, chats.values()))})


def _begun(query: Any) -> list[Any]:
    """The conversation of a player before it is shown the game."""
    return [{"role": "user", "content": query}] if isinstance(query, str) and query else list(query or ())


def _num_answers(chat: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in chat)
