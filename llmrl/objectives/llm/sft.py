"""Supervised fine-tuning: the negative log-likelihood of the tokens that the assistant wrote.

The assistant mask of the batch marks these tokens; the `Renderer` makes the mask if a batch holds messages instead. The
end-of-turn token is among them, so that the model learns to stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from llmrl.data.ragged.tensordicts import present_keys
from llmrl.errors import ConfigError, DataError, MissingKeyError
from llmrl.modules.llm.log_probs import with_predecessor
from llmrl.modules.llm.rendering import Renderer
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.batch import PaddedBatch
from llmrl.objectives.llm.functional import StepCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reduction = Literal["token", "mean", "sum", "none"]
LossFunction = Literal["sft", "minor_sft"]
_RENDERER_OPTIONS = ("chat_template", "chat_template_name", "include_end_of_turn")


@shows_values
class SFTLossOutput(TensorClass["nocast"]):
    """Loss terms to sum and differentiate (``loss_*``), and detached metrics; float32 scalars.

    ``loss_sft`` is float32[B] for reduction="none". Metrics are means over the trained tokens of the step, ``tokens``
    and ``empty_rows`` are counts: the outputs of micro-batches add up (`merge_outputs`). None if not computed.
    """

    loss_sft: Tensor
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    nll: Tensor | None = None  # nats per trained token, for every reduction
    accuracy: Tensor | None = None  # fraction of trained tokens that the model finds most likely
    tokens: Tensor | None = None  # trained tokens of this batch
    empty_rows: Tensor | None = None  # conversations without a trained token, excluded from every mean


class SFTLoss(LossModule):
    """Negative log-likelihood over the assistant's tokens, with an optional KL to a reference.

    Reads   ("tokens", "full")                 int64 ragged[T]
            ("masks", "all_assistant_mask")    bool ragged[T]     the tokens to train; optional ("masks",
                                                                  "trained_from") leaves out those before it
            ("history", "full")                History [B, M]     if one of these two is missing; rendered with
                                                                  ``tokenizer`` or else by the actor's renderer
            ("next", "ref_log_probs", "full")  float32 ragged[T]  or at the root; if kl_to_ref_coeff is given, or for
                                                                  "minor_sft"
    Calls   actor_network.token_scores(ids, attention mask, select, entropy=) if it has that, else actor_network(td)
            for ("log_probs", "full")
    Returns SFTLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  DataError if no conversation has a token to train, MissingKeyError, ShapeError; ConfigError for settings
            that contradict each other

    tokenizer         renders ("history", "full"), with ``tokenizer_kwargs``: ``chat_template``, ``chat_template_name``,
                      ``include_end_of_turn``; anything else goes to the template
    loss_function     "sft": -log pi. "minor_sft": -log sigmoid(``beta`` (log pi - log pi_ref)) for each conversation
    reduction         "token": mean over the trained tokens of the step, the default of "sft". "mean" (over
                      conversations), "sum" or "none" (one value per conversation)
    normalize_by_seq_length  with the last three: a conversation is the mean of its tokens, not the sum
    kl_to_ref_coeff   weight of the KL from the reference
    device            where the batch is moved to

    A policy wrapper scores at its own temperature: give it temperature 1 here, or pass its ``scorer``.
    """

    default_keys: ClassVar = {
        "history": ("history", "full"),
        "tokens": reading.TOKENS,
        "attention_mask": reading.ATTENTION_MASK,
        "assistant_mask": reading.ASSISTANT_MASK,
        "log_probs": ("log_probs", "full"),
        "ref_log_prob": ("next", "ref_log_probs", "full"),
    }

    def __init__(
        self,
        actor_network: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        reduction: Reduction | None = None,
        normalize_by_seq_length: bool | None = None,
        kl_to_ref_coeff: float | None = None,
        loss_function: LossFunction = "sft",
        beta: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if loss_function not in get_args(LossFunction):
            raise fn.unknown("SFTLoss: loss_function", loss_function, get_args(LossFunction))
        if reduction is None:
            reduction = "token" if loss_function == "sft" else "mean"
        if reduction not in get_args(Reduction):
            raise fn.unknown("SFTLoss: reduction", reduction, get_args(Reduction))
        over_conversations = "set reduction to 'mean', 'sum' or 'none'"
        for holds, problem in (
            (
                reduction != "token" or normalize_by_seq_length is None,
                f"normalize_by_seq_length is not supported with reduction='token'; {over_conversations}",
            ),
            (
                reduction != "token" or loss_function == "sft",
                f"loss_function='minor_sft' is not supported with reduction='token'; {over_conversations}",
            ),
            (beta == 0.1 or loss_function == "minor_sft", f"beta={beta} needs loss_function='minor_sft'"),
            (beta > 0, f"beta must be above 0: got {beta}"),
            (
                kl_to_ref_coeff is None or kl_to_ref_coeff >= 0,
                f"kl_to_ref_coeff must not be negative: got {kl_to_ref_coeff}",
            ),
            (tokenizer_kwargs is None or tokenizer is not None, "tokenizer_kwargs need a tokenizer"),
        ):
            if not holds:
                raise ConfigError(f"SFTLoss: {problem}.")
        self.actor_network = actor_network
        self.renderer = None
        if tokenizer is not None:
            template_kwargs = dict(tokenizer_kwargs or {})
            options = {name: template_kwargs.pop(name) for name in _RENDERER_OPTIONS if name in template_kwargs}
            self.renderer = Renderer(tokenizer, **options, template_kwargs=template_kwargs or None)
        self.reduction, self.loss_function = reduction, loss_function
        self.normalize_by_seq_length = True if normalize_by_seq_length is None else normalize_by_seq_length
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.beta = beta
        self.device = None if device is None else torch.device(device)

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts tokens and sequences in the whole batch of an optimizer step, on this rank; renders messages."""
        return StepCounts.of(self._read(td)[1])

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> SFTLossOutput:
        batch, mask_BT = self._read(td)
        counts = normalizer or StepCounts.of(mask_BT)  # whole step, so that micro-batches add up
        if counts.tokens < 1:
            raise DataError(
                f"SFTLoss: a step must have a token to train: got none in {len(mask_BT)} conversations; look at their "
                "assistant masks."
            )
        keys = self.tensor_keys
        scores = reading.actor_scores(
            self.actor_network, td, batch, mask_BT, log_probs_key=keys.log_probs, entropy=False
        )
        log_prob_BT = scores.log_probs
        reference_BT = None
        if self.kl_to_ref_coeff is not None or self.loss_function == "minor_sft":
            reference_BT = batch.reference(td, keys.ref_log_prob, mask_BT).to(log_prob_BT)

        def mean(value_BT: Tensor) -> Tensor:
            return value_BT.masked_fill(~mask_BT, 0).sum() / counts.tokens

        length_B = mask_BT.sum(-1)
        terms = {"loss_sft": self._reduce(log_prob_BT, reference_BT, mask_BT, length_B, counts)}
        if self.kl_to_ref_coeff is not None:
            kl = mean(fn.kl_estimate(log_prob_BT, reference_BT, mask_BT))
            terms |= {"loss_kl_to_ref": self.kl_to_ref_coeff * kl, "kl_to_ref": kl.detach()}
        metrics = {
            "nll": mean(-log_prob_BT.detach()),
            "accuracy": None if scores.top1 is None else mean(scores.top1.to(log_prob_BT.dtype)),
            "tokens": length_B.sum().to(log_prob_BT.dtype),
            "empty_rows": (length_B == 0).sum().to(log_prob_BT.dtype),
        }
        return SFTLossOutput(**terms, **metrics, batch_size=[])

    def _reduce(
        self, log_prob_BT: Tensor, reference_BT: Tensor | None, mask_BT: Tensor, length_B: Tensor, counts: StepCounts
    ) -> Tensor:
        log_prob_B = fn.sequence_sum(log_prob_BT, mask_BT)
        if self.reduction == "token":  # every token counts the same, so long answers weigh more
            return -log_prob_B.sum() / counts.tokens
        # Every conversation counts the same, with the mean over its tokens or with their sum.
        divisor_B = length_B.clamp(min=1) if self.normalize_by_seq_length else torch.ones_like(length_B)
        if self.loss_function == "sft":
            loss_B = -log_prob_B / divisor_B
        else:
            reference_B = fn.sequence_sum(reference_BT, mask_BT)
            loss_B = fn.minor_sft(log_prob_B / divisor_B, reference_B / divisor_B, beta=self.beta)
        loss_B = loss_B.masked_fill(length_B == 0, 0.0)  # minor_sft of an empty row is log 2, not 0
        if self.reduction == "none":
            return loss_B
        return loss_B.sum() / counts.sequences if self.reduction == "mean" else loss_B.sum()

    def _read(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        keys = self.tensor_keys
        # Ids in the batch are trained as they are: rendering the messages again could give other ids.
        has_tokens = td.get(keys.tokens, None, as_list=True) is not None
        if has_tokens and td.get(keys.assistant_mask, None, as_list=True) is not None:
            batch = PaddedBatch.read(td, keys, reader="SFTLoss", device=self.device)
            return batch, batch.trained_mask(td, keys, "rlhf")
        history = td.get(keys.history, None)
        if history is None:
            raise MissingKeyError(
                f"SFTLoss: the batch must hold {keys.tokens} with {keys.assistant_mask}, or {keys.history}: keys "
                f"present: {present_keys(td)}."
            )
        renderer = self.renderer or getattr(self.actor_network, "renderer", None)
        if renderer is None:
            raise ConfigError("SFTLoss: conversations that come as messages need a tokenizer: pass tokenizer=.")
        rendered = renderer.render(history.to_chats())
        batch = PaddedBatch.from_rows([row.ids for row in rendered], reader="SFTLoss", device=self.device)
        mask_BT = batch.align([row.assistant_mask for row in rendered], keys.history)
        # The first token of a row is not trained: no token predicts it.
        return batch, with_predecessor(mask_BT, batch.attention_mask)
