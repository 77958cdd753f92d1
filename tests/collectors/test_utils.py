"""split_trajectories against slices taken by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from llmrl.collectors.utils import split_trajectories
from llmrl.errors import MissingKeyError, ShapeError

IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
ROWS = [[0, 1, 2], [3, 4, 0], [5, 6, 7]]
MASK = [[True] * 3, [True, True, False], [True] * 3]


def steps(**entries) -> TensorDict:
    return TensorDict(x=torch.arange(8.0), y=torch.ones(8, 2), **entries, batch_size=[8])


def flags() -> torch.Tensor:
    return torch.isin(torch.arange(8), torch.tensor([2, 4])).unsqueeze(-1)


@pytest.mark.parametrize(
    ("entries", "arguments", "ids_key", "mask_key"),
    [
        ({"collector": {"traj_ids": IDS}}, {}, ("collector", "traj_ids"), ("collector", "mask")),
        ({"collector": {"traj_ids": IDS.unsqueeze(-1) + 5}}, {}, ("collector", "traj_ids"), ("collector", "mask")),
        ({"traj_ids": IDS}, {}, "traj_ids", "mask"),
        ({"traj_ids": IDS}, {"prefix": ()}, "traj_ids", "mask"),
        ({"meta": {"traj_ids": IDS}}, {"prefix": "meta"}, ("meta", "traj_ids"), ("meta", "mask")),
        ({"a": {"run": IDS}}, {"trajectory_key": ("a", "run")}, ("a", "run"), ("a", "mask")),
        ({"run": IDS}, {"trajectory_key": "run", "prefix": "meta"}, "run", ("meta", "mask")),
        ({"next": {"done": flags()}}, {}, ("collector", "traj_ids"), ("collector", "mask")),
        ({"next": {"end": flags()}}, {"done_key": "end"}, ("collector", "traj_ids"), ("collector", "mask")),
        ({"next": {"a": {"end": flags()}}}, {"done_key": ("next", "a", "end"), "prefix": ()}, "traj_ids", "mask"),
    ],
)
def test_each_trajectory_becomes_a_padded_row(entries, arguments, ids_key, mask_key):
    batch = steps(**{key: TensorDict(v, batch_size=[8]) if isinstance(v, dict) else v for key, v in entries.items()})
    before = set(batch.keys(True, True))
    out = split_trajectories(batch, **arguments)
    assert out.batch_size == (3, 3)
    assert out.names == [None, "time"]
    assert out["x"].tolist() == ROWS
    assert out["y"].sum(-1).tolist() == [[2, 2, 2], [2, 2, 0], [2, 2, 2]]
    assert out[mask_key].tolist() == MASK
    first = out[ids_key].reshape(3, 3)[:, 0]
    assert (first - first[0]).tolist() == [0, 1, 2]
    assert set(batch.keys(True, True)) == before
    nested = split_trajectories(batch, **arguments, as_nested=True)
    assert nested.batch_size == (3, -1)
    assert (nested.to_padded_tensor(mask_key=mask_key) == out).all()
    nested = split_trajectories(batch, **arguments, as_nested=torch.jagged)
    assert nested.batch_size == (3,)
    assert [row.tolist() for row in nested["x"].unbind()] == [[0, 1, 2], [3, 4], [5, 6, 7]]


def test_rows_of_a_batch_are_cut_apart_even_if_their_ids_agree():
    """In the order of the rows; 0.0 of the first row does not go on in the second."""
    batch = TensorDict(x=torch.arange(8.0).view(2, 4), traj_ids=IDS.view(2, 4), batch_size=[2, 4])
    assert split_trajectories(batch)["x"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 0, 0], [5, 6, 7]]
    whole = TensorDict(x=torch.arange(8.0).view(2, 4), traj_ids=torch.tensor([[3] * 4, [4] * 4]), batch_size=[2, 4])
    out = split_trajectories(whole)
    assert out["x"].tolist() == whole["x"].tolist()
    assert out["mask"].all()


def test_what_is_no_tensor_repeats_the_last_entry():
    batch = steps(traj_ids=IDS).set("text", NonTensorStack(*"abcdefgh"))
    assert split_trajectories(batch).get("text").tolist() == [list("abc"), list("dee"), list("fgh")]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(MissingKeyError, match=r"needs \('collector', 'traj_ids'\) or \('next', 'done'\)"):
        split_trajectories(steps())
    with pytest.raises(ShapeError, match="one value per step"):
        split_trajectories(steps(traj_ids=IDS.unsqueeze(-1).expand(8, 2)))
    ragged = lazy_stack([TensorDict(x=torch.zeros(1 + step), traj_ids=torch.tensor(0)) for step in range(3)])
    with pytest.raises(ShapeError, match="one shape at every step"):
        split_trajectories(ragged)
