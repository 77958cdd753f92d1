import pytest
import torch
from tensordict import TensorDict

from llmrl.data import Bounded, Composite, Unbounded
from llmrl.envs import (
    Compose,
    EnvBase,
    ExcludeTransform,
    RenameTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    check_env_specs,
)
from llmrl.envs.transforms.rb_transforms import NextStateReconstructor
from llmrl.errors import ConfigError, MissingKeyError
from tests.support.refusals import refusals


class Echo(EnvBase):
    """The observation is the action; the reward is 1."""

    goal = 42

    def __init__(self, num_rows: int = 2):
        super().__init__(batch_size=(num_rows,), batch_locked=False)
        shape = (num_rows, 1)
        self.observation_spec = Composite(seen=Unbounded(shape), shape=(num_rows,))
        self.action_spec = Bounded(-1.0, 1.0, shape=shape)
        self.reward_spec = Unbounded(shape)

    def _reset(self, td):
        batch_size = self.batch_size if td is None else td.batch_size
        return TensorDict(seen=torch.zeros(*batch_size, 1), batch_size=batch_size)

    def _step(self, td):
        return TensorDict(seen=td["action"], reward=torch.ones_like(td["action"]), batch_size=td.batch_size)


class Log(Transform):
    """Writes down which of its hooks ran."""

    def __init__(self, name: str, log: list[str]):
        super().__init__()
        self.name, self.log = name, log


def logging(hook):
    def run(self, *given):
        self.log.append(f"{self.name}.{hook}")
        return given[-1]

    return run


for hook in ("_call", "_step", "_reset", "_reset_env_preprocess", "forward", "inv"):
    setattr(Log, hook, logging(hook))


class Scale(Transform):
    """Multiplies observations by ``factor``, divides actions by it."""

    def __init__(self, factor: float):
        super().__init__(in_keys=["seen"], in_keys_inv=["action"])
        self.factor = factor

    def _apply_transform(self, value):
        return value * self.factor

    def _inv_apply_transform(self, value):
        return value / self.factor


def act(env, value: float = 1.0):
    td = env.reset()
    return td.set("action", torch.full((*td.batch_size, 1), value))


def test_hooks_run_in_the_order_appended_and_inv_in_the_opposite_one():
    log: list[str] = []
    env = TransformedEnv(Echo(), Compose(Log("a", log), Log("b", log)))
    td = act(env)
    assert log == ["a._reset_env_preprocess", "b._reset_env_preprocess", "a._reset", "b._reset"]
    log.clear()
    env.step(td)
    assert log == ["b.inv", "a.inv", "a._step", "b._step"]
    log.clear()
    env.transform(td)
    env.transform.inv(td)
    assert log == ["a.forward", "b.forward", "b.inv", "a.inv"]


def test_entries_are_mapped_on_the_way_out_and_actions_on_the_way_in():
    env = Echo().append_transform(Scale(10.0)).append_transform(Scale(3.0))
    td = env.step(act(env, 6.0))
    assert td["action"].flatten().tolist() == [6.0, 6.0]  # the caller's td keeps the action it wrote
    assert td["next", "seen"].flatten().tolist() == pytest.approx([6.0, 6.0])
    last = Echo().append_transform(Transform(in_keys=["seen"], out_keys=["copy"]))
    assert last.step(act(last, 2.0))["next", "copy"].flatten().tolist() == [2.0, 2.0]


def test_a_key_that_is_absent_is_an_error_at_a_step_but_not_at_a_reset():
    class Negate(Transform):
        def _apply_transform(self, value):
            return -value

    env = Echo().append_transform(Negate(in_keys=["reward"]))
    assert env.step(act(env))["next", "reward"].eq(-1).all()  # the reset had no reward
    wrong = Echo().append_transform(Negate(in_keys=["rewrad"]))
    with pytest.raises(MissingKeyError, match=r"Negate: reads 'rewrad'.*keys present: 'done', 'reward', 'seen'"):
        wrong.step(act(wrong))


def test_a_hook_that_forgets_its_return_is_named():
    class Forgets(Transform):
        def _step(self, td, next_td):
            next_td["reward"] = next_td["reward"] + 1

    env = Echo().append_transform(Forgets())
    with pytest.raises(ConfigError, match=r"Forgets._step: must return next_td, got None"):
        env.step(act(env))


def test_an_inv_that_holds_rows_back_belongs_in_a_buffer():
    class Holds(Transform):
        def inv(self, td):
            return None

    assert Compose(Holds(), Transform()).inv(TensorDict()) is None
    env = Echo().append_transform(Holds())
    with pytest.raises(ConfigError, match="belongs in a replay buffer"):
        env.step(act(env))


def test_specs_pass_through_the_transforms_in_order_and_are_kept():
    calls = []

    class Declares(Transform):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def transform_observation_spec(self, observation_spec):
            calls.append(self.name)
            observation_spec[self.name] = Unbounded((2, 1))
            return observation_spec

        def transform_reward_spec(self, reward_spec):
            reward_spec["reward"] = Unbounded((2, 7, 1))
            return reward_spec

    base = Echo()
    env = TransformedEnv(base, Declares("a"))
    assert list(env.observation_spec.keys()) == ["seen", "a"]
    assert env.observation_spec is env.observation_spec
    assert calls == ["a"]
    env.append_transform(Declares("b"))
    assert (list(env.observation_spec.keys()), env.reward_spec.shape) == (["seen", "a", "b"], (2, 7, 1))
    assert base.reward_spec.shape == (2, 1)
    base.observation_spec = Composite(other=Unbounded((2, 1)), shape=(2,))
    assert list(env.observation_spec.keys()) == ["other", "a", "b"]
    with pytest.raises(RuntimeError, match="locked"):
        env.observation_spec["c"] = None
    with pytest.raises(ConfigError, match="set reward_spec on base_env"):
        env.reward_spec = Unbounded((2, 1))


def test_append_and_insert_place_transforms():
    first, second, third = Transform(), Transform(), Transform()
    env = TransformedEnv(Echo(), second)
    assert env.append_transform(third) is env
    assert env.insert_transform(0, first) is env
    assert (list(env.transform), len(env.transform)) == ([first, second, third], 3)
    assert env.transform[1] is second
    assert list(env.transform[1:]) == [second, third]
    with pytest.raises(ConfigError, match="already in it"):
        env.append_transform(second)


def test_a_transform_knows_its_env_and_the_env_below_it():
    first, second, third = Log("1", []), Log("2", []), Log("3", [])
    base = Echo()
    env = TransformedEnv(base, Compose(first, Compose(second, third)))
    assert first.container is second.container is env
    assert first.parent is base
    assert list(second.parent.transform) == [first]
    assert list(third.parent.transform) == [first, second]
    assert third.parent.base_env is base
    assert env.transform.parent is base  # regression: it was the env itself
    assert third.container is env  # looking at a parent moved nothing
    assert Transform().container is None
    assert Transform().parent is None


def test_a_transform_that_reads_its_env_when_it_is_attached_sees_those_before_it_and_no_others():
    """Regression: it saw the transforms that an insertion came before, and not those beside it in a `Compose`."""

    class Reads(Transform):
        def set_container(self, container):
            super().set_container(container)
            self.seen = list(self.parent.observation_spec.keys())

    rename = RenameTransform(["seen"], ["other"])
    for append in (True, False):
        reads = Reads()
        env = TransformedEnv(Echo(), None if append else rename.clone())
        if append:
            env.append_transform(Compose(rename.clone(), reads))
        else:
            env.insert_transform(0, reads)
        assert reads.seen == ["other" if append else "seen"]


def test_a_transform_that_refuses_an_env_is_not_in_it_and_stays_where_it_was():
    env, other = TransformedEnv(Echo(), StepCounter()), TransformedEnv(Echo(), Log("of another", []))
    free, wrong = Transform(), ExcludeTransform("reward")
    for refused, match in ((wrong, "needs its reward"), (Compose(free, other.transform[0]), "belongs to one env")):
        with pytest.raises(ConfigError, match=match):
            env.insert_transform(0, refused)
        assert (len(env.transform), refused.container) == (1, None)
    assert (free.container, other.transform[0].container) == (None, other)
    check_env_specs(env)


def test_a_transform_belongs_to_one_env_and_its_clone_to_none():
    counter = StepCounter(3)
    env = TransformedEnv(Echo(), counter)
    with pytest.raises(ConfigError, match=r"in a TransformedEnv already; append transform.clone\(\)"):
        TransformedEnv(Echo(), counter)
    clone = env.transform.clone()
    assert clone.container is None
    assert clone[0] is not counter
    assert TransformedEnv(Echo(), clone).transform[0].max_steps == 3


def test_public_attributes_come_from_the_base_env():
    env = Echo().append_transform(Transform()).append_transform(Transform())
    assert env.goal == 42
    assert TransformedEnv(env).goal == 42


def test_seed_state_and_close_reach_the_transforms():
    class Counts(Log):
        count = 5

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    for name in ("_set_seed", "close"):
        setattr(Counts, name, lambda self, *given, name=name: self.log.append((name, *given)))
    log = []
    env, other = (TransformedEnv(Echo(), Compose(StepCounter(), Counts("", log))) for _ in range(2))
    env.set_seed(7)
    env.transform[1].count = 9
    other.load_state_dict(env.state_dict())
    assert other.transform[1].count == 9
    env.close()
    env.close()
    assert log == [("_set_seed", 7), ("close",)]
    assert env.base_env.is_closed


def test_the_step_counter_counts_truncates_and_starts_again():
    env = Echo().append_transform(StepCounter(max_steps=3))
    steps = env.rollout(7, lambda td: td.set("action", torch.zeros(2, 1)), break_when_any_done=False)
    assert steps["step_count"][0].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert steps["next", "step_count"][0].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert steps["next", "truncated"][0].flatten().tolist() == [False, False, True, False, False, True, False]
    assert steps["next", "done"].equal(steps["next", "truncated"])
    assert not steps["next", "terminated"].any()
    assert (steps["step_count"].dtype, steps["step_count"].shape) == (torch.int64, (2, 7, 1))


def test_the_step_counter_keeps_what_the_env_said_and_can_leave_done_alone():
    class Cuts(Echo):
        def _step(self, td):
            return super()._step(td).set("truncated", torch.tensor([[True], [False]]))

    env = Cuts().append_transform(StepCounter(max_steps=9))
    assert env.step(act(env))["next", "truncated"].flatten().tolist() == [True, False]
    quiet = Echo().append_transform(
        StepCounter(1, truncated_key="cut", step_count_key=("my", "count"), update_done=False)
    )
    td = quiet.step(act(quiet))
    assert td["next", "cut"].all()
    assert not td["next", "done"].any()
    assert td["next", "my", "count"].flatten().tolist() == [1, 1]
    check_env_specs(quiet)


class CountsBytes(Transform):
    """Writes what no entry of the batch is mapped to."""

    def __init__(self):
        super().__init__(in_keys=[], out_keys=["bytes"])

    def forward(self, td):
        return td.set("bytes", torch.full(td.batch_size, td.bytes()))


def test_a_transform_that_only_writes_works_in_an_env_and_by_itself():
    env = Echo().append_transform(CountsBytes()).append_transform(Transform(in_keys=[], out_keys=["x"]))
    check_env_specs(env)
    assert "bytes" not in env.rollout(2).keys(True)  # forward is not called there
    assert CountsBytes()(TensorDict(a=torch.zeros(2, 3), batch_size=[2]))["bytes"].tolist() == [24, 24]


def stepped(transform):
    """A step, without a reset, of an env with this transform."""
    return Echo().append_transform(transform).step(TensorDict(seen=ONES, action=ONES, batch_size=[2]))


ONES, PRIVATE = torch.ones(2, 1), "_private"
test_what_a_transform_or_its_env_cannot_do_is_refused = refusals(
    (ConfigError, "one key to write per key", lambda: stepped(Transform(in_keys=["seen"], out_keys=["x", "y"]))),
    (ConfigError, "one key to write per key", lambda: stepped(Transform(["seen"], None, ["action"], []))),
    (MissingKeyError, "'step_count'.*env.reset", lambda: stepped(StepCounter())),
    (ConfigError, "at least 1: got 0", lambda: StepCounter(max_steps=0)),
    (ConfigError, "keeps no state", lambda: StepCounter().load_state_dict({"count": 1})),
    (ConfigError, "one entry per transform", lambda: Compose(StepCounter()).load_state_dict({})),
    (ConfigError, r"Compose\.pop: .*transform at 2: got 2", lambda: Compose(Transform(), Transform()).pop(2)),
    (ConfigError, "must be a Transform", lambda: Echo().append_transform(lambda td: td)),
    (ConfigError, "index 0", lambda: Echo().insert_transform(1, Transform())),
    (AttributeError, "'gaol', .*Did you mean 'goal'", lambda: Echo().append_transform(Transform()).gaol),
    (AttributeError, PRIVATE, lambda: getattr(Echo().append_transform(Transform()), PRIVATE)),
)


def test_a_transform_takes_its_entries_by_name():
    double = type("Double", (Transform,), {"_apply_transform": lambda self, value: 2 * value})
    assert double(in_keys=["seen"])(seen=torch.ones(2, 1)).tolist() == [[2.0], [2.0]]
    pair = double(in_keys=["seen", ("next", "seen")], out_keys=["a", "b"])(next_seen=torch.ones(3), seen=torch.zeros(3))
    assert [value.tolist() for value in pair] == [[0.0] * 3, [2.0] * 3]
    ahead = NextStateReconstructor(traj_key=None, done_key=None)(observation=torch.tensor([[1.0], [2.0]]))
    assert ahead.nan_to_num(-1.0).flatten().tolist() == [2, -1]
    with pytest.raises(TypeError, match=r"takes one tensordict, or seen by name: got sen\. Did you mean 'seen'"):
        double(in_keys=["seen"])(sen=torch.ones(2))
    with pytest.raises(MissingKeyError, match="reads 'seen'"):
        double(in_keys=["seen"])()


def test_a_popped_transform_is_detached_and_no_longer_runs_or_declares():
    class Declares(Transform):
        def _call(self, next_td):
            return next_td.set("extra", torch.zeros(*next_td.batch_size, 1))

        def transform_observation_spec(self, observation_spec):
            observation_spec["extra"] = Unbounded((*observation_spec.shape, 1))
            return observation_spec

    nested = Compose(Declares())
    env = Echo().append_transform(Declares()).append_transform(nested)
    assert "extra" in env.observation_spec
    assert env.transform[:1].pop().container is env  # a slice is attached to nothing
    inner = nested.pop()
    assert len(nested) == 0
    assert env.transform.pop(0).container is None
    assert env.transform.pop() is nested
    assert inner.container is nested.container is None
    assert "extra" not in env.observation_spec
    check_env_specs(env)
    env.append_transform(inner)
    env.transform.append(Log("last", []))
    assert "extra" in env.observation_spec


def test_the_step_counter_restarts_only_the_rows_that_are_reset_and_counts_a_subset():
    env = Echo().append_transform(StepCounter(max_steps=2))
    root = env.step_mdp(env.step(act(env)))
    after = env.reset(root.set("_reset", torch.tensor([[True], [False]])))
    assert after["step_count"].flatten().tolist() == [0, 1]
    assert env.step(act(env)[:1].set("step_count", torch.tensor([[1]])))["next", "done"].all()
