"""SerialEnv and ParallelEnv: one answer from both, for every kind of env, and clear errors from processes that fail."""

import functools
import os
import pickle
import subprocess
import sys
import time

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from llmrl.data import Bounded, Composite, NonTensor, Unbounded
from llmrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from llmrl.errors import ConfigError, DeadlineError, WorkerError
from tests.support.counting_env import CountingEnv
from tests.support.processes import is_running, wait_until
from tests.support.refusals import refusals

Forked = functools.partial(ParallelEnv, mp_start_method="fork", timeout_s=20.0)
KINDS = {"serial": SerialEnv, "parallel": Forked}


@pytest.fixture(params=KINDS)
def batch(request):
    """Makes a batched env of the kind that is tested, and closes it."""
    made = []

    def make(*args, **kwargs):
        made.append(KINDS[request.param](*args, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


class Count(EnvBase):
    """Counts from ``start`` up by the action; terminates at ``limit``."""

    def __init__(self, start=0.0, limit=1e9, size=1, batch_size=(), **options):
        super().__init__(batch_size=batch_size, **options)
        shape = (*batch_size, size)
        self.start, self.limit = start, limit
        self.observation_spec = Composite(inner=Composite(count=Unbounded(shape), shape=batch_size), shape=batch_size)
        self.action_spec = Bounded(0.0, 1.0, shape=shape)
        self.reward_spec = Unbounded((*batch_size, 1))

    def _reset(self, td):
        start = self.start if td is None else td.get("from", self.start)
        batch_size = self.batch_size if td is None else td.batch_size
        count = torch.zeros(*batch_size, self.full_observation_spec["inner", "count"].shape[-1]) + start
        return TensorDict(inner=TensorDict(count=count, batch_size=batch_size), batch_size=batch_size)

    def _step(self, td):
        count = td["inner", "count"] + td["action"]
        reward = count.sum(-1, keepdim=True)
        out = TensorDict(reward=reward, terminated=reward >= self.limit, batch_size=self.batch_size)
        return out.set(("inner", "count"), count)


class Words(EnvBase):
    """A ragged observation that grows by one each step, beside a text; ends at ``limit`` of them."""

    def __init__(self, length, limit=4):
        super().__init__()
        self.length, self.limit = length, limit
        self.observation_spec = Composite(ids=Unbounded((-1,), dtype=torch.int64), text=NonTensor((), example_data=""))
        self.action_spec = Bounded(0.0, 1.0, shape=(1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, td):
        return TensorDict(ids=torch.zeros(self.length, dtype=torch.int64), text="a" * self.length)

    def _step(self, td):
        ids = torch.cat([td["ids"], torch.ones(1, dtype=torch.int64)])
        out = TensorDict(ids=ids, text=td["text"] + "b", reward=torch.tensor([float(len(ids))]))
        return out.set("terminated", torch.tensor([len(ids) >= self.limit]))


def cartpole():
    return GymEnv("CartPole-v1")


def act(value):
    return lambda td: td.set("action", torch.full((*td.batch_size, 1), value))


@pytest.mark.parametrize(
    "make",
    [
        cartpole,
        lambda: GymEnv("Pendulum-v1", max_episode_steps=12),
        lambda: GymEnv("Blackjack-v1", categorical_action_encoding=True),
        lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(7)),
        lambda: GymEnv("CartPole-v1", device="cpu"),
    ],
)
def test_both_give_the_same_numbers_as_the_envs_one_by_one(make):
    num_steps, seeds = 30, []
    serial, parallel, singles = SerialEnv(3, make), Forked(3, make), [make() for _ in range(3)]
    try:
        assert serial.full_observation_spec == parallel.full_observation_spec
        assert serial.full_action_spec == parallel.full_action_spec
        assert serial.set_seed(5) == parallel.set_seed(5)
        seed = 5
        for single in singles:
            seeds.append(seed)
            seed = single.set_seed(seed)
        assert serial.set_seed(5) == seed
        expected = serial.rollout(num_steps, break_when_any_done=False)
        found = parallel.rollout(num_steps, break_when_any_done=False)
        assert (expected == found).all()
        assert expected.device == found.device
        assert expected["next", "done"].any()
        for row, single in enumerate(singles):  # the same actions, env by env
            td = single.reset()
            for step in range(num_steps):
                action = expected["action"][row, step]
                td, root = single.step_and_maybe_reset(td.set("action", action))
                assert td["next", "reward"].equal(expected["next", "reward"][row, step])
                assert td["next", "done"].equal(expected["next", "done"][row, step])
                td = root
        check_env_specs(parallel, break_when_any_done="both", return_contiguous=True)
        check_env_specs(TransformedEnv(parallel, StepCounter(2)), break_when_any_done="both")
        check_env_specs(TransformedEnv(serial, StepCounter(2)), break_when_any_done="both")
    finally:
        parallel.close()


def test_entries_of_any_size_and_dtype_lie_in_shared_memory(batch):
    """Regression: a complex128 behind an entry of an odd number of bytes was refused at the start."""

    class Mixed(EnvBase):
        def __init__(self):
            super().__init__()
            self.values = {"odd": torch.ones(5, dtype=torch.uint8), "none": torch.ones(0, 4)}
            for dtype in (torch.complex128, torch.bool, torch.bfloat16, torch.complex128):
                self.values[f"{len(self.values)}"] = torch.ones(3, dtype=dtype)
            specs = {key: Unbounded(value.shape, dtype=value.dtype) for key, value in self.values.items()}
            self.observation_spec, self.reward_spec = Composite(specs), Unbounded((1,))

        def _reset(self, td):
            return TensorDict(self.values)

        def _step(self, td):
            return TensorDict({**self.values, "reward": torch.ones(1), "done": torch.zeros(1, dtype=torch.bool)})

    env = batch(2, Mixed)
    assert env._declared is not None
    td = env.rollout(2, policy=lambda td: td)["next"]
    for key, value in Mixed().values.items():
        assert torch.equal(td[key], value.expand(2, 2, *value.shape))


def test_a_partial_reset_restarts_only_the_envs_that_are_named(batch):
    env = batch(3, Count, create_env_kwargs=[{"start": 0.0}, {"start": 10.0}, {"start": 20.0}])
    td = env.step_mdp(env.step(act(0.5)(env.reset())))
    assert td["inner", "count"].flatten().tolist() == [0.5, 10.5, 20.5]
    after = env.reset(td.clone().set("_reset", torch.tensor([[False], [True], [False]])))
    assert after["inner", "count"].flatten().tolist() == [0.5, 10.0, 20.5]
    given = td.clone().set("from", torch.tensor([7.0, 8.0, 9.0]))  # what a reset is given reaches the env
    assert env.reset(given)["inner", "count"].flatten().tolist() == [7.0, 8.0, 9.0]
    mask = TensorDict(_reset=torch.tensor([[True], [False], [False]]), batch_size=[3])
    assert env.reset(mask)["inner", "count"].flatten().tolist() == [0.0, 8.0, 9.0]  # the others have their own


def test_a_worker_restarts_what_is_done_in_the_round_trip_of_the_step(monkeypatch):
    env = Forked(3, Count, create_env_kwargs=[{"limit": 2.0}, {"limit": 3.0, "start": 1.0}, {"start": 5.0}])
    asked = []
    ask = env._ask
    monkeypatch.setattr(env, "_ask", lambda requests, what: asked.append(what) or ask(requests, what))
    try:
        td, counts = env.reset(), []
        for _ in range(4):
            stepped, td = env.step_and_maybe_reset(act(1.0)(td))
            counts.append(
                (stepped["next", "inner", "count"].flatten().tolist(), td["inner", "count"].flatten().tolist())
            )
        assert counts == [
            ([1, 2, 6], [1, 2, 6]),
            ([2, 3, 7], [0, 1, 7]),
            ([1, 2, 8], [1, 2, 8]),
            ([2, 3, 9], [0, 1, 9]),
        ]
        assert asked == ["reset"] + ["take a step"] * 4
        env.step(act(1.0)(td))  # nothing is restarted that was not asked for
        td["inner", "count"][0] = 1.0
        assert env.step(act(1.0)(td))["next", "done"].flatten().tolist() == [True, False, False]
    finally:
        env.close()


def test_a_step_reads_the_tensordict_and_not_what_the_env_remembers(batch):
    env = batch(2, Count)
    td = env.reset()
    td["inner", "count"] = torch.tensor([[3.0], [4.0]])
    assert env.step(act(1.0)(td))["next", "inner", "count"].flatten().tolist() == [4.0, 5.0]


@pytest.mark.parametrize("batch_locked", [True, False])
def test_envs_with_a_batch_of_their_own(batch, batch_locked):
    env = batch(2, Count, create_env_kwargs={"batch_size": (3,), "batch_locked": batch_locked})
    assert env.batch_size == (2, 3)
    check_env_specs(env)
    td = env.step_mdp(env.step(act(0.5)(env.reset())))
    mask = torch.tensor([[[True], [False], [True]], [[False], [False], [False]]])
    after = env.reset(td.set("_reset", mask))["inner", "count"][..., 0]
    assert after.tolist() == [[0.0, 0.5, 0.0], [0.5, 0.5, 0.5]]


def test_ragged_rows_and_texts_go_as_messages(batch):
    env = batch(2, Words, create_env_kwargs=[{"length": 1}, {"length": 2}])
    check_env_specs(env, break_when_any_done="both")
    td = env.rollout(4, policy=act(1.0), break_when_any_done=False)
    rows = [[step["ids"].tolist() for step in row.unbind(0)] for row in td.unbind(0)]
    assert rows == [[[0], [0, 1], [0, 1, 1], [0]], [[0, 0], [0, 0, 1], [0, 0], [0, 0, 1]]]
    texts = [[step["next", "text"] for step in row.unbind(0)] for row in td.unbind(0)]
    assert texts == [["ab", "abb", "abbb", "ab"], ["aab", "aabb", "aab", "aabb"]]
    assert [row["next", "reward"].flatten().tolist() for row in td.unbind(0)] == [[2, 3, 4, 2], [3, 4, 3, 4]]
    assert isinstance(env.reset(), LazyStackedTensorDict)
    twin = SerialEnv(2, Words, create_env_kwargs=[{"length": 1}, {"length": 2}])
    expected = twin.rollout(4, policy=act(1.0), break_when_any_done=False)
    assert all((a == b).all() for a, b in zip(td.unbind(0), expected.unbind(0), strict=True))


def test_scores_in_place_of_a_one_hot_action_reach_the_env_as_they_are(batch):
    env = batch(2, cartpole)
    env.set_seed(0)
    start = env.reset()
    scores = torch.tensor([[0.25, 0.75], [0.75, 0.25]])  # as integers both would be zeros
    found = env.step(start.clone().set("action", scores))["next", "observation"]
    env.set_seed(0)
    exact = env.step(env.reset().set("action", torch.tensor([[0, 1], [1, 0]])))["next", "observation"]
    assert found.equal(exact)


def test_seeds_follow_each_other_or_are_the_same_and_states_come_back(batch):
    env = batch(3, cartpole)
    after = env.set_seed(1)
    first = env.reset()["observation"]
    assert len({tuple(row) for row in first.tolist()}) == 3
    assert env.set_seed(1) == after
    assert env.reset()["observation"].equal(first)
    assert env.set_seed(1, static_seed=True) == 1
    assert len({tuple(row) for row in env.reset()["observation"].tolist()}) == 1
    assert TransformedEnv(env, StepCounter()).set_seed(1) == after
    state = env.state_dict()
    actions = env.rand_action()["action"]
    env.load_state_dict(state)
    assert env.rand_action()["action"].equal(actions)
    del state["worker2"]
    with pytest.raises(ConfigError, match=r"an entry per worker: got 2, expected 3"):
        env.load_state_dict(state)


def test_specs_that_differ_are_refused_by_worker_and_entry(batch):
    with pytest.raises(
        ConfigError, match=r"worker 1 of 2 differs from worker 0: \('inner', 'count'\) of the observation"
    ):
        batch(2, Count, create_env_kwargs=[{}, {"size": 2}])
    with pytest.raises(ConfigError, match=r"worker 2 of 3 differs .*: batch_size is"):
        batch(3, [Count, Count, lambda: Count(batch_size=(2,))])


test_bad_arguments_are_refused = refusals(
    (ConfigError, "num_workers must be at least 1", lambda: SerialEnv(0, cartpole)),
    (ConfigError, "create_env_fn must be one, or one per worker: got 1 for 2", lambda: SerialEnv(2, [cartpole])),
    (ConfigError, "must be a function that makes an env: got 'CartPole-v1'", lambda: SerialEnv(2, "CartPole-v1")),
    (ConfigError, "mp_start_method must be one of", lambda: ParallelEnv(1, cartpole, mp_start_method="thread")),
    (WorkerError, "create_env_fn must return an EnvBase: got str", lambda: Forked(1, lambda: "env")),
)


def failing(fault, at):
    return [functools.partial(CountingEnv, 100), functools.partial(CountingEnv, 100, fault=fault, at=at)]


def test_an_env_of_several_in_this_process_that_raises_is_named():
    with pytest.raises(ValueError, match="the env failed at 5") as caught:
        SerialEnv(2, failing("raise", 5)).rollout(8, policy=act(0.0))
    assert "worker 1 of 2" in str(caught.value.__notes__)


def test_an_env_that_breaks_its_specs_is_named(batch):
    class Wrong(Count):
        def _step(self, td):
            return super()._step(td).set(("inner", "count"), torch.zeros(2))

    env = batch(2, [Count, Wrong])
    with pytest.raises(Exception, match=r"must write what its specs declare: .*'count'.* is torch.float32 of shape"):
        env.rand_step()


# -- processes ---------------------------------------------------------------------------------------------------------


def pids(env):
    return [process.pid for process in env._processes]


def all_gone(workers):
    return not any(map(is_running, workers))


@pytest.mark.parametrize(
    ("fault", "at", "error", "text"),
    [
        ("raise", 0, WorkerError, "must reset: its env raised ValueError: the env failed at 0"),
        ("raise", 5, WorkerError, "must take a step: its env raised ValueError: the env failed at 5"),
        ("kill", 2, WorkerError, "must take a step: its process was killed by SIGKILL"),
        ("hang", 2, DeadlineError, r"take a step within 3 s \(timeout_s\): .*worker 1 runs"),
    ],
)
def test_a_worker_that_fails_is_named_and_all_processes_end(fault, at, error, text):
    env = Forked(2, failing(fault, at), timeout_s=3.0 if fault == "hang" else 20.0)
    workers = pids(env)
    with pytest.raises(error, match=text) as caught:
        env.rollout(10, policy=act(0.0))
    assert "worker 1 of 2" in str(caught.value) or fault == "hang"
    assert fault != "raise" or "counting_env.py" in str(caught.value)  # the traceback
    assert all_gone(workers)
    with pytest.raises(WorkerError, match="must be open to reset"):
        env.reset()


def test_an_env_that_cannot_be_made_is_named():
    def broken():
        raise RuntimeError("no display")

    with pytest.raises(WorkerError, match="worker 1 of 2 must make its env: its env raised RuntimeError: no display"):
        Forked(2, [cartpole, broken])
    with pytest.raises(DeadlineError, match=r"make its env within 0.5 s \(start_timeout_s\)"):
        Forked(2, [Count, lambda: time.sleep(60)], start_timeout_s=0.5)


def test_processes_end_with_close_and_with_the_object():
    env = Forked(2, cartpole)
    workers = pids(env)
    env.close()
    env.close()
    assert all_gone(workers)
    env = Forked(2, cartpole)
    workers = pids(env)
    del env
    wait_until(lambda: all_gone(workers))


def test_a_pickled_env_is_started_anew():
    env = Forked(2, cartpole)
    copy = pickle.loads(pickle.dumps(env))
    try:
        assert set(pids(copy)).isdisjoint(pids(env))
        assert env.set_seed(3) == copy.set_seed(3)
        assert (env.rollout(4) == copy.rollout(4)).all()
    finally:
        env.close()
        copy.close()


def test_forked_workers_draw_different_numbers_from_the_global_generators():
    class Draws(Count):
        def _reset(self, td):
            return TensorDict(inner=TensorDict(count=torch.rand(1)))

    env = Forked(3, Draws)
    assert len(set(env.reset()["inner", "count"].flatten().tolist())) == 3
    env.close()


SCRIPT = """
import os, sys, time
from llmrl.envs import GymEnv, ParallelEnv
if __name__ == "__main__":
    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"), mp_start_method=sys.argv[1])
    env.rollout(3)
    print(*[process.pid for process in env._processes], flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
    if sys.argv[2] == "raise":
        raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "end"), [("fork", "kill"), ("forkserver", "exit"), ("spawn", "raise")])
def test_no_process_is_left_however_the_owner_ends(method, end, tmp_path):
    (tmp_path / "main.py").write_text(SCRIPT)
    arguments = [sys.executable, str(tmp_path / "main.py"), method, {"kill": "wait"}.get(end, end)]
    environment = {name: value for name, value in os.environ.items() if value != "None"}  # tensordict leaves some
    owner = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    workers = [int(pid) for pid in owner.stdout.readline().split()]
    if end == "kill":
        owner.kill()
    _, stderr = owner.communicate(timeout=60)
    assert len(workers) == 2, stderr
    assert stderr == ""
    assert owner.returncode == {"exit": 0, "raise": 3, "kill": -9}[end]
    wait_until(lambda: all_gone(workers))
