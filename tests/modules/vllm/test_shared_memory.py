"""A block of shared memory: what is written is what another process reads, and every other bit is noticed."""

import os
import subprocess
import sys

import pytest
import torch

from llmrl.modules.llm.engines.vllm.shared_memory import SharedBuffer, StoredTensor, checksum, padded_size

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
SHAPES = [(), (1,), (7,), (3, 5), (0, 4), (700, 500)]


@pytest.fixture
def block():
    block = SharedBuffer.create(1 << 23)
    yield block
    block.unlink()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_read_as_it_was_written(block, dtype, shape):
    value = (torch.randn(shape) * 100).to(dtype)
    placed = block.write("w", value, offset=128)
    assert placed == StoredTensor("w", str(dtype)[6:], list(shape), 128, checksum(value))
    read = block.read(placed)
    assert (read.dtype, read.shape) == (value.dtype, value.shape)
    assert torch.equal(read, value)
    assert block.is_intact(placed)


def test_the_checksum_is_the_sum_of_words():
    # 3 = 1 + 2; the bytes 1, 0, ... are the word 1, and a last word is filled up with zeros
    assert checksum(torch.tensor([1, 2])) == 3
    assert checksum(torch.tensor([1], dtype=torch.uint8)) == 1
    assert checksum(torch.tensor([0] * 8 + [1, 1], dtype=torch.uint8)) == 257
    assert checksum(torch.tensor([2**63 - 1, 1])) == -(2**63)  # modulo 2^64
    assert checksum(torch.tensor([0, 0, 1, 0], dtype=torch.int16)[1:]) == checksum(torch.tensor([0, 1, 0]).short())


@pytest.mark.parametrize("size", [1, 8, 13, 1 << 20, (1 << 20) + 5, 3 << 20])
def test_any_flipped_bit_is_noticed(block, size):
    placed = block.write("w", torch.randint(0, 255, (size,), dtype=torch.uint8), offset=64)
    for at in {0, size // 2, size - 1}:
        for bit in (0, 7):
            block.bytes[64 + at] ^= 1 << bit
            assert not block.is_intact(placed)
            block.bytes[64 + at] ^= 1 << bit
    assert block.is_intact(placed)


def test_neighbours_do_not_touch(block):
    """The last one lies in another order in memory: it arrives in its own."""
    placed, offset = [], 0
    values = [torch.full((n,), n, dtype=torch.int8) for n in (1, 63, 64, 65, 100)]
    values.append(torch.arange(12.0).reshape(3, 4).t())
    for n, value in enumerate(values):
        placed.append(block.write(str(n), value, offset=offset))
        offset += padded_size(value.nbytes)
    assert [entry.offset for entry in placed] == [0, 64, 128, 192, 320, 448]
    assert all(torch.equal(block.read(entry), value) for entry, value in zip(placed, values, strict=True))


def test_no_room_is_an_error_and_leaves_no_file():
    with pytest.raises(OSError):
        SharedBuffer.create(1 << 55)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"llmrl-weights-{os.getpid()}-")]


@pytest.mark.slow
def test_nothing_is_left_when_the_process_that_made_it_is_killed():
    """The path is gone as soon as the peer has it; the peer goes on reading."""
    code = (
        "import os, signal, torch\nfrom llmrl.modules.llm.engines.vllm.shared_memory import SharedBuffer\n"
        "block = SharedBuffer.create(4096)\nblock.write('w', torch.arange(4), offset=0)\n"
        "print(block.path, flush=True)\ninput()\nblock.unlink()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = maker.stdout.readline().strip()
    peer = SharedBuffer.open(path, 4096)
    maker.communicate("\n", timeout=60)
    assert maker.returncode == -9
    assert not os.path.exists(path)
    assert peer.read(StoredTensor("w", "int64", [4], 0, 0)).tolist() == [0, 1, 2, 3]
