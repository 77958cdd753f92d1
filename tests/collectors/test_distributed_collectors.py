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

from llmrl.collectors import SyncDataCollector
from llmrl.collectors.distributed import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RPCDataCollector,
    launchers,
    submitit_delayed_launcher,
)
from llmrl.collectors.distributed.rendezvous import Address, Rendezvous, connect
from llmrl.data import LazyTensorStorage, ReplayBuffer
from llmrl.errors import ConfigError, UnsupportedError, WorkerError
from llmrl.weight_update import DistributedWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.support.counting_env import CountingEnv, Scale
from tests.support.processes import is_running, raises_within, wait_until
from tests.support.worker_collectors import collectors

ENVS = [CountingEnv] * 2


@pytest.fixture
def make():
    with collectors(DistributedDataCollector, launcher="mp") as make:
        yield make


# --- without a worker ---


def refused(error, match, cls=DistributedDataCollector, envs=ENVS, policy=None, **options):
    options = {"frames_per_batch": 12, "launcher": "mp", "timeout_s": 60.0, **options}
    with pytest.raises(error, match=match):
        cls(envs, policy or Scale(), **options)


BUFFER = ReplayBuffer(storage=LazyTensorStorage(10))
SHARED, NESTED = {"policy": SharedMemWeightSyncScheme()}, {"env.transform[0]": DistributedWeightSyncScheme()}
REFUSED = [
    (ConfigError, "mpi.*gloo", {"backend": "mpi"}),
    (ConfigError, "'gloo' or 'nccl'", {"backend": "tcp"}),
    (ConfigError, "launcher", {"launcher": "ssh"}),
    (ConfigError, "submitit_delayed_launcher", {"launcher": "submitit_delayed"}),
    (ConfigError, "launcher='submitit'", {"slurm_kwargs": {"slurm_partition": "x"}}),
    (ConfigError, "executor", {"launcher": "submitit", "slurm_kwargs": {"folder": "/tmp", "no_such_setting": 1}}),
    (ConfigError, "collector_class", {"collector_class": "ray"}),
    (ConfigError, "num_workers_per_collector=2", {"num_workers_per_collector": 2}),
    (ConfigError, "at least 1", {"num_workers_per_collector": 0}),
    (ConfigError, "'collector_kwargs': 1", {"collector_kwargs": [{}]}),
    (TypeError, "Did you mean 'tcp_port'", {"tcp_prot": 3}),
    (TypeError, "update_interval", {"cls": DistributedSyncDataCollector, "sync": True}),
    (ConfigError, "update_interval", {"cls": DistributedSyncDataCollector, "update_interval": 0}),
    (ConfigError, "one device per worker", {"cls": RPCDataCollector, "visible_devices": ["cpu"]}),
    (ConfigError, "TensorPipeRpcBackendOptions", {"cls": RPCDataCollector, "tensorpipe_options": {"threads": 3}}),
    (UnsupportedError, "batches", {"replay_buffer": BUFFER, "extend_buffer": False}),
    (ConfigError, "must be a DistributedWeightSyncScheme", {"weight_sync_schemes": SHARED}),
    (ConfigError, "must be a RPCWeightSyncScheme", {"cls": RPCDataCollector, "weight_sync_schemes": SHARED}),
    (ConfigError, "the policy alone", {"collector_class": "sync", "weight_sync_schemes": NESTED}),
]


@pytest.mark.parametrize(("error", "words", "options"), REFUSED)
def test_arguments_that_cannot_be_used_are_refused_before_a_process_starts(error, words, options):
    refused(error, words, **options)


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


def test_a_batch_has_a_part_of_each_worker_where_that_is_asked_for(make):
    one = make(sync=True)
    first = one.next()
    assert (first.batch_size, first.names) == ((2, 6), [None, "time"])
    expected = SyncDataCollector(CountingEnv, Scale(), frames_per_batch=6).next().exclude("collector")
    assert all((row.exclude("collector") == expected).all() for row in first.unbind(0))
    one.update_policy_weights_(Scale(2.0))
    assert (one.next()["action"] == 2).all()
    with pytest.raises(ConfigError, match="into a replay_buffer"):
        one.start()


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
