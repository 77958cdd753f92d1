"""`EpisodeTurns`: conversations with environments that have ``reset`` and ``step``: games, simulators, servers.

An environment's first observation is the user's message, and each further one answers the policy: as the user's next
message, or, where the policy acts by tools, as their results.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.concurrency.deadline import AsyncRunner, Calls, ThreadRunner, runner_of
from llmrl.data.ragged.tensordicts import column, column_values, required
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.completions import ScoringTransform, add_reward, completion_texts, renderer_of, view_of
from llmrl.envs.llm.transforms.tool_messages import append_messages, without_stand_ins
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.trajectory import at_last_step
from llmrl.errors import RolloutError, check_at_least, check_choice
from llmrl.tools.runner import cut_text

EPISODE = "episode"  # the column with what an environment is started with, as JSON; then the number of the episode
_NUMBERS = itertools.count()
_FAILED = "(The environment could not be started.)"


@dataclass
class Observed:
    """What an environment answers: text, a reward if it gives one now, and whether the episode is over.

    In a game that the policy plays alone, ``player`` reads the text and acts next, and ``rewards`` end it.
    """

    text: str
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    refused: bool = False  # the action could not be taken: the text says why, and the episode goes on
    player: str | None = None
    rewards: dict[str, float] | None = None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Episode(Protocol):
    """One environment; all methods are functions, or ``start`` and ``step`` both coroutine functions."""

    def start(self, **row: Any) -> Any:
        """Resets it with the entries of a row. Returns `Observed`."""

    def step(self, text: str) -> Any:
        """Acts by the policy's text. Returns `Observed`."""

    def close(self) -> None:
        """Frees it, whether or not it is over."""


@dataclass
class Running:
    """The episode of one conversation; ``seen`` is what it answered in this turn."""

    episode: Episode
    seen: list[Observed] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or any(each.done for each in self.seen)


class EpisodeTurns(Transform):
    """An episode for each conversation of a `ChatEnv`.

    Reads   "query" NonTensor [B]: text or messages that the first observation follows; "episode" str [B]: what it is
            started with, as JSON. The policy's turn, unless tools act in its place (``by_text`` False)
    Calls   ``make() -> Episode``, ``start`` within ``start_timeout_s`` and ``step`` within ``step_timeout_s`` seconds,
            at most ``concurrency`` at a time; not in a turn that tools of another kind have answered
    Writes  "episode_number"           int64[B]; also "conversation_id", which tools know a conversation by
            (view, "prompt")           one more user message, the observation of at most ``max_chars`` characters
            ("next", "env_reward")     float32[B, 1, 1]: with ``reward`` "sum" that of this turn; with "last" 0 before
                                       the conversation's last turn, and then the last one of the episode. None counts
                                       as 0; NaN if the episode is over and gave none at all
            ("next", "reward")         NaN if the episode failed: it raised, was late, or gave a reward that is not
                                       finite; else 0 is added, see `EpisodeReward`
            ("next", "terminated" | "truncated" | "done")  the episode's; truncated if it failed

    A copy shares the episodes, so closing one closes all. ``counters`` has their number, and how many failed;
    ``first_error`` why the first did.
    """

    def __init__(
        self,
        make: Callable[[], Episode],
        *,
        by_text: bool = True,
        reward: str = "sum",
        start_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        concurrency: int = 256,
        max_chars: int = 16000,
        on_close: Callable[[], None] | None = None,
    ):
        check_choice("EpisodeTurns", "reward", reward, ("sum", "last"))
        check_at_least("EpisodeTurns", 1, concurrency=concurrency)
        check_at_least("EpisodeTurns", 100, max_chars=max_chars)
        super().__init__()
        self.make, self.by_text, self.reward = make, by_text, reward
        self.start_timeout_s, self.step_timeout_s = start_timeout_s, step_timeout_s
        self.concurrency, self.max_chars = concurrency, max_chars
        self.running: dict[int, Running] = {}  # by number, oldest first
        self.counters = {"episodes": 0, "failed": 0}
        self.first_error: str | None = None
        self._on_close = on_close
        self._lock = threading.Lock()
        self._runner: AsyncRunner | ThreadRunner | None = None

    # -- at reset ------------------------------------------------------------------------------------------------------

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase:
        queries = column_values(td, "query") if td is not None else None
        rows = column_values(td, EPISODE) if td is not None else None
        if queries is None or rows is None:
            raise RolloutError(f"EpisodeTurns: a row must have the columns 'query' and {EPISODE!r}.")
        numbers = [next(_NUMBERS) for _ in rows]
        self._forget_oldest(4 * max(64, len(rows)))
        for number in numbers:
            self.running[number] = Running(self.make())
        starts = [
            partial(self.running[n].episode.start, **json.loads(row)) for n, row in zip(numbers, rows, strict=True)
        ]
        self._play(numbers, starts, self.start_timeout_s, "started")
        self.counters["episodes"] += len(rows)
        td = shallow_copy(td)
        td.set("query", column(self._asked(*each) for each in zip(queries, numbers, strict=True)))
        td.set("episode_number", torch.tensor(numbers, device=td.device))
        return td

    def _asked(self, query: Any, number: int) -> Any:
        state = self.running[number]
        seen, state.seen = state.seen, []
        text = _FAILED if state.error else self._text(seen)
        if seen and seen[-1].done and not state.error:
            state.error = f"the episode was over before it began: {text!r:.200}"
        if not isinstance(query, str):
            return [*query, {"role": "user", "content": text}] if text else query
        return "\n\n".join(filter(None, (query, text)))

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        if "conversation_id" in reset_td.keys():
            reset_td.set("conversation_id", reset_td.get("episode_number").clone())
        return reset_td

    # -- at step -------------------------------------------------------------------------------------------------------

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        numbers = required(td, "episode_number", "EpisodeTurns", "step a tensordict that env.reset() returned").tolist()
        with self._lock:
            gone = RolloutError("the episode was closed, because newer ones were begun")
            states = [self.running.get(number) or Running(_Gone(), error=str(gone)) for number in numbers]
        if self.by_text:
            texts = completion_texts(td, getattr(self.container, "tokenizer", None), who="EpisodeTurns")
            called = _called(td, next_td)
            no_room = next_td.get("done").flatten().tolist()  # without an answer: ChatEnv had no room for one
            acting = [
                row
                for row, (state, text) in enumerate(zip(states, texts, strict=True))
                if not state.error and not called[row] and (text or not no_room[row])
            ]
            steps = [partial(states[row].episode.step, texts[row]) for row in acting]
            self._play([numbers[row] for row in acting], steps, self.step_timeout_s, "done with a step")
        last = (at_last_step(self.container, td) | next_td.get("done").flatten()).tolist()
        return self._answer(next_td, numbers, states, last)

    def _answer(
        self, next_td: TensorDictBase, numbers: list[int], states: list[Running], last: list[bool]
    ) -> TensorDictBase:
        messages: list[list[dict[str, Any]]] = []
        rewards = []
        flags = {"terminated": [], "truncated": []}
        for state, is_last in zip(states, last, strict=True):
            seen, over = state.seen, state.is_over
            rewards.append(self._earned(state, is_last or over))
            failed = state.error is not None
            flags["terminated"].append(not failed and any(each.terminated for each in seen))
            flags["truncated"].append(failed or any(each.truncated for each in seen))
            says = self.by_text and seen and not (over or is_last)  # no later turn would read it
            messages.append([{"role": "user", "content": self._text(seen)}] if says else [])
            state.seen = []
        if any(messages):
            append_messages(next_td, view_of(next_td), messages, renderer_of(self.container))
        done = next_td.get("done")
        for flag, ends in flags.items():
            next_td.set(flag, next_td.get(flag) | torch.tensor(ends, device=done.device).view(done.shape))
        done = done | next_td.get("terminated") | next_td.get("truncated")
        next_td.set("done", done)
        next_td.set("env_reward", torch.tensor(rewards, dtype=torch.float32, device=done.device).view(-1, 1, 1))
        # The policy is not to blame for a failed episode: the row gets a NaN reward, which is ignored.
        broken = [math.nan if state.error else 0.0 for state in states]
        add_reward(next_td, torch.tensor(broken, dtype=torch.float32, device=done.device))
        self._end([n for n, ends, left in zip(numbers, done.flatten().tolist(), last, strict=True) if ends or left])
        return next_td

    def _earned(self, state: Running, is_last: bool) -> float:
        given = [each.reward for each in state.seen if each.reward is not None]
        if bad := [reward for reward in given if not math.isfinite(reward)]:
            state.error = state.error or f"a reward must be finite: got {bad[0]}"
        state.rewards += given
        if state.error:
            self._note(state.error)
            return math.nan
        if state.is_over and not state.rewards:
            return math.nan
        if self.reward == "last":
            return state.rewards[-1] if is_last and state.rewards else 0.0
        return sum(given)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _play(self, numbers: Sequence[int], calls: list[Callable[[], Any]], timeout_s: float, what: str) -> None:
        """Makes the calls, at the same time; adds what they return to the episodes' states, or why they failed."""
        if not calls:
            return
        if self._runner is None:
            self._runner = runner_of(calls[0].func, "episodes", self.concurrency)
        outcomes = self._runner.run(Calls(calls), timeout_s=timeout_s)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if (state := self.running.get(number)) is None:
                continue
            if not outcome.done:
                state.error = f"the environment was not {what} within {timeout_s:g} s"
            elif outcome.error is not None:
                state.error = outcome.error
            else:
                state.seen.append(outcome.value)

    def _text(self, seen: Sequence[Observed]) -> str:
        text = "\n".join(each.text for each in seen if each.text)
        return without_stand_ins(cut_text(text, self.max_chars)[0])

    def _note(self, error: str) -> None:
        with self._lock:
            self.counters["failed"] += 1
            self.first_error = self.first_error or error

    def _end(self, numbers: Sequence[int]) -> None:
        with self._lock:
            ended = [self.running.pop(number) for number in numbers if number in self.running]
        for state in ended:
            with suppress(Exception):  # it is over: what its end says is not about the conversation
                state.episode.close()

    def _forget_oldest(self, limit: int) -> None:
        """Ends episodes whose conversations were abandoned, which no step reports."""
        with self._lock:
            numbers = list(self.running)
        self._end(numbers[: max(0, len(numbers) - limit)])

    # -- specs and state -----------------------------------------------------------------------------------------------

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        shape, device = state_spec.shape, state_spec.device
        state_spec["episode_number"] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        return state_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for name in ("reward", "env_reward"):
            reward_spec[name] = Unbounded((*reward_spec.shape, 1, 1), device=reward_spec.device)
        return reward_spec

    def clone(self) -> Self:
        """A copy for another env, which shares the episodes, with counters of its own."""
        other = super().clone()
        other.running, other._lock = self.running, self._lock
        other.counters, other._runner = dict.fromkeys(self.counters, 0), None
        return other

    def close(self) -> None:
        """Ends all episodes."""
        self._end(list(self.running))
        if self._runner is not None:
            self._runner.close()
        if self._on_close is not None:
            self._on_close()


class EpisodeReward(ScoringTransform):
    """Adds the environment's own reward, ("next", "env_reward"), to the reward: the scorer of an `EpisodeEnv`."""

    def __init__(self) -> None:
        super().__init__()
        self.first_error: str | None = None

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        values = required(next_td, "env_reward", "EpisodeReward", "put EpisodeTurns before it")
        if bool((values.isnan() & ~next_td.get("reward").isnan()).any()):
            self.first_error = "the episode ended without a reward: the environment must give one, or set env.reward"
        add_reward(next_td, values.flatten())
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1), device=reward_spec.device)
        return reward_spec


class _Gone:
    def close(self) -> None: ...


def _called(td: TensorDictBase, next_td: TensorDictBase) -> list[bool]:
    """True for rows whose turn called a tool, which has answered it."""
    before, after = td.get("tool_use", None), next_td.get("tool_use", None)
    if not isinstance(before, TensorDict) or not isinstance(after, TensorDict):
        return [False] * td.batch_size.numel()
    return (after.get("calls") > before.get("calls")).flatten().tolist()


def as_json(row: Mapping[str, Any]) -> str:
    """A row as the column "episode" has it."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True, default=str)
