"""An answer sampled in one piece or, if weight updates interrupt it, in several pieces by successive versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmrl.modules.llm.engines.base import Generation, StopReason
from llmrl.modules.llm.engines.vllm.core import Completion, RowHear
from llmrl.modules.llm.vision import Media

_STRIDE = 0x9E3779B97F4A7C15  # changes the seed: a piece must not repeat the random numbers of the previous one


@dataclass
class Answer:
    """The ids sampled after ``prompt`` so far; ``reason`` is ABORT until the answer has ended."""

    prompt: list[int]
    row_seed: int
    media: Media | None = None  # the prompt's images; None: no row has any
    hear: RowHear | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)  # one tensor per piece
    plain: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # one per id
    routes: Tensor | None = None  # of prompt and answer, from the first id on, as far as reported
    reason: StopReason = StopReason.ABORT

    @property
    def so_far(self) -> list[int]:
        """Prompt and answer so far, which the next piece continues."""
        return self.prompt + self.ids

    @property
    def seed(self) -> int:
        """Seed of the next piece. Hashed, because torch's CPU generator reads only 32 of its bits."""
        seed = (self.row_seed + len(self.ids) * _STRIDE) % (1 << 64)
        digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def add(self, piece: Completion, version: int) -> None:
        """Appends a piece that ``version`` sampled."""
        ids = piece.ids.tolist()
        self.ids += ids
        self.log_probs.append(piece.log_probs)
        self.versions += [version] * len(ids)
        if piece.routes is not None:  # earlier ids, re-read by newer weights, keep their old routes
            known = self.routes if self.routes is not None else piece.routes[:0]
            self.routes = torch.cat([known, piece.routes[len(known) :]])
        self.reason = piece.reason

    def can_continue(self, version: int, max_age: int | None) -> bool:
        """False if its oldest id would be more than ``max_age`` versions old at ``version``."""
        return not self.versions or max_age is None or version - self.versions[0] <= max_age


def as_generation(answers: Sequence[Answer], version: int, *, truncated: bool, mixed: bool) -> Generation:
    """The answers of a call. ``version`` applies if nothing was sampled; ``mixed`` reports a version for each id."""
    versions = [torch.tensor(answer.versions, dtype=torch.int64) for answer in answers]
    return Generation(
        [torch.tensor(answer.ids, dtype=torch.int64) for answer in answers],
        [torch.cat(answer.log_probs) for answer in answers],
        [torch.cat(answer.plain) for answer in answers] if truncated else None,
        [answer.reason for answer in answers],
        min((answer.versions[0] for answer in answers if answer.versions), default=version),
        versions if mixed else None,
        _routes(answers),
    )


def _routes(answers: Sequence[Answer]) -> list[Tensor] | None:
    """The routes of each id of prompt and answer, -1 where unknown; None if no answer has any."""
    shape = next((answer.routes.shape[1:] for answer in answers if answer.routes is not None), None)
    if shape is None:
        return None
    rows = []
    for answer in answers:
        known = torch.zeros(0, *shape, dtype=torch.int16) if answer.routes is None else answer.routes
        rows.append(torch.cat([known, known.new_full((len(answer.so_far) - len(known), *shape), -1)]))
    return rows
