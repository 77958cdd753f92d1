"""Reads pairs of conversations: each row holds the chosen one, then the rejected one."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import required
from llmrl.errors import DataError
from llmrl.modules.llm.log_probs import with_predecessor
from llmrl.modules.llm.vision import POSITIONS, Media, read_media
from llmrl.objectives.llm.batch import PaddedBatch

__all__ = ["read_pairs"]


def read_pairs(td: TensorDictBase, keys: Any, reader: str) -> tuple[PaddedBatch, Tensor, list[Media] | None]:
    """The 2 B conversations, the chosen ones first, bool[2 B, T], the tokens of their answers, and their media.

    Reads   ``keys.tokens``, ``keys.assistant_mask`` and ``keys.num_chosen``, as `DPOLoss` says
    Raises  DataError for a pair of which one answer, but not the other, has no token; MissingKeyError
    """
    ids = list(required(td, keys.tokens, reader, as_list=True))
    masks = list(required(td, keys.assistant_mask, reader, as_list=True))
    cuts = required(td, keys.num_chosen, reader, "the number of tokens of the chosen conversation")
    pairs = list(zip(cuts.flatten().tolist(), ids, masks, strict=True))
    for row, (cut, whole, _) in enumerate(pairs):
        if not 0 < cut < len(whole):
            raise DataError(
                f"{reader}: num_chosen must leave tokens to both conversations: got {cut} of {len(whole)} in row {row}."
            )
    halves = [whole[:cut] for cut, whole, _ in pairs] + [whole[cut:] for cut, whole, _ in pairs]
    batch = PaddedBatch.from_rows(halves, reader=reader)
    marked = [mask[:cut] for cut, _, mask in pairs] + [mask[cut:] for cut, _, mask in pairs]
    mask_CT = with_predecessor(batch.align(marked, keys.assistant_mask).bool(), batch.attention_mask)
    trained_B2 = torch.stack(mask_CT.any(-1).chunk(2), -1)
    if (lonely := trained_B2.any(-1) & ~trained_B2.all(-1)).any():
        raise DataError(
            f"{reader}: both answers of a pair must have a token: row {int(lonely.nonzero()[0])} has one without."
        )
    media = read_media(td)
    if media is not None:  # one row's tensors are those of both its conversations
        rows = list(zip(cuts.flatten().tolist(), media, strict=True))
        media = [{**own, POSITIONS: own[POSITIONS][own[POSITIONS] < cut]} for cut, own in rows]
        media += [{**own, POSITIONS: own[POSITIONS][own[POSITIONS] >= cut] - cut} for cut, own in rows]
    return batch, mask_CT, media
