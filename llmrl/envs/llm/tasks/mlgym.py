"""MLGym tasks (arXiv:2502.14499) as conversations: the model writes shell commands, a container returns the output."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import column, required
from llmrl.data.specs import Composite, NonTensor, Unbounded
from llmrl.envs.llm.answers import fenced_blocks
from llmrl.envs.llm.chat import ChatEnv
from llmrl.envs.llm.completions import completion_texts, renderer_of, view_of
from llmrl.envs.llm.transforms.tool_messages import append_messages
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, MissingDependencyError, RolloutError
from llmrl.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = "Write exactly one command, in a block of its own:\n```\nls\n```"
_ARGUMENTS = ("EnvironmentArguments", "EnvironmentConfig", "BaseEnvironmentConfig")  # names of one class by revision
_SOURCE = "https://github.com/facebookresearch/MLGym"

Score = Callable[[Mapping[str, Any]], float | None]


class MLGymWrapper(TransformedEnv):
    """One gym per conversation: runs the command of each turn, and returns its output as the user's next message.

    Reads   the policy's turn; the command is in its last fenced block outside thinking
    Calls   ``gym.reset() -> (observation, info)``; ``gym.step(command)`` -> (observation, reward, done, info), or with
            terminated and truncated instead of done. If reset returns None, ``task_args.description`` is used
    Writes  ("next", view, "prompt")  one more user message: the observation, or a format error
            ("next", "reward")        float32[B, 1, 1]: the gym's, plus ``score(info)`` at the end (None: the first
                                      number of the newest entry of ``info["score"]``, where higher is better);
                                      ``reward_wrong_format`` (None: 0) without a command; NaN if the gym failed
            ("next", "exit_status")   str [B], the gym's own; "" until the gym sets one
            ("next", "terminated" | "truncated" | "done")  the gym's; truncated where it failed, or at "max_steps"
            "gym_slot"                int64[B]: the number of the conversation's gym
    Raises  ConfigError without a gym or a description; RolloutError for more conversations than free gyms

    >>> class Shell:
    ...     reset = lambda self: ("How many files are there?", {})
    ...     def step(self, command):
    ...         return "2", 0.0, command == "submit", {"score": [{"accuracy": 1.0}]}
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = MLGymWrapper(Shell())
    >>> batch = env.rollout(9, ScriptedPolicy(["```\\nls | wc -l\\n```", "It is 2.\\n```\\nsubmit\\n```"]))
    >>> batch["next", "reward"].flatten().tolist()
    [0.0, 1.0]
    >>> env.close()
    """

    def __init__(
        self,
        envs: Any,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        input_mode: str = "history",
        device: torch.device | str | None = None,
        reward_wrong_format: float | None = None,
        score: Score | None = None,
        system_prompt: str | None = None,
    ):
        gyms = list(envs) if isinstance(envs, (list, tuple)) else [envs]
        if not gyms or any(not hasattr(gym, "step") or not hasattr(gym, "reset") for gym in gyms):
            raise ConfigError(f"MLGymWrapper: there must be at least one gym with reset and step: got {envs!r:.80}.")
        env = ChatEnv(
            input_mode=input_mode,
            batch_size=len(gyms),
            system_prompt=f"You solve a task in a shell. {_FORMAT}" if system_prompt is None else system_prompt,
            tokenizer=tokenizer,
            device=device,
        )
        self.turns = _GymTurns(gyms, score or first_score, reward_wrong_format or 0.0, tokenizer)
        self.counters = self.turns.counters  # all turns, turns without a command, turns with a failed gym
        super().__init__(env, self.turns)

    @property
    def first_error(self) -> str | None:
        """The traceback of the first gym that failed."""
        return self.turns.first_error


class _GymTurns(Transform):
    """Owns the gyms, and records which of them are in use."""

    def __init__(
        self, gyms: Sequence[Any], score: Score, wrong_format: float, tokenizer: PreTrainedTokenizerBase | None
    ):
        super().__init__()
        self.gyms = list(gyms)
        self.score = score
        self.wrong_format = wrong_format
        self.tokenizer = tokenizer
        self.counters = {"turns": 0, "wrong_format": 0, "failed": 0}
        self.first_error: str | None = None
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(len(self.gyms), thread_name_prefix="mlgym")

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase:
        count = len(self.gyms) if td is None else td.batch_size.numel()
        slots = self._take(count)
        try:
            # Gyms run in parallel, because a reset may start a container and a step may train a model.
            queries = list(self._pool.map(self._start, slots))
        except BaseException:
            self._release(slots)
            raise
        td = TensorDict({}, batch_size=[count]) if td is None else shallow_copy(td)
        td.set("query", column(queries))
        td.set("gym_slot", torch.tensor(slots, device=td.device))
        return td

    def _take(self, count: int) -> list[int]:
        with self._lock:
            if count == len(self.gyms):
                self._busy.clear()  # all conversations restart
            free = [slot for slot in range(len(self.gyms)) if slot not in self._busy]
            if count > len(free):
                raise RolloutError(
                    f"MLGymWrapper.reset: every conversation needs a gym: {count} must start, but {len(free)} of "
                    f"{len(self.gyms)} are free; end the others, or reset all."
                )
            self._busy.update(free[:count])
            return free[:count]

    def _release(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._busy.difference_update(slots)

    def _start(self, slot: int) -> str:
        gym = self.gyms[slot]
        observation, _ = gym.reset()
        text = observation.get("observation") if isinstance(observation, Mapping) else observation
        text = text or getattr(getattr(gym, "task_args", None), "description", None)
        if not isinstance(text, str):
            raise ConfigError(
                f"MLGymWrapper: a gym must say what its task is: {type(gym).__name__}.reset() returned no text, and it "
                "has no task_args.description."
            )
        return text

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        slots_B = required(td, "gym_slot", "MLGymWrapper.step", "step a tensordict that env.reset() returned")
        slots = slots_B.tolist()
        if idle := sorted(set(slots) - self._busy):
            raise RolloutError(f"MLGymWrapper.step: the conversation of gym {idle[0]} has ended: reset it first.")
        texts = completion_texts(td, self.tokenizer, who="MLGymWrapper")
        turns = list(self._pool.map(self._turn, slots, texts))
        done = [turn["terminated"] or turn["truncated"] for turn in turns]
        # A conversation that ended gets no message, because no later turn would read it.
        messages = [
            [] if ended else [{"role": "user", "content": turn["text"]}]
            for turn, ended in zip(turns, done, strict=True)
        ]
        if any(messages):
            append_messages(next_td, view_of(next_td), messages, renderer_of(self.container))
        rewards_B = torch.tensor([turn["reward"] for turn in turns], dtype=torch.float32, device=td.device)
        next_td.set("reward", rewards_B.view(-1, 1, 1))
        next_td.set("gym_slot", slots_B)
        next_td.set("exit_status", column(turn["exit_status"] for turn in turns))
        next_td.set("done", torch.tensor(done, device=td.device).view(-1, 1))
        for name in ("terminated", "truncated"):
            next_td.set(name, torch.tensor([turn[name] for turn in turns], device=td.device).view(-1, 1))
        self._release([slot for slot, ended in zip(slots, done, strict=True) if ended])
        return next_td

    def _turn(self, slot: int, text: str) -> dict[str, Any]:
        turn = {"text": "", "reward": self.wrong_format, "terminated": False, "truncated": False, "exit_status": ""}
        command = command_of(text)
        self._count("turns")
        if command is None:
            self._count("wrong_format")
            return {**turn, "text": f"There was no command to run. {_FORMAT}"}
        try:
            observation, reward, *ends, info = self.gyms[slot].step(command)
            score = self.score(info) if any(ends) else None
        except Exception:  # the boundary to the user's gym
            self._count("failed", traceback.format_exc())
            return {**turn, "reward": float("nan"), "truncated": True, "exit_status": "failed"}
        status = str(info.get("exit_status") or "")
        truncated = bool(ends[1]) if len(ends) > 1 else bool(ends[0]) and "max_steps" in status
        return {
            "text": observation or "(no output)",
            "reward": float(reward) + (0.0 if score is None else float(score)),
            "terminated": bool(ends[0]) and not (truncated and len(ends) == 1),
            "truncated": truncated,
            "exit_status": status,
        }

    def _count(self, name: str, error: str | None = None) -> None:
        with self._lock:
            self.counters[name] += 1
            self.first_error = self.first_error or error

    def close(self) -> None:
        self._pool.shutdown()
        for gym in self.gyms:
            if hasattr(gym, "close"):
                gym.close()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        shape = observation_spec.shape
        observation_spec["gym_slot"] = Unbounded(shape=shape, dtype=torch.int64, device=observation_spec.device)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1), device=reward_spec.device)
        reward_spec["exit_status"] = NonTensor(shape=reward_spec.shape, example_data="")
        return reward_spec


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device | str | None = "cpu",
    reward_wrong_format: float | None = None,
    max_steps: int = 10,
    seed: int = 42,
    score: Score | None = None,
) -> MLGymWrapper:
    """An environment of MLGym's own tasks, with one conversation and one container per task.

    task, tasks  names such as "prisonersDilemma", of files tasks/<name>.yaml in the package. Repeat a name to get
                 several conversations of that task, for example a GRPO group
    device       of the tensors; "cuda:1" also gives the containers that GPU
    max_steps    commands before the gym ends the episode; ``seed`` is the gym's
    Raises  MissingDependencyError without gymnasium or mlgym; ConfigError unless exactly one of task and tasks is given
    """
    if (task is None) == (tasks is None) or (tasks is not None and (isinstance(tasks, str) or not tasks)):
        raise ConfigError(f"make_mlgym: give one task, or a list of tasks: got task={task!r} and tasks={tasks!r}.")
    gymnasium = require("gymnasium", extra="gym", used_by="make_mlgym")
    try:
        environment = require("mlgym.environment.env", extra="gym", used_by="make_mlgym")
        registration = require("mlgym.environment.registration", extra="gym", used_by="make_mlgym")
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"make_mlgym: needs the package 'mlgym', which is not installed; run: pip install 'git+{_SOURCE}' (the "
            "package of that name on PyPI is unrelated)."
        ) from error
    known = (getattr(environment, name, None) for name in _ARGUMENTS)
    arguments_class = next(value for value in known if value is not None)
    place = torch.device("cpu" if device is None else device)
    envs = []
    for number, name in enumerate([task] if tasks is None else tasks):
        options = {"max_steps": max_steps, "seed": seed, "container_type": "docker", "verbose": False}
        arguments = arguments_class(task_config_path=f"tasks/{name}.yaml", **options)
        gymnasium.registry.pop(f"mlgym/{arguments.task.id}", None)  # an entry of an earlier call has other settings
        registration.register_task(arguments)
        devices = [f"cpu_{number}"] if place.type == "cpu" else [str(place.index or 0)]
        # Unwrapped: MLGym's step returns four values, which gymnasium's own wrappers reject.
        made = gymnasium.make(f"mlgym/{arguments.task.id}", devices=devices, disable_env_checker=True)
        envs.append(made.unwrapped)
    return MLGymWrapper(envs, tokenizer=tokenizer, device=device, reward_wrong_format=reward_wrong_format, score=score)


def command_of(text: str) -> str | None:
    """The content of the last fenced block outside thinking; None if there is none.

    >>> command_of("Let me look.\\n```\\nls -l\\n```")
    'ls -l'
    """
    found = fenced_blocks(text)
    return found[-1][1].strip() or None if found else None


def first_score(info: Mapping[str, Any]) -> float | None:
    """The first number of the newest entry of ``info["score"]``; None if there is none.

    >>> first_score({"score": [{"accuracy": 0.25}, {"accuracy": 0.5}]})
    0.5
    """
    scores = info.get("score")
    if not scores:
        return None
    newest = scores[-1]
    return float(next(iter(newest.values()))) if isinstance(newest, Mapping) else float(newest)
