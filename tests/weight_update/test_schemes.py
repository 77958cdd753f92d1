"""A sender hands weights to workers, each of which applies them whole at a boundary of its own, and answers."""

import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn

from llmrl.errors import ConfigError, DeadlineError, MissingKeyError, WeightSyncError, WorkerError
from llmrl.testing import tiny_model
from llmrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TransportBackend,
)
from llmrl.weight_update.payload import pack

FORK = mp.get_context("fork")
SCHEMES = pytest.mark.parametrize("make_scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])


def make_model(value=0.0):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return fill(model, value)


@torch.no_grad()
def fill(model, value):
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


def connect(scheme, model, worker=0, sender=None):
    """A sender and a receiver in this process."""
    sender, receiver, (ours, theirs) = sender or scheme.create_sender(), scheme.create_receiver(), mp.Pipe()
    sender.register_worker(worker, ours)
    receiver.register_model(model)
    receiver.register_worker_transport(theirs)
    return sender, receiver


def work(scheme, theirs, results, model, stop_after):
    """A worker's process: reports the values that its model holds after each update."""
    receiver = scheme.create_receiver()
    receiver.register_model(model)
    receiver.register_worker_transport(theirs)
    for _ in range(stop_after):
        version = receiver.receive(timeout=60)
        results.put((version, sorted({v for t in model.state_dict().values() for v in t.reshape(-1).tolist()})))


@SCHEMES
def test_workers_in_processes_get_every_version(make_scheme):
    scheme, sender, workers = make_scheme(timeout=60), make_scheme(timeout=60).create_sender(), []
    for index in range(2):
        (ours, theirs), results = mp.Pipe(), FORK.SimpleQueue()
        process = FORK.Process(target=work, args=(scheme, theirs, results, make_model(), 4), daemon=True)
        process.start()
        theirs.close()
        sender.register_worker(index, ours)
        workers.append((process, results))
    source = make_model()
    for version in range(1, 5):
        sender.update_weights(fill(source, version))
        fill(source, 99)  # what was handed over is a copy
        assert [results.get() for _, results in workers] == [(version, [version])] * 2
    sender.wait()
    for process, _ in workers:
        process.join(60)
    sender.update_weights(source)  # found out by the wait: nothing was under way
    with pytest.raises(WorkerError, match=r"worker 0 \(model 'policy'\).*unregister_worker(.|\n)*worker 1"):
        sender.wait()


@SCHEMES
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda w: w.pop("0.bias"), "'0.bias' is missing"),
        (lambda w: w.update({"0.bias": torch.zeros(4)}), r"must be torch.float32 \(3,\): got torch.float32 \(4,\)"),
        (lambda w: w.update({"0.bias": torch.zeros(3).int()}), "got torch.int32"),
        (lambda w: w.update({"0.bia": torch.zeros(3)}), r"no weight is called '0.bia'.*0.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole_and_the_next_ones_are_taken(make_scheme, spoil, told):
    model, other = make_model(), make_model()
    sender, receiver = connect(make_scheme(), model)
    _, second = connect(sender.scheme, other, worker=1, sender=sender)
    weights = make_model(1).state_dict()
    spoil(weights)
    sender.update_weights(weights)
    assert receiver.receive(1) is None
    assert second.receive(1) is None
    with pytest.raises(WeightSyncError, match=rf"worker 0 \(model 'policy'\) refused version 1.*{told}"):
        sender.update_weights(make_model(2))
    assert all((tensor == 0).all() for tensor in model.state_dict().values())
    sender.update_weights(make_model(2))
    assert (receiver.receive(1), second.receive(1), receiver.version) == (2, 2, 2)
    sender.wait()
    assert all((tensor == 2).all() for tensor in (*model.state_dict().values(), *other.state_dict().values()))


@SCHEMES
def test_a_sender_that_knows_the_model_refuses_before_it_sends(make_scheme):
    sender, receiver = connect(make_scheme(), make_model())
    sender.set_context(owner := SimpleNamespace(policy=make_model()), "policy")
    with pytest.raises(WeightSyncError, match=r"'1\.running_var' is missing"):
        sender.update_weights({k: v for k, v in owner.policy.state_dict().items() if k != "1.running_var"})
    assert receiver.receive() is None
    assert sender.version == 0


@SCHEMES
def test_a_version_that_goes_backwards_is_refused(make_scheme):
    scheme, model = make_scheme(), make_model()
    sender, receiver = connect(scheme, model)
    for _ in range(2):
        sender.update_weights(make_model(1))
        receiver.receive(1)
    fresh, (ours, theirs) = scheme.create_sender(), mp.Pipe()
    fresh.register_worker("a", ours)
    receiver.register_worker_transport(theirs)
    fresh.update_weights(make_model(2))
    assert receiver.receive(1) is None
    with pytest.raises(WeightSyncError, match=r"worker 'a'.*got 1 after 2"):
        fresh.wait()
    assert (model[0].weight == 1).all()


@SCHEMES
def test_a_worker_that_never_polls_is_named_at_the_deadline_and_may_recover(make_scheme):
    model = make_model()
    sender, receiver = connect(make_scheme(timeout=0.2), model)
    sender.update_weights(make_model(1))
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"worker 0.*version 1.*receiver\.receive"):
        sender.update_weights(make_model(2))
    assert time.monotonic() - started < 9  # that of the default
    assert receiver.receive(1) == 1
    sender.update_weights(make_model(2))
    assert receiver.receive(1) == 2
    sender.unregister_worker(0)
    sender.update_weights(make_model(3))
    sender.wait()


@SCHEMES
def test_a_refusal_is_told_also_where_another_worker_is_late(make_scheme):
    sender, late = connect(make_scheme(timeout=0.2), make_model())
    _, refusing = connect(sender.scheme, nn.Linear(1, 1), worker=1, sender=sender)
    sender.update_weights(make_model(1))
    assert refusing.receive(1) is None
    for _ in range(2):
        with pytest.raises(DeadlineError, match="worker 0"):
            sender.wait()
    assert late.receive(1) == 1
    with pytest.raises(WeightSyncError, match=r"worker 1.*refused version 1"):
        sender.wait()
    sender.wait()


@SCHEMES
def test_several_models_of_a_context_and_their_paths(make_scheme):
    inner = SimpleNamespace(policy=make_model(), env=SimpleNamespace(transform=[SimpleNamespace(actor=make_model())]))
    scheme, pairs = make_scheme(), {}
    for number, path in enumerate(["policy", "env.transform[0].actor"], start=1):
        sender, receiver, (ours, theirs) = scheme.create_sender(), scheme.create_receiver(), mp.Pipe()
        sender.set_context(inner, path)
        sender.register_worker(0, ours)
        receiver.set_context(inner)
        receiver.register_worker_transport(theirs)  # without a model: the one at the sender's id
        pairs[path] = sender, receiver
        sender.update_weights(make_model(number))
    assert [receiver.receive(1) for _, receiver in pairs.values()] == [1, 1]
    assert (inner.policy[0].weight == 1).all()
    assert (inner.env.transform[0].actor[0].weight == 2).all()
    sender, receiver = pairs["policy"]
    pairs["env.transform[0].actor"][0].update_weights("policy")  # the path of another model
    assert pairs["env.transform[0].actor"][1].receive(1) == 2
    assert (inner.env.transform[0].actor[0].weight == 1).all()
    fresh, unknown = connect(scheme, "env.transform[1].actor")
    unknown.set_context(inner)
    fresh.update_weights(make_model(3))
    unknown.receive(1)
    with pytest.raises(WeightSyncError, match=r"\[1\].*IndexError"):
        fresh.wait()


@SCHEMES
def test_worker_ids_choose_who_gets_a_version(make_scheme):
    models = [make_model(), make_model()]
    sender, first = connect(make_scheme(), models[0])
    _, second = connect(sender.scheme, models[1], worker=1, sender=sender)
    sender.update_weights(make_model(1), worker_ids=[1])
    assert (first.receive(), second.receive(1)) == (None, 1)
    sender.update_weights(make_model(2))
    assert (first.receive(1), second.receive(1)) == (2, 2)
    with pytest.raises(ConfigError, match=r"\[7\] are not registered"):
        sender.update_weights(make_model(1), worker_ids=[7])


@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hugging_face_model_with_buffers_that_are_not_saved_and_tied_weights(make_scheme, dtype):
    """More than a pipe holds, so that it waits for a worker that reads later."""
    source, target = tiny_model(), tiny_model().to(dtype)
    for parameter in source.parameters():
        parameter.data.add_(1)
    sender, receiver = connect(make_scheme(), target)
    for weights in (TensorDict.from_module(source), source, source.state_dict()):
        sender.update_weights(weights)
        receiver.receive(60)
        sender.wait()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name].to(dtype)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@SCHEMES
@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_weights_of_a_gpu_reach_a_model_on_it_or_in_main_memory(make_scheme, there):
    source, target = make_model().to("cuda"), make_model().to(there)
    sender, receiver = connect(make_scheme(), target)
    for version in (1, 2, 3):
        sender.update_weights(fill(source, version))
        fill(source, -1)
        assert receiver.receive(60) == version
    tensors = target.state_dict().values()
    assert {(tensor.device.type, tensor.float().mean().item()) for tensor in tensors} == {(there, 3.0)}


def test_shared_memory_is_one_block_for_all_workers_and_two_in_turn():
    scheme, models = SharedMemWeightSyncScheme(), [make_model(), make_model()]
    sender, first = connect(scheme, models[0])
    _, second = connect(scheme, models[1], worker=1, sender=sender)
    for version in range(1, 6):
        sender.update_weights(make_model(version))
        assert (first.receive(1), second.receive(1)) == (version, version)
        # a worker must not do this: it shows that the other one sees it
        nn.init.constant_(models[0][0].weight, -version)
        assert (models[1][0].weight == -version).all()
        assert (models[1][0].bias == version).all()
    assert len(sender._transports[1]._known) == 2


def test_registered_shared_weights_are_kept_up_to_date_and_others_refused():
    held = TensorDict.from_module(make_model()).data.clone().share_memory_()
    scheme = SharedMemWeightSyncScheme(auto_register=False)
    sender, receiver = connect(scheme, make_model())
    with pytest.raises(MissingKeyError, match="model 'policy' must be registered"):
        sender.update_weights(make_model(1))
    scheme.register_shared_weights("policy", held)
    place = held["0", "weight"].data_ptr()
    sender.update_weights(make_model(1))
    assert receiver.receive(1) == 1
    assert (held["0", "weight"] == 1).all()
    assert held["0", "weight"].data_ptr() == place


def test_no_scheme_takes_everything_and_sends_nothing():
    scheme, model = NoWeightSyncScheme(), make_model()
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    sender.register_worker(0, None)
    receiver.register_model(model)
    receiver.register_worker_transport(None)
    sender.update_weights(make_model(1))
    sender.wait()
    assert receiver.receive() is None
    assert (model[0].weight == 0).all()


def read_by_hand(scheme, pipe, results):
    """A worker that asks its transport, as the document has it."""
    policy = nn.Linear(4, 2)
    receiver = scheme.create_receiver()
    receiver.register_model(policy)
    receiver.register_worker_transport(pipe)
    model_id, weights = receiver._transport.receive_weights(timeout=60.0)
    receiver.apply_weights(weights)
    results.put((model_id, type(weights), policy.weight.tolist(), receiver._transport.receive_weights(0.01)))


@pytest.mark.parametrize("starts_first", [True, False])  # the sender does not wait for a worker that is not there yet
@pytest.mark.parametrize(
    ("make_scheme", "strategy", "given", "kind"),
    [
        (MultiProcessWeightSyncScheme, "state_dict", nn.Module.state_dict, dict),
        (SharedMemWeightSyncScheme, "tensordict", TensorDict.from_module, TensorDict),
    ],
)
def test_a_worker_in_a_process_may_read_by_hand(make_scheme, strategy, given, kind, starts_first):
    policy, results, (ours, theirs) = nn.Linear(4, 2), FORK.SimpleQueue(), mp.Pipe()
    scheme = make_scheme(strategy=strategy, timeout=60)
    sender = scheme.create_sender()
    sender.register_worker(worker_idx=0, pipe_or_context=ours)
    worker = FORK.Process(target=read_by_hand, args=(scheme, theirs, results), daemon=True)
    steps = [worker.start, lambda: sender.update_weights(given(policy))]
    for step in steps if starts_first else steps[::-1]:
        step()
    sender.wait()
    assert results.get() == ("policy", kind, policy.weight.tolist(), None)
    worker.join(60)
    assert worker.exitcode == 0


class Inbox(TransportBackend):
    """A transport of a user, at the worker's end. It does not note what is pending."""

    def __init__(self, *versions):
        super().__init__()
        self.payloads = [("policy", pack(make_model(version).state_dict(), version)) for version in versions]
        self.answers = []

    send_weights = wait = None  # the sender's end

    def receive(self, timeout):
        return self.payloads.pop(0) if self.payloads else None

    def answer(self, problem=""):
        if self.answers is None:
            raise ConnectionError("the sender is gone")
        self.answers.append(problem)


def test_a_transport_of_a_user_brings_versions_and_an_answer_that_fails_is_an_error():
    """Regression: the version was that of `pending`, and weights whose answer failed were taken for refused ones."""
    receiver, inbox = MultiProcessWeightSyncScheme().create_receiver(), Inbox(7, 3, 8)
    receiver.register_model(make_model())
    receiver.register_worker_transport(inbox)
    assert [receiver.receive(), receiver.receive(), receiver.version] == [7, None, 7]
    assert inbox.answers[0] == ""
    assert "a version must grow" in inbox.answers[1]
    inbox.answers = None
    with pytest.raises(ConnectionError, match="the sender is gone"):
        receiver.receive()
    assert [receiver.version, receiver.receive()] == [8, None]


def test_bad_settings_pipes_and_messages_are_told():
    with pytest.raises(ConfigError, match="strategy is"):
        MultiProcessWeightSyncScheme(strategy="pickle")
    with pytest.raises(ConfigError, match="duplex"):
        MultiProcessWeightSyncScheme().create_sender().register_worker(0, mp.Pipe(duplex=False)[1])
    with pytest.raises(ConfigError, match="set_context"):
        MultiProcessWeightSyncScheme().create_sender().update_weights()
    with pytest.raises(WeightSyncError, match="'a' must be a tensor: got int"):
        MultiProcessWeightSyncScheme().create_sender().update_weights({"a": 1})
    scheme, (ours, theirs) = MultiProcessWeightSyncScheme(), mp.Pipe()
    receiver = scheme.create_receiver()
    receiver.register_worker_transport(theirs)
    with pytest.raises(ConfigError, match="register_model"):
        receiver.apply_weights({})
    ours.send("roll")
    with pytest.raises(WeightSyncError, match="nothing but this sender's weights"):
        receiver.receive(1)
    ours.close()
    with pytest.raises(WorkerError, match="sender must stay"):
        receiver.receive(1)
    sender = scheme.create_sender()
    sender.register_worker(0, theirs)
    sender.update_weights({"a": torch.zeros(1)})
    theirs.close()
    with pytest.raises(WorkerError, match="worker 0"):
        sender.wait()
    assert pickle.loads(pickle.dumps(scheme)).timeout == 10.0


def use_all_the_time(scheme, theirs, results, stop):
    """A worker that uses its model without a pause: every read must find one version alone."""
    model = nn.ParameterDict({f"weight_{n}": nn.Parameter(torch.zeros(20_000)) for n in range(20)})
    receiver, torn, taken = scheme.create_receiver(), 0, 0
    receiver.register_model(model)
    receiver.register_worker_transport(theirs)
    while not stop.value:
        taken += receiver.receive() is not None
        for tensor in model.values():
            torn += int((tensor != receiver.version).any())
    results.put((taken, torn))


def push_until_noticed(sender, named):
    for _ in range(2):  # the first one may still be handed over
        for tensor in named.values():
            tensor.fill_(sender.version + 1)
        sender.update_weights(named)


@SCHEMES
@pytest.mark.parametrize(("versions", "seconds"), [(8, 0.0), pytest.param(200, 15.0, marks=pytest.mark.slow)])
def test_no_worker_ever_sees_half_of_an_update(make_scheme, versions, seconds):
    """Of three workers one is killed on the way."""
    sender, results = make_scheme(timeout=60.0).create_sender(), FORK.SimpleQueue()
    stop = FORK.RawValue("b")  # without a lock, which the killed worker might hold
    named, workers = {f"weight_{n}": torch.zeros(20_000) for n in range(20)}, []
    for number in range(3):
        ours, theirs = mp.Pipe()
        workers.append(FORK.Process(target=use_all_the_time, args=(sender.scheme, theirs, results, stop), daemon=True))
        workers[-1].start()
        theirs.close()
        sender.register_worker(number, ours)
    last_at = time.monotonic() + seconds
    while sender.version < versions or time.monotonic() < last_at:
        for tensor in named.values():
            tensor.fill_(sender.version + 1)
        if sender.version == versions // 2 and 2 in sender._transports:
            workers[2].kill()
            workers[2].join(60)
            with pytest.raises(WorkerError, match="worker 2"):
                push_until_noticed(sender, named)
            sender.unregister_worker(2)
            continue
        sender.update_weights(named)
        for tensor in named.values():
            tensor.fill_(-1)  # a worker that still read here would notice
    sender.wait()
    stop.value = 1
    found = [results.get() for _ in range(2)]
    assert [torn for _, torn in found] == [0, 0]
    assert sender.version - 2 <= min(taken for taken, _ in found) <= sender.version
