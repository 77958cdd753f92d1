"""Storages in files: what the directory may hold, what a full disk says, and who cleans up."""

import errno
import gc
import pickle
import shutil

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from llmrl.errors import UnsupportedError
from tests.support.buffers import holding

pytestmark = pytest.mark.filterwarnings("ignore:.* rows were written at once")  # longer than the storage on purpose


def rows(*numbers: int) -> TensorDict:
    return TensorDict({"a": torch.tensor(numbers), "b.c": torch.tensor(numbers) / 2}, batch_size=[len(numbers)])


def test_rows_are_in_the_files_of_the_directory(tmp_path):
    buffer = holding(rows(1, 2, 3, 4, 5), LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    assert (buffer["a"].tolist(), buffer["b.c"].tolist()) == ([5, 2, 3, 4], [2.5, 1.0, 1.5, 2.0])
    on_disk = [path.read_bytes() for path in sorted((tmp_path / "rows").glob("buffer.column_*"))]
    assert torch.frombuffer(bytearray(on_disk[0]), dtype=torch.int64).tolist() == [5, 2, 3, 4]
    del buffer
    gc.collect()
    assert (tmp_path / "rows" / "buffer.column_0.bin").exists()


def test_files_in_a_temporary_directory_go_with_the_storage_and_others_only_if_asked(tmp_path):
    temporary = LazyMemmapStorage(4)
    temporary.set(slice(0, 2), rows(1, 2))
    folder = temporary._folder.path
    assert folder.exists()
    asked = LazyMemmapStorage(4, scratch_dir=tmp_path / "asked", auto_cleanup=True)
    asked.set(slice(0, 2), rows(1, 2))
    (tmp_path / "asked" / "notes").write_text("mine")
    kept = LazyMemmapStorage(4, auto_cleanup=False)
    kept_folder = kept._folder.path
    del temporary, asked, kept
    gc.collect()
    assert not folder.exists()
    assert [path.name for path in (tmp_path / "asked").iterdir()] == ["notes"]
    assert kept_folder.exists()
    shutil.rmtree(kept_folder)


def test_a_directory_with_files_is_refused_unless_they_may_be_replaced(tmp_path):
    first = LazyMemmapStorage(4, scratch_dir=tmp_path)
    first.set(slice(0, 2), rows(1, 2))
    with pytest.raises(RuntimeError, match="existsok=True"):
        LazyMemmapStorage(4, scratch_dir=tmp_path)
    second = LazyMemmapStorage(4, scratch_dir=tmp_path, existsok=True)
    assert len(second) == 0
    second.set(slice(0, 2), rows(7, 8))
    assert second[:]["a"].tolist() == [7, 8]
    assert first[:]["a"].tolist() == [1, 2]  # who mapped the files that were replaced keeps them
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="must be a directory"):
        LazyMemmapStorage(4, scratch_dir=tmp_path / "file")


def test_a_disk_that_is_too_small_is_an_error_at_the_first_write_and_nothing_is_left(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**13, scratch_dir=tmp_path))
    with pytest.raises(OSError, match="smaller max_size or another scratch_dir"):
        buffer.extend(rows(1, 2))
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert not list(tmp_path.glob("buffer.column_*"))


def test_a_disk_that_fills_up_meanwhile_is_an_error_too(tmp_path, largest_file):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=tmp_path))
    with largest_file(100_000), pytest.raises(OSError, match="has no room") as error:
        buffer.extend(rows(1, 2))
    assert error.value.errno == errno.EFBIG
    assert len(buffer) == 0
    buffer.extend(rows(1, 2))  # once there is room, it goes on
    assert buffer["a"].tolist() == [1, 2]


def test_what_files_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device='cuda'"):
        LazyMemmapStorage(4, device="cuda")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    with_text = rows(1, 2)
    with_text["text"] = ["a", "b"]
    with pytest.raises(UnsupportedError, match="LazyStackStorage"):
        buffer.extend(with_text)
    assert len(buffer) == 0
    buffer.extend(rows(1, 2))
    assert len(buffer) == 2
    with pytest.raises(ValueError, match="ndim"):
        LazyMemmapStorage(4, ndim=0)
    with pytest.raises(ValueError, match="LazyTensorStorage allocates"):
        TensorStorage(None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype_survives_a_file(dtype):
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    storage = LazyMemmapStorage(4)
    storage.set(slice(0, 4), values)
    assert storage[:].dtype is dtype
    assert torch.equal(storage[:], values)


def test_sharing_twice_changes_nothing_and_is_not_taken_back():
    buffer = holding(rows(1, 2), LazyTensorStorage(4))
    assert not buffer.storage.shared
    for _ in range(2):
        buffer.share()
        assert buffer.storage.shared
    buffer.extend(rows(3, 4, 5))
    assert buffer["a"].tolist() == [5, 2, 3, 4]
    with pytest.raises(RuntimeError, match="share"):
        buffer.share(False)


@pytest.mark.parametrize("cleanup", [True, False])
def test_shared_memory_is_given_back_with_its_owner_unless_it_is_to_stay(cleanup):
    storage = LazyTensorStorage(4, shared_init=True, cleanup_memmap=cleanup)
    storage.set(0, rows(7)[0])
    folder, other = storage.folder, pickle.loads(pickle.dumps(storage))
    assert folder.is_dir()
    del storage
    gc.collect()
    try:
        assert folder.is_dir() is not cleanup
        if not cleanup:
            other.set(1, rows(8)[0])
            assert other.get(0)["a"].tolist() == rows(7)[0]["a"].tolist()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert LazyTensorStorage(4).folder is None
