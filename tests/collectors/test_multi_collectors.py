"""Collectors in processes of their own: shapes, order, weights, shared buffers, and what happens when one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector, aSyncDataCollector
from llmrl.collectors.distributed import DistributedDataCollector, RPCDataCollector
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.envs import EnvBase, Transform, TransformedEnv
from llmrl.errors import ConfigError, DeadlineError, UnsupportedError, WeightSyncError, WorkerError
from llmrl.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import raises_within, wait_until

MULTI = [MultiSyncDataCollector, MultiaSyncDataCollector]
REMOTE = (DistributedDataCollector, RPCDataCollector)
ALL = [*MULTI, *(pytest.param(cls, marks=pytest.mark.slow) for cls in REMOTE)]


@pytest.fixture
def make():
    """Collectors that are shut down after the test; it fails where a process is left."""
    made = []

    def build(cls=MultiSyncDataCollector, envs=2, policy=None, **options):
        envs = [CountingEnv] * envs if isinstance(envs, int) else envs
        options = {"frames_per_batch": 12, "total_frames": 24, "timeout_s": 60.0, **options}
        options |= {"launcher": "mp"} if cls in REMOTE else {}
        made.append(cls(envs, None if "policy_factory" in options else policy or Scale(), **options))
        return made[-1]

    yield build
    for one in made:
        one.shutdown()
    assert not [process for process in multiprocessing.active_children() if "llmrl" in process.name]


def shared_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8, shared=True)


# --- what is handed out ---


@pytest.mark.parametrize("batch_size", [(), (3,)])
def test_the_table_of_batch_sizes(make, batch_size):
    envs = [lambda: CountingEnv(batch_size=batch_size)] * 2  # B = 2 workers, P = 3 envs
    frames = 12  # T = 12 steps of one env, 4 of three; a worker of two has half
    steps = frames // 3 if batch_size else frames
    expected = {
        "stack": (2, *batch_size, steps // 2),
        0: (6, steps // 2) if batch_size else (steps,),
        -1: (*batch_size, steps),
    }
    for how, size in expected.items():
        batch = make(envs=envs, cat_results=how, total_frames=frames).next()
        assert batch.batch_size == size, how
        assert batch.names[-1] == "time"
        assert batch["collector", "traj_ids"].numel() == frames
    one = SyncDataCollector(envs[0], Scale(), frames_per_batch=frames)
    assert one.next().batch_size == make(MultiaSyncDataCollector, envs).next().batch_size == (*batch_size, steps)


def test_a_part_of_each_worker_is_what_one_collector_collects(make):
    both = make()
    alone = SyncDataCollector(CountingEnv, Scale(), frames_per_batch=6, total_frames=12)
    for batch, part in zip(both, alone, strict=True):
        for row in batch.unbind(0):
            assert (row.exclude("collector") == part.exclude("collector")).all()
    assert both.counters == {"produced": 24, "delivered": 24, "dropped": 0}
    assert len(both) == 2


@pytest.mark.parametrize("cls", MULTI)
def test_trajectories_have_ids_of_their_own_in_every_worker(make, cls):
    seen: dict[int, list[float]] = {}
    for batch in make(cls, total_frames=48, frames_per_batch=12):
        rows = batch.unbind(0) if batch.batch_dims == 2 else [batch]
        for row in rows:
            for number, count in zip(row["collector", "traj_ids"].tolist(), row["observation"].flatten(), strict=True):
                seen.setdefault(number, []).append(int(count))
    assert all(counts == [0, 1, 2, 3][: len(counts)] for counts in seen.values())
    assert sum(map(len, seen.values())) == 48


def test_batches_stay_as_they_are_and_are_finished_in_this_process(make):
    one, two = make(envs=[lambda: CountingEnv(100)] * 2)
    assert (one["observation"] + 6 == two["observation"]).all()
    batch = make(split_trajs=True, cat_results=-1, postproc=lambda td: td.set("pid", torch.full(td.shape, os.getpid())))
    batch = batch.next()
    assert batch.batch_size == (4, 4)
    assert batch["collector", "mask"].sum() == 12
    assert (batch["pid"] == os.getpid()).all()


def test_workers_that_stop_early_leave_rows_without_a_trajectory(make):
    slow = lambda: CountingEnv(1000, cost_s=0.01)  # noqa: E731
    one = make(envs=[CountingEnv, slow], frames_per_batch=200, total_frames=-1, preemptive_threshold=0.5)
    batch = one.next()
    missing = batch["collector", "traj_ids"] == -1
    assert not missing[0].any()
    assert 0 < missing[1].sum() < 100
    assert (batch["next", "observation"][missing] == 0).all()
    assert one.counters["produced"] == one.counters["delivered"] == int((~missing).sum())


def test_frames_can_be_shared_out_unequally(make):
    batch = make(frames_per_batch=[4, 8], cat_results=-1, total_frames=12).next()
    assert (batch["collector", "traj_ids"] % 2).tolist() == [0] * 4 + [1] * 8
    for wrong in ({"frames_per_batch": [4]}, {"frames_per_batch": [4, 8]}):
        with pytest.raises(ConfigError, match=r"frames_per_batch|do not stack"):
            make(**wrong)


def test_a_slow_trainer_loses_nothing_and_workers_wait(make):
    one = make(MultiaSyncDataCollector, total_frames=-1, frames_per_batch=8)
    one.next()
    time.sleep(0.3)
    assert one.counters["produced"] <= 5 * 8  # two batches ahead each, and the one that was taken
    batches = [one.next() for _ in range(20)]
    assert len({tuple(batch["collector", "traj_ids"].tolist()) for batch in batches}) == 20


def test_one_worker_collects_ahead(make):
    one = aSyncDataCollector(CountingEnv, Scale(), frames_per_batch=6, total_frames=18)
    numbers = [batch["collector", "traj_ids"].tolist() for batch in one]
    one.shutdown()
    assert numbers == [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4]]


def test_entries_whose_shapes_vary_come_as_messages(make):
    class Growing(Transform):
        def _step(self, td, next_td):
            return next_td.set("seen", torch.zeros(int(next_td["observation"])))

        def _reset(self, td, reset_td):
            return reset_td.set("seen", torch.zeros(0))

    batch = make(envs=[lambda: TransformedEnv(CountingEnv(), Growing())] * 2, frames_per_batch=8).next()
    assert [len(step["next", "seen"]) for step in batch[1].unbind(0)] == [1, 2, 3, 4]


# --- weights ---


class Wide(Transform):
    """An entry of more bytes than a pipe takes at once."""

    def _step(self, td, next_td):
        return next_td.set("wide", torch.zeros(100_000))

    def _reset(self, td, reset_td):
        return reset_td.set("wide", torch.zeros(100_000))


def test_weights_reach_workers_whose_batches_wait_to_be_read(make):
    one = make(MultiaSyncDataCollector, [lambda: TransformedEnv(CountingEnv(), Wide())] * 2, total_frames=-1)
    one.next()
    wait_until(lambda: one.counters["produced"] >= 36)  # both workers have a batch to send
    for scale in range(3):
        one.update_policy_weights_(Scale(float(scale)))
    wait_until(lambda: (one.next()["action"] == 2).all())


def test_a_large_request_and_the_memory_for_batches_reach_a_worker_one_after_the_other(make):
    policy = Scale()
    policy.rest = nn.Parameter(torch.zeros(1_000_000))
    late = lambda: CountingEnv(1000, cost_s=0.05)  # noqa: E731
    one = make(MultiaSyncDataCollector, [CountingEnv, late], policy, total_frames=-1, frames_per_batch=4)
    state = one.state_dict()
    for _ in range(3):
        one.next()  # the other worker's first batch comes while it is given the state
        one.load_state_dict(state)
    assert one.next().batch_size == (4,)


@pytest.mark.parametrize("scheme", [None, SharedMemWeightSyncScheme(), MultiProcessWeightSyncScheme()])
def test_weights_reach_all_workers_with_their_version(make, scheme):
    schemes = {} if scheme is None else {"weight_sync_schemes": {"policy": scheme}}
    policy = Scale()
    one = make(policy=policy, total_frames=60, track_policy_version=True, **schemes)
    assert (one.next()["action"] == 1).all()
    for number, weights in enumerate((Scale(2.0), {"scale": torch.tensor(3.0)}), start=1):
        one.update_policy_weights_(weights)
        batch = one.next()
        assert (batch["action"] == number + 1).all()
        assert (batch["policy_version"] == number).all()
    policy.scale.data.fill_(4)
    one.update_policy_weights_()
    assert (one.next()["action"] == 4).all()
    with pytest.raises(WeightSyncError, match="scale"):
        one.update_policy_weights_({"scale": torch.zeros(2)})
    assert (one.next()["action"] == 4).all()
    assert one.policy_version == 3


def test_weights_can_be_pushed_at_each_batch_or_never(make):
    policy = Scale()
    one = make(policy=policy, update_at_each_batch=True)
    one.next()
    policy.scale.data.fill_(5)
    assert (one.next()["action"] == 5).all()
    still = make(policy=policy, weight_sync_schemes={"policy": NoWeightSyncScheme()})
    still.update_policy_weights_(Scale(7.0))
    assert (still.next()["action"] == 5).all()


class Bias(Transform):
    """Adds the weight of its model to the reward."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(1, 1)

    def _call(self, next_td):
        return next_td.set("bias", self.actor.bias.detach().clone())


def test_models_in_the_env_are_found_by_their_path(make):
    path = "env.transform[0].actor"
    schemes = {"policy": SharedMemWeightSyncScheme(), path: MultiProcessWeightSyncScheme()}
    one = make(envs=[lambda: TransformedEnv(CountingEnv(), Bias())] * 2, weight_sync_schemes=schemes)
    actor = nn.Linear(1, 1)
    one.update_policy_weights_(actor, model_id=path)
    batch = one.next()
    assert (batch["next", "bias"] == actor.bias.detach()).all()
    assert (batch["action"] == 1).all()
    one.update_policy_weights_(weights_dict={"policy": Scale(3.0), path: nn.Linear(1, 1)})
    assert (one.next()["action"] == 3).all()
    with pytest.raises(ConfigError, match="critic"):
        one.update_policy_weights_(actor, model_id="critic")
    with pytest.raises(ConfigError, match=r"worker_ids must be from 0 to 1: got \[2, -1\]"):
        one.update_policy_weights_(actor, model_id=path, worker_ids=[0, 2, -1])


def test_asynchronous_rows_carry_the_version_that_made_them(make):
    one = make(
        MultiaSyncDataCollector,
        [lambda: CountingEnv(1000, cost_s=0.001)] * 2,
        total_frames=-1,
        frames_per_batch=40,
        track_policy_version=True,
    )
    seen, end = set(), time.monotonic() + 60
    while len(seen) < 4:  # a batch may have been collected long before it is taken
        assert time.monotonic() < end, seen
        one.update_policy_weights_({"scale": torch.tensor(float(one.policy_version) + 2)})
        batch = one.next()
        assert (batch["action"].flatten() == batch["policy_version"] + 1).all()
        seen |= set(batch["policy_version"].tolist())


# --- seeds, state, factories ---


def test_seeds_are_derived_per_worker_and_repeat(make):
    def actions():
        one = MultiSyncDataCollector([CountingEnv] * 2, frames_per_batch=12)
        following = one.set_seed(7)
        batch = one.next()
        one.shutdown()
        return following, batch["action"].squeeze(-1)

    following, first = actions()
    assert following == seed_after(2, 7)
    assert torch.equal(first, actions()[1])
    assert not torch.equal(first[0], first[1])


def seed_after(count: int, seed: int) -> int:
    for _ in range(count):
        seed = CountingEnv().set_seed(seed)
    return seed


def test_a_state_has_one_entry_per_worker_and_is_gone_on_from(make):
    one = make(total_frames=48)
    one.next()
    one.update_policy_weights_(Scale(2.0))
    state = one.state_dict()
    assert {"worker0", "worker1", "frames", "iter"} <= set(state)
    other = make(total_frames=48)
    other.load_state_dict(state)
    batches = list(other)
    assert len(batches) == 3
    assert (batches[0]["action"] == 2).all()
    assert batches[0]["collector", "traj_ids"].min() == 4


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, DistributedDataCollector])
def test_a_policy_can_be_made_in_the_workers_which_keep_it_where_they_refuse_weights(make, cls):
    one = make(cls, policy_factory=lambda: Scale(6.0), total_frames=-1)
    assert (one.next()["action"] == 6).all()
    one.update_policy_weights_(Scale(7.0))
    wait_until(lambda: (one.next()["action"] == 7).all())
    one.update_policy_weights_({"scale": torch.zeros(2)})  # only the workers can tell
    with pytest.raises(WeightSyncError, match=r"(?s)(?=.*worker 0.*refused)(?=.*worker 1.*refused)"):
        one.update_policy_weights_(Scale(8.0))
    assert (one.next()["action"] == 7).all()
    one.update_policy_weights_(Scale(8.0))
    wait_until(lambda: (one.next()["action"] == 8).all())  # batches that were collected before may come first


# --- shared buffers ---


@pytest.mark.parametrize("cls", MULTI)
def test_workers_write_into_the_buffer_themselves(make, cls):
    rows = shared_buffer()
    assert list(make(cls, replay_buffer=rows)) == [None, None]
    assert len(rows) == 24
    assert rows[:]["collector", "traj_ids"].bincount().sum() == 24


@pytest.mark.parametrize("cls", MULTI)
def test_workers_fill_the_buffer_until_they_are_shut_down_and_in_a_pause_answer_and_take_weights(make, cls):
    rows = shared_buffer()
    one = make(cls, [lambda: CountingEnv(cost_s=0.001)] * 2, replay_buffer=rows, total_frames=-1)
    one.start()
    wait_until(lambda: len(rows) > 60)
    with one.pause(), one.pause():
        count = one.counters["produced"]
        time.sleep(0.05)
        assert one.counters["produced"] == count
        for scale in (2.0, 3.0):
            one.update_policy_weights_(Scale(scale))
        state = one.state_dict()
        assert one.set_seed(7) == seed_after(2, 7)
    assert {"worker0", "worker1"} <= set(state)
    wait_until(lambda: len(rows) > count + 60)
    count = one.counters["produced"]
    one.update_policy_weights_(Scale(-1.0))
    wait_until(lambda: len(rows) > count + 60)
    one.async_shutdown()
    counts = one.counters
    assert counts["delivered"] == rows.write_count
    assert counts["produced"] == counts["delivered"] + counts["dropped"]
    assert set(rows[:]["action"].flatten().tolist()) == {1.0, 3.0, -1.0}
    with pytest.raises(WorkerError, match="shut down"):
        one.update_policy_weights_()


def test_two_collectors_fill_one_buffer_with_whole_rows(make):
    rows = shared_buffer()
    both = [make(cls, replay_buffer=rows, total_frames=240) for cls in MULTI]
    for one in both:
        one.start()
    wait_until(lambda: len(rows) == 480)
    assert (rows[:]["next", "reward"] == rows[:]["next", "observation"] + 1).all()


def test_a_buffer_that_is_not_shared_is_refused(make):
    with pytest.raises(RuntimeError, match="share"):
        make(replay_buffer=ReplayBuffer(storage=LazyTensorStorage(100)))


# --- what fails ---


def failing(fault: str, at: int = 5):
    return [lambda: CountingEnv(10), lambda: CountingEnv(10, fault=fault, at=at)]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("at", [0, 5])
def test_what_an_env_raises_is_raised_here_with_worker_and_traceback(make, cls, at):
    one = make(cls, failing("raise", at), total_frames=-1)
    with raises_within(50, WorkerError, rf"worker 1 of 2.*ValueError: the env failed at {at}") as caught:
        [one.next() for _ in range(10**6)]  # the other worker goes on
    assert "counting_env.py" in str(caught.value)
    for call in (one.next, one.update_policy_weights_, one.state_dict):
        with pytest.raises(WorkerError, match="worker 1 of 2"):
            call()


@pytest.mark.parametrize(
    "cls", [*MULTI, DistributedDataCollector, pytest.param(RPCDataCollector, marks=pytest.mark.slow)]
)
def test_a_killed_worker_is_named(make, cls):
    one = make(cls, failing("kill"), total_frames=-1)
    with pytest.raises(WorkerError, match=r"worker 1 of 2.*was killed by SIGKILL"):
        wait_until(lambda: one.next() is None)  # the other worker may be first, and its batches are handed out


@pytest.mark.parametrize("cls", ALL)
def test_an_env_that_never_returns_is_named(make, cls):
    one = make(cls, failing("hang"), timeout_s=4.0, total_frames=-1)
    with raises_within(50, DeadlineError, r"worker 1 of 2.*nothing for 4 s.*timeout_s"):
        [one.next() for _ in range(10**6)]  # the other worker goes on


def test_a_worker_killed_while_it_writes_leaves_whole_rows_and_is_reported(make):
    rows = shared_buffer()
    one = make(replay_buffer=rows, total_frames=-1, envs=[lambda: CountingEnv(1000)] * 2)
    one.start()
    wait_until(lambda: len(rows) > 100)
    with pytest.warns(UserWarning, match="worker 0 of 2.*has ended"):
        kill_and_wait(one)
    with pytest.raises(WorkerError, match=r"worker 0 of 2.*SIGKILL"):
        one.async_shutdown()
    content = rows[:]
    assert (content["next", "reward"] == content["next", "observation"] + 1).all()
    rows.extend(content[:4])  # the lock is free


def kill_and_wait(one) -> None:
    watchers = [thread for thread in threading.enumerate() if thread.name == "llmrl-collector-watch"]
    os.kill(one._pool.workers[0].process.pid, signal.SIGKILL)
    watchers[-1].join(60)  # the latest; one of an earlier collector may still be ending


@pytest.mark.parametrize("cls", ALL)
def test_a_constructor_that_fails_is_named(make, cls):
    def broken() -> EnvBase:
        raise OSError("no display")

    with pytest.raises(WorkerError, match=r"worker 1 of 2.*OSError: no display"):
        make(cls, [CountingEnv, broken])


def test_specs_that_differ_are_named_where_batches_are_joined(make):
    with pytest.raises(ConfigError, match=r"worker 1 of 2.*same.*batch size is \(\(3,\), ''\)"):
        make(envs=[CountingEnv, lambda: CountingEnv(batch_size=(3,))])
    sizes = {make(MultiaSyncDataCollector, [CountingEnv, lambda: CountingEnv(batch_size=(3,))]).next().batch_size}
    assert sizes <= {(12,), (3, 4)}


def test_what_cannot_be_sent_is_named(make):
    policy = Scale()
    policy.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"policy must be picklable.*lock.*policy_factory"):
        make(policy=policy)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"create_env_fn\[1\] must be picklable"):
        make(envs=[CountingEnv, lambda: CountingEnv(lock)])
    with pytest.raises(TypeError, match=r"cat_result.*Did you mean 'cat_results'"):
        make(cat_result=0)
    with pytest.raises(ConfigError, match="cat_results"):
        make(cat_results=1)
    with pytest.raises(UnsupportedError, match="interruptor"):
        make(interruptor=type("I", (), {"collection_stopped": lambda self: False})())
    with pytest.raises(ConfigError, match=r"one number of workers.*'create_env_fn': 2, 'num_workers': 3"):
        make(num_workers=3)
