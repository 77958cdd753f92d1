"""The distribution over the vocabulary at chosen positions of a batch, with its logits.

Losses call ``token_scores`` instead, whose memory does not grow with the vocabulary times the tokens.

Shapes: B sequences, T tokens, N chosen positions, V vocabulary, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from llmrl.errors import ShapeError
from llmrl.modules.llm.engines.transformers import model_device
from llmrl.modules.llm.log_probs import hidden_before, with_predecessor
from llmrl.modules.llm.packing import accepted, evaluating, find_head_path, map_logits, padded_inputs
from llmrl.modules.llm.policies.scoring_batch import Conversations

__all__ = ["TokenCategorical", "token_categorical"]

_ROWS_AT_A_TIME = 256  # of the vocabulary-wide temporaries


class TokenCategorical(Distribution):
    """A categorical over the vocabulary at every chosen token: what that token was, or could have been, drawn from.

    logits  float32[N, V]    of the chosen positions alone, in the order of ``mask``
    tokens  int64[*B, T]     the conversations
    mask    bool[*B, T]      the positions that have a distribution: those asked for that have a token before them
    Raises  ShapeError       where values do not have the shape of the tokens

    Results have the shape of the tokens. Where the mask is False, ``log_prob`` and ``entropy`` are 0, and ``sample``
    and ``mode`` keep the token that is there. Memory: 4 N V bytes, and about five times that for a backward pass.

    >>> mask = torch.tensor([[False, True, True]])
    >>> dist = TokenCategorical(torch.zeros(2, 4), torch.tensor([[3, 1, 2]]), mask)
    >>> dist.log_prob(dist.tokens).exp().tolist(), dist.mode.tolist()
    ([[1.0, 0.25, 0.25]], [[3, 0, 0]])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's own way to say that there is none)
    has_rsample = False

    def __init__(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
        if mask.shape != tokens.shape or logits.ndim != 2 or len(logits) != int(mask.sum()):
            raise ShapeError(
                "TokenCategorical: logits must have one row per True of a mask that is shaped like the tokens: got "
                f"{tuple(logits.shape)} for {int(mask.sum())} in {tuple(mask.shape)}, tokens {tuple(tokens.shape)}."
            )
        super().__init__(batch_shape=mask.shape, validate_args=False)
        self.logits = logits
        self.tokens = tokens
        self.mask = mask
        self._log_total_N = torch.cat([part_CV.logsumexp(-1) for part_CV in logits.split(_ROWS_AT_A_TIME)])

    def reshape(self, batch_size: torch.Size) -> TokenCategorical:
        """The same distributions for tokens [*batch_size, T]."""
        shape = (*batch_size, self.mask.shape[-1])
        return TokenCategorical(self.logits, self.tokens.reshape(shape), self.mask.reshape(shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """float32[*S, *B, T] of ids int64[*S, *B, T]; ``dist.log_prob(dist.tokens)`` is what ``token_scores`` gives."""
        if value.shape[-self.mask.ndim :] != self.mask.shape:
            raise ShapeError(
                f"TokenCategorical.log_prob: ids must end in the shape of the tokens: got {tuple(value.shape)}, "
                f"expected {tuple(self.mask.shape)}."
            )
        ids_SN = value[..., self.mask].to(self.logits.device)
        rows_SN = torch.arange(len(self.logits), device=self.logits.device).expand(ids_SN.shape)
        return self._spread(self.logits[rows_SN, ids_SN] - self._log_total_N, 0.0)

    def entropy(self) -> Tensor:
        """float32[*B, T], in nats."""
        parts = zip(self.logits.split(_ROWS_AT_A_TIME), self._log_total_N.split(_ROWS_AT_A_TIME), strict=True)
        entropies = []
        for logits_CV, log_total_C in parts:
            log_p_CV = logits_CV - log_total_C[:, None]
            finite_CV = log_p_CV.clamp(min=torch.finfo(log_p_CV.dtype).min)  # a probability of 0 counts 0, not 0 * -inf
            entropies.append(-(log_p_CV.exp() * finite_CV).sum(-1))
        return self._spread(torch.cat(entropies), 0.0)

    @property
    def mode(self) -> Tensor:
        """int64[*B, T]: the most likely token."""
        return self._spread(self.logits.argmax(-1), self.tokens)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """int64[*sample_shape, *B, T], from torch's global generator."""
        shape = torch.Size(sample_shape)
        if not len(self.logits):
            return self.tokens.expand(*shape, *self.mask.shape).clone()
        parts = zip(self.logits.split(_ROWS_AT_A_TIME), self._log_total_N.split(_ROWS_AT_A_TIME), strict=True)
        drawn = [
            torch.multinomial((logits_CV - log_total_C[:, None]).exp(), shape.numel(), replacement=True)
            for logits_CV, log_total_C in parts
        ]
        ids_SN = torch.cat(drawn).T.reshape(*shape, -1)
        return self._spread(ids_SN, self.tokens)

    def _spread(self, values_SN: Tensor, elsewhere: Tensor | float) -> Tensor:
        """[*S, *B, T] of [*S, N]."""
        shape = (*values_SN.shape[:-1], *self.mask.shape)
        if isinstance(elsewhere, Tensor):
            out = elsewhere.to(values_SN.device).expand(shape).clone()
        else:
            out = values_SN.new_full(shape, elsewhere)
        mask = self.mask.to(values_SN.device).expand(shape)
        return out.masked_scatter(mask, values_SN)


def token_categorical(
    model: nn.Module,
    conversations: Conversations,
    masking_strategy: str,
    mask: Tensor | Sequence[Tensor] | None,
    *,
    pad_token_id: int,
    temperature: float,
) -> TokenCategorical:
    """The distributions of the chosen tokens, [B, T]. Without gradients the model is in evaluation mode meanwhile."""
    chosen = conversations.selected(masking_strategy, mask)
    device = model_device(model)
    ids_BT, attention_BT = (value.to(device) for value in conversations.padded(pad_token_id))
    select_BT = attention_BT.masked_scatter(attention_BT, torch.cat(chosen).to(device))
    mask_BT = with_predecessor(select_BT, attention_BT)
    with nullcontext() if torch.is_grad_enabled() else evaluating(model):
        logits_NV = _chosen_logits(model, padded_inputs(ids_BT, attention_BT), mask_BT, temperature)
    return TokenCategorical(logits_NV, ids_BT, mask_BT)


def _chosen_logits(model: nn.Module, inputs: dict[str, Tensor], mask_BT: Tensor, temperature: float) -> Tensor:
    """float32[N, V]: the logits that the tokens under the mask are drawn from, divided by the temperature.

    Calls  the body once, and the head on the N positions; where the two do not make up the model, the whole model
    """
    path = find_head_path(model)
    if path is None:
        output = model(**accepted(model, inputs))
        return map_logits(getattr(output, "logits", output)[:, :-1][mask_BT[:, 1:]], None, temperature)
    hidden_NH = hidden_before(path, inputs, mask_BT)
    if len(hidden_NH) <= _ROWS_AT_A_TIME or torch.is_grad_enabled():
        return map_logits(path.head(hidden_NH), path, temperature)
    # in parts, so that there is no second tensor of their size while they are made
    start, logits_NV = 0, None
    for part_CH in hidden_NH.split(_ROWS_AT_A_TIME):
        part_CV = map_logits(path.head(part_CH), path, temperature)
        if logits_NV is None:
            logits_NV = part_CV.new_empty(len(hidden_NH), part_CV.shape[-1])
        logits_NV[start : start + len(part_CV)] = part_CV
        start += len(part_CV)
    return logits_NV
