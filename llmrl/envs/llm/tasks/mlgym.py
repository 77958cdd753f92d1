"""MLGym tasks (arXiv:2502.14499) as conversations: the model writes shell commands, a container returns the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import column
from llmrl.envs.llm.answers import fenced_blocks
from llmrl.envs.llm.chat import ChatEnv
from llmrl.envs.llm.transforms.episodes import EPISODE, EpisodeReward, EpisodeTurns, Observed
from llmrl.envs.td_ops import shallow_copy
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
    Writes  the entries of `EpisodeTurns`. The reward is the gym's, plus ``score(info)`` at the end (None: the first
            number of the newest entry of ``info["score"]``, where higher is better); ``reward_wrong_format`` (None: 0)
            without a command; NaN if the gym failed, or took longer than ``timeout_s`` seconds for a reset or a step.
            Truncated where it failed, or at "max_steps"
    Raises  ConfigError without a gym; RolloutError for more conversations than free gyms

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
        timeout_s: float = 3600.0,
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
        self.turns = _GymTurns(gyms, score or first_score, reward_wrong_format or 0.0, timeout_s)
        self.counters = self.turns.counters  # episodes, those that failed, turns without a command
        super().__init__(env, self.turns)
        self.append_transform(EpisodeReward())

    @property
    def first_error(self) -> str | None:
        """The traceback of the first gym that failed."""
        return self.turns.first_error


class _GymTurns(EpisodeTurns):
    """`EpisodeTurns` over gyms that are used again: containers that took minutes to make."""

    def __init__(self, gyms: Sequence[Any], score: Score, wrong_format: float, timeout_s: float):
        super().__init__(
            self._take, start_timeout_s=timeout_s, step_timeout_s=timeout_s, concurrency=len(gyms), on_close=self._close
        )
        self.gyms, self.free = list(gyms), list(gyms)
        self.score, self.wrong_format = score, wrong_format
        self.counters["wrong_format"] = 0

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase:
        count = len(self.gyms) if td is None else td.batch_size.numel()
        if count == len(self.gyms):
            self._end(list(self.running))  # all conversations restart
        if count > len(self.free):
            raise RolloutError(
                f"MLGymWrapper.reset: every conversation needs a gym: {count} must start, but {len(self.free)} of "
                f"{len(self.gyms)} are free; end the others, or reset all."
            )
        td = TensorDict({}, batch_size=[count]) if td is None else shallow_copy(td)
        td.set("query", column([""] * count)).set(EPISODE, column(["{}"] * count))
        return super()._reset_env_preprocess(td).exclude(EPISODE)

    def _take(self) -> _Gym:
        return _Gym(self, self.free.pop(0))

    def _close(self) -> None:
        for gym in self.gyms:
            if hasattr(gym, "close"):
                gym.close()


class _Gym:
    """An `Episode` in a gym, which is free again when the episode is closed."""

    def __init__(self, turns: _GymTurns, gym: Any) -> None:
        self.turns, self.gym = turns, gym

    def start(self) -> Observed:
        observation, _ = self.gym.reset()
        text = observation.get("observation") if isinstance(observation, Mapping) else observation
        text = text or getattr(getattr(self.gym, "task_args", None), "description", None)
        if not isinstance(text, str):
            raise ConfigError(
                f"MLGymWrapper: a gym must say what its task is: {type(self.gym).__name__}.reset() returned no text, "
                "and it has no task_args.description."
            )
        return Observed(text)

    def step(self, text: str) -> Observed:
        if (command := command_of(text)) is None:
            self.turns.counters["wrong_format"] += 1
            return Observed(f"There was no command to run. {_FORMAT}", self.turns.wrong_format, refused=True)
        observation, reward, *ends, info = self.gym.step(command)
        score = self.turns.score(info) if any(ends) else None
        at_limit = "max_steps" in str(info.get("exit_status"))
        truncated = bool(ends[1]) if len(ends) > 1 else bool(ends[0]) and at_limit
        return Observed(
            observation or "(no output)",
            float(reward) + (0.0 if score is None else float(score)),
            terminated=bool(ends[0]) and not (truncated and len(ends) == 1),
            truncated=truncated,
        )

    def close(self) -> None:
        self.turns.free.append(self.gym)


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
