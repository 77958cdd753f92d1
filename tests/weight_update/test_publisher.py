"""A set of weights arrives whole, under a version that everyone agrees on, or not at all."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from llmrl.collectors import PublisherUpdater, VanillaWeightUpdater, WeightUpdaterBase
from llmrl.errors import ConfigError, WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.engines.vllm.weight_spec import WeightLayout
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from llmrl.weight_update import WeightPublisher

WEIGHTS = {"a": torch.ones(2), "b.weight": torch.zeros(2, 3)}


def engine():
    return FakeEngine(["x"], tokenizer=tiny_tokenizer())


def test_every_receiver_gets_the_weights_and_the_version():
    receivers = [engine(), engine()]
    publisher = WeightPublisher(receivers)
    assert publisher.publish(WEIGHTS) == 1
    assert publisher.publish(WEIGHTS, version=5) == 5
    assert [r.version for r in receivers] == [5, 5]
    assert all(r.weights is WEIGHTS for r in receivers)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.ones(2)}, "missing 'b.weight'"),
        (WEIGHTS | {"c": torch.ones(1)}, "not expected 'c'"),
        ({"a": torch.ones(2), "b.weigth": torch.zeros(2, 3)}, "Did you mean 'b.weight'"),
        (WEIGHTS | {"a": torch.ones(3)}, r"'a' must be torch.float32 \(2,\): got torch.float32 \(3,\)"),
        (WEIGHTS | {"a": torch.ones(2, dtype=torch.bfloat16)}, "got torch.bfloat16"),
    ],
)
def test_another_set_of_weights_reaches_nobody(weights, message):
    receiver = engine()
    publisher = WeightPublisher([receiver], metadata={n: (t.dtype, t.shape) for n, t in WEIGHTS.items()})
    with pytest.raises(WeightSyncError, match=message):
        publisher.publish(weights)
    assert (publisher.version, receiver.version, receiver.weights) == (0, 0, None)


def test_a_version_must_grow():
    publisher = WeightPublisher([engine()])
    publisher.publish(None, version=3)
    with pytest.raises(WeightSyncError, match="got 3 after 3"):
        publisher.publish(None, version=3)


def test_a_receiver_that_refuses_or_lies_is_named():
    class Refuses:
        version = 0

        def update_weights(self, weights, *, version):
            raise OSError("out of memory")

    class Lies(Refuses):
        def update_weights(self, weights, *, version):
            pass

    for receiver, message in (
        (Refuses(), "Refuses raised OSError: out of memory"),
        (Lies(), "Lies must be at version 1"),
    ):
        publisher = WeightPublisher([receiver])
        with pytest.raises(WeightSyncError, match=message):
            publisher.publish(WEIGHTS)
        assert publisher.version == 0
    with pytest.raises(ConfigError, match="update_weights"):
        WeightPublisher([object()])


def test_a_real_engine_scores_with_the_published_weights():
    model, trained = tiny_model(seed=0), tiny_model(seed=1)
    receiver = TransformersEngine(model, eos_token_ids=(2,), pad_token_id=0)
    ids = [torch.arange(5, 12)]
    before = receiver.score(ids)[0]
    WeightPublisher([receiver]).publish(trained.state_dict())
    after = receiver.score(ids)[0]
    assert not torch.allclose(before, after)
    assert torch.equal(after, TransformersEngine(trained, eos_token_ids=(2,), pad_token_id=0).score(ids)[0])
    assert receiver.version == 1


def test_buffers_outside_of_the_state_dict_are_left_out_and_other_names_refused():
    """As in ``TensorDict.from_module``. Regression: rotary frequencies were unknown names."""
    model, trained = tiny_model(seed=0), tiny_model(seed=1)
    receiver = TransformersEngine(model, eos_token_ids=(2,), pad_token_id=0)
    weights = TensorDict.from_module(trained)
    assert "model.rotary_emb.inv_freq" in receiver.unsaved_buffers == WeightLayout(model.config).unsaved_buffers
    updater = PublisherUpdater(WeightPublisher([receiver]))
    updater.push_weights(weights)
    updater.push_weights(trained)  # the set is the same without them
    updater.push_weights(weights)
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight)
    assert receiver.version == 3
    for publisher in (updater.publisher, WeightPublisher([receiver])):
        with pytest.raises(WeightSyncError, match=r"model\.rotary_emb\.inv_frec"):
            publisher.publish({**trained.state_dict(), "model.rotary_emb.inv_frec": torch.ones(1)})
        with pytest.raises(WeightSyncError, match=r"Did you mean '?lm_head\.weight"):
            publisher.publish({n.replace("lm_head", "lm_haed"): t for n, t in trained.state_dict().items()})
    assert receiver.version == 3


class Collector:
    def __init__(self):
        self.updates = 0

    def increment_version(self):
        self.updates += 1


def test_an_updater_takes_modules_mappings_and_nothing_and_tells_its_collector():
    receiver, collector = engine(), Collector()
    updater = PublisherUpdater(WeightPublisher([receiver]))
    updater.register_collector(collector)
    module = nn.Linear(2, 1)
    updater.push_weights(module)
    assert set(receiver.weights) == {"weight", "bias"}
    updater.push_weights()
    assert receiver.weights is None
    assert collector.updates == receiver.version == 2


def test_vanilla_updater_copies_or_changes_nothing():
    policy, trainer = nn.Linear(2, 1), nn.Linear(2, 1)
    updater = VanillaWeightUpdater(weight_getter=lambda: trainer, policy_weights=policy)
    updater.push_weights()
    assert torch.equal(policy.weight, trainer.weight)
    kept = policy.weight.clone()
    with pytest.raises(WeightSyncError, match=r"1 differ, first 'bias'.*nothing was written"):
        updater.push_weights({"weight": torch.zeros(1, 2)})
    assert torch.equal(policy.weight, kept)
    with pytest.raises(WeightSyncError, match="must be given"):
        VanillaWeightUpdater(policy_weights=policy).push_weights()


def test_a_custom_updater_maps_names_and_serves_its_workers():
    class Renaming(WeightUpdaterBase):
        sent = ()

        def all_worker_ids(self):
            return [0, 1]

        def _maybe_map_weights(self, server_weights):
            return {f"model.{name}": tensor for name, tensor in server_weights.items()}

        def _sync_weights_with_worker(self, *, worker_id, server_weights):
            self.sent = (*self.sent, (worker_id, sorted(server_weights)))

    updater = Renaming()
    updater.push_weights(WEIGHTS)
    updater.push_weights(WEIGHTS, worker_ids=1)
    names = ["model.a", "model.b.weight"]
    assert updater.sent == ((0, names), (1, names), (1, names))
