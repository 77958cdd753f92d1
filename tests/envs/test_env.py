import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorClass, TensorDict, TensorDictBase

from llmrl.data import Bounded, Composite, Unbounded
from llmrl.envs import EnvBase
from llmrl.errors import ConfigError, MissingKeyError, RolloutError, ShapeError
from tests.support.refusals import refusals


class Walk(EnvBase):
    """Position += action; the reward is the position; terminated beyond ``goal``. Row i of a reset starts at 10 * i."""

    def __init__(self, num_rows: int = 3, goal: float = 100.0, batch_locked: bool = False):
        super().__init__(batch_size=(num_rows,), batch_locked=batch_locked)
        shape = (num_rows, 1)
        self.goal = goal
        self.observation_spec = Composite(position=Unbounded(shape), shape=(num_rows,))
        self.action_spec = Bounded(-1.0, 1.0, shape=shape)
        self.reward_spec = Unbounded(shape)
        self.resets: list[list[int]] = []

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        batch_size = self.batch_size if td is None else td.batch_size
        self.resets.append(list(batch_size))
        return TensorDict(position=10.0 * torch.arange(batch_size.numel()).reshape(-1, 1), batch_size=batch_size)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        position = td["position"] + td["action"]
        return TensorDict(position=position, reward=position, terminated=position > self.goal, batch_size=td.batch_size)


def act(value: float):
    return lambda td: td.set("action", torch.full((*td.batch_size, 1), value))


def test_step_writes_next_and_nothing_else():
    env = Walk()
    td = act(2.0)(env.reset())
    before = {key: value for key, value in td.items()}
    out = env.step(td)
    assert out is td
    assert {key: td[key] for key in before} == before  # the same tensor objects
    assert set(td.keys()) == {*before, "next"}
    assert td["next", "position"].flatten().tolist() == [2.0, 12.0, 22.0]
    assert td["next", "reward"].flatten().tolist() == [2.0, 12.0, 22.0]


@pytest.mark.parametrize(
    ("given", "done", "terminated", "truncated"),
    [
        ({}, False, False, False),
        ({"terminated": True}, True, True, False),
        ({"truncated": True}, True, False, True),
        ({"done": True}, True, True, False),
        ({"done": True, "truncated": True}, True, False, True),
        ({"done": True, "terminated": True}, True, True, False),
        ({"done": True, "terminated": False}, True, False, True),
        ({"terminated": True, "truncated": True}, True, True, True),
        ({"done": False, "terminated": True, "truncated": True}, False, True, True),  # what the env says is left alone
    ],
)
def test_the_done_flags_that_an_env_leaves_out_are_filled_in(given, done, terminated, truncated):
    class Flags(Walk):
        def _step(self, td):
            flags = {key: torch.full((3, 1), value) for key, value in given.items()}
            return TensorDict(flags, batch_size=[3])

    td = act(0.0)(Flags().reset())
    next_td = Flags().step(td)["next"]
    for key, expected in (("done", done), ("terminated", terminated), ("truncated", truncated)):
        assert next_td[key].tolist() == [[expected]] * 3, key
        assert next_td[key].dtype == torch.bool
        assert td[key].tolist() == [[False]] * 3  # as a reset leaves it


def test_what_a_policy_put_under_next_stays_unless_the_env_writes_it():
    env = Walk()
    td = act(1.0)(env.reset())
    td["next"] = TensorDict(hidden=torch.ones(3, 5), reward=torch.zeros(3, 1), batch_size=[3])
    td = env.step(td)
    assert td["next", "hidden"].eq(1).all()
    assert td["next", "reward"].flatten().tolist() == [1.0, 11.0, 21.0]
    assert env.step_mdp(td)["hidden"].eq(1).all()


@pytest.mark.parametrize("batch_locked", [True, False])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_partial_reset_restarts_the_masked_rows_and_leaves_the_others(batch_locked, shape):
    env = Walk(batch_locked=batch_locked)
    td = env.step_mdp(env.step(act(0.5)(env.reset())))
    td["_reset"] = torch.tensor([False, True, True]).reshape(shape)
    td["carried"] = torch.arange(3)
    after = env.reset(td)
    if batch_locked:  # the env saw all rows, and the mask
        assert after["position"].flatten().tolist() == [0.5, 10.0, 20.0]
        assert env.resets == [[3], [3]]
    else:  # the env saw a batch of two
        assert after["position"].flatten().tolist() == [0.5, 0.0, 10.0]
        assert env.resets == [[3], [2]]
    assert after["carried"].tolist() == [0, 1, 2]
    assert "_reset" not in set(after.keys())
    assert td["position"].flatten().tolist() == [0.5, 10.5, 20.5]  # the caller's is untouched


def test_a_reset_of_no_row_changes_nothing_and_of_all_rows_is_a_full_one():
    env = Walk()
    td = env.step_mdp(env.step(act(0.5)(env.reset())))
    none = env.reset(td.copy().set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
    assert none["position"].flatten().tolist() == [0.5, 10.5, 20.5]
    assert len(env.resets) == 1
    whole = env.reset(td.copy().set("_reset", torch.ones(3, 1, dtype=torch.bool)))
    assert whole["position"].flatten().tolist() == [0.0, 10.0, 20.0]


def test_a_partial_reset_needs_the_values_that_the_other_rows_keep():
    env = Walk()
    mask = TensorDict(_reset=torch.tensor([[True], [False], [False]]), batch_size=[3])
    with pytest.raises(MissingKeyError, match=r"Walk.reset: .* must hold 'position'"):
        env.reset(mask)
    locked = Walk(batch_locked=True)
    assert locked.reset(mask)["position"].flatten().tolist() == [0.0, 10.0, 20.0]  # it has them itself
    with pytest.raises(ShapeError, match="one entry per row"):
        env.reset(mask.copy().set("_reset", torch.ones(3, 2, dtype=torch.bool)))


def test_reset_carries_what_it_was_given_and_hands_it_to_the_env():
    class Query(Walk):
        def _reset(self, td):
            return TensorDict(position=td["start"] * 1.0, batch_size=td.batch_size)

    given = TensorDict(start=torch.tensor([[4], [5]]), next=TensorDict(batch_size=[2]), batch_size=[2])
    td = Query().reset(given)
    assert td["start"].tolist() == [[4], [5]]
    assert td["position"].tolist() == [[4.0], [5.0]]
    assert "next" not in set(td.keys())
    assert "position" not in set(given.keys())


def test_an_unlocked_env_steps_any_rows_and_a_locked_one_refuses():
    env = Walk()
    td = act(1.0)(env.reset())
    some = env.step(td[torch.tensor([True, False, True])])
    assert some["next", "position"].flatten().tolist() == [1.0, 21.0]
    assert env.rand_step(td[:2])["next"].batch_size == (2,)
    locked = Walk(batch_locked=True)
    for call in (locked.step, locked.reset):
        with pytest.raises(ShapeError, match=r"its own batch size only: got \(2,\), expected \(3,\)"):
            call(td[:2])


def test_step_and_maybe_reset_restarts_only_the_rows_that_are_done():
    env = Walk(goal=20.5)
    td, root = env.step_and_maybe_reset(act(1.0)(env.reset()))
    assert td["next", "position"].flatten().tolist() == [1.0, 11.0, 21.0]
    assert td["next", "done"].flatten().tolist() == [False, False, True]
    assert root["position"].flatten().tolist() == [1.0, 11.0, 0.0]
    assert not root["done"].any()
    assert not root["terminated"].any()
    assert not {"reward", "action", "next", "_reset"} & set(root.keys())


class Words(TensorClass["nocast"]):
    tokens: torch.Tensor = None


class Ragged(EnvBase):
    """Keeps a ragged tensorclass and texts: each step appends one token; a row ends when it has ``limit``."""

    def __init__(self, limit: int = 3):
        super().__init__(batch_size=(3,), batch_locked=False)
        self.limit = limit

    def _reset(self, td):
        num_rows = 3 if td is None else len(td)
        names = NonTensorStack(*[f"fresh {row}" for row in range(num_rows)])
        return TensorDict(words=words([[0]] * num_rows), name=names, batch_size=[num_rows])

    def _step(self, td):
        rows = [[*row.tolist(), 1] for row in td["words"].get("tokens", as_list=True)]
        done = torch.tensor([[len(row) >= self.limit] for row in rows])
        name = NonTensorStack(*[f"row of {len(row)}" for row in rows])
        return TensorDict(words=words(rows), name=name, done=done, batch_size=td.batch_size)


def words(rows: list[list[int]]) -> Words:
    return Words.from_tensordict(LazyStackedTensorDict(*[TensorDict(tokens=torch.tensor(row)) for row in rows]))


def tokens(td: TensorDictBase) -> list[list[int]]:
    return [row.tolist() for row in td["words"].get("tokens", as_list=True)]


def test_ragged_containers_and_texts_step_and_restart_row_by_row():
    env = Ragged()
    td = env.reset()
    td["words"] = words([[0], [0, 5], [0, 5, 5]])
    td, root = env.step_and_maybe_reset(td)
    assert tokens(td["next"]) == [[0, 1], [0, 5, 1], [0, 5, 5, 1]]
    assert tokens(root) == [[0, 1], [0], [0]]
    assert list(root["name"]) == ["row of 2", "fresh 0", "fresh 1"]
    assert isinstance(root["words"], Words)
    assert tokens(td) == [[0], [0, 5], [0, 5, 5]]
    steps = Ragged(limit=4).rollout(9, policy=lambda td: td)
    assert (steps.batch_size, steps.names) == ((3, 3), [None, "time"])  # a lazy stack
    assert tokens(steps[:, 2]["next"]) == [[0, 1, 1, 1]] * 3


def test_a_rollout_stacks_time_last_and_stops_at_the_first_done():
    env = Walk(goal=22.5)
    steps = env.rollout(10, act(1.0))
    assert (steps.batch_size, steps.names[-1]) == ((3, 3), "time")
    assert steps["position"][..., 0].tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert steps["next", "done"][..., 0].tolist() == [[False] * 3, [False] * 3, [False, False, True]]
    assert not isinstance(steps, LazyStackedTensorDict)
    assert (steps[:, 1:]["position"] == steps[:, :-1]["next", "position"]).all()


def test_a_rollout_goes_on_over_resets_or_until_every_row_was_done():
    env = Walk(goal=21.5)
    steps = env.rollout(5, act(1.0), break_when_any_done=False)
    assert steps["position"][2].flatten().tolist() == [20, 21, 0, 1, 2]
    assert steps["position"][0].flatten().tolist() == [0, 1, 2, 3, 4]
    until_all = Walk(goal=21.5).rollout(50, act(4.0), break_when_any_done=False, break_when_all_done=True)
    assert until_all.batch_size == (3, 6)  # row 0 passes 21.5 with its sixth step, to 24
    assert until_all["next", "done"][:, -1].all()


def test_a_rollout_from_a_tensordict_with_a_callback_and_random_actions():
    env = Walk()
    seen = []
    td = env.reset().set("position", torch.full((3, 1), 7.0))
    steps = env.rollout(2, callback=lambda e, td: seen.append((e, td)), auto_reset=False, tensordict=td)
    assert steps["position"][:, 0].eq(7.0).all()
    assert [e for e, _ in seen] == [env, env]
    assert "next" not in set(td.keys())
    assert "action" not in set(td.keys())
    assert steps["action"].abs().max() <= 1


def test_a_rollout_casts_to_the_policy_s_device_and_back():
    policy = torch.nn.Linear(1, 1)
    seen = []
    policy.forward = lambda td: (seen.append(td.device), act(0.0)(td))[1]
    env = Walk().to("cpu")
    steps = env.rollout(2, policy, auto_cast_to_device=True)
    assert seen == [torch.device("cpu")] * 2
    assert steps["next", "position"].shape == (3, 2, 1)


def test_the_seed_fixes_random_actions_and_names_the_next_seed():
    env = Walk()
    next_seed = env.set_seed(3)
    first = env.rollout(4)["action"]
    torch.rand(5)  # the global generator plays no part
    assert env.set_seed(3) == next_seed != 3
    assert env.rollout(4)["action"].equal(first)
    state = env.state_dict()
    later = env.rand_action()["action"]
    other = Walk()
    other.load_state_dict(state)
    assert other.rand_action()["action"].equal(later)
    assert env.set_seed(3, static_seed=True) == 3


def step_returning(value):
    """A step of an env whose _step returns ``value(td)``."""
    env = type("Wrong", (Walk,), {"_step": lambda self, td: value(td)})()
    return env.step(act(0.0)(env.reset()))


UNTYPED = TensorDict(done=torch.zeros(3, 1), batch_size=[3])
test_wrong_steps_rollouts_and_specs_are_named = refusals(
    (MissingKeyError, "Walk.step: .*'action'.*keys present: 'done', 'position'", lambda: Walk().step(Walk().reset())),
    (RolloutError, "got None", lambda: step_returning(lambda td: None)),
    (RolloutError, "the tensordict it was given", lambda: step_returning(lambda td: td)),
    (RolloutError, "Wrong._step: 'done' must be bool", lambda: step_returning(lambda td: UNTYPED)),
    (ConfigError, "auto_reset=False", lambda: Walk().rollout(2, auto_reset=False)),
    (ConfigError, "at least 1", lambda: Walk().rollout(0)),
    (RuntimeError, "locked", lambda: Walk().observation_spec.set("x", Unbounded((3,)))),
    (ShapeError, r"Composite's, \(3,\)", lambda: setattr(Walk(), "action_spec", Bounded(-1.0, 1.0, shape=(1,)))),
    (ConfigError, "must be a Composite", lambda: setattr(Walk(), "observation_spec", Unbounded((3,)))),
)


def test_specs_are_read_as_leaf_or_whole_and_are_locked():
    env = Walk()
    assert env.action_spec == Bounded(-1.0, 1.0, shape=(3, 1))
    assert list(env.full_action_spec.keys()) == ["action"]
    assert env.action_keys == ("action",) == (env.action_key,)
    assert env.reward_keys == ("reward",)
    assert set(env.done_keys) == {"done", "terminated", "truncated"}
    assert env.done_spec["done"].shape == (3, 1)
    assert env.state_spec.is_empty()
    env.action_spec = Composite(left=Unbounded((3, 1)), right=Unbounded((3, 1)))
    assert (env.action_keys, env.action_spec.shape) == (("left", "right"), (3,))
    with pytest.raises(ConfigError, match="there must be one action"):
        env.action_key  # noqa: B018
    with pytest.raises(MissingKeyError, match="'left'"):
        env.step(act(0.0)(env.reset()))
