"""The examples of the documents on collectors and on `NextStateReconstructor`, repaired only where they cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from llmrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.data.replay_buffers.samplers import SliceSampler
from llmrl.envs import EnvBase, ParallelEnv, SerialEnv, Transform
from llmrl.envs.transforms.rb_transforms import NextStateReconstructor
from llmrl.weight_update import MultiProcessWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale

gymnasium = pytest.importorskip("gymnasium")
N = 60


def make_env() -> EnvBase:
    return CountingEnv()


def cart_pole_policy() -> TensorDictModule:
    """As in the document; the env is asked for its specs. Scores are a valid action: the largest counts."""
    from llmrl.envs import GymEnv

    env = GymEnv("CartPole-v1")
    return TensorDictModule(
        nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]),
        in_keys=["observation"],
        out_keys=["action"],
    )


def test_a_single_collector_with_a_scheme_for_several_processes():
    from llmrl.envs import GymEnv

    policy = cart_pole_policy()
    scheme = MultiProcessWeightSyncScheme(strategy="state_dict")
    with pytest.warns(UserWarning, match="1024 frames"):  # 1000 is not a multiple of 64
        collector = SyncDataCollector(
            create_env_fn=lambda: GymEnv("CartPole-v1"),
            policy=policy,
            frames_per_batch=64,
            total_frames=1000,
            weight_sync_schemes={"policy": scheme},
        )
    for i, data in enumerate(collector):
        assert data.batch_size == (64,)
        if i % 10 == 0:
            collector.update_policy_weights_(policy.state_dict())
    collector.shutdown()
    assert collector.policy_version == 2
    assert collector.counters["delivered"] == 1024


SCRIPT = """
import torch.nn as nn
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from llmrl.collectors import MultiSyncDataCollector
from llmrl.envs import GymEnv
from llmrl.weight_update import SharedMemWeightSyncScheme

env = GymEnv("CartPole-v1")
policy = TensorDictModule(
    nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]),
    in_keys=["observation"],
    out_keys=["action"],
)
shared_scheme = SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
collector = MultiSyncDataCollector(
    create_env_fn=[lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1")],
    policy=policy,
    frames_per_batch=192,
    total_frames=9600,
    weight_sync_schemes={"policy": shared_scheme},
)
sizes = set()
for data in collector:
    sizes.add(tuple(data.batch_size))
    collector.update_policy_weights_(TensorDict.from_module(policy))
collector.shutdown()
print(sizes, collector.counters, collector.policy_version)
"""


@pytest.mark.slow
def test_several_collectors_with_shared_memory_as_a_script_without_a_guard(tmp_path: Path):
    """9,600 frames in place of the document's 10,000, which is not a multiple of 192."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=400)
    assert done.stdout == "{(3, 64)} {'produced': 9600, 'delivered': 9600, 'dropped': 0} 50\n", done.stderr


# --- replay buffers ---


def test_flattening_data_while_they_are_written():
    """``transform=`` of the document runs on reads; ``write_transform`` does what is meant."""
    memory = ReplayBuffer(storage=LazyTensorStorage(N), write_transform=lambda data: data.reshape(-1), batch_size=4)
    collector = SyncDataCollector(SerialEnv(2, make_env), Scale(), frames_per_batch=20, total_frames=40)
    for data in collector:
        memory.extend(data)
    assert memory[:].batch_size == (40,)


def parallel() -> ParallelEnv:
    return ParallelEnv(2, make_env, mp_start_method="forkserver")


@pytest.mark.parametrize(
    ("cls", "make", "frames", "shape"),
    [
        (SyncDataCollector, make_env, N, (120,)),
        (MultiSyncDataCollector, lambda: [make_env] * 2, N, (2, 60)),
        (SyncDataCollector, parallel, N, (2, 60)),
        (MultiSyncDataCollector, lambda: [parallel()] * 2, 96, (2, 2, 48)),  # the env itself: each worker starts a copy
    ],
    ids=["one env", "several collectors", "batched envs", "several collectors of batched envs"],
)
def test_slices_are_steps_of_one_trajectory(cls, make, frames, shape):
    """The slices that a buffer of what collectors yield hands out are in order."""
    options = {"cat_results": "stack"} if cls is MultiSyncDataCollector else {}
    collector = cls(envs := make(), Scale(), frames_per_batch=frames, total_frames=-1, **options)
    if isinstance(envs, list) and isinstance(envs[0], EnvBase):
        envs[0].close()
    memory = ReplayBuffer(
        storage=LazyTensorStorage(1000, ndim=len(shape)),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    for data, _ in zip(collector, range(2), strict=False):
        memory.extend(data)
    collector.shutdown()
    sample = memory.sample(16)
    ids = sample["collector", "traj_ids"].reshape(4, 4)
    assert (ids == ids[:, :1]).all()
    assert (sample["observation"].reshape(4, 4).diff() == 1).all()
    assert memory[:].batch_size == shape


# --- the next state ---


@pytest.mark.parametrize("cls", [SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector])
def test_next_states_are_rebuilt_from_what_a_compact_collector_wrote(cls):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=3, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(step_count_key=("collector", "step_count")),
        batch_size=12,
    )
    env = make_env if cls is SyncDataCollector else [make_env] * 2
    options = {"cat_results": -1} if cls is MultiSyncDataCollector else {}
    collector = cls(
        env, Scale(), frames_per_batch=24, total_frames=48, compact_obs=True, max_frames_per_traj=50, **options
    )
    for data in collector:
        assert ("next", "observation") not in data.keys(True)
        rb.extend(data)
    collector.shutdown()
    sample = rb.sample()
    known = ~sample["next", "observation"].isnan()
    assert known.sum() == 8  # two of three rows of a slice
    assert (sample["next", "observation"][known] == sample["observation"][known] + 1).all()


def test_a_transform_that_measures_bytes_in_an_env_and_offline():
    class TransformThatMeasuresBytes(Transform):
        """Measures the number of bytes in the tensordict, and writes it under `"bytes"`."""

        def __init__(self):
            super().__init__(in_keys=[], out_keys=["bytes"])

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            tensordict["bytes"] = tensordict.bytes()
            return tensordict

    t = TransformThatMeasuresBytes()
    make_env().append_transform(t)
    assert t(TensorDict(a=0))["bytes"] == 8
