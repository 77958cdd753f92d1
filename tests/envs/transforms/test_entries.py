"""Transforms that know no language, on envs and on buffers: values worked out by hand, specs that follow them."""

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from llmrl.data import (
    Bounded,
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    Unbounded,
)
from llmrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    EnvBase,
    ExcludeTransform,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    Resize,
    RewardSum,
    SelectTransform,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    TransformedEnv,
    check_env_specs,
)
from llmrl.errors import ConfigError, MissingKeyError


class Camera(EnvBase):
    """At time t every pixel is 10 * t, ("robot", "speed") is [t, -t], and so is the float64 force plus the action."""

    def __init__(self, num_rows=None, batch_locked=True):
        batch = () if num_rows is None else (num_rows,)
        super().__init__(batch_size=batch, batch_locked=batch_locked)
        low, high = torch.tensor([0.0, -50.0]), torch.tensor([50.0, 0.0])
        robot = Composite(speed=Bounded(low, high, (*batch, 2)), shape=batch)
        self.observation_spec = Composite(
            pixels=Bounded(0, 255, (*batch, 4, 6, 3), dtype=torch.uint8),
            robot=robot,
            force=Unbounded((*batch, 1), dtype=torch.float64),
            time=Bounded(0, 99, (*batch, 1), dtype=torch.int64),
            shape=batch,
        )
        self.action_spec = Bounded(-1.0, 1.0, (*batch, 1), dtype=torch.float64)
        self.reward_spec = Unbounded((*batch, 1))

    def _reset(self, td):
        return self._at(torch.zeros(*(self.batch_size if td is None else td.batch_size), 1, dtype=torch.int64))

    def _step(self, td):
        assert td["action"].dtype == torch.float64
        time = td["time"] + 1
        out = self._at(time, td["action"])
        return out.set("reward", time.float()).set("terminated", time >= 4)

    def _at(self, time, action=0.0):
        batch = time.shape[:-1]
        robot = TensorDict(speed=torch.cat([time, -time], -1).float(), batch_size=batch)
        pixels = (10 * time[..., None, None]).expand(*batch, 4, 6, 3).to(torch.uint8)
        return TensorDict(pixels=pixels, robot=robot, force=time.double() + action, time=time, batch_size=batch)


ALL = [
    lambda: ToTensorImage(),
    lambda: Compose(ToTensorImage(), Resize(3, 2)),
    lambda: Compose(
        ToTensorImage(out_keys="image"), Resize(8, in_keys="image", out_keys="large", interpolation="nearest")
    ),
    lambda: SelectTransform(("robot", "speed"), "time"),
    lambda: ExcludeTransform("robot", "pixels"),
    lambda: RenameTransform([("robot", "speed"), "reward"], ["speed", "gain"], ["action"], ["push"]),
    lambda: RenameTransform(["pixels"], [("camera", "left")], create_copy=True),
    lambda: InitTracker(),
    lambda: TensorDictPrimer(hidden=Unbounded((3,)), counter=Categorical(4)),
    lambda: TensorDictPrimer({"hidden": Unbounded((3,))}, random=True),
    lambda: RewardSum(),
    lambda: ObservationNorm(1.0, 2.0, in_keys=[("robot", "speed")]),
    lambda: ObservationNorm(torch.tensor([1.0, 2.0]), -2.0, [("robot", "speed")], ["norm"], standard_normal=True),
    lambda: CatTensors([("robot", "speed"), "force"], "joined"),
    lambda: CatTensors([("robot", "speed"), ("robot", "speed")], "twice", del_keys=False),
    lambda: DoubleToFloat(),
    lambda: DoubleToFloat(["force"], ["light"]),
    lambda: Compose(DoubleToFloat(), CatTensors([("robot", "speed"), "force"], "joined"), RewardSum(), InitTracker()),
]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("env", [Camera, lambda: Camera(3, False), lambda: SerialEnv(2, Camera)])
def test_the_specs_declare_what_the_env_then_writes(env, make):
    env = TransformedEnv(env(), make())
    check_env_specs(env, break_when_any_done="both", num_steps=6, return_contiguous=True)
    env.append_transform(StepCounter(3))
    check_env_specs(env, break_when_any_done="both", num_steps=6)


def run(transform, steps=2):
    env = TransformedEnv(Camera(), transform)
    key = env.action_key
    return env.rollout(steps, policy=lambda td: td.set(key, torch.zeros(1, dtype=env.action_spec.dtype)))


def test_images_become_fractions_with_the_channels_first():
    td = run(ToTensorImage())
    assert (td["pixels"].shape, td["next", "pixels"].dtype) == ((2, 3, 4, 6), torch.float32)
    assert td["next", "pixels"][1].unique().tolist() == [pytest.approx(20 / 255)]
    image = torch.arange(24).reshape(2, 4, 3)
    out = ToTensorImage(from_int=False, dtype=torch.float64)(TensorDict(pixels=image))["pixels"]
    assert out[1].tolist() == image[..., 1].tolist()
    spec = TransformedEnv(Camera(), ToTensorImage()).observation_spec["pixels"]
    assert spec == Bounded(0.0, 1.0, (3, 4, 6))


def test_resizing_is_that_of_interpolate():
    images = torch.rand(2, 5, 3, 8, 6)
    out = Resize(4, 3)(TensorDict(pixels=images))["pixels"]
    expected = F.interpolate(images.flatten(0, 1), (4, 3), mode="bilinear", antialias=True).unflatten(0, (2, 5))
    assert out.equal(expected)
    corners = torch.tensor([[[0, 255], [100, 7]]], dtype=torch.uint8)
    large = Resize(4, interpolation="nearest")(TensorDict(pixels=corners))["pixels"]
    assert large.tolist() == [[[0, 0, 255, 255]] * 2 + [[100, 100, 7, 7]] * 2]
    assert Resize(1)(TensorDict(pixels=corners))["pixels"].tolist() == [[[90]]]  # 362 / 4 = 90.5, to even
    assert Resize(1)(TensorDict(pixels=corners))["pixels"].dtype == torch.uint8


def test_selecting_keeps_reward_and_done_in_an_env():
    td = run(SelectTransform("time"))
    assert set(td["next"].keys()) == {"time", "reward", "done", "terminated", "truncated"}
    assert list(TransformedEnv(Camera(), SelectTransform("time")).observation_spec.keys()) == ["time"]
    td = run(ExcludeTransform(("robot", "speed"), "pixels"))
    assert not {"pixels", ("robot", "speed")} & {*td.keys(True, True)}
    with pytest.raises(ConfigError, match="an env needs its reward and its done flags"):
        TransformedEnv(Camera(), ExcludeTransform("reward"))


def test_renaming_moves_entries_and_actions():
    renamed = RenameTransform([("robot", "speed"), "reward"], ["speed", "gain"], ["action"], ["push"])
    env = TransformedEnv(Camera(), renamed)
    assert (env.action_keys, env.reward_keys) == (("push",), ("gain",))
    td = env.rollout(2, policy=lambda td: td.set("push", torch.full((1,), 0.5, dtype=torch.float64)))
    assert td["next", "speed"].tolist() == [[1, -1], [2, -2]]
    assert td["next", "gain"].flatten().tolist() == [1, 2]
    assert td["next", "force"].flatten().tolist() == [1.5, 2.5]
    assert not {"robot", "action", "reward"} & {*td.keys(), *td["next"].keys()}
    with pytest.raises(ConfigError, match="needs its done flags"):
        TransformedEnv(Camera(), RenameTransform(["done"], ["terminal"]))
    with pytest.raises(MissingKeyError, match="RenameTransform: reads 'a'"):
        RenameTransform(["a"], ["b"])(TensorDict(c=torch.zeros(1)))


def test_the_first_step_is_marked_also_after_a_reset_on_the_way():
    env = TransformedEnv(SerialEnv(2, Camera), InitTracker())
    td = env.rollout(6, break_when_any_done=False)
    assert td["is_init"][..., 0].tolist() == [[True, False, False, False, True, False]] * 2
    assert not td["next", "is_init"].any()


def test_rewards_add_up_and_start_again():
    env = TransformedEnv(Camera(), RewardSum())
    td = env.rollout(6, break_when_any_done=False)
    assert td["next", "episode_reward"].flatten().tolist() == [1, 3, 6, 10, 1, 3]
    assert td["episode_reward"].flatten().tolist() == [0, 1, 3, 6, 0, 1]
    plain = Camera().rollout(6, break_when_any_done=False)
    batch = torch.stack([plain, plain])
    assert RewardSum()(batch)["next", "episode_reward"].squeeze(-1).tolist() == [[1, 3, 6, 10, 1, 3]] * 2
    with pytest.raises(ConfigError, match="out_keys must name where the sums go"):
        RewardSum(["gain"])


def test_primed_entries_stay_until_the_policy_writes_new_ones():
    primer = TensorDictPrimer({"hidden": Unbounded((2,)), "kept": Unbounded(())}, default_value={"hidden": 5.0})
    env = TransformedEnv(Camera(), primer)

    def policy(td):
        td["next"] = TensorDict(hidden=td["hidden"] + 1)
        return env.rand_action(td)

    td = env.rollout(6, policy=policy, break_when_any_done=False)
    assert td["hidden"][:, 0].tolist() == [5, 6, 7, 8, 5, 6]
    assert td["next", "hidden"][:, 0].tolist() == [6, 7, 8, 9, 6, 7]
    assert td["kept"].tolist() == [0] * 6
    batch = TensorDictPrimer(hidden=Unbounded((2,)))(TensorDict(a=torch.zeros(4), batch_size=[4]))
    assert batch["hidden"].shape == (4, 2)
    drawn = TransformedEnv(Camera(2), TensorDictPrimer(Composite(hidden=Unbounded((2, 3)), shape=(2,)), random=True))
    drawn.set_seed(1)
    first = drawn.reset()["hidden"]
    assert first.shape == (2, 3)
    drawn.set_seed(1)
    assert drawn.reset()["hidden"].equal(first)


def test_normalising_and_its_measured_statistics():
    td = run(ObservationNorm(1.0, 2.0, in_keys=[("robot", "speed")]))
    assert td["next", "robot", "speed"].tolist() == [[3, -1], [5, -3]]
    td = run(ObservationNorm(1.0, 2.0, [("robot", "speed")], standard_normal=True))
    assert td["next", "robot", "speed"].tolist() == [[0, -1], [0.5, -1.5]]
    action = ObservationNorm(1.0, 2.0, [], in_keys_inv=["action"], standard_normal=True)
    assert action.inv(TensorDict(action=torch.tensor([3.0])))["action"].tolist() == [7.0]
    with pytest.raises(ConfigError, match="must be given, or measured"):
        run(ObservationNorm(in_keys=[("robot", "speed")]))
    for standard in (True, False):
        env = TransformedEnv(GymEnv("CartPole-v1"), ObservationNorm(standard_normal=standard))
        env.set_seed(0)
        env.transform[0].init_stats(300)
        env.set_seed(0)
        values = env.rollout(300, break_when_any_done=False)["observation"]
        assert values.mean(0).abs().max() < 1e-5
        assert (values.std(0) - 1).abs().max() < 1e-4
        check_env_specs(env)
        copy = ObservationNorm(standard_normal=standard)
        copy.load_state_dict(env.transform[0].state_dict())
        ones = TensorDict(observation=torch.ones(4))
        assert copy(ones.copy())["observation"].equal(env.transform[0](ones)["observation"])


def test_joining_and_casting():
    td = run(CatTensors([("robot", "speed"), "force"], "joined"))
    assert td["next", "joined"].tolist() == [[1, -1, 1], [2, -2, 2]]
    assert td["next", "joined"].dtype == torch.float64
    assert not {"force", ("robot", "speed")} & {*td["next"].keys(True, True)}
    spec = TransformedEnv(Camera(), CatTensors([("robot", "speed"), ("robot", "speed")], "twice")).observation_spec
    assert spec["twice"] == Bounded(torch.tensor([0.0, -50, 0, -50]), torch.tensor([50.0, 0, 50, 0]), (4,))
    with pytest.raises(MissingKeyError, match="CatTensors: reads 'x'"):
        check_env_specs(TransformedEnv(Camera(), CatTensors(["x"])))
    td = run(DoubleToFloat())
    assert td["next", "force"].dtype == td["action"].dtype == torch.float32
    both = DoubleToFloat()(TensorDict({"a": torch.ones(1).double(), ("b", "c"): torch.ones(1).double()}))
    assert {value.dtype for value in both.values(True, True)} == {torch.float32}


def test_on_a_buffer_they_work_on_samples():
    env = TransformedEnv(Camera(), InitTracker())
    both = [("next", "pixels"), "pixels"]
    transform = Compose(ToTensorImage(in_keys=both), Resize(2, in_keys=both), ExcludeTransform("robot", "force"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform, batch_size=8)
    buffer.extend(env.rollout(12, break_when_any_done=False))
    sample = buffer.sample()
    assert sample["next", "pixels"].shape == (8, 3, 2, 2)
    shown = sample["next", "pixels"][:, 0, 0, 0].mul(255 / 10).round().long()
    assert shown.tolist() == sample["next", "time"][:, 0].tolist()
    assert not {"robot", "force"} & {*sample.keys()}
    assert "robot" in sample["next"].keys()
    written = ReplayBuffer(storage=LazyTensorStorage(20), transform=ExcludeTransform("pixels", inverse=True))
    written.extend(env.rollout(3))
    assert "pixels" not in written[:].keys()
    renamed = ReplayBuffer(storage=LazyTensorStorage(20))
    renamed.append_transform(RenameTransform(["done", ("next", "done")], ["terminal", ("next", "terminal")]))
    renamed.extend(env.rollout(4))
    for _ in range(2):  # what is stored keeps its names
        assert renamed[:]["next", "terminal"].flatten().tolist() == [False, False, False, True]
    assert "done" not in renamed[:]["next"].keys()
