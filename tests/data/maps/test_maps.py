"""Maps from rows to rows, and the hashes beneath them."""

import pytest
import torch
from tensordict import TensorDict

from llmrl.data import BinaryToDecimal, HashToInt, QueryModule, RandomProjectionHash, SipHash, TensorDictMap
from llmrl.data.replay_buffers import LazyTensorStorage, ListStorage
from llmrl.errors import MissingKeyError, ShapeError
from tests.support.refusals import refusals


def keys(*rows, dtype=torch.int64):
    return TensorDict(x=torch.tensor(rows, dtype=dtype), batch_size=[len(rows)])


def values(*rows):
    return TensorDict(y=torch.tensor(rows, dtype=torch.float32), batch_size=[len(rows)])


def new_map(size=10, **options):
    return TensorDictMap(query_module=QueryModule(["x"]), storage=LazyTensorStorage(size), **options)


class Same(torch.nn.Module):
    """A hash that is the same for all rows."""

    def forward(self, x):
        return torch.zeros(x.shape[:-1], dtype=torch.int64)


# --- hashes


def test_a_hash_is_the_same_in_every_process():
    """The numbers are those of hashlib.blake2b over struct.pack("<2f", 0.5, 0.0) and (1.0, 2.0)."""
    assert SipHash()(torch.tensor([[0.5, -0.0], [1.0, 2.0]])).tolist() == [8908929057036585851, 7373934272132878346]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64])
def test_rows_have_one_hash_where_their_numbers_are_equal(dtype):
    rows = torch.tensor([[[1, 0], [0, 1]], [[1, 0], [1, 1]]]).to(dtype)
    (first, second), (third, fourth) = SipHash()(rows).tolist()
    assert first == third
    assert len({first, second, fourth}) == 3
    assert all(len(digest) == 8 for digest in SipHash(as_tensor=False)(rows))


def test_a_projection_is_drawn_once_and_comes_back_with_the_state():
    rows = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    before = torch.random.get_rng_state()
    one, other = RandomProjectionHash(n_components=4), RandomProjectionHash(n_components=4)
    assert torch.equal(one(rows), other(rows)), "every process draws the same"
    assert torch.equal(torch.random.get_rng_state(), before)
    seeded = RandomProjectionHash(n_components=4, seed=1)
    assert not torch.equal(seeded(rows), one(rows))
    restored = RandomProjectionHash(n_components=4)
    restored.load_state_dict(seeded.state_dict())
    assert torch.equal(restored(rows), seeded(rows))
    with pytest.raises(ShapeError, match="40 features"):
        one(rows[:, :3])


def test_numbers_of_hashes_come_back_with_the_state():
    numbers = HashToInt()
    assert numbers(torch.tensor([[5, -3], [5, 9]]), extend=True).tolist() == [[0, 1], [0, 2]]
    restored = HashToInt()
    restored.load_state_dict(numbers.state_dict())
    assert restored(torch.tensor([9, 8, 5])).tolist() == [2, 3, 0]


# --- queries
def test_rows_of_several_keys_are_numbered_by_all_of_them():
    td = TensorDict(a=torch.tensor([1, 1, 2, 1]), b={"c": torch.tensor([[0.0], [1.0], [0.0], [0.0]])}, batch_size=[4])
    query = QueryModule(["a", ("b", "c")])
    out = query(td, clone=True)
    assert out["_index"].tolist() == [0, 1, 2, 0]
    assert out["_hash"][0] == out["_hash"][3]
    assert len(set(out["_hash"].tolist())) == 3
    assert "_index" not in td.keys()
    unseen = TensorDict(a=torch.tensor(2), b={"c": torch.tensor([1.0])})
    assert query(unseen, extend=False, write_hash=False)["_index"] == 3
    assert "_hash" not in unseen.keys()
    restored = QueryModule(["a", ("b", "c")])
    restored.load_state_dict(query.state_dict())
    assert restored.index(td).tolist() == [0, 1, 2, 0]


def test_hashes_decide_only_where_they_are_asked_to():
    exact = QueryModule(["x"], hash_module=Same())
    assert exact.index(keys([1], [2]), extend=True).tolist() == [0, 1]
    merged = QueryModule(["x"], hash_module=Same(), hash_to_int=HashToInt())
    assert merged.index(keys([1], [2]), extend=True).tolist() == [0, 0]


def test_what_a_key_is_cannot_change():
    query = QueryModule(["x"])
    wide = keys([1] * 100, [2] * 100, [1] * 100)  # of wide rows digests are compared
    assert query(wide)["_index"].tolist() == [0, 1, 0]
    with pytest.raises(ShapeError, match="int64"):
        query(keys([1] * 100, dtype=torch.float32))


test_rows_and_keys_that_are_not_there_are_named = refusals(
    (MissingKeyError, "1 of 1 .*'x'", lambda: new_map()[keys([1, 2])]),
    (MissingKeyError, "'x'", lambda: QueryModule(["x"])(values(1))),
    (MissingKeyError, "'w'", lambda: TensorDictMap.from_tensordict_pair(keys([1]), values(1), ["x"], ["w"])),
)


# --- maps
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_row_is_read_where_it_was_written(storage):
    parts = {"query_module": QueryModule(["x"]), "collate_fn": lambda rows: torch.stack(list(rows))}
    map_ = TensorDictMap(storage=storage(3), **parts)
    map_[keys([1, 2], [3, 4])] = values(12, 34)
    map_[keys([3, 4], [5, 6], [3, 4])] = values(0, 56, 43)
    assert len(map_) == 3, "a key that was written three times counts once"
    assert map_[keys([5, 6], [1, 2], [3, 4])]["y"].tolist() == [56, 12, 43]
    assert map_.contains(keys([1, 2], [2, 1])).tolist() == [True, False]
    assert keys([1, 2]) in map_
    assert keys([1, 2], [2, 1]) not in map_


@pytest.mark.parametrize("numbers", [None, HashToInt()])
def test_a_map_without_a_batch_and_with_batches_of_no_rows(numbers):
    map_ = TensorDictMap(query_module=QueryModule(["x"], hash_to_int=numbers), storage=LazyTensorStorage(3))
    one = keys([1, 2])[0]
    map_[one] = values(7)[0]
    assert (map_[one].batch_size, map_[one]["y"]) == ((), 7)
    assert bool(map_.contains(one))
    assert map_[torch.tensor([0, 0])]["y"].tolist() == [7, 7], "an index is a position"
    grid = keys([1, 2], [1, 2]).reshape(1, 2)
    assert map_[grid]["y"].tolist() == [[7, 7]]
    map_[keys([1, 2])[:0]] = values(7)[:0]
    assert (map_[keys([1, 2])[:0]]["y"].tolist(), map_.contains(keys([1, 2])[:0]).tolist()) == ([], [])
    assert len(map_) == 1


def test_a_write_that_fails_changes_nothing():
    map_ = new_map(size=2)
    map_[keys([1, 1])] = values(1)
    with pytest.raises(RuntimeError, match="at most 2 keys"):
        map_[keys([2, 2], [3, 3])] = values(2, 3)
    with pytest.raises(ValueError, match="z"):
        map_[keys([2, 2])] = values(2).rename_key_("y", "z")
    with pytest.raises(ShapeError, match="one batch size"):
        map_[keys([2, 2])] = values(2, 3)
    assert len(map_) == 1
    assert keys([2, 2]) not in map_
    map_.clear()
    assert len(map_) == 0
    assert keys([1, 1]) not in map_
    map_[keys([1], [2])] = values(1, 2)
    assert map_[keys([2])]["y"].tolist() == [2]


def test_old_and_new_values_are_merged_in_their_order():
    def appended(old, new):
        return TensorDict(y=old["y"] * 10 + new["y"], batch_size=old.batch_size)

    map_ = new_map(write_fn=appended)
    map_[keys([1], [2], [1], [1])] = values(1, 5, 2, 3)
    assert map_[keys([1], [2])]["y"].tolist() == [123, 5]
    map_[keys([3], [1], [3])] = values(7, 4, 8)
    assert map_[keys([1], [2], [3])]["y"].tolist() == [1234, 5, 78]


def test_the_keys_that_were_written_hold_their_positions():
    example = values(0), ["x"], ["y", "_index"]
    map_ = TensorDictMap.from_tensordict_pair(keys([1]), *example)
    written = keys([5], [6], [5])
    map_[written] = values(50, 60, 70)
    assert written["_index"].tolist() == [0, 1, 0]
    assert [map_[keys([6], [5])][key].tolist() for key in ("y", "_index")] == [[60, 70], [1, 0]]
    single = keys([7])[0]
    map_[single] = values(80)[0]
    assert single["_index"].item() == 2


def test_chunks_of_bits_are_added():
    bits = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 1, 0, 0]])
    assert BinaryToDecimal(4, "cpu", torch.int32)(bits).tolist() == [3, 15 + 4]
    signs = BinaryToDecimal(2, "cpu", torch.int64, convert_to_binary=True)
    assert signs(torch.tensor([-0.5, 3.0])).item() == 1
    with pytest.raises(ShapeError, match="chunks of 4"):
        BinaryToDecimal(4, "cpu", torch.int32)(bits[:, :6])
