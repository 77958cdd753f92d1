import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorClass, TensorDict

from llmrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from llmrl.errors import ConfigError, MissingKeyError, ShapeError


class Pair(TensorClass["nocast"]):
    left: torch.Tensor = None
    right: torch.Tensor = None


def agent_spec() -> Composite:
    return Composite(
        {"agent": {"action": Categorical(3, shape=(2,)), "state": None}}, obs=Unbounded((2, 4)), shape=(2,)
    )


def test_update_pop_separates_empty():
    spec = agent_spec()
    spec.update(Composite({"agent": {"reward": Unbounded((2, 1))}}, obs=Unbounded((2, 5)), shape=(2,)))
    assert set(spec["agent"].keys()) == {"action", "state", "reward"}
    assert spec["obs"].shape == (2, 5)
    assert isinstance(spec.pop(("agent", "action")), Categorical)
    assert ("agent", "action") not in spec
    assert spec.pop("gone", None) is None
    for take in (spec.pop, spec.separates):
        with pytest.raises(MissingKeyError):
            take("gone")
    assert list(spec.separates("obs", ("agent", "reward")).keys(True, True)) == ["obs", ("agent", "reward")]
    assert "obs" in spec
    assert spec.separates("gone", default=None)["gone"] is None
    assert (spec.empty().shape, spec.empty().is_empty()) == ((2,), True)
    nested = Composite(a=Composite())
    assert (nested.is_empty(recurse=True), nested.is_empty()) == (True, False)
    del spec["obs"]
    assert "obs" not in spec


@pytest.mark.parametrize("stacked", [False, True])
def test_a_locked_spec_refuses_writes_at_every_depth_and_its_clone_does_not(stacked):
    spec = agent_spec()
    spec = (torch.stack([spec, spec.clone().set("more", None)]) if stacked else spec).lock_()
    part = spec[0] if stacked else spec["agent"]
    for write in (
        lambda: spec.set("new", None),
        lambda: spec["agent"].set("new", None),
        lambda: part.set("new", None),
        lambda: spec.pop("obs"),
        lambda: spec.pop(("agent", "action")),
        lambda: setattr(spec, "device", "cpu"),
        lambda: spec.clear_device_(),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            write()
    clone = spec.clone()
    clone["agent", "new"] = None
    assert ("agent", "new") not in spec
    spec.unlock_()["agent", "new"] = None
    assert spec == clone


def test_what_cannot_be_an_entry_is_refused():
    for name in ("shape", "device", "dtype", "space"):
        with pytest.raises(AttributeError, match="cannot be named"):
            Composite({name: Unbounded()})
    with pytest.raises(ShapeError, match=r"'obs' must begin .*\(3,\): got \(2, 4\)"):
        Composite(obs=Unbounded((2, 4)), shape=(3,))
    with pytest.raises(TypeError, match=r"'shpae' must be a spec.* Did you mean 'shape'"):
        Composite(shpae=(3,))
    with pytest.raises(RuntimeError, match="All devices must match"):
        Composite(obs=Unbounded(device="meta"), device="cpu")
    with pytest.raises(ConfigError, match="two names"):
        Composite(shape=(1,), batch_size=(1,))
    assert Composite(batch_size=(3,)).batch_size == (3,)


def test_names_of_dims_follow_them_and_are_those_of_the_values():
    spec = Composite(x=Unbounded((2, 1, 4)), shape=(2, 1), names=["env", None])
    assert (spec.names, spec.rand((5,)).names) == (["env", None], [None, "env", None])
    assert spec.refine_names(..., "time").names == ["env", "time"]
    assert spec.unsqueeze(0).names == [None, "env", "time"]
    assert (spec.expand(3, 2, 1).names, spec.squeeze().names) == ([None, "env", "time"], ["env"])
    assert (spec[0].names, spec.clone().names) == (["time"], ["env", "time"])
    spec["inner"] = given = Composite(shape=(2, 1, 3), names=["other", None, "agent"])
    assert (spec["inner"].names, given.names) == (["env", "time", "agent"], ["other", None, "agent"])
    del spec["inner"]
    assert spec == Composite(x=Unbounded((2, 1, 4)), shape=(2, 1))
    for wrong, match in ((("env",), "one name per dim"), (("agent", "time"), "cannot be renamed")):
        with pytest.raises(ConfigError, match=match):
            spec.refine_names(*wrong)
    assert spec.names == ["env", "time"]
    spec.names = None
    assert spec.names == spec.rand().names == [None, None]


def test_is_in_needs_every_key_and_names_what_is_wrong():
    spec = agent_spec()
    td = spec.rand()
    assert spec.is_in(td.copy().set("extra", torch.zeros(2)))
    assert not spec.is_in(td.exclude(("agent", "action")))
    td["agent", "action"] = torch.tensor([0, 3])
    td["obs"] = td["obs"].double()
    found = {mismatch.key: mismatch.kind for mismatch in spec.mismatches(td)}
    assert found == {("agent", "action"): "domain", ("obs",): "dtype"}
    with pytest.raises(AssertionError, match=r"\('agent', 'action'\): declared one of 0 to 2, got 3"):
        spec.assert_is_in(td)
    assert not spec.is_in(torch.zeros(2))
    assert not spec.is_in(TensorDict(agent=torch.zeros(2), obs=torch.zeros(2, 4), batch_size=[2]))


def ragged_pair(lengths: list[int], dtype: torch.dtype = torch.int64) -> Pair:
    rows = [TensorDict({"left": torch.zeros(n, dtype=dtype)}, batch_size=[]) for n in lengths]
    return Pair.from_tensordict(LazyStackedTensorDict(*rows))


def test_ragged_containers_are_checked_and_projected_row_by_row():
    spec = Composite(
        pair=Composite(left=Bounded(0, 9, shape=(3, -1), dtype=torch.int64), shape=(3,), data_cls=Pair), shape=(3,)
    )
    td = TensorDict(pair=ragged_pair([1, 4, 2]), batch_size=[3])
    assert spec.is_in(td)
    assert not spec.is_in(TensorDict(pair=ragged_pair([1, 4, 2], torch.float32), batch_size=[3]))
    assert not spec.is_in(TensorDict(pair=TensorDict(left=torch.zeros(3, 2).long(), batch_size=[3]), batch_size=[3]))
    assert isinstance(spec.rand()["pair"], Pair)
    td["pair"]._tensordict.tensordicts[1]["left"][:] = 11
    assert not spec.is_in(td)
    rows = spec.project(td)["pair"].get("left", as_list=True)
    assert [row.tolist() for row in rows] == [[0], [9] * 4, [0, 0]]


def test_a_lazy_batch_of_tensordicts_is_checked_with_the_row_spec():
    spec = Composite(x=Unbounded((2, -1)), text=NonTensor((2,), example_data=""), shape=(2,))
    rows = [TensorDict(x=torch.zeros(n), text="a") for n in (2, 3)]
    assert spec.is_in(LazyStackedTensorDict(*rows))
    assert not spec.is_in(LazyStackedTensorDict(*rows, rows[0]))
    assert spec.is_in(TensorDict(x=torch.zeros(2, 5), text=NonTensorStack("a", "b"), batch_size=[2]))


def test_a_device_can_be_cleared_and_set():
    spec = Composite({"in": {"x": Unbounded()}}, device="cpu")
    assert spec["in"].device == torch.device("cpu")
    assert spec.clear_device_() is spec
    assert spec.device is spec["in"].device is None
    assert spec["in", "x"].device == torch.device("cpu")
