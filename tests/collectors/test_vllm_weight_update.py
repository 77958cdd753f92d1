"""The documented updater and scheme: they find their engine, say what a set is, and move the version once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from llmrl.collectors.llm.weight_update import VLLMWeightSyncScheme, vLLMUpdater
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.engines.vllm.transfer import NCCL
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from tests.support.refusals import refusals


def make_engine():
    return FakeEngine(["x"], tokenizer=tiny_tokenizer())


class Collector:
    def __init__(self, engine):
        self.policy, self.updates = SimpleNamespace(engine=engine), 0

    def increment_version(self):
        self.updates += 1


def test_the_updater_pushes_to_the_engine_of_its_collectors_policy():
    engine, model = make_engine(), nn.Linear(2, 1)
    collector, updater = Collector(engine), vLLMUpdater()
    with pytest.raises(WeightSyncError, match="there must be an engine to push to"):
        updater.push_weights(model.state_dict())
    updater.register_collector(collector)
    updater.init(vLLMUpdater.get_model_metadata(model))
    updater.push_weights(model.state_dict())
    assert set(engine.weights) == {"weight", "bias"}
    updater.push_weights(TensorDict(dict(model.state_dict())))
    updater.push_weights(model)
    assert set(engine.weights) == {"weight", "bias"}
    updater.push_weights()  # the engine shares the trainer's module
    assert engine.weights is None
    assert (engine.version, collector.updates) == (4, 4)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma"])
@pytest.mark.parametrize("form", ["module", "state_dict", "from_module"])
def test_the_updater_serves_an_engine_that_is_not_vllm(form, architecture):
    """Regression: such an engine was given groups, and failed with an AttributeError."""
    own, trained = (tiny_model(architecture=architecture, seed=seed) for seed in (0, 1))
    engine = TransformersEngine(own, eos_token_ids=(2,), pad_token_id=0)
    updater = vLLMUpdater(engine=engine, model_metadata=vLLMUpdater.get_model_metadata(trained))
    forms = {"module": lambda model: model, "state_dict": nn.Module.state_dict, "from_module": TensorDict.from_module}
    updater.push_weights(forms[form](trained))
    ids = [torch.arange(5, 12)]
    trainer = TransformersEngine(trained, eos_token_ids=(2,), pad_token_id=0)
    assert torch.equal(engine.score(ids)[0], trainer.score(ids)[0])
    assert engine.version == 1


def test_what_is_pushed_must_contain_the_metadata():
    model = tiny_model(tiny_tokenizer(), architecture="gemma")  # tied
    metadata = vLLMUpdater.get_model_metadata(model)
    assert metadata["model.norm.weight"] == (torch.float32, torch.Size([64]))
    engine = make_engine()
    updater = vLLMUpdater(model_metadata=metadata, engine=engine)
    updater.push_weights(model)
    updater.push_weights(model.state_dict())  # with both names of the tied weight
    with pytest.raises(WeightSyncError, match=r"model.norm.weight must be .*\[64\].* got .*\[3\]"):
        updater.push_weights(model.state_dict() | {"model.norm.weight": torch.ones(3)})
    assert engine.version == 2


def test_an_address_means_a_broadcast_to_that_many_workers_of_the_engine():
    engine = make_engine()
    vLLMUpdater("10.0.0.1", 29500, vllm_tp_size=4, engine=engine)
    assert engine.weight_backend == NCCL(4, "10.0.0.1", 29500)
    VLLMWeightSyncScheme("10.0.0.1", 29500, gpus_per_replica=2).create_receiver(engine)
    assert engine.weight_backend == NCCL(2, "10.0.0.1", 29500)


def test_a_sender_gives_every_receiver_the_same_version_or_none_any():
    engines, model = [make_engine(), make_engine()], nn.Linear(2, 1)
    scheme = VLLMWeightSyncScheme(num_replicas=2, strategy="state_dict")
    sender = scheme.create_sender()
    with pytest.raises(WeightSyncError, match="weights must be given, or a model registered"):
        sender.update_weights()
    sender.register_model(model)
    sender.init_all_workers_group({name: (t.dtype, t.shape) for name, t in model.state_dict().items()}, engines[0])
    with pytest.raises(WeightSyncError, match="2 engines must have registered: got 1; no engine was updated"):
        sender.update_weights()
    receiver = scheme.create_receiver(engines[1])
    receiver.init_all_workers_group()
    sender.register_worker(1, receiver)
    sender.register_worker(1, receiver)  # once more with its number changes nothing
    engines[1].version = 4
    sender.update_weights()
    assert [engine.version for engine in engines] == [5, 5]
    with pytest.raises(WeightSyncError, match="bias must be among the weights"):
        sender.update_weights({"weight": model.weight})
    assert [engine.version for engine in engines] == [5, 5]
    assert sender.version == 5
    scheme.create_transport(engines[0]).send_weights("policy", model)  # by hand
    assert [engine.version for engine in engines] == [6, 5]


def scheme(**arguments):
    return lambda: VLLMWeightSyncScheme(**arguments)


NO_ENGINE = "must implement RLvLLMEngine interface .* got object"


test_impossible_settings_and_what_is_not_an_engine_are_refused = refusals(
    (ConfigError, "vllm_tp_size must be at least 1: got 0", lambda: vLLMUpdater(vllm_tp_size=0)),
    (ConfigError, "master_port requires master_address", lambda: vLLMUpdater(master_port=29500)),
    (TypeError, NO_ENGINE, lambda: vLLMUpdater(engine=object())),
    (TypeError, NO_ENGINE, lambda: VLLMWeightSyncScheme().create_receiver(object())),
    (TypeError, NO_ENGINE, lambda: VLLMWeightSyncScheme().create_sender().register_worker(0, object())),
    (ConfigError, "gpus_per_replica must be at least 1", scheme(gpus_per_replica=0)),
    (ConfigError, "num_replicas must be at least 1", scheme(num_replicas=0)),
    (ConfigError, "got 'pickle'", scheme(strategy="pickle")),
    (ConfigError, "master_port requires master_address", scheme(master_port=1)),
    (ConfigError, "reaches the workers of one engine", scheme(master_address="a", num_replicas=2)),
)
