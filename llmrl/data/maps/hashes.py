"""Integers for rows of tensors: hashes that are the same in every process, and numbers by first appearance."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmrl.errors import CheckpointError, ShapeError


def row_bytes(rows: Tensor) -> list[bytes]:
    """The bytes of each row of [N, F]. Equal numbers have equal bytes: -0.0 counts as 0.0."""
    rows = rows.detach().cpu()
    if rows.is_floating_point() or rows.is_complex():
        rows = rows + 0.0  # turns -0.0 into 0.0
    count, width = rows.shape[0], rows.shape[1] * rows.element_size()
    if not width:
        return [b""] * count
    # One void value per row: numpy makes the bytes objects in one pass, without a loop over rows.
    return rows.contiguous().view(torch.uint8).numpy().view(np.dtype((np.void, width))).ravel().tolist()


class BinaryToDecimal(nn.Module):
    """Converts bits, most significant first, to numbers; sums the chunks of ``num_bits`` along the last dim.

    Reads    bits [..., F], F a multiple of ``num_bits``; ``convert_to_binary``: any numbers; positive ones count as 1
    Returns  ``dtype`` [...]
    Raises   ShapeError if the last dim is not a multiple of ``num_bits``

    >>> BinaryToDecimal(4, "cpu", torch.int32)(torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1]])).tolist()  # 2 + 1
    [3]
    """

    def __init__(
        self, num_bits: int, device: torch.device | str, dtype: torch.dtype, convert_to_binary: bool = False
    ) -> None:
        super().__init__()
        self.num_bits, self.convert_to_binary = num_bits, convert_to_binary
        self.register_buffer("bases", 2 ** torch.arange(num_bits - 1, -1, -1, device=device, dtype=dtype))

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[-1] % self.num_bits:
            raise ShapeError(
                f"BinaryToDecimal: the last dim must have whole chunks of {self.num_bits} bits: got "
                f"{list(features.shape)}."
            )
        bits = features > 0 if self.convert_to_binary else features
        chunks = bits.unflatten(-1, (-1, self.num_bits)).to(self.bases)
        return (chunks * self.bases).sum((-1, -2), dtype=self.bases.dtype)


class SipHash(nn.Module):
    """The 64-bit BLAKE2b hash of each row: equal rows have equal hashes, in every process and on every machine.

    Kept under its documented name, although it is not SipHash. Among a million distinct rows two collide with a
    probability of 3e-8; a `TensorDictMap` compares the rows themselves.

    Reads    [*B, F]
    Returns  int64[*B]; with ``as_tensor=False`` a list of 8 bytes for each row

    >>> SipHash()(torch.tensor([[1, 2], [1, 3], [1, 2]])).tolist()
    [-6578062687609052266, -3669384978770721860, -6578062687609052266]
    """

    def __init__(self, as_tensor: bool = True) -> None:
        super().__init__()
        self.as_tensor = as_tensor

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        rows = row_bytes(x.reshape(x.shape[:-1].numel(), x.shape[-1]))
        digests = [blake2b(row, digest_size=8).digest() for row in rows]
        if not self.as_tensor:
            return digests
        hashes = np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)  # the same on big-endian machines
        return torch.from_numpy(hashes).reshape(x.shape[:-1]).to(x.device)


class RandomProjectionHash(SipHash):
    """Hashes a row's projection on ``n_components`` random directions (None: 16), cast to ``dtype_cast``, so that close
    rows may collide.

    Reads    [*B, F]; the first call, or `fit`, draws the projection [F, n_components] with ``init_method`` and
             ``seed``, so it is the same in every process
    Returns  as `SipHash`
    Raises   ShapeError for rows of another width
    """

    transform: Tensor | None

    def __init__(
        self,
        *,
        n_components: int | None = None,
        dtype_cast: torch.dtype = torch.bfloat16,
        as_tensor: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(as_tensor)
        self.n_components, self.dtype_cast, self.seed = 16 if n_components is None else n_components, dtype_cast, seed
        self.init_method = nn.init.normal_ if init_method is None else init_method
        self.register_buffer("transform", None)

    def fit(self, x: Tensor) -> None:
        """Draws the projection for rows of the width of ``x``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            transform = torch.empty(x.shape[-1], self.n_components)
            self.init_method(transform)
        self.transform = transform.to(x.device)

    def forward(self, x: Tensor) -> Tensor | list[bytes]:
        if self.transform is None:
            self.fit(x)
        if x.shape[-1] != len(self.transform):
            raise ShapeError(
                f"RandomProjectionHash: rows must have {len(self.transform)} features, as the first ones had: got "
                f"{x.shape[-1]}."
            )
        return super().forward((x.to(self.transform) @ self.transform).to(self.dtype_cast))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        self.transform = state_dict.get(prefix + "transform")  # its shape is only known from the checkpoint
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class HashToInt(nn.Module):
    """Numbers hashes 0, 1, 2 ... in the order in which they were first seen.

    Reads    int64 [*B]
    Returns  int64 [*B]; an unknown hash gets the next number with ``extend=True``, else the count of known hashes,
             which is not the number of any of them

    >>> numbers = HashToInt()
    >>> numbers(torch.tensor([7, 9, 7]), extend=True).tolist(), numbers(torch.tensor([9, 8])).tolist()
    ([0, 1, 0], [1, 2])
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def forward(self, hash_value: Tensor, extend: bool = False) -> Tensor:
        numbers = number(self._numbers, hash_value.flatten().tolist(), extend=extend)
        return torch.tensor(numbers, dtype=torch.int64, device=hash_value.device).reshape(hash_value.shape)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(self._numbers), dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        if not isinstance(state, Tensor) or state.dtype != torch.int64:
            raise CheckpointError(f"HashToInt: a state must be an int64 tensor of hashes: got {state!r:.80}.")
        self._numbers = {value: place for place, value in enumerate(state.tolist())}


def number(known: dict[Any, int], keys: list[Any], *, extend: bool) -> list[int]:
    """The number of each key. With ``extend`` unknown keys get the next numbers, else ``len(known)``."""
    if not extend:
        missing = len(known)
        return [known.get(key, missing) for key in keys]
    return [known.setdefault(key, len(known)) for key in keys]
