"""Collectors whose workers connect to them: processes of this machine, a gloo group, torch RPC, jobs of submitit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client

import pytest
import torch

from llmrl.collectors import MultiSyncDataCollector, SyncDataCollector
from llmrl.collectors.distributed import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RPCDataCollector,
    launchers,
    submitit_delayed_launcher,
)
from llmrl.collectors.distributed.rendezvous import Address, Rendezvous, connect
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.errors import ConfigError, UnsupportedError, WeightSyncError, WorkerError
from llmrl.weight_update import DistributedWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import descendants, is_running, raises_within, wait_until

ENVS = [CountingEnv] * 2


@pytest.fixture
def make():
    """Collectors that are shut down after the test; it fails where a worker's process is left."""
    made, started = [], set()

    def build(cls=DistributedDataCollector, envs=ENVS, policy=None, **options):
        options = {"frames_per_batch": 12, "total_frames": 24, "launcher": "mp", "timeout_s": 60.0, **options}
        made.append(cls(envs, Scale() if policy is None else policy, **options))
        workers = [worker.process.pid for worker in made[-1]._pool.workers]
        started.update(workers, *(dict(descendants(pid)) for pid in workers))
        return made[-1]

    yield build
    for one in made:
        one.shutdown()
    wait_until(lambda: not any(map(is_running, started)), 60)  # a worker's own fork server takes its time


# --- without a worker ---


def refused(error, match, cls=DistributedDataCollector, envs=ENVS, policy=None, **options):
    options = {"frames_per_batch": 12, "launcher": "mp", "timeout_s": 60.0, **options}
    with pytest.raises(error, match=match):
        cls(envs, policy or Scale(), **options)


def test_arguments_that_cannot_be_used_are_refused_before_a_process_starts(tmp_path):
    refused(ConfigError, "mpi.*built with MPI.*gloo", backend="mpi")
    refused(ConfigError, "backend must be 'gloo' or 'nccl': got 'tcp'", backend="tcp")
    if not torch.cuda.is_available():
        refused(ConfigError, "nccl.*CUDA device.*gloo", backend="nccl")
    refused(ConfigError, "launcher must be 'mp'", launcher="ssh")
    refused(ConfigError, "submitit_delayed_launcher decorates", launcher="submitit_delayed")
    refused(ConfigError, "settings of launcher='submitit'", slurm_kwargs={"slurm_partition": "x"})
    refused(ConfigError, "collector_class must be", collector_class="ray")
    refused(ConfigError, "num_workers_per_collector=2 needs", num_workers_per_collector=2)
    refused(ConfigError, "at least 1", num_workers_per_collector=0)
    refused(ConfigError, "one number of workers.*'create_env_fn': 2, 'collector_kwargs': 1", collector_kwargs=[{}])
    refused(TypeError, "frames_per_bach.*Did you mean 'frames_per_batch'", frames_per_bach=3)
    refused(TypeError, "tcp_prot.*Did you mean 'tcp_port'", tcp_prot=3)
    refused(TypeError, "update_interval", DistributedSyncDataCollector, sync=True)
    refused(ConfigError, "update_interval must be at least 1", DistributedSyncDataCollector, update_interval=0)
    refused(ConfigError, "one device per worker", RPCDataCollector, visible_devices=["cpu"])
    refused(ConfigError, "TensorPipeRpcBackendOptions", RPCDataCollector, tensorpipe_options={"threads": 3})
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    refused(UnsupportedError, "come in batches: leave it out", replay_buffer=buffer, extend_buffer=False)
    schemes = {"policy": SharedMemWeightSyncScheme()}
    refused(ConfigError, "must be a DistributedWeightSyncScheme.*got SharedMem", weight_sync_schemes=schemes)
    refused(ConfigError, "must be a RPCWeightSyncScheme", RPCDataCollector, weight_sync_schemes=schemes)
    nested = {"env.transform[0]": DistributedWeightSyncScheme()}
    refused(ConfigError, "the policy alone", collector_class="sync", weight_sync_schemes=nested)
    policy = Scale()
    policy.lock = threading.Lock()
    refused(ConfigError, "policy must be picklable.*lock.*policy_factory", policy=policy)
    refused(
        ConfigError, "submitit executor", launcher="submitit", slurm_kwargs={"folder": tmp_path, "no_such_setting": 1}
    )


def test_the_collector_of_a_delayed_job_is_what_its_launcher_was_told(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "_delayed", launchers._Delayed(tmp_path / "a.json", 1, "rpc", "gloo", None, True))
    refused(ConfigError, "num_jobs=1, framework='rpc'.*got 2 workers, 'distributed'", launcher="submitit_delayed")
    for wrong in ({"num_jobs": 0}, {"num_jobs": 1, "framework": "ray"}):
        with pytest.raises(ConfigError, match="num_jobs must be at least 1 and framework"):
            submitit_delayed_launcher(**wrong)


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(ConfigError, f"tcp_port={port} must be free.*give another one", tcp_port=port)


def test_only_who_has_the_key_is_let_in():
    meeting = Rendezvous("127.0.0.1", None, is_local=True, who="test")
    address = meeting.address
    with socket.create_connection((address.host, address.port)):  # sends nothing, and does not hold up the others
        with pytest.raises(Exception, match=r"digest|Connection|EOF|^$"):
            Client((address.host, address.port), authkey=b"another")
        worker = connect(Address(address.host, address.port, address.key), 3)
        index, where, connection = meeting.arrivals.get(timeout=20)
    assert (index, where) == (3, f"process {os.getpid()} on {socket.gethostname()}")
    assert address.key.hex() not in repr(address)
    for one in (worker, connection):
        one.close()
    meeting.close()


# --- with workers ---


def test_a_batch_has_a_part_of_each_worker_and_weights_come_with_their_version(make):
    one = make(sync=True, total_frames=60, track_policy_version=True)
    alone = SyncDataCollector(CountingEnv, Scale(), frames_per_batch=6)
    first = one.next()
    assert (first.batch_size, first.names) == ((2, 6), [None, "time"])
    expected = alone.next().exclude("collector")
    assert all((row.exclude("collector", "policy_version") == expected).all() for row in first.unbind(0))
    assert len(one) == 5
    for number, weights in enumerate((Scale(2.0), {"scale": torch.tensor(3.0)}), start=1):
        one.update_policy_weights_(weights)
        batch = one.next()
        assert (batch["action"] == number + 1).all()
        assert (batch["policy_version"] == number).all()
    for wrong in ({"scale": torch.zeros(2)}, {}):
        with pytest.raises(WeightSyncError, match="scale"):
            one.update_policy_weights_(wrong)
    state, following = one.state_dict(), one.set_seed(7)
    assert {"worker0", "worker1", "frames", "iter", "version"} <= set(state)
    assert following == CountingEnv().set_seed(CountingEnv().set_seed(7))
    assert (one.next()["action"] == 3).all()
    one.load_state_dict(state)
    assert len(list(one)) == 2  # three of five were delivered
    ids = first["collector", "traj_ids"]
    assert not set(ids[0].tolist()) & set(ids[1].tolist())
    one.shutdown()
    assert one.counters["produced"] == one.counters["delivered"] + one.counters["dropped"]
    with pytest.raises(ConfigError, match="into a replay_buffer: give one"):
        one.start()
    with pytest.raises(WorkerError, match="shut down"):
        one.update_policy_weights_()


@pytest.mark.parametrize("cls", [DistributedDataCollector, pytest.param(RPCDataCollector, marks=pytest.mark.slow)])
def test_a_buffer_is_filled_in_the_background_until_the_end_or_a_failure(make, cls):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=12)
    one = make(cls, total_frames=-1, replay_buffer=buffer, track_policy_version=True)
    one.start()
    for number in range(1, 4):
        one.update_policy_weights_(Scale(float(number)))
    wait_until(lambda: len(buffer) and buffer[-1]["policy_version"] == 3, 60)
    rows = buffer[:]
    assert rows["action"].flatten().equal(1.0 * rows["policy_version"].clamp(min=1))
    with one.pause():
        time.sleep(0.3)  # a message that was on its way is not read
        before = buffer.write_count
        time.sleep(0.3)
        assert buffer.write_count == before
        one.update_policy_weights_(Scale(9.0))
    wait_until(lambda: buffer.write_count > before, 60)
    assert one.set_seed(7) == CountingEnv().set_seed(CountingEnv().set_seed(7))
    assert one.state_dict()["version"] == 4
    with pytest.raises(ConfigError, match="in the background already: read the replay buffer"):
        one.next()
    assert buffer.sample().batch_size == (12,)
    with pytest.warns(UserWarning, match=r"worker 1 of 2"):
        kill_and_wait(one)
    for call in (one.update_policy_weights_, one.async_shutdown):
        with pytest.raises(WorkerError, match=r"in the background failed: .*worker 1 of 2.*SIGKILL"):
            call()
    assert one.counters["delivered"] == buffer.write_count


def kill_and_wait(one) -> None:
    os.kill(one._pool.workers[1].process.pid, signal.SIGKILL)
    wait_until(lambda: not one.background.is_running, 60)


def test_a_buffer_gets_batches_of_all_workers_and_a_start_has_an_end(make):
    grid = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    one = make(sync=True, replay_buffer=grid)
    assert list(one) == [None, None]
    assert grid[:]["observation"][..., 0].tolist() == [[0, 1, 2, 3] * 3] * 2
    with pytest.raises(ConfigError, match="has begun already"):
        one.start()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    two = make(sync=True, total_frames=36, replay_buffer=buffer)
    two.start()
    wait_until(lambda: not two.background.is_running, 60)
    two.async_shutdown()
    assert two.counters == {"produced": 36, "delivered": 36, "dropped": 0}
    assert len(buffer) == 36


def test_a_worker_that_is_killed_before_it_takes_weights_is_named(make):
    one = make(total_frames=-1, weight_sync_schemes={"policy": DistributedWeightSyncScheme(sync=True, timeout=30)})
    pid = one._pool.workers[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with raises_within(50, WorkerError, r"worker 0 of 2 \(process \d+ on .*take weights.*was killed by SIGKILL"):
        one.update_policy_weights_(Scale(2.0))


@pytest.mark.slow
def test_batches_come_as_they_are_ready_and_weights_as_often_as_asked(make):
    policy = Scale()
    one = make(policy=policy, total_frames=-1, update_after_each_batch=True, max_weight_update_interval=3)
    assert one.next().batch_size == (12,)
    pushed = []
    hand_over = one._hand_over
    one._hand_over = lambda sender, named, ids: (pushed.append(ids), hand_over(sender, named, ids))
    for _ in range(12):
        policy.scale.data += 1
        one.next()
    assert len(pushed) == 12
    assert {index for ids in pushed for index in ids} == {0, 1}
    every = make(DistributedSyncDataCollector, policy=Scale(), total_frames=-1, update_interval=2)
    values = []
    for _ in range(5):
        batch = every.next()
        values += batch["action"].unique().tolist()
        every.policy.scale.data += 1
    assert values == [1.0, 1.0, 3.0, 3.0, 5.0]


@pytest.mark.slow
def test_workers_can_have_processes_of_their_own(make):
    options = {"collector_class": MultiSyncDataCollector, "num_workers_per_collector": 2, "track_policy_version": True}
    one = make(sync=True, total_frames=-1, **options)
    assert one.next().batch_size == (2, 2, 3)
    one.update_policy_weights_(Scale(4.0))
    batch = one.next()
    assert (batch["action"] == 4).all()
    assert (batch["policy_version"] == 1).all()
    rows = batch["collector", "traj_ids"].reshape(4, 3).tolist()
    assert [len({number % 4 for number in row}) for row in rows] == [1] * 4
    assert len({row[0] % 4 for row in rows}) == 4
    state = one.state_dict()
    one.load_state_dict(state)
    assert (one.next()["action"] == 4).all()


@pytest.mark.slow
def test_rpc_has_one_group_at_a_time_and_another_one_later(make):
    one = make(RPCDataCollector, sync=True, total_frames=-1)
    with pytest.raises(ConfigError, match="one group at a time"):
        make(RPCDataCollector)
    one.update_policy_weights_(Scale(2.0))
    assert (one.next()["action"] == 2).all()
    os.kill(one._pool.workers[1].process.pid, signal.SIGKILL)
    one.shutdown()
    again = make(RPCDataCollector, total_frames=24, weight_sync_schemes={"policy": NoWeightSyncScheme()})
    assert [batch.batch_size for batch in again] == [(12,), (12,)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_policies_and_batches_on_a_gpu_and_a_gpu_for_each_process_of_nccl(make):
    policy = Scale().cuda()
    one = make(policy=policy, sync=True, policy_device="cuda", storing_device="cuda")
    batch = one.next()
    assert batch["action"].device.type == "cuda"
    policy.scale.data += 1
    one.update_policy_weights_()
    assert (one.next()["action"] == 2).all()
    refused(ConfigError, "one for each worker", envs=[CountingEnv] * torch.cuda.device_count(), backend="nccl")


OWNER = """
import time
from llmrl.collectors.distributed import DistributedDataCollector
from tests.support.counting_env import CountingEnv, Scale

envs = [lambda: CountingEnv(10, fault="hang", at=5)] * 2
one = DistributedDataCollector(envs, Scale(), frames_per_batch=12, launcher="mp")
one._pool.grant(one._pool.workers[0])
print(*[worker.process.pid for worker in one._pool.workers], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_an_owner_that_is_killed_also_while_their_env_hangs():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert [is_running(pid) for pid in pids] == [True, True]
        time.sleep(0.5)  # for the worker to be in the step that hangs
        owner.kill()
    wait_until(lambda: not any(map(is_running, pids)), 60)


# --- jobs ---


@pytest.mark.slow
def test_jobs_of_submitit_collect_and_a_killed_one_is_named(tmp_path):
    pytest.importorskip("submitit")
    jobs = {"folder": str(tmp_path), "cluster": "local", "timeout_min": 5}
    one = DistributedDataCollector(ENVS, Scale(), frames_per_batch=12, total_frames=-1, sync=True, slurm_kwargs=jobs)
    assert one.next().batch_size == (2, 6)
    pids = [int(worker.where.split()[1]) for worker in one._pool.workers]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 of 2.*its job \d+ is "):
        [one.next() for _ in range(5)]
    wait_until(lambda: not any(map(is_running, pids)), 60)


def trainer(path):
    collector = DistributedDataCollector(
        ENVS, Scale(), frames_per_batch=12, total_frames=24, launcher="submitit_delayed"
    )
    sizes = [tuple(batch.batch_size) for batch in collector]
    collector.shutdown()
    return sizes, path


@pytest.mark.slow
def test_the_function_of_the_trainer_runs_as_a_job_beside_those_that_collect(tmp_path):
    pytest.importorskip("submitit")
    jobs = {"folder": str(tmp_path), "cluster": "local", "timeout_min": 5}
    launch = submitit_delayed_launcher(num_jobs=2, submitit_main_conf=jobs, submitit_collection_conf=jobs)(trainer)
    assert launch("given") == ([(12,), (12,)], "given")
    assert not list(tmp_path.glob("address-*"))
