"""Buffers that a trainer and an engine's workers share, in host memory or on one GPU, and the tensors in them."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64  # bytes: enough for any dtype, and the size of a cache line
_CHUNK = 1 << 20  # bytes copied at a time: small enough to be still in the cache when they are summed


class StoredTensor(NamedTuple):
    """Description of a tensor in a buffer, in a serialisable form.

    dtype     torch's dtype name
    offset    offset of its first byte in the buffer
    checksum  the sum, modulo 2^64, of its 64-bit words; int64[] on the tensor's device until `sealed` reads it
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int
    checksum: Any

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


class Buffer(ABC):
    """``bytes`` uint8[size], through which a trainer sends tensors to workers.

    ``connect(open_workers)``  opens the workers' ends: calls ``open_workers`` with the needed information
    ``pass_on(start, end)``    makes these bytes readable for the workers; does nothing if they share memory
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes, self.size = memory, memory.numel()

    @abstractmethod
    def connect(self, open_workers: Callable[[dict[str, Any]], Any]) -> None: ...

    def pass_on(self, start: int, end: int) -> None:  # noqa: B027 (most buffers have nothing to do)
        pass

    def close(self) -> None:  # noqa: B027 (most buffers have nothing to do)
        """Ends what `pass_on` has begun."""

    def write(self, name: str, tensor: Tensor, *, offset: int) -> StoredTensor:
        """Copies ``tensor`` to ``offset``, a multiple of 64, where `padded_size` of its size must be free. A GPU may
        still be copying afterwards: all bytes are there once `sealed` has returned.
        """
        source = tensor.detach().reshape(-1).view(torch.uint8)
        end = offset + source.numel()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if source.is_cuda:
            self.bytes[offset:end].copy_(source, non_blocking=True)
            return StoredTensor(name, dtype, shape, offset, _sum(source))
        total = torch.zeros((), dtype=torch.int64)
        self.bytes[end : offset + padded_size(source.numel())] = 0  # the checksum includes the whole last word
        for start in range(0, source.numel(), _CHUNK):
            chunk = source[start : start + _CHUNK]
            first = offset + start
            self.bytes[first : first + chunk.numel()].copy_(chunk)
            total += self.bytes[first : first + -(-chunk.numel() // 8) * 8].view(torch.int64).sum().cpu()
        return StoredTensor(name, dtype, shape, offset, total)

    def sealed(self, stored: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Written tensors with their checksums as numbers, when all their bytes are in the buffer."""
        sums = _numbers([entry.checksum for entry in stored])
        return [entry._replace(checksum=total) for entry, total in zip(stored, sums, strict=True)]

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor as a view of the buffer, which later writes change."""
        dtype = getattr(torch, stored.dtype)
        return self.bytes[stored.offset : stored.offset + stored.num_bytes].view(dtype).view(stored.shape)

    def damaged(self, stored: Sequence[StoredTensor]) -> list[str]:
        """Names of the tensors whose bytes are no longer those that were written."""
        sums = _numbers([_sum(self.read(entry)) for entry in stored])
        return [entry.name for entry, total in zip(stored, sums, strict=True) if total != entry.checksum]


class SharedBuffer(Buffer):
    """``size`` bytes mapped into this process; every process that maps the same path sees the same bytes.

    The path exists from `create` until `unlink`. The memory then exists as long as a process has it mapped. If every
    peer has opened it before `unlink`, nothing is left behind, however the processes end.

    >>> buffer = SharedBuffer.create(1 << 12)
    >>> peer = SharedBuffer.open(buffer.path, buffer.size)
    >>> buffer.unlink()
    >>> [stored] = buffer.sealed([buffer.write("weight", torch.arange(3.0), offset=64)])
    >>> peer.read(stored), peer.damaged([stored])
    (tensor([0., 1., 2.]), [])
    >>> peer.bytes[64] += 1
    >>> buffer.damaged([stored])
    ['weight']
    """

    def __init__(self, path: str, handle: int, size: int) -> None:
        self.path = path
        # Pages are populated now if the system supports it, so that the first update is not slower.
        memory = mmap.mmap(handle, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        super().__init__(torch.frombuffer(memory, dtype=torch.uint8))  # unmapped with the last tensor that views it
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            pin(self, self.bytes)

    @classmethod
    def create(cls, size: int) -> SharedBuffer:
        """Creates a buffer, in /dev/shm if that exists. Raises OSError if there is not enough room."""
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix=f"llmrl-weights-{os.getpid()}-", dir=folder)
        try:
            # Reserve all of it now: running out of shared memory later would kill the process with SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            else:
                os.truncate(handle, size)
            return cls(path, handle, size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(handle)

    @classmethod
    def open(cls, path: str, size: int) -> SharedBuffer:
        """Opens a buffer that another process created. Raises OSError if it does not exist."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, handle, size)
        finally:
            os.close(handle)

    def unlink(self) -> None:
        """Removes the path; a second call does nothing."""
        Path(self.path).unlink(missing_ok=True)

    def connect(self, open_workers: Callable[[dict[str, Any]], Any]) -> None:
        try:
            open_workers({"path": self.path, "size": self.size})
        finally:
            self.unlink()


def pin(owner: Any, memory: Tensor) -> bool:
    """Lets GPUs copy from and to host memory at full speed, while the program goes on, as long as ``owner`` exists.
    False if that is refused.
    """
    runtime, start = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(start, memory.nbytes, 0)):
        return False
    weakref.finalize(owner, runtime.cudaHostUnregister, start)
    return True


class CudaBuffer(Buffer):
    """Memory of a GPU that this process and the workers use, shared by CUDA IPC handles.

    A handle is sent as numbers and text, because vLLM's messages refuse the classes in torch's own form.
    """

    @classmethod
    def create(cls, size: int) -> CudaBuffer:
        """Creates a buffer on the current GPU. Raises torch.OutOfMemoryError if there is not enough memory."""
        with _shareable_segments():
            return cls(torch.empty(size, dtype=torch.uint8, device="cuda"))

    @classmethod
    def open(cls, gpu: str, fields: list[Any], size: int) -> CudaBuffer:
        """Opens the buffer of another process on the GPU with this UUID."""
        number = next(n for n in range(torch.cuda.device_count()) if _gpu_uuid(n) == gpu)
        with torch.cuda.device(number):
            storage = torch.UntypedStorage._new_shared_cuda(number, *handle_of_fields(fields))
            return cls(torch.empty(0, dtype=torch.uint8, device=f"cuda:{number}").set_(storage)[:size])

    def connect(self, open_workers: Callable[[dict[str, Any]], Any]) -> None:
        _, *handle = self.bytes.untyped_storage()._share_cuda_()
        gpu = _gpu_uuid(self.bytes.device.index)
        open_workers({"gpu": gpu, "handle": fields_of_handle(handle), "size": self.size})


@contextmanager
def _shareable_segments() -> Iterator[None]:
    """Allocates GPU memory outside of expandable segments. A handle of those needs a system call (pidfd_getfd) that
    many containers forbid.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not of every version of torch
    was = read() if read else ""
    if "expandable_segments:true" not in was.lower().replace(" ", ""):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(was)


def fields_of_handle(handle: Sequence[Any]) -> list[Any]:
    """The parts of a GPU memory handle, with bytes as hexadecimal text."""
    return [part.hex() if isinstance(part, bytes) else part for part in handle]


def handle_of_fields(fields: Sequence[Any]) -> list[Any]:
    """Rebuilds a handle from the result of `fields_of_handle`."""
    return [bytes.fromhex(field) if isinstance(field, str) else field for field in fields]


def _gpu_uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def padded_size(size: int) -> int:
    """``size`` in bytes, rounded up so that the next tensor is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def checksum(tensor: Tensor) -> int:
    """The sum modulo 2^64 of a contiguous tensor's bytes as 64-bit words, the last one padded with zeros.

    A single flipped bit always changes it. Cheap enough to be computed whenever a weight is moved.
    """
    return int(_sum(tensor))


def _sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # a view as int64 must be aligned
    whole = flat.numel() // 8 * 8
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        total += last.view(torch.int64)[0]
    return total


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """The values of int64[] tensors. Waits once for each device, however many there are."""
    values: dict[int, int] = {}
    for device in {total.device for total in sums}:
        places = [place for place, total in enumerate(sums) if total.device == device]
        values |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [values[place] for place in range(len(sums))]
