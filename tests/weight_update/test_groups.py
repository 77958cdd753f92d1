"""Weights in groups: all of them, whole, and never many at a time."""

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from llmrl.errors import ConfigError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import LazyWeight, WeightGroups, weight_groups
from llmrl.weight_update.publish import as_weights
from tests.support.vllm import stepped

peft = pytest.importorskip("peft")


def make_model(architecture="qwen2"):
    return tiny_model(tiny_tokenizer(), architecture=architecture, heads=2)


def together(groups):
    return {name: tensor for group in groups for name, tensor in group.items()}


def test_groups_are_the_state_dict_each_within_its_size():
    model = make_model()
    limit = 1 << 14
    groups = list(weight_groups(model, max_bytes=limit))
    state = model.state_dict()
    found = together(groups)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    for group in groups:
        assert len(group) == 1 or sum(tensor.nbytes for tensor in group.values()) <= limit
    assert len(groups) > 5
    assert not any(tensor.requires_grad for tensor in found.values())


def test_a_tied_weight_comes_once_under_its_first_name():
    model = make_model("gemma")
    state, sent = model.state_dict(), weight_groups(model).metadata
    assert [name for name in state if name not in sent] == ["lm_head.weight"]
    assert list(weight_groups(nn.Identity())) == []


def test_nothing_is_made_before_it_is_asked_for_and_each_pass_makes_it_anew():
    made = []

    def lazy(name):
        return LazyWeight(torch.float32, torch.Size([4]), lambda dtype: made.append(name) or torch.zeros(4))

    groups = WeightGroups({name: lazy(name) for name in "abc"}, max_bytes=32)
    assert groups.metadata["c"] == (torch.float32, torch.Size([4]))
    passing = iter(groups)
    assert made == []
    assert list(next(passing)) == ["a", "b"]
    assert made == ["a", "b"]
    groups.drain()
    assert made == ["a", "b", "a", "b", "c"]
    with pytest.raises(ConfigError, match="max_bytes must be positive: got 0"):
        WeightGroups({}, max_bytes=0)


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that this rank puts into all-gathers."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.num_bytes += arguments[0].nbytes
        return function(*arguments, **(options or {}))


def check_cast(model, kept):
    """The bits of casting what was gathered, for half of the bytes: also of adapters merged in float32, and of weights
    that no one casts.
    """
    counts = []
    for groups in (as_weights(model), as_weights(model).cast(torch.bfloat16, kept)):
        with GatheredBytes() as gathered:
            counts.append((groups.built(), gathered.num_bytes))
    (whole, before), (found, after) = counts
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        expected = value if any(part in name for part in kept) else value.bfloat16()
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    if not hasattr(model, "peft_config"):  # a layer with adapters is gathered in float32, to merge them
        float32 = sum(value.nbytes for name, value in whole.items() if value.dtype == torch.float32 and "norm" in name)
        assert 2 * after == pytest.approx(before + float32 / 2, rel=0.01)


def _rank(rank, world_size, meeting, architecture):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    try:
        model = tiny_model(tiny_tokenizer(), architecture=architecture, heads=2, vocab_size=487)  # not of two halves
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        mesh = distributed.device_mesh.init_device_mesh("cpu", (world_size,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        assert any(hasattr(value, "full_tensor") for value in model.state_dict().values())
        groups = weight_groups(model, max_bytes=1 << 14)
        assert groups.metadata == {n: (expected[n].dtype, expected[n].shape) for n in groups.metadata}
        if rank == 0:
            alive = list(groups)
            found = together(alive)
            assert len(alive) > 5
            assert not any(isinstance(tensor, distributed.tensor.DTensor) for tensor in found.values())
            assert all(torch.equal(found[name], expected[name]) for name in found)
            assert expected.keys() - found.keys() <= {"lm_head.weight"}
        else:
            groups.drain()
        check_cast(model, ("norm",))
        settings = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "down_proj"])
        torch.manual_seed(0)
        check_cast(stepped(peft.get_peft_model(model, settings), 0, size=0.1), ("norm",))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def test_cast_groups_hold_more_weights_and_leave_integers_and_kept_names_as_they_are():
    model = make_model("gemma")
    model.register_buffer("steps", torch.arange(3))
    groups = weight_groups(model, max_bytes=1 << 14)
    cast = groups.cast(torch.bfloat16, ("norm",))
    for name, (dtype, shape) in cast.metadata.items():
        own = torch.int64 if name == "steps" else torch.float32
        assert (dtype, shape) == (own if own == torch.int64 or "norm" in name else torch.bfloat16, shape)
    assert {name: tuple(value.shape) for name, value in cast.built().items()} == {
        name: tuple(shape) for name, (_, shape) in groups.metadata.items()
    }
    assert len(list(cast)) < len(list(groups))
    assert groups.cast(None).metadata == groups.metadata


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "gemma"])
def test_a_sharded_model_is_gathered_group_by_group_in_the_precision_of_the_engine_on_all_ranks(tmp_path, architecture):
    mp.spawn(_rank, args=(2, f"file://{tmp_path}/ranks", architecture), nprocs=2)
