"""Gyms of strings as conversations, against a small gym of the interface that MLGym's have."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from llmrl.envs import check_env_specs
from llmrl.envs.llm import MLGymWrapper, make_mlgym
from llmrl.errors import ConfigError, MissingDependencyError, RolloutError
from llmrl.testing import ScriptedPolicy, tiny_tokenizer
from tests.support.conversations import fake_policy
from tests.support.refusals import refusals

gymnasium = pytest.importorskip("gymnasium")

TOKENIZER = tiny_tokenizer()


def run(command):
    return f"Let me see.\n```\n{command}\n```"


class Shell(gymnasium.Env):
    """Steps as MLGymEnv does: four results, a reward that is always 0, the score in the last info."""

    def __init__(self, name="shell", max_steps=10, **_):
        self.task_args = SimpleNamespace(description=f"Solve {name}.", id=name)
        self.max_steps = max_steps
        self.commands, self.resets, self.closed = [], 0, False

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.commands = []
        return {"observation": None}, {}

    def step(self, action):
        self.commands.append(action)
        if len(self.commands) > self.max_steps:
            return "Exited", 0, True, {"exit_status": "evaluation_success (max_steps)", "score": [{"accuracy": 0.25}]}
        if action == "submit":
            return "Exited (submit)", 0, True, {"exit_status": "submitted", "score": [{"accuracy": 0.75}]}
        if action == "validate":
            return "Your score is 0.5", 0, False, {"score": [{"accuracy": 0.5}]}
        if action == "crash":
            raise RuntimeError("the container is gone")
        return f"ran {action}", 0, False, {}

    def close(self):
        self.closed = True


def answered(env, td, *answers):
    return env.step(ScriptedPolicy(list(answers))(td))


def last(td, row=0):
    return td["next", "history"].prompt.to_chats()[row][-1]


def test_the_score_is_paid_once_at_the_end():
    env = MLGymWrapper(Shell())
    td = answered(env, env.reset(), run("validate"))
    assert td["next", "reward"].item() == 0
    td = answered(env, env.step_mdp(td), run("submit"))
    assert td["next", "reward"].item() == 0.75
    assert td["next", "terminated"].item()
    assert last(td)["role"] == "assistant"  # an answer would not be read


def test_a_limit_of_the_gym_truncates():
    env = MLGymWrapper(Shell(max_steps=0), score=lambda info: 10 * info["score"][-1]["accuracy"])
    td = answered(env, env.reset(), run("ls"))["next"]
    assert (td["truncated"].item(), td["terminated"].item(), td["done"].item()) == (True, False, True)
    assert td["reward"].item() == 2.5


def test_an_answer_without_a_command_is_told_so_and_may_cost():
    shell = Shell()
    env = MLGymWrapper(shell, reward_wrong_format=-0.5)
    td = answered(env, env.reset(), "<think>\n```\nrm -rf /\n```\n</think>I do not know.")
    assert shell.commands == []
    assert td["next", "reward"].item() == -0.5
    assert last(td)["content"].startswith("There was no command to run.")
    assert env.counters == {"episodes": 1, "wrong_format": 1, "failed": 0}


def test_a_gym_that_raises_is_a_failure_and_not_a_zero():
    env = MLGymWrapper([Shell("a"), Shell("b")])
    td = answered(env, env.reset(), run("crash"), run("ls"))["next"]
    assert [math.isnan(value) for value in td["reward"].flatten().tolist()] == [True, False]
    assert td["truncated"].flatten().tolist() == [True, False]
    assert "the container is gone" in env.first_error


def test_a_partial_reset_gives_the_free_gym_and_leaves_the_other_conversation():
    shells = [Shell("a"), Shell("b")]
    env = MLGymWrapper(shells)
    _, root = env.step_and_maybe_reset(ScriptedPolicy([run("submit"), run("ls")])(env.reset()))
    assert [shell.resets for shell in shells] == [2, 1]
    assert [len(chat) for chat in root["history"].prompt.to_chats()] == [2, 4]
    with pytest.raises(RolloutError, match="1 must start, but 0 of 2 are free"):
        env.reset(TensorDict(batch_size=[1]))
    ended = answered(env, root, run("submit"), run("submit"))
    late = answered(env, env.step_mdp(ended), run("ls"), run("ls"))["next"]
    assert late["reward"].isnan().all()
    assert [shell.commands for shell in shells] == [["submit"], ["ls", "submit"]]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_the_stream_of_ids_goes_on_in_every_mode(mode):
    env = MLGymWrapper(Shell(), tokenizer=TOKENIZER, input_mode=mode)
    policy = fake_policy(TOKENIZER, [run("ls"), run("submit")], input_mode=mode)
    engine = policy.engine
    first = env.step(policy(env.reset()))
    second = env.step(policy(env.step_mdp(first)))
    [before] = first.get(("tokens", "full"), as_list=True)
    assert torch.equal(engine.prompts[1][: len(before)], before)
    assert TOKENIZER.decode(engine.prompts[1][len(before) :]).count("ran ls") == 1
    assert second["next", "reward"].item() == 0.75


def test_the_specs_are_kept_and_closing_closes_the_gyms():
    shells = [Shell("a"), Shell("b")]
    env = MLGymWrapper(shells)
    check_env_specs(env, policy=ScriptedPolicy([run("ls")]))
    env.close()
    assert all(shell.closed for shell in shells)


@pytest.fixture
def mlgym(monkeypatch):
    """A package of that name with what `make_mlgym` uses of the real one."""
    made = []

    class EnvironmentArguments:
        def __init__(self, task_config_path, max_steps, seed, container_type, verbose):
            made.append(self)
            self.task_config_path, self.max_steps, self.seed = task_config_path, max_steps, seed
            self.task = SimpleNamespace(id=task_config_path.removeprefix("tasks/").removesuffix(".yaml"))

    def register_task(arguments):
        def entry(devices):
            shell = Shell(arguments.task.id, arguments.max_steps)
            shell.devices = devices
            return shell

        gymnasium.register(id=f"mlgym/{arguments.task.id}", entry_point=entry, nondeterministic=True)

    package, environment = ModuleType("mlgym"), ModuleType("mlgym.environment")
    env, registration = ModuleType("mlgym.environment.env"), ModuleType("mlgym.environment.registration")
    env.EnvironmentArguments, registration.register_task = EnvironmentArguments, register_task
    for module in (package, environment, env, registration):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield made
    for name in [name for name in gymnasium.registry if name.startswith("mlgym/")]:
        del gymnasium.registry[name]


def test_the_tasks_of_the_package_are_made_by_name(mlgym):
    env = make_mlgym(tasks=["prisonersDilemma", "titanic"], max_steps=4, reward_wrong_format=-1.0)
    td = env.reset()
    asked = [chat[-1]["content"] for chat in td["history"].prompt.to_chats()]
    assert asked == ["Solve prisonersDilemma.", "Solve titanic."]
    assert [arguments.task_config_path for arguments in mlgym] == ["tasks/prisonersDilemma.yaml", "tasks/titanic.yaml"]
    assert {arguments.max_steps for arguments in mlgym} == {4}
    assert [gym.devices for gym in env.turns.gyms] == [["cpu_0"], ["cpu_1"]]
    assert answered(env, td, run("submit"), "what?")["next", "reward"].flatten().tolist() == [0.75, -1.0]
    group = make_mlgym(tasks=["titanic"] * 3, max_steps=7)
    assert group.batch_size == (3,)
    assert {gym.max_steps for gym in group.turns.gyms} == {7}
    assert make_mlgym(task="titanic").batch_size == (1,)


def test_a_gym_that_does_not_say_its_task_is_a_failure():
    shell = Shell()
    del shell.task_args
    env = MLGymWrapper(shell)
    assert answered(env, env.reset(), run("ls"))["next", "reward"].isnan().all()
    assert "must say what its task is" in env.first_error


ONE = "give one task, or a list of tasks"
test_gyms_and_tasks_that_cannot_be_used_are_refused = refusals(
    (ConfigError, "at least one gym with reset and step", lambda: MLGymWrapper([])),
    (ConfigError, ONE, make_mlgym),
    (ConfigError, ONE, lambda: make_mlgym(task="a", tasks=["b"])),
    (ConfigError, ONE, lambda: make_mlgym(tasks=[])),
    (ConfigError, ONE, lambda: make_mlgym(tasks="titanic")),
    (MissingDependencyError, r"github\.com/facebookresearch/MLGym", lambda: make_mlgym(task="titanic")),
)
