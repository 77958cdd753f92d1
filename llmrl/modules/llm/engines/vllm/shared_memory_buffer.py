"""A block of memory that processes of one machine share, and tensors written into it and read out of it.

The bytes only: who writes when, and what becomes of the tensors, is the transfer's part on the trainer's side and the
worker's on the other. Nothing here knows of vLLM.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Placed", "SharedBlock", "checksum", "padded_size"]

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
_PIECE = 1 << 20  # bytes copied at a time: small enough to be summed before they leave the cache
_PREFIX = "llmrl-weights-"


class Placed(NamedTuple):
    """A tensor in a block, in a form that any message can carry.

    dtype     torch's name of it
    offset    of its first byte in the block
    checksum  the sum, modulo 2^64, of the 64-bit words it was written as
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int
    checksum: int


class SharedBlock:
    """``size`` bytes, mapped into this process; whoever maps the same path sees the same bytes.

    The path exists from `create` until `unlink`. After that the memory lives as long as somebody has it mapped, so once
    every peer has opened it nothing is left behind, however the processes end.

    >>> block = SharedBlock.create(1 << 12)
    >>> peer = SharedBlock.open(block.path, block.size)
    >>> block.unlink()
    >>> placed = block.write("weight", torch.arange(3.0), offset=64)
    >>> peer.read(placed), peer.is_intact(placed)
    (tensor([0., 1., 2.]), True)
    >>> peer.bytes[64] += 1
    >>> block.is_intact(placed)
    False
    """

    def __init__(self, path: str, handle: int, size: int) -> None:
        self.path, self.size = path, size
        # The pages are mapped now, lest the first update pay for it; where that flag is unknown it does.
        memory = mmap.mmap(handle, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # unmapped with the last tensor that looks into it

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        """A new block, in memory where the system has a folder for that.

        Raises  OSError where there is no room for it: all of it is reserved now, because running out of shared memory
                later is not an error but the end of the process
        """
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder)
        try:
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
    def open(cls, path: str, size: int) -> SharedBlock:
        """The block that another process created. Raises OSError where it is not there."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, handle, size)
        finally:
            os.close(handle)

    def unlink(self) -> None:
        """Takes the path away; a second call does nothing."""
        Path(self.path).unlink(missing_ok=True)

    def write(self, name: str, tensor: Tensor, *, offset: int) -> Placed:
        """Copies ``tensor`` to ``offset``, a multiple of 64, where `padded_size` of its bytes must be free."""
        source = tensor.detach().reshape(-1).view(torch.uint8)
        end = offset + source.numel()
        self.bytes[end : offset + padded_size(source.numel())] = 0
        total = 0
        for start in range(0, source.numel(), _PIECE):
            piece = self.bytes[offset + start : min(offset + start + _PIECE, end)]
            piece.copy_(source[start : start + _PIECE])
            total += _sum(self.bytes[offset + start : offset + start + _whole_words(piece.numel())])
        return Placed(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, _wrapped(total))

    def read(self, placed: Placed) -> Tensor:
        """The tensor, looking into the block: what is written there later shows in it."""
        dtype = getattr(torch, placed.dtype)
        count = torch.Size(placed.shape).numel()
        return self.bytes[placed.offset : placed.offset + count * dtype.itemsize].view(dtype).view(placed.shape)

    def is_intact(self, placed: Placed) -> bool:
        """Whether the bytes are still those that were written."""
        return checksum(self.read(placed)) == placed.checksum


def padded_size(size: int) -> int:
    """``size`` bytes, and what keeps the next tensor aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def checksum(tensor: Tensor) -> int:
    """The sum of a contiguous tensor's bits, read as 64-bit words modulo 2^64, the last one filled up with zeros.

    One flipped bit always changes it. Cheap enough to be computed whenever a weight is moved.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words are only read where words begin
    whole = flat.numel() // 8 * 8
    total = _sum(flat[:whole])
    if whole < flat.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        total += _sum(last)
    return _wrapped(total)


def _sum(words: Tensor) -> int:
    return int(words.view(torch.int64).sum())


def _whole_words(size: int) -> int:
    return -(-size // 8) * 8


def _wrapped(total: int) -> int:
    """A Python integer as the 64 bits that it would be."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
