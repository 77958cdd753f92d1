"""Reads pairs of conversations: each row holds the chosen one, then the rejected one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from llmrl.data.ragged.tensordicts import required
from llmrl.errors import ConfigError, DataError
from llmrl.modules.llm.log_probs import with_predecessor
from llmrl.modules.llm.vision import POSITIONS, Media, present, read_media
from llmrl.objectives.llm.batch import PaddedBatch, token_scores_of
from llmrl.objectives.llm.functional import StepCounts, sequence_sum


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

    def half(self, number: int) -> Pairs:
        """The first (0) or the second (1) conversation of each row, B of them, padded to the longest."""
        ids_BT, attention_BT = (each.chunk(2)[number] for each in (self.batch.input_ids, self.batch.attention_mask))
        lengths = self.batch.lengths[len(ids_BT) * number :][: len(ids_BT)]
        batch = replace(
            self.batch,
            input_ids=ids_BT[:, : max(lengths)],
            attention_mask=attention_BT[:, : max(lengths)],
            lengths=lengths,
        )
        media = None if self.media is None else self.media[len(ids_BT) * number :][: len(ids_BT)]
        return Pairs(batch, self.mask_CT.chunk(2)[number][:, : max(lengths)], media)

    def log_probs(self, actor: nn.Module) -> Tensor:
        """float32[C]: the log-prob of each answer under the actor, with grad.

        Raises  ConfigError for an actor without token_scores
        """
        token_scores = token_scores_of(actor)
        if token_scores is None:
            raise ConfigError(
                f"{self.batch.reader}: the actor must have token_scores, as policy wrappers and TokenScorer have: got "
                f"{type(actor).__name__}."
            )
        given = {"entropy": False, **present(media=self.media)}
        scores = token_scores(self.batch.input_ids, self.batch.attention_mask, self.mask_CT, **given)
        return sequence_sum(scores.log_probs, self.mask_CT)

    def reference(self, td: TensorDictBase, key: NestedKey) -> Tensor:
        """float[B, 2]: the log-probs of both answers under the reference. Raises  DataError for NaN or inf"""
        reader = self.batch.reader
        reference_B2 = required(td, key, reader, "write sequence_log_probs there")
        # A row without trained tokens is a placeholder on a rank without pairs; its reference may be anything.
        without_tokens_B2 = torch.stack((~self.mask_CT.any(-1)).chunk(2), -1)
        reference_B2 = reference_B2.masked_fill(without_tokens_B2.to(reference_B2.device), 0.0)
        if not reference_B2.isfinite().all():
            row = int((~reference_B2.isfinite()).any(-1).nonzero()[0])
            raise DataError(f"{reader}: reference_log_probs must be finite: got NaN or inf in row {row}.")
        return reference_B2.to(self.mask_CT.device)


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
