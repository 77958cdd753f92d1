"""A set of weights arrives whole, under a version that the engine owns, or not at all."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from llmrl.collectors.weight_updaters import (
    EngineUpdater,
    MultiProcessedWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from llmrl.errors import WeightSyncError
from llmrl.modules.llm.engines import TransformersEngine
from llmrl.modules.llm.engines.weights import WeightSpec
from llmrl.testing import FakeEngine, tiny_model, tiny_tokenizer
from llmrl.weight_update import LazyWeight, WeightGroups, publish

WEIGHTS = {"a": torch.ones(2), "b.weight": torch.zeros(2, 3)}
METADATA = {name: (tensor.dtype, tensor.shape) for name, tensor in WEIGHTS.items()}


def make_engine():
    return FakeEngine(["x"], tokenizer=tiny_tokenizer())


def test_the_engine_gets_the_weights_and_the_next_version_or_the_one_given():
    engine = make_engine()
    assert publish(WEIGHTS, engine) == 1
    assert publish(WEIGHTS, engine, version=5) == engine.version == 5
    assert engine.weights is WEIGHTS
    engine.version = 7  # after a resumption
    assert publish(None, engine) == 8
    assert engine.weights is None
    with pytest.raises(WeightSyncError, match="got 8 after 8"):
        publish(None, engine, version=8)


def test_a_rank_that_does_not_send_makes_the_weights_and_has_the_version():
    engine, made = make_engine(), []
    engine.update_weights = lambda *a, **k: pytest.fail("sent")
    make = lambda dtype: made.append(1) or torch.zeros(2)  # noqa: E731
    groups = WeightGroups({name: LazyWeight(torch.float32, torch.Size([2]), make) for name in "ab"}, max_bytes=8)
    assert publish(groups, engine, sends=False) == engine.version == 1
    assert len(made) == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.ones(2)}, "b.weight must be among the weights"),
        (WEIGHTS | {"a": torch.ones(3)}, r"a must be .*\[2\].* got .*\[3\]"),
        (WEIGHTS | {"a": torch.ones(2, dtype=torch.bfloat16)}, "got .torch.bfloat16"),
    ],
)
def test_weights_that_differ_from_the_metadata_do_not_reach_the_engine(weights, message):
    engine = make_engine()
    with pytest.raises(WeightSyncError, match=message):
        publish(weights, engine, metadata=METADATA)
    assert (engine.version, engine.weights) == (0, None)


def test_a_module_comes_in_groups_and_whole_where_the_engine_takes_none():
    engine, model = make_engine(), nn.Linear(2, 1)
    publish(model, engine, metadata={"weight": (torch.float32, torch.Size([1, 2]))})
    assert set(engine.weights) == {"weight", "bias"}
    engine.takes_groups = True
    publish(model, engine)
    assert isinstance(engine.weights, WeightGroups)


def test_an_engine_that_refuses_or_lies_is_named():
    class Refuses:
        version = 0

        def update_weights(self, weights, *, version):
            raise OSError("out of memory")

    class Lies(Refuses):
        def update_weights(self, weights, *, version):
            pass

    for engine, message in (
        (Refuses(), "Refuses: it raised OSError: out of memory"),
        (Lies(), "Lies must be at version 1"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            publish(WEIGHTS, engine)
    with pytest.raises(TypeError, match="update_weights"):
        publish(WEIGHTS, object())


def test_buffers_outside_of_the_state_dict_are_left_out_and_other_names_refused():
    """As in ``TensorDict.from_module``. Regression: rotary frequencies were unknown names."""
    model, trained = tiny_model(seed=0), tiny_model(seed=1)
    engine = TransformersEngine(model, eos_token_ids=(2,), pad_token_id=0)
    assert "model.rotary_emb.inv_freq" in engine.unsaved_buffers == WeightSpec(model.config).unsaved_buffers
    updater = EngineUpdater(engine)
    updater.push_weights(TensorDict.from_module(trained))
    updater.push_weights(trained)  # the set is the same without them
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight)
    ids = [torch.arange(5, 12)]
    trainer = TransformersEngine(trained, eos_token_ids=(2,), pad_token_id=0)
    assert torch.equal(engine.score(ids)[0], trainer.score(ids)[0])
    with pytest.raises(WeightSyncError, match=r"model\.rotary_emb\.inv_frec"):
        publish({**trained.state_dict(), "model.rotary_emb.inv_frec": torch.ones(1)}, engine)
    with pytest.raises(WeightSyncError, match=r"Did you mean '?lm_head\.weight"):
        publish({n.replace("lm_head", "lm_haed"): t for n, t in trained.state_dict().items()}, engine)
    assert engine.version == 2


def test_vanilla_updater_copies_or_changes_nothing():
    policy, trainer = nn.Linear(2, 1), nn.Linear(2, 1)
    updater = VanillaWeightUpdater(weight_getter=lambda: trainer, policy_weights=policy)
    updater.push_weights()
    assert torch.equal(policy.weight, trainer.weight)
    kept = policy.weight.clone()
    with pytest.raises(WeightSyncError, match=r"'bias' is missing.*Nothing was updated"):
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


@pytest.mark.parametrize("given", ["module", "from_module", "state_dict"])
@pytest.mark.parametrize("held", ["module", "from_module"])
def test_a_language_models_weights_are_copied_from_and_into_any_form(given, held):
    """Regression: `TensorDict.from_module` also holds buffers that a state dict leaves out, and was refused."""
    forms = {"module": lambda model: model, "from_module": TensorDict.from_module, "state_dict": nn.Module.state_dict}
    trainer, policy = (tiny_model(seed=seed) for seed in (0, 1))
    updater = VanillaWeightUpdater(policy_weights=forms[held](policy))
    if held == "from_module" and given != "from_module":
        with pytest.raises(WeightSyncError, match=r"inv_freq'.* missing"):  # it says that it wants them
            updater.push_weights(forms[given](trainer))
        return
    updater.push_weights(forms[given](trainer))
    torch.testing.assert_close(policy.state_dict(), trainer.state_dict(), atol=0, rtol=0)


def test_weights_are_copied_into_what_workers_share_on_each_device():
    held = [TensorDict.from_module(nn.Linear(2, 1)).data.clone().share_memory_() for _ in range(2)]
    shared, trainer = {"cpu": held[0], "cpu:0": held[1]}, TensorDict.from_module(nn.Linear(2, 1))
    updater = MultiProcessedWeightUpdater(get_server_weights=lambda: trainer, policy_weights=shared)
    updater.push_weights(worker_ids="cpu:0")
    assert torch.equal(shared["cpu:0"]["weight"], trainer["weight"])
    assert not torch.equal(shared["cpu"]["weight"], trainer["weight"])
    updater.push_weights()
    assert torch.equal(shared["cpu"]["weight"], trainer["weight"])
    with pytest.raises(WeightSyncError, match=r"'bias' is missing"):
        updater.push_weights({"weight": torch.zeros(1, 2)})
