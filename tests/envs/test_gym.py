"""gymnasium's own numbers are the reference: the same seed and actions give the same trajectory."""

import contextlib

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from llmrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from llmrl.envs import GymEnv, GymWrapper, ParallelEnv, StepCounter, TransformedEnv, check_env_specs
from llmrl.errors import ConfigError, ShapeError, UnsupportedError
from tests.support.refusals import refusals

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Speed(spaces.Box):
    """A user's own space has the spec of the one that it inherits from."""


INSIDE = spaces.Dict({"speed": Speed(-1, 1, (2,)), "gear": spaces.Discrete(3, start=5)})
NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 3), np.uint8),
        "pair": spaces.Tuple((spaces.MultiBinary(4), spaces.Box(-np.inf, np.inf, (1,), np.float64))),
        "many": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "inside": INSIDE,
        "text": spaces.Text(5, charset="ab"),
    }
)


class Echo(gymnasium.Env):
    """Draws observations; keeps the actions that it took. The reward is the step; ends at step 4."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space, self.taken, self.closed = observation_space, action_space, [], False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.time += 1
        return self.observation_space.sample(), self.time, self.time == 4, False, {}

    def close(self):
        self.closed = True


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "FrozenLake-v1"])
def test_specs_hold_along_random_runs_and_under_a_transform(name, categorical):
    env = GymEnv(name, categorical_action_encoding=categorical)
    for seed in range(3):
        check_env_specs(env, seed=seed, break_when_any_done="both", return_contiguous=True)
        check_env_specs(TransformedEnv(env, StepCounter(2)), seed=seed, break_when_any_done="both")


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_has_the_numbers_of_gymnasium(name, categorical):
    env, plain = GymEnv(name, categorical_action_encoding=categorical), gymnasium.make(name)
    env.set_seed(7)
    td = env.rollout(12, break_when_any_done=False)
    observation, _ = plain.reset(seed=7)
    for step in range(12):
        assert td["observation"][step].tolist() == observation.tolist()
        action = td["action"][step]
        action = action.numpy() if name == "Pendulum-v1" else int(action if categorical else action.argmax())
        observation, reward, terminated, truncated, _ = plain.step(action)
        next_td = td["next"][step]
        assert next_td["observation"].tolist() == observation.tolist()
        assert next_td["reward"].tolist() == [pytest.approx(reward)]
        flags = [next_td[key].item() for key in ("terminated", "truncated", "done")]
        assert flags == [terminated, truncated, terminated or truncated]
        if terminated or truncated:
            observation, _ = plain.reset()
    assert (td["observation"].dtype, td["next", "reward"].shape) == (torch.float32, (12, 1))


def test_a_time_limit_truncates_and_a_fall_terminates():
    env = GymEnv("CartPole-v1", max_episode_steps=3)
    next_td = env.rollout(5)["next"]
    assert next_td["truncated"].flatten().tolist() == [False, False, True]
    assert not next_td["terminated"].any()
    always_left = GymEnv("CartPole-v1").rollout(100, policy=lambda td: td.set("action", torch.tensor([1, 0])))["next"]
    assert always_left["terminated"][-1]
    assert not always_left["truncated"].any()


def test_the_spaces_become_specs():
    env = GymWrapper(Echo(NESTED, INSIDE), device="cpu")
    spec = env.observation_spec
    assert spec["image"] == Bounded(0, 255, (2, 3), dtype=torch.uint8)
    assert spec["pair", "0"] == Binary(4)
    assert spec["pair", "1"] == Unbounded(1, dtype=torch.float64)
    assert spec["many"] == MultiOneHot([2, 3], dtype=torch.int64)
    assert spec["inside", "gear"] == OneHot(3, dtype=torch.int64)
    assert set(env.action_keys) == {("action", "speed"), ("action", "gear")}
    numbers = GymWrapper(Echo(NESTED, INSIDE), categorical_action_encoding=True)
    assert numbers.observation_spec["many"] == MultiCategorical([2, 3])
    assert numbers.action_spec["action", "gear"] == Categorical(3)
    assert isinstance(env.action_spec, Composite)


@pytest.mark.parametrize("categorical", [False, True])
def test_nested_observations_and_actions_go_in_and_out(categorical):
    plain = Echo(NESTED, INSIDE)
    env = GymWrapper(plain, categorical_action_encoding=categorical)
    check_env_specs(env, seed=1, break_when_any_done="both")
    env.set_seed(3)
    td = env.reset()
    twin = Echo(NESTED, INSIDE)
    expected, _ = twin.reset(seed=3)
    assert td["image"].tolist() == expected["image"].tolist()
    assert td["pair", "0"].tolist() == expected["pair"][0].tolist()
    assert td["pair", "1"].dtype == torch.float64
    assert td["text"] == expected["text"]
    many, gear = td["many"], td["inside", "gear"]
    if not categorical:
        many, gear = torch.stack([many[:2].argmax(), many[2:].argmax()]), gear.argmax()
    assert (many + torch.tensor([1, 0])).tolist() == expected["many"].tolist()
    assert gear.item() + 5 == expected["inside"]["gear"]
    plain.taken.clear()
    gear = torch.tensor(2) if categorical else torch.tensor([0.1, 0.2, 3.0])  # scores: the largest counts
    td["action"] = TensorDict(speed=torch.tensor([0.5, -0.25]), gear=gear)
    env.step(td)
    assert (plain.taken[0]["gear"], plain.taken[0]["speed"].tolist()) == (7, [0.5, -0.25])


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.MultiDiscrete([2, 3], start=[1, 0]), torch.tensor([0, 1, 0, 0, 1]), [2, 2]),
        (spaces.MultiBinary(3), torch.tensor([1, 0, 1], dtype=torch.int8), [1, 0, 1]),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), None, (1, 2)),
    ],
)
def test_actions_of_several_parts(space, action, expected):
    plain = Echo(spaces.Box(-1, 1, (1,)), space)
    env = GymWrapper(plain)
    check_env_specs(env, break_when_any_done="both")
    td = env.reset()
    if action is None:
        action = TensorDict({"0": torch.tensor([0, 1]), "1": torch.tensor([0, 0, 1])})
    env.step(td.set("action", action))
    assert [int(part) for part in plain.taken[-1]] == list(expected)


def test_what_an_env_hands_out_is_not_written_again():
    class InPlace(Echo):
        def step(self, action):
            self.state += 1
            return self.state, 0.0, False, False, {}

        def reset(self, **kwargs):
            super().reset(**kwargs)
            self.state = np.zeros(2, np.float32)
            return self.state, {}

    td = GymWrapper(InPlace(spaces.Box(-9, 9, (2,)), spaces.Discrete(2))).rollout(3)
    assert td["observation"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_frame_skip_adds_rewards_up_to_the_end_of_the_episode():
    plain = Echo(spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
    td = GymWrapper(plain, frame_skip=3).rollout(10)
    assert td["next", "reward"].flatten().tolist() == [6.0, 4.0]  # 1 + 2 + 3, then 4 ends it
    assert td["next", "done"].flatten().tolist() == [False, True]


def test_pixels_replace_the_observation_or_stand_beside_it():
    env = GymEnv("CartPole-v1", from_pixels=True)
    assert list(env.observation_spec.keys()) == ["pixels"]
    td = env.rollout(2)
    assert (td["pixels"].shape, td["pixels"].dtype) == ((2, 400, 600, 3), torch.uint8)
    assert td["pixels"].float().std() > 1  # a cart on white
    both = GymEnv("CartPole-v1", from_pixels=True, pixels_only=False)
    check_env_specs(both)
    both.set_seed(0)
    assert both.reset()["observation"].tolist() == gymnasium.make("CartPole-v1").reset(seed=0)[0].tolist()
    env.close()
    both.close()


def test_the_seed_is_for_the_next_reset_and_close_closes_once():
    plain = Echo(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    env = GymWrapper(plain)
    env.set_seed(1)
    first, second = env.reset()["observation"], env.reset()["observation"]
    assert not first.equal(second)
    env.set_seed(1)
    assert env.reset()["observation"].equal(first)
    env.close()
    env.close()
    assert plain.closed
    assert env.is_closed


def arrays(env):
    """Arrays for the entries that a process of a `ParallelEnv` reads and writes."""
    parts = (["action"], ["observation", "reward", "done"])
    specs = [[env._get_spec(part) for part in names] for names in parts]
    return [{key: spec[key].zero().numpy() for spec in group for key in spec.leaf_keys} for group in specs]


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_a_step_from_arrays_into_arrays_is_the_step(name, categorical):
    twins = [GymEnv(name, categorical_action_encoding=categorical, frame_skip=2) for _ in range(2)]
    inputs, outputs = arrays(twins[1])
    step = twins[1]._array_step(inputs, outputs)
    for env in twins:
        env.set_seed(3)
    td, _ = (env.reset() for env in twins)
    for _ in range(30):
        td = twins[0].rand_action(td)
        inputs["action"][...] = td["action"].numpy()
        td, root = twins[0].step_and_maybe_reset(td)
        assert step() == td["next", "done"].item()
        for key, array in outputs.items():
            assert td["next", key].equal(torch.from_numpy(array)), key
        if td["next", "done"]:
            assert twins[1].reset()["observation"].equal(root["observation"])
        td = root


def test_a_step_from_arrays_is_left_to_the_step_where_it_would_differ():
    class Doubled(GymEnv):
        def _step(self, td):
            td = super()._step(td)
            return td.set("reward", 2 * td["reward"])

    for env in (Doubled("CartPole-v1"), GymEnv("Blackjack-v1"), GymWrapper(Echo(INSIDE, INSIDE))):
        assert env._array_step(*arrays(env)) is None
    doubled = ParallelEnv(1, Doubled, create_env_kwargs={"env_name": "CartPole-v1"}, mp_start_method="fork")
    with contextlib.closing(doubled) as env:
        assert env.rand_step()["next", "reward"].item() == 2
    short = Echo(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    env = GymWrapper(short)
    env.reset()
    short.observation_space = spaces.Box(-1, 1, (1,))
    with pytest.raises(ShapeError, match=r"must have the shape of its space, \(3,\): got \(1,\)"):
        env._array_step(*arrays(env))()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_what_is_read_and_written():
    env = GymEnv("CartPole-v1", device="cuda")
    check_env_specs(env, break_when_any_done="both")
    assert {value.device.type for value in env.rollout(3).values(True, True)} == {"cuda"}


PAIR = spaces.Discrete(2)
test_what_cannot_be_wrapped_is_refused = refusals(
    (ConfigError, "able to make 'CartPole-v77'.*v1", lambda: GymEnv("CartPole-v77")),
    (ConfigError, "frame_skip", lambda: GymEnv("CartPole-v1", frame_skip=0)),
    (ConfigError, "must be a gymnasium.Env: got str", lambda: GymWrapper("CartPole-v1")),
    (ConfigError, "render_mode='rgb_array'", lambda: GymWrapper(gymnasium.make("CartPole-v1"), from_pixels=True)),
    (UnsupportedError, "observation space must be a Box", lambda: GymWrapper(Echo(spaces.Sequence(PAIR), PAIR))),
    (ConfigError, r"another entry: got \['reward'\]", lambda: GymWrapper(Echo(spaces.Dict(reward=PAIR), PAIR))),
)
