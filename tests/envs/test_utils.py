import random

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict

from llmrl.data import Bounded, Composite, NonTensor, OneHot, Unbounded
from llmrl.envs import EnvBase, RandomPolicy, StepCounter, check_env_specs, make_composite_from_td, step_mdp
from llmrl.errors import ConfigError, MissingKeyError


class Box(TensorClass["nocast"]):
    prompt: torch.Tensor = None
    full: torch.Tensor = None


def stepped() -> TensorDict:
    return TensorDict(
        obs=torch.zeros(2),
        hidden=torch.full((2,), 7.0),
        action=torch.ones(2),
        reward=torch.full((2,), 5.0),
        done=torch.zeros(2, 1),
        agents={"action": torch.ones(2), "memory": torch.full((2,), 3.0), "obs": torch.zeros(2)},
        next=TensorDict(
            obs=torch.ones(2),
            reward=torch.ones(2),
            done=torch.ones(2, 1),
            agents={"obs": torch.ones(2), "reward": torch.ones(2)},
            batch_size=[2],
        ),
        batch_size=[2],
    )


def test_step_mdp_moves_next_to_the_root_and_keeps_what_only_the_root_has():
    td = stepped()
    root = step_mdp(td)
    assert set(root.keys()) == {"obs", "hidden", "action", "done", "agents"}
    assert root["obs"] is td["next", "obs"]
    assert root["hidden"] is td["hidden"]
    assert root["done"].all()
    assert set(root["agents"].keys()) == {"action", "memory", "obs", "reward"}
    assert root["agents", "obs"].eq(1).all()
    assert root["agents", "memory"].eq(3).all()
    assert root.batch_size == (2,)
    assert set(td.keys()) == set(stepped().keys())  # and the input is untouched, at every depth
    assert set(td["next", "agents"].keys()) == {"obs", "reward"}


def test_step_mdp_leaves_out_what_it_is_asked_to():
    td = stepped()
    assert "action" not in set(step_mdp(td, exclude_action=True).keys())
    assert "done" not in set(step_mdp(td, exclude_done=True).keys())
    assert step_mdp(td, exclude_reward=False)["reward"].eq(1).all()
    assert set(step_mdp(td, keep_other=False).keys()) == {"obs", "done", "agents"}
    nested = step_mdp(td, exclude_action=True, action_keys=(("agents", "action"),), reward_keys=(("agents", "reward"),))
    assert set(nested["agents"].keys()) == {"memory", "obs"}
    assert nested["reward"].eq(1).all()


def test_step_mdp_replaces_a_tensorclass_whole():
    now = Box(prompt=torch.zeros(2), full=torch.ones(2), batch_size=[2])
    then = Box(prompt=torch.ones(2), batch_size=[2])
    td = TensorDict(box=now, next=TensorDict(box=then, batch_size=[2]), batch_size=[2])
    root = step_mdp(td, exclude_action=True, action_keys=(("box", "full"),))
    assert root["box"].full is None
    assert root["box"].prompt.eq(1).all()
    ended = step_mdp(td.set("next", TensorDict(batch_size=[2])), exclude_action=True, action_keys=(("box", "full"),))
    assert "box" not in set(ended.keys())


def test_step_mdp_of_a_lazy_stack_is_one_per_row():
    rows = [TensorDict(next=TensorDict(x=torch.arange(n), reward=torch.zeros(1)), y=torch.ones(1)) for n in (1, 3)]
    root = step_mdp(LazyStackedTensorDict(*rows))
    assert [row.tolist() for row in root.get("x", as_list=True)] == [[0], [0, 1, 2]]
    assert set(root.keys()) == {"x", "y"}


def test_step_mdp_without_next_says_what_is_there():
    with pytest.raises(MissingKeyError, match=r"'next'.*keys present: 'obs'; step the env"):
        step_mdp(TensorDict(obs=torch.zeros(1)))


def test_a_composite_made_from_data_holds_that_data():
    rows = LazyStackedTensorDict(*[TensorDict(full=torch.arange(n)) for n in (2, 5)])
    td = TensorDict(
        obs=torch.zeros(2, 3, dtype=torch.float64),
        nested={"flag": torch.ones(2, 1, dtype=torch.bool)},
        text=NonTensorStack("a", "b"),
        one=NonTensorData(3, batch_size=[2]),
        box=Box.from_tensordict(rows),
        batch_size=[2],
    )
    spec = make_composite_from_td(td)
    assert spec.is_in(td), list(spec.mismatches(td))
    assert spec["obs"] == Unbounded((2, 3), dtype=torch.float64)
    assert spec["text"] == NonTensor((2,), example_data="a")
    assert spec["one"].example_data == 3
    assert spec["box"].data_cls is Box
    assert spec["box", "full"].shape == (2, -1)
    assert make_composite_from_td(td, dynamic_shape=True)["obs"].shape == (2, -1)
    jagged = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    assert make_composite_from_td(TensorDict(x=jagged, batch_size=[2]))["x"] == Unbounded((2, -1))
    scalar = TensorDict(x=torch.zeros(()))
    assert make_composite_from_td(scalar)["x"].shape == (1,)
    assert make_composite_from_td(scalar, unsqueeze_null_shapes=False)["x"].shape == ()


class Coin(EnvBase):
    """Draws its observations from every global generator there is. The wrong envs below are this one, broken."""

    def __init__(self):
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite(x=Bounded(0.0, 1.0, shape=(2, 1)), shape=(2,))
        self.action_spec = Bounded(-1.0, 1.0, shape=(2, 1))
        self.reward_spec = Unbounded((2, 1))

    def draw(self):
        return torch.rand(2, 1) * random.random() * float(np.random.rand())

    def _reset(self, td):
        return TensorDict(x=self.draw(), batch_size=[2])

    def _step(self, td):
        x = self.draw()
        return TensorDict(x=x, reward=x, done=torch.tensor([[True], [False]]), batch_size=[2])


class Pairs(EnvBase):
    """Two rows that differ: bounds, numbers of choices, and what is told to them."""

    def __init__(self, shift: float = 0.0):
        super().__init__(batch_size=(2,))
        self.shift = shift
        self.observation_spec = Composite(
            x=torch.stack([Bounded(0.0, 1.0, (1,)), Bounded(5.0, 6.0, (1,))]),
            told=torch.stack([Composite(near=Unbounded((3,))), Composite(near=Unbounded((2,)))]),
            shape=(2,),
        )
        self.action_spec = torch.stack([OneHot(3, mask=torch.tensor([True, False, True])), OneHot(3)])
        self.reward_spec = Unbounded((2, 1))

    def _reset(self, td):
        return self.observation_spec.rand()

    def _step(self, td):
        out = self.observation_spec.rand()
        out["x"] += self.shift
        return out.update({"reward": torch.zeros(2, 1), "done": torch.zeros(2, 1).bool()})


def test_specs_whose_rows_differ_are_checked_row_by_row():
    check_env_specs(Pairs(), break_when_any_done="both")
    with pytest.raises(AssertionError, match=r"next, 'x': entry 0 of the stack: .*\[0.0, 1.0\], got 5"):
        check_env_specs(Pairs(shift=5.0))


@pytest.mark.parametrize("mode", [None, True, False, "both"])
def test_an_env_that_keeps_its_specs_passes(mode):
    check_env_specs(Coin(), break_when_any_done=mode)
    check_env_specs(Coin().append_transform(StepCounter(2)), break_when_any_done=True, return_contiguous=True)


def test_the_check_moves_no_random_state_but_what_it_is_told_to_seed():
    env = Coin()
    env.set_seed(0)
    before = env.rand_action()["action"]
    env.set_seed(0)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    check_env_specs(env, break_when_any_done="both")
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert env.rand_action()["action"].equal(before)
    torch.manual_seed(5)
    check_env_specs(env, seed=11)
    assert torch.rand(1).item() == expected[0]
    again = Coin()
    again.set_seed(11)
    again.rand_action()  # the check took one action: a row is done after the first step
    assert env.rand_action()["action"].equal(again.rand_action()["action"])


def wrong(**entries):
    class Wrong(Coin):
        def _step(self, td):
            td = super()._step(td)
            for key, value in entries.items():
                td = td.exclude(key) if value is None else td.set(key, value)
            return td

    return Wrong()


DOUBLE = torch.zeros(2, 1).double()


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (wrong(reward=None), r"step 0, next, 'reward': .*missing; keys present: .*\(reward_spec\)"),
        (wrong(reward=torch.zeros(2)), r"step 0, next, 'reward': .*\(2, 1\), got \(2,\) \(reward_spec\)"),
        (wrong(x=DOUBLE), r"next, 'x': .*float32, got torch.float64 \(observation_spec\)"),
        (wrong(x=torch.full((2, 1), 2.0)), r"next, 'x': .*\[0.0, 1.0\], got 2.0 at \[0, 0\]"),
        (wrong(done=torch.zeros(2, 3).bool()), r"next, 'done': .*\(2, 1\), got \(2, 3\) \(done_spec\)"),
        (wrong(extra=torch.zeros(2)), r"step 0, next, 'extra': .*no spec declares it"),
        (wrong(reward=None, x=DOUBLE), r"(?s)'reward'.*'x'|'x'.*'reward'"),  # everything at once
    ],
)
def test_an_env_that_breaks_its_specs_is_told_where(env, match):
    with pytest.raises(AssertionError, match=match):
        check_env_specs(env)


def test_the_check_can_leave_dtypes_out():
    check_env_specs(wrong(x=DOUBLE), check_dtype=False)
    with pytest.raises(ConfigError, match="bool or 'both'"):
        check_env_specs(Coin(), break_when_any_done="sometimes")


def test_the_check_takes_a_start_and_a_policy():
    class Asked(Coin):
        def _reset(self, td):
            return TensorDict(x=td["start"], batch_size=[2])

    start = TensorDict(start=torch.full((2, 1), 0.5), batch_size=[2])
    check_env_specs(Asked(), tensordict=start, policy=lambda td: td.set("action", torch.zeros(2, 1)))
    with pytest.raises(AssertionError, match=r"step 0, 'action': declared within \[-1.0, 1.0\], got 3.0"):
        check_env_specs(Asked(), tensordict=start, policy=lambda td: td.set("action", torch.full((2, 1), 3.0)))


def test_a_random_policy_draws_from_the_spec_for_as_many_rows_as_there_are():
    policy = RandomPolicy(OneHot(3, shape=(2, 3)), "move")
    action = policy(TensorDict(batch_size=[2]))["move"]
    assert action.sum(-1).tolist() == [1, 1]
    agent = Composite(turn=OneHot(4, shape=(2, 4)), shape=(2,))
    spec = Composite(move=Bounded(-1.0, 1.0, (2, 1)), agent=agent, shape=(2,))
    policy = RandomPolicy(spec, generator=torch.Generator().manual_seed(0))
    assert policy.out_keys == ["move", ("agent", "turn")]
    td = policy(TensorDict(batch_size=[5]))
    assert (td["move"].shape, td["agent", "turn"].shape) == ((5, 1), (5, 4))
    assert spec[0].is_in(td[0])
    again = RandomPolicy(spec, generator=torch.Generator().manual_seed(0))(TensorDict(batch_size=[5]))
    assert (td == again).all()
