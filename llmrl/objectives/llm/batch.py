"""Reading of conversations for a loss; only this module of the losses distinguishes ragged from padded batches.

Ragged rows are padded on the right. Dense ones (``pad_output=True``: prompt padded on the left, response on the right)
keep their layout, and the attention mask says which positions are real. Every other column must align with the tokens,
else it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.data.ragged.tensordicts import required
from llmrl.errors import DataError, ShapeError
from llmrl.modules.llm.head_scores import HeadFunction
from llmrl.modules.llm.log_probs import TokenScorer, TokenScores, with_predecessor
from llmrl.modules.llm.policies.containers import own_part, response_part
from llmrl.modules.llm.vision import present, read_media
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.settings import MaskingStrategy

TOKENS = ("tokens", "full")
RESPONSE = ("tokens", "response")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
ROUTES = ("log_probs", "routes")
GROUP_ID = "group_id"

_get = partial(required, as_list=True)  # ragged rows come as a list


@dataclass(frozen=True)
class PaddedBatch:
    """The tokens of B conversations as int64[B, T], and the layout to which other columns are padded.

    ``lengths`` is None for a dense batch, else the length of each row before padding on the right.
    """

    reader: str  # named in errors
    input_ids: Tensor
    attention_mask: Tensor
    lengths: list[int] | None
    device: torch.device | None

    @classmethod
    def from_rows(
        cls,
        rows: list[Tensor],
        attention: Sequence[Tensor] | None = None,
        *,
        reader: str,
        device: torch.device | None = None,
    ) -> PaddedBatch:
        """Pads rows on the right; ``attention``, bool[T_i] each, is needed for rows that contain padding already."""
        lengths = [len(row) for row in rows]
        ids_BT = pad_rows(rows)
        attention_BT = lengths_mask(torch.tensor(lengths, device=ids_BT.device), ids_BT.shape[1])
        if attention is not None:
            if [len(row) for row in attention] != lengths:
                raise ShapeError(f"{reader}: the attention mask must have one value per token in every row.")
            attention_BT &= pad_rows(list(attention)).bool()
        return cls(reader, ids_BT.to(device), attention_BT.to(device), lengths, device)

    @classmethod
    def read(cls, td: TensorDictBase, keys: Any, *, reader: str, device: torch.device | None = None) -> PaddedBatch:
        """Reads ``keys.tokens`` int64 ragged[T] or [B, T], and ``keys.attention_mask``, required for dense tokens."""
        if td.ndim != 1:
            raise ShapeError(
                f"{reader}: the batch must have one dimension, a conversation per row: got batch size "
                f"{tuple(td.batch_size)}; flatten it with td.reshape(-1)."
            )
        tokens_key, attention_key = keys.tokens, keys.attention_mask
        ids = _get(td, tokens_key, reader)
        if isinstance(ids, list):  # rows of a dense batch that went through a buffer still contain padding
            return cls.from_rows(ids, td.get(attention_key, None, as_list=True), reader=reader, device=device)
        attention_BT = _get(td, attention_key, reader)
        if not isinstance(attention_BT, Tensor) or attention_BT.shape != ids.shape:
            raise ShapeError(f"{reader}: {attention_key} must be bool{list(ids.shape)} like {tokens_key}.")
        return cls(reader, ids.to(device), attention_BT.bool().to(device), None, device)

    def column(self, td: TensorDictBase, key: NestedKey, missing: str = "") -> Tensor:
        """One value per token, [B, T], 0 (False) in the padding.

        Raises  MissingKeyError, starting with ``missing`` if given; ShapeError if a row is not as long as its tokens
        """
        return self.align(_get(td, key, self.reader, missing), key)

    def finite(self, td: TensorDictBase, key: NestedKey, mask_BT: Tensor, *, missing: str, remedy: str) -> Tensor:
        """A `column` without NaN or inf on the trained tokens. Raises  DataError that names the first row with one"""
        value_BT = self.column(td, key, missing)
        self._check_finite(value_BT, mask_BT, f"{key} must be finite on every trained token", remedy)
        return value_BT

    def reference(self, td: TensorDictBase, key: NestedKey, mask_BT: Tensor) -> Tensor:
        """The log-probs of the reference; under ``key`` without "next" for data that are not steps."""
        at_root = key[1:] if isinstance(key, tuple) and key[0] == "next" else key
        if td.get(key, None, as_list=True) is None and td.get(at_root, None, as_list=True) is not None:
            key = at_root
        return self.finite(td, key, mask_BT, missing="Couldn't find the ref log-prob", remedy="score it again")

    def align(self, column: Tensor | list[Tensor], key: NestedKey) -> Tensor:
        if isinstance(column, Tensor) and self.lengths is None:
            if column.shape[:2] != self.input_ids.shape:
                raise ShapeError(
                    f"{self.reader}: {key} must have one value per token: got {list(column.shape)}, the tokens are "
                    f"{list(self.input_ids.shape)}."
                )
            return column.to(self.device)
        got, expected = [len(row) for row in column], self._row_lengths()  # rows of one length may be stacked
        if got != self.lengths:
            row = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), 0)
            raise ShapeError(
                f"{self.reader}: {key} must have one value per token: got {got[row] if got else 0} values in row "
                f"{row}, whose conversation has {expected[row]} tokens (usually: scored with another tokenizer, or "
                "after the text was tokenised again)."
            )
        return pad_rows(list(column), length=self.input_ids.shape[1]).to(self.device)

    def advantage(self, td: TensorDictBase, key: NestedKey, mask_BT: Tensor) -> Tensor:
        """float[B, T], 0 outside the mask, from one number per conversation ([1, 1] per row) or per token ([T, 1])."""
        advantage = _get(td, key, self.reader)
        num_tokens = self.input_ids.shape[1]
        if isinstance(advantage, Tensor) and advantage.numel() == len(self.input_ids):  # one per conversation
            advantage_BT = advantage.reshape(-1, 1).expand(-1, num_tokens)
        else:
            aligned = []
            for i, (row, length) in enumerate(zip(advantage, self._row_lengths(), strict=True)):
                if row.numel() not in (1, length):
                    raise ShapeError(
                        f"{self.reader}: {key!r} must have one value per conversation or per token: got {row.numel()} "
                        f"values in row {i}, whose conversation has {length} tokens."
                    )
                aligned.append(row.reshape(-1).expand(length))
            advantage_BT = pad_rows(aligned, length=num_tokens)
        advantage_BT = advantage_BT.to(self.device)
        self._check_finite(
            advantage_BT, mask_BT, f"{key!r} must be finite on every trained token", "the reward failed: drop the row"
        )
        return advantage_BT.masked_fill(~mask_BT, 0.0)

    def trained_mask(self, td: TensorDictBase, keys: Any, strategy: MaskingStrategy) -> Tensor:
        """bool[B, T]: the tokens to train. The first token of a row is never trained: no token predicts it.

        Reads    ``keys.assistant_mask``; without it ``keys.response``; for "generic" also ``keys.sample_log_prob``

        ``sft``      the assistant mask: the tokens that the policy sampled, from ("masks", "trained_from") on if the
                     batch has that; without an assistant mask the response
        ``rlhf``     the same, and the assistant mask is required
        ``generic``  the tokens of ``sft``, and all others that have a behaviour log-prob
        """
        if strategy == "rlhf" or td.get(keys.assistant_mask, None, as_list=True) is not None:
            mask_BT = self.column(td, keys.assistant_mask).bool()
            own_BT = mask_BT & own_part(td, mask_BT)
        else:
            mask_BT = own_BT = response_part(td, self.attention_mask, self.lengths, keys.response)
        if strategy == "generic":
            key = untruncated(td, keys.sample_log_prob)
            sampled_BT = self.column(td, key, "Couldn't find the log-prob of the sampled tokens") != 0
            # Assistant tokens follow the mask: one sampled with probability 1 has log-prob 0, as unsampled ones do.
            sampled_BT = sampled_BT if mask_BT is None else torch.where(mask_BT, own_BT, sampled_BT)
            return with_predecessor(sampled_BT, self.attention_mask)
        if own_BT is None:  # neither mask nor response: an error that names both
            missing = f"the batch has neither {keys.assistant_mask} nor {keys.response}"
            _get(td, keys.response, self.reader, missing)
        return with_predecessor(own_BT, self.attention_mask)

    def observed(self, td: TensorDictBase, keys: Any, mask_BT: Tensor) -> Tensor:
        """bool[B, T]: the tokens after the first trained one of a row that no policy sampled, such as tool results."""
        sampled_BT = self.column(td, keys.assistant_mask).bool()
        return (mask_BT.cumsum(-1) > 0) & ~sampled_BT & self.attention_mask

    def _row_lengths(self) -> list[int]:
        return self.lengths or [self.input_ids.shape[1]] * len(self.input_ids)

    def _check_finite(self, value_BT: Tensor, mask_BT: Tensor, expected: str, remedy: str) -> None:
        broken_B = (~value_BT.isfinite() & mask_BT).any(-1)
        if broken_B.any():
            row = int(broken_B.nonzero()[0])
            raise DataError(f"{self.reader}: {expected}: got NaN or inf in row {row}; {remedy}.")


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy-gradient loss reads, [B, T] each and checked; None: not needed, or no groups in the batch."""

    tokens: PaddedBatch
    mask_BT: Tensor
    group_id_B: Tensor | None
    behaviour_BT: Tensor
    advantage_BT: Tensor
    proximal_BT: Tensor | None
    reference_BT: Tensor | None
    observed_BT: Tensor | None

    @classmethod
    def read(
        cls,
        td: TensorDictBase,
        keys: Any,
        tokens: PaddedBatch,
        mask_BT: Tensor,
        *,
        proximal: bool,
        reference: bool,
        observations: bool,
    ) -> PolicyBatch:
        """Raises  MissingKeyError, ShapeError for a column that does not fit the tokens, DataError for NaN"""

        def finite(key: NestedKey, name: str, remedy: str) -> Tensor:
            missing = f"Couldn't find the log-prob of the {name}"
            return tokens.finite(td, key, mask_BT, missing=missing, remedy=remedy)

        return cls(
            tokens,
            mask_BT,
            group_ids(td, keys.group_id),
            finite(untruncated(td, keys.sample_log_prob), "sampled tokens", "the engine gave none"),
            tokens.advantage(td, keys.advantage, mask_BT),
            finite(keys.proximal_log_prob, "proximal policy", "compute it again") if proximal else None,
            tokens.reference(td, keys.ref_log_prob, mask_BT) if reference else None,
            tokens.observed(td, keys, mask_BT) if observations else None,
        )

    @property
    def scored_BT(self) -> Tensor:
        """The tokens whose log-probs the loss needs."""
        return self.mask_BT if self.observed_BT is None else self.mask_BT | self.observed_BT

    def to(self, like: Tensor) -> PolicyBatch:
        """The same in the dtype and on the device of the actor's log-probs."""
        names = ("behaviour_BT", "advantage_BT", "proximal_BT", "reference_BT")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(like) for name, value in given.items()})


def untruncated(td: TensorDictBase, key: NestedKey) -> NestedKey:
    """The key of the log-probs before truncation ("plain" next to "full") if the batch has them, else ``key``.

    The trainer does not truncate its distribution, so the ratio needs the engine's log-probs from before top-p, top-k
    and min-p.
    """
    plain = (*key[:-1], "plain") if isinstance(key, tuple) and key[-1] == "full" else key
    return key if td.get(plain, None, as_list=True) is None else plain


def actor_scores(
    actor: nn.Module,
    td: TensorDictBase,
    batch: PaddedBatch,
    select_BT: Tensor,
    *,
    log_probs_key: NestedKey,
    entropy: bool,
    head: HeadFunction | None = None,
) -> TokenScores:
    """Log-probs of the selected tokens under the actor, with grad; float32, or float64 where the actor's are.

    Calls  actor.token_scores(ids, attention mask, select, entropy=) if it has that (wrappers, TokenScorer, also in
           DDP), with media= if the batch has "media" and routes= if it has ("log_probs", "routes"); else
           actor(copy of td), reading ``log_probs_key`` from its output
    """
    if (token_scores := token_scores_of(actor)) is not None:
        routes = None if td.get(ROUTES, None, as_list=True) is None else batch.column(td, ROUTES)
        given = {"entropy": entropy, **present(media=read_media(td), routes=routes, head=head)}
        scores = token_scores(batch.input_ids, batch.attention_mask, select_BT, **given)
    else:
        missing = "Couldn't find the log-prob in what the actor wrote"
        scores = TokenScores(batch.column(actor(td.copy()), log_probs_key, missing), None)
    if scores.log_probs.dtype in (torch.float16, torch.bfloat16):  # too coarse for a ratio
        entropy_BT = None if scores.entropy is None else scores.entropy.float()
        scores = scores._replace(log_probs=scores.log_probs.float(), entropy=entropy_BT)
    return scores


def token_scores_of(actor: nn.Module) -> Callable[..., TokenScores] | None:
    """The actor's ``token_scores``, or None if it has no such method."""
    if isinstance(actor, DistributedDataParallel) and isinstance(actor.module, TokenScorer):
        return actor  # DDP averages gradients only if DDP itself is called
    return getattr(actor, "token_scores", None)


def group_ids(td: TensorDictBase, key: NestedKey = GROUP_ID) -> Tensor | None:
    """int64[B], or None if the batch has no groups."""
    value = td.get(key, None)
    return value.reshape(-1) if isinstance(value, Tensor) else None


def count_step(
    td: TensorDictBase, *, mask_key: NestedKey = ASSISTANT_MASK, group_key: NestedKey = GROUP_ID
) -> StepCounts:
    """Counts the trained tokens, sequences and groups of a step's whole batch, before it is cut into micro-batches.

    Counts as `GRPOLoss` does with ``masking_strategy="sft"``.

    Reads    ("masks", "all_assistant_mask") bool ragged[T] or [B, T]; if the batch has them
             ("masks", "all_attention_mask"), ("masks", "trained_from"), "group_id" int64[B]
    Returns  StepCounts of this process: ``.over_ranks()`` adds up those of all ranks
    """
    return StepCounts.of(trained_tokens(td, mask_key, "count_step")[0], group_ids(td, group_key))


def trained_tokens(td: TensorDictBase, mask_key: NestedKey, reader: str) -> tuple[Tensor, list[int] | None]:
    """Mask bool[B, T] of the tokens that ``masking_strategy="sft"`` trains, read without the ids; and row lengths.

    Ragged rows are padded on the right; the lengths of a dense batch are None.
    """
    mask = _get(td, mask_key, reader)
    attention = td.get(ATTENTION_MASK, None, as_list=True)
    if isinstance(mask, list):
        batch = PaddedBatch.from_rows(mask, attention, reader=reader)
    else:
        batch = PaddedBatch(reader, mask, torch.ones_like(mask) if attention is None else attention, None, None)
    mask_BT = batch.input_ids.bool()
    return with_predecessor(mask_BT & own_part(td, mask_BT), batch.attention_mask.bool()), batch.lengths
