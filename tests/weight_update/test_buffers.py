"""A block of shared memory: what is written is what another process reads, and every other bit is noticed."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines.vllm import transfer
from llmrl.modules.llm.engines.weights import WeightSet
from llmrl.weight_update.buffers import (
    Buffer,
    CudaBuffer,
    SharedBuffer,
    StoredTensor,
    checksum,
    padded_size,
)

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
    [placed] = block.sealed([block.write("w", value, offset=128)])
    assert placed == StoredTensor("w", str(dtype)[6:], list(shape), 128, checksum(value))
    read = block.read(placed)
    assert (read.dtype, read.shape) == (value.dtype, value.shape)
    assert torch.equal(read, value)
    assert block.damaged([placed]) == []


def test_the_checksum_is_the_sum_of_words():
    # 3 = 1 + 2; the bytes 1, 0, ... are the word 1, and a last word is filled up with zeros
    assert checksum(torch.tensor([1, 2])) == 3
    assert checksum(torch.tensor([1], dtype=torch.uint8)) == 1
    assert checksum(torch.tensor([0] * 8 + [1, 1], dtype=torch.uint8)) == 257
    assert checksum(torch.tensor([2**63 - 1, 1])) == -(2**63)  # modulo 2^64
    assert checksum(torch.tensor([0, 0, 1, 0], dtype=torch.int16)[1:]) == checksum(torch.tensor([0, 1, 0]).short())


@pytest.mark.parametrize("size", [1, 8, 13, 1 << 20, (1 << 20) + 5, 3 << 20])
def test_any_flipped_bit_is_noticed(block, size):
    stored = block.sealed([block.write("w", torch.randint(0, 255, (size,), dtype=torch.uint8), offset=64)])
    for at in {0, size // 2, size - 1}:
        for bit in (0, 7):
            block.bytes[64 + at] ^= 1 << bit
            assert block.damaged(stored) == ["w"]
            block.bytes[64 + at] ^= 1 << bit
    assert block.damaged(stored) == []


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
        "import os, signal, torch\nfrom llmrl.weight_update.buffers import SharedBuffer\n"
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


def test_checksums_of_a_bucket_are_read_in_one_wait(block, monkeypatch):
    """On a GPU each read waits for all that was started before it."""
    values, reads = [torch.randn(7) for _ in range(20)], []
    for method in ("item", "tolist", "__int__", "__bool__"):
        own = getattr(torch.Tensor, method)
        monkeypatch.setattr(torch.Tensor, method, lambda tensor, own=own: (reads.append(1), own(tensor))[1])
    stored = block.sealed([block.write(str(n), value, offset=64 * n) for n, value in enumerate(values)])
    assert block.damaged(stored) == []
    assert len(reads) == 2  # one when they were written, one when they are checked


class Nowhere(Buffer):
    """Takes tensors of any size and keeps none."""

    def __init__(self, size):
        self.size = size

    def connect(self, open_workers):
        pass

    def write(self, name, tensor, *, offset):
        assert offset + padded_size(tensor.nbytes) <= self.size
        return StoredTensor(name, str(tensor.dtype)[6:], list(tensor.shape), offset, torch.tensor(0))


def shapes_of_7b():
    """The weights of Qwen2.5 7B."""
    yield from [("embed", (152064, 3584)), ("head", (152064, 3584)), ("norm", (3584,))]
    for n in range(28):
        for name, shape in [("q", (3584, 3584)), ("k", (512, 3584)), ("v", (512, 3584)), ("o", (3584, 3584))]:
            yield f"{n}.{name}", shape
        for name, shape in [("up", (18944, 3584)), ("gate", (18944, 3584)), ("down", (3584, 18944)), ("norm", (3584,))]:
            yield f"{n}.{name}", shape


def test_large_matrices_are_sent_while_others_are_loaded():
    """Half of 256 MiB is less than a matrix of 136 MB; the buffer has grown to the embedding's 1.09 GB anyway."""
    weights = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes_of_7b()}
    received = []

    def call(method, end, **arguments):
        if method == "llmrl_receive":
            received.append([StoredTensor(*entry).num_bytes for entry in arguments["stored"]])
        return [{}] if method == "llmrl_finish" else [[]]

    class Settings(transfer.CudaIPC):
        def create_buffer(self, size, call, end):
            return Nowhere(size)

    metadata = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    transfer.WeightTransfer(call).send(WeightSet(metadata, [weights]), float("inf"), Settings())
    assert sum(map(sum, received)) == 2 * sum(tensor.numel() for tensor in weights.values())
    assert len(received) <= 30
    assert sum(bucket[0] > 545_000_000 for bucket in received) == 2  # alone: the embedding and the head


@pytest.mark.parametrize("settings", ["expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64", ""])
def test_gpu_memory_for_other_processes_is_not_in_expandable_segments(monkeypatch, settings):
    now = [settings]
    empty = torch.empty

    def allocate(*size, device, **options):
        assert "True" not in now[0]
        return empty(*size, **options)

    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: now[0])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: now.__setitem__(0, text))
    monkeypatch.setattr(torch, "empty", allocate)
    assert CudaBuffer.create(4096).size == 4096
    assert now == [settings]


@pytest.mark.parametrize(
    ("default", "route", "expected"),
    [
        ("192.0.2.7", None, "192.0.2.7"),
        ("0.0.0.0", "192.0.2.8", "192.0.2.8"),
        ("0.0.0.0", "127.0.0.1", None),
        ("0.0.0.0", None, None),
    ],
)
def test_without_a_default_route_workers_elsewhere_get_the_address_of_the_route_to_them(
    monkeypatch, default, route, expected
):
    class Probe(SimpleNamespace):
        __enter__, __exit__ = (lambda self: self), (lambda self, *problem: None)

        def connect(self, address):
            if route is None:
                raise OSError(101, "Network is unreachable")

        def getsockname(self):
            return (route, 5)

    monkeypatch.setattr(transfer, "vllm_module", lambda name: SimpleNamespace(get_ip=lambda: default))
    monkeypatch.setattr(transfer.socket, "getaddrinfo", lambda host, *rest, **named: [(2, 2, 0, "", (host, 1))])
    monkeypatch.setattr(transfer.socket, "socket", lambda *kinds: Probe())
    here, there = ({"machine": f"{host} boot", "gpu": host, "sees": [host]} for host in ("a", "b"))
    if expected is None:
        with pytest.raises(ConfigError, match=r"workers on b can reach.*set VLLM_HOST_IP"):
            transfer.nearest_transfer(here, [there])
    else:
        assert transfer.nearest_transfer(here, [there]).master_address == expected
