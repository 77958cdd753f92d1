"""Reads pairs of conversations: each row holds the chosen one, then the rejected one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import required
from llmrl.errors import DataError
from llmrl.modules.llm.log_probs import with_predecessor
from llmrl.modules.llm.vision import POSITIONS, Media, read_media
from llmrl.objectives.llm.batch import PaddedBatch
from llmrl.objectives.llm.functional import StepCounts


class Pairs(NamedTuple):
    """2 B conversations, the chosen ones first, with the tokens of their answers, bool[2 B, T], and their media."""

    batch: PaddedBatch
    mask_CT: Tensor
    media: list[Media] | None

    def counts(self) -> StepCounts:
        """The tokens of the answers, and the pairs as ``sequences``."""
        return StepCounts.of(torch.cat(self.mask_CT.chunk(2), -1))

    def mean(self, value_B: Tensor, counts: StepCounts) -> Tensor:
        """The part of this batch in a mean over the pairs of a step."""
        is_pair_B = self.mask_CT.any(-1).chunk(2)[0]  # rows without trained tokens only fill a rank without pairs
        return value_B.masked_fill(~is_pair_B, 0.0).sum() / max(counts.sequences, 1)


def read_pairs(td: TensorDictBase, keys: Any, reader: str) -> Pairs:
    """Cuts each row into its two conversations.

    Reads   ``keys.tokens``, ``keys.assistant_mask`` and ``keys.num_chosen``, as `DPOLoss` does
    Raises  DataError for a pair with one answer that has tokens and one that has none; MissingKeyError
    """
    ids = list(required(td, keys.tokens, reader, as_list=True))
    masks = list(required(td, keys.assistant_mask, reader, as_list=True))
    cuts = required(td, keys.num_chosen, reader, "write the number of tokens of the chosen conversation there")
    pairs = list(zip(cuts.flatten().tolist(), ids, masks, strict=True))
    for row, (cut, whole, _) in enumerate(pairs):
        if not 0 < cut < len(whole):
            raise DataError(
                f"{reader}: num_chosen must leave tokens to both conversations: got {cut} of {len(whole)} in row {row}."
            )
    # All chosen ones first: `chunk(2)` then splits values per conversation into chosen and rejected.
    halves = [whole[:cut] for cut, whole, _ in pairs] + [whole[cut:] for cut, whole, _ in pairs]
    batch = PaddedBatch.from_rows(halves, reader=reader)
    marked = [mask[:cut] for cut, _, mask in pairs] + [mask[cut:] for cut, _, mask in pairs]
    mask_CT = with_predecessor(batch.align(marked, keys.assistant_mask).bool(), batch.attention_mask)
    trained_B2 = torch.stack(mask_CT.any(-1).chunk(2), -1)
    if (lonely := trained_B2.any(-1) & ~trained_B2.all(-1)).any():
        raise DataError(
            f"{reader}: both answers of a pair must have a token: one in row {int(lonely.nonzero()[0])} has none."
        )
    media = read_media(td)
    if media is not None:  # both conversations share the row's tensors; their positions are split
        rows = list(zip(cuts.flatten().tolist(), media, strict=True))
        media = [{**own, POSITIONS: own[POSITIONS][own[POSITIONS] < cut]} for cut, own in rows]
        media += [{**own, POSITIONS: own[POSITIONS][own[POSITIONS] >= cut] - cut} for cut, own in rows]
    return Pairs(batch, mask_CT, media)
