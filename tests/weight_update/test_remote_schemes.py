"""Weights to other processes by Ray, by torch.distributed.rpc and from rank to rank: real ones, on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn
from torch.distributed import rpc

from llmrl.collectors.weight_updaters import DistributedWeightUpdater, RayWeightUpdater, RPCWeightUpdater
from llmrl.errors import ConfigError, DeadlineError, WeightSyncError, WorkerError
from llmrl.weight_update import (
    DistributedWeightSyncScheme,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)

FORK = mp.get_context("fork")


def make_model(value=0.0):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


class Holder:
    """What a worker's collector is to a scheme: an object with models."""

    def __init__(self):
        self.policy = make_model()
        self.env = SimpleNamespace(transform=[SimpleNamespace(actor=make_model())])

    def values(self):
        return self.policy.weight.unique().tolist() + self.env.transform[0].actor.weight.unique().tolist()

    def pid(self):
        return os.getpid()

    def poll_in_a_thread(self, scheme):
        """Like a collector that runs in the background: weights are applied where its thread asks for them."""
        self.receiver = scheme.create_receiver()
        self.receiver.set_context(self, "policy")
        self.receiver.register_model("policy")
        self.receiver.register_worker_transport(None)
        self.applied_in = []

        def work():
            while True:
                if self.receiver.receive(0.05) is not None:
                    self.applied_in.append(threading.current_thread().name)

        threading.Thread(target=work, name="collecting", daemon=True).start()

    def threads_that_applied(self):
        return self.applied_in


def run(world, *roles, context=FORK):
    """Runs each role in a process of its own until the first one ends, which must find all that is wrong.

    What the others raise when it has ended is not a problem.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port, and held open
    problems = context.SimpleQueue()
    processes = [
        context.Process(target=play, args=(role, rank, world, store.port, problems), daemon=True)
        for rank, role in enumerate(roles)
    ]
    for process in processes:
        process.start()
    processes[0].join(300)
    for process in processes:
        process.kill()
        process.join(60)
    assert processes[0].exitcode == 0, "nothing reported" if problems.empty() else problems.get()


def play(role, rank, world, port, problems):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    warnings.simplefilter("ignore")  # torch's, of its own calls
    try:
        role(rank, world)
    except BaseException:
        problems.put(traceback.format_exc())
        os._exit(1)
    os._exit(0)


# -- from rank to rank ------------------------------------------------------------------------------------------------


def gloo_trainer(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = dist.distributed_c10d._get_default_store()
    scheme = DistributedWeightSyncScheme(timeout=60, sync=False)
    other = scheme.create_sender()
    other.set_context(SimpleNamespace(), "env.transform[0].actor")
    for worker in (1, 2):
        other.register_worker(worker, (None, worker, "env.transform[0].actor"))
    updater = DistributedWeightUpdater(store, TensorDict.from_module(make_model(1)), num_workers=2, timeout=60)
    updater.push_weights()
    for version in (2, 3):
        updater.push_weights(make_model(version))
        other.update_weights(make_model(10 * version))
    with pytest.raises(WeightSyncError, match=r"worker 0 \(model 'policy'\) refused version 4.*'bias' is missing"):
        updater.push_weights({"weight": torch.zeros(2, 3)})
    updater.push_weights(make_model(5), worker_ids=[0])
    updater.push_weights(make_model(5))
    again = scheme.create_sender()  # another sender: the versions must go on
    again.register_worker(1, (store, 1))
    again.update_weights(make_model(6))
    with pytest.raises(WeightSyncError, match=r"worker 1.*got 1 after 6"):
        again.wait()
    sender = updater.sender
    store.set("checked", "")
    assert [store.get(f"values of {worker}") for worker in (1, 2)] == [b"[5.0, 30.0]"] * 2
    os.kill(int(store.get("pid of 2")), signal.SIGKILL)
    sender.scheme.timeout = 4.0
    with pytest.raises((DeadlineError, WorkerError), match="worker 1"):
        sender.update_weights(make_model(6))
    sender.unregister_worker(1)
    sender.scheme.timeout = 60.0
    sender.update_weights(make_model(7))


def gloo_worker(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid of {rank}", str(os.getpid()))
    scheme, holder, receivers = DistributedWeightSyncScheme(), Holder(), []
    for path in ("policy", "env.transform[0].actor"):
        receivers.append(scheme.create_receiver())
        receivers[-1].set_context(holder)
        receivers[-1].register_model(path)
        receivers[-1].register_worker_transport((store, 0, path))
    reported = False
    while True:
        for receiver in receivers:
            receiver.receive(0.01)
        if not reported and store.check(["checked"]):
            reported = True
            store.set(f"values of {rank}", str(holder.values()))


def test_ranks_take_weights_of_two_models_refuse_bad_ones_and_a_killed_one_is_named():
    run(3, gloo_trainer, gloo_worker, gloo_worker)


# -- RPC --------------------------------------------------------------------------------------------------------------


def rpc_trainer(rank, world):
    rpc.init_rpc("trainer", rank=rank, world_size=world)
    scheme = RPCWeightSyncScheme(timeout=60)
    rrefs = [rpc.remote(f"worker{index}", Holder) for index in (1, 2)]
    infos = [rref.owner() for rref in rrefs]
    updater = RPCWeightUpdater(infos, Holder, rrefs, TensorDict.from_module(make_model(1)), 2, timeout=60)
    sender, other = updater.sender, scheme.create_sender()
    other.set_context(SimpleNamespace(), "env.transform[0].actor")
    for index, rref in enumerate(rrefs):
        other.register_worker(index, rref)
    updater.push_weights()
    other.update_weights(make_model(2))
    other.wait()
    sender.update_weights(make_model(3))
    sender.wait()
    assert [rref.rpc_sync().values() for rref in rrefs] == [[3.0, 2.0]] * 2
    sender.update_weights(nn.Linear(4, 2))
    with pytest.raises(WeightSyncError, match=r"worker 0.*\(2, 3\): got torch.float32 \(2, 4\)(.|\n)*worker 1"):
        sender.wait()
    rrefs[0].rpc_sync().poll_in_a_thread(scheme)
    again = scheme.create_sender()
    again.register_worker("polls", rrefs[0])
    again.update_weights(make_model(4))
    again.wait()
    assert rrefs[0].rpc_sync().values() == [4.0, 2.0]
    assert rrefs[0].rpc_sync().threads_that_applied() == ["collecting"]
    pid = rrefs[1].rpc_sync().pid()
    os.kill(pid, signal.SIGKILL)
    sender.scheme.timeout = 5.0
    sender.unregister_worker(0)
    sender.update_weights(make_model(6))
    with pytest.raises((WorkerError, DeadlineError), match="worker 1"):
        sender.wait()


def rpc_worker(rank, world):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    time.sleep(600)


@pytest.mark.slow
def test_calls_bring_weights_to_workers_that_take_them_at_once_or_when_they_poll():
    # torch.distributed.rpc of a process is for good, and a fork would have that of this one
    run(3, rpc_trainer, rpc_worker, rpc_worker, context=mp.get_context("spawn"))


# -- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_actors_take_weights_from_the_object_store(cluster):
    actor_class = cluster.remote(Holder).options(num_cpus=0, max_concurrency=1)
    actors = [actor_class.remote() for _ in range(2)]
    cluster.get([actor.pid.remote() for actor in actors], timeout=240)
    scheme = RayWeightSyncScheme(timeout=60)
    sender, other = scheme.create_sender(), scheme.create_sender()
    other.set_context(SimpleNamespace(), "env.transform[0].actor")
    for index, actor in enumerate(actors):
        sender.register_worker(index, actor)
        other.register_worker(index, actor)
    sender.update_weights(make_model(1))
    updater = RayWeightUpdater(TensorDict.from_module(make_model(2)), actors, max_interval=1)
    updater.sender = sender
    updater.push_weights()
    assert sender.version == 2
    updater.push_weights(make_model(9))  # they may miss one
    assert sender.version == 2
    updater.push_weights(make_model(3))
    other.update_weights(make_model(7))
    other.wait()
    sender.wait()
    assert cluster.get([actor.values.remote() for actor in actors]) == [[3.0, 7.0]] * 2
    sender.update_weights({"weight": torch.zeros(2, 3)}, worker_ids=[1])
    with pytest.raises(WeightSyncError, match=r"worker 1.*refused version 4.*'bias' is missing"):
        sender.wait()
    cluster.kill(actors[0])
    sender.update_weights(make_model(5))
    with pytest.raises(WorkerError, match=r"worker 0.*ActorDied"):
        sender.wait()
    assert cluster.get(actors[1].values.remote()) == [5.0, 7.0]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_actor_that_collects_in_a_thread_takes_weights_there(cluster):
    actor = cluster.remote(Holder).options(num_cpus=0).remote()
    scheme = RayWeightSyncScheme(timeout=60)
    cluster.get(actor.poll_in_a_thread.remote(scheme))
    sender = scheme.create_sender()
    sender.register_worker(0, actor)
    sender.update_weights(make_model(4))
    sender.wait()
    assert cluster.get(actor.values.remote()) == [4.0, 0.0]
    assert cluster.get(actor.threads_that_applied.remote()) == ["collecting"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_transforms_module_in_an_actor_belongs_to_no_worker(cluster):
    actor = cluster.remote(Holder).options(num_cpus=0).remote()
    collector = SimpleNamespace(transform=[SimpleNamespace(actor=actor)])
    scheme = RayModuleTransformScheme(module="env.transform[0].actor", timeout=60)
    assert not scheme.per_worker
    sender = scheme.create_sender()
    with pytest.raises(ConfigError, match="must be a Ray actor"):
        sender.set_context(collector, "transform")
    sender.set_context(collector, "transform[0]")
    sender.update_weights(make_model(2))
    sender.wait()
    assert cluster.get(actor.values.remote()) == [0.0, 2.0]
