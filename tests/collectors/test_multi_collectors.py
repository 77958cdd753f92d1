"""Collectors in processes of this machine: what `test_conformance` does not ask of every kind of workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector, aSyncDataCollector
from llmrl.collectors.distributed import DistributedDataCollector
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.samplers import SliceSampler
from llmrl.envs import ParallelEnv, Transform, TransformedEnv
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import wait_until
from tests.support.worker_collectors import collectors

MULTI = [MultiSyncDataCollector, MultiaSyncDataCollector]


@pytest.fixture
def make():
    with collectors(MultiSyncDataCollector) as make:
        yield make


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


def test_weights_come_by_another_scheme_at_each_batch_or_never(make):
    policy = Scale()
    piped = make(policy=policy, weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()})
    piped.update_policy_weights_(Scale(2.0))
    assert (piped.next()["action"] == 2).all()
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


# --- seeds, factories ---


def test_actions_of_a_seed_repeat_and_differ_between_workers():
    def actions():
        one = MultiSyncDataCollector([CountingEnv] * 2, frames_per_batch=12)
        one.set_seed(7)
        batch = one.next()
        one.shutdown()
        return batch["action"].squeeze(-1)

    first = actions()
    assert torch.equal(first, actions())
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    ("cls", "options"), [(MultiSyncDataCollector, {}), (DistributedDataCollector, {"launcher": "mp"})]
)
def test_a_policy_can_be_made_in_the_workers_which_keep_it_where_they_refuse_weights(make, cls, options):
    one = make(cls, policy_factory=lambda: Scale(6.0), total_frames=-1, **options)
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


def test_two_collectors_fill_one_buffer_with_whole_rows(make):
    rows = shared_buffer()
    both = [make(cls, replay_buffer=rows, total_frames=240) for cls in MULTI]
    for one in both:
        one.start()
    wait_until(lambda: len(rows) == 480)
    assert (rows[:]["next", "reward"] == rows[:]["next", "observation"] + 1).all()


# --- what is refused ---


def test_specs_that_differ_are_named_where_batches_are_joined(make):
    with pytest.raises(ConfigError, match=r"worker 1 of 2.*same.*batch size is \(\(3,\), ''\)"):
        make(envs=[CountingEnv, lambda: CountingEnv(batch_size=(3,))])
    sizes = {make(MultiaSyncDataCollector, [CountingEnv, lambda: CountingEnv(batch_size=(3,))]).next().batch_size}
    assert sizes <= {(12,), (3, 4)}


REFUSED = [
    ({"envs": [CountingEnv, partial(CountingEnv, threading.Lock())]}, ConfigError, r"create_env_fn\[1\] .*picklable"),
    ({"cat_result": 0}, TypeError, "Did you mean 'cat_results'"),
    ({"cat_results": 1}, ConfigError, "cat_results"),
    ({"preemptive_threshold": 2}, ConfigError, "preemptive_threshold"),
    ({"num_workers": 3}, ConfigError, "'create_env_fn': 2, 'num_workers': 3"),
    ({"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(100))}, RuntimeError, "share"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_arguments_that_cannot_be_used_are_refused(make, options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


# --- as users write it ---


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_slices_of_a_buffer_of_what_workers_collect_are_steps_of_one_trajectory(make, batched):
    envs = [ParallelEnv(2, CountingEnv, mp_start_method="forkserver")] * 2 if batched else 2  # each worker has a copy
    one = make(envs=envs, frames_per_batch=96, total_frames=192, cat_results="stack")
    shape = (2, 2, 48) if batched else (2, 96)
    memory = ReplayBuffer(
        storage=LazyTensorStorage(1000, ndim=len(shape)),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    for batch in one:
        memory.extend(batch)
    if batched:
        envs[0].close()
    sample = memory.sample(16)
    ids = sample["collector", "traj_ids"].reshape(4, 4)
    assert (ids == ids[:, :1]).all()
    assert (sample["observation"].reshape(4, 4).diff() == 1).all()
    assert memory[:].batch_size == shape


SCRIPT = """
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from llmrl.collectors import MultiSyncDataCollector
from llmrl.envs import GymEnv

policy = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
make_env = lambda: GymEnv("CartPole-v1")
collector = MultiSyncDataCollector([make_env] * 3, policy, frames_per_batch=192, total_frames=1920)
sizes = set()
for data in collector:
    sizes.add(tuple(data.batch_size))
    collector.update_policy_weights_(TensorDict.from_module(policy))
collector.shutdown()
print(sizes, collector.counters, collector.policy_version)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_around_its_main_part(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=400)
    assert done.stdout == "{(3, 64)} {'produced': 1920, 'delivered': 1920, 'dropped': 0} 10\n", done.stderr
