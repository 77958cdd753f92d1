"""Tiny causal models, and the log-probs, entropies and gradients of their own logits, for tests of scoring."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 37
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Bigram(nn.Module):
    """Logits of the next token from a table: a model without attention, positions or a separate head."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def sharpened(model: nn.Module) -> nn.Module:
    """Initial weights of 0.02 make almost uniform logits, in which a wrong position or mask would not show."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)
    return model.eval()


def causal_lm(kind: str, **settings: object) -> nn.Module:
    """A model of Transformers by its model type, sharpened: the same weights at every call."""
    torch.manual_seed(0)
    return sharpened(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)))


def naive_scores(
    model: nn.Module, ids: Tensor, attention: Tensor, select: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from full float32 logits, row by row and without padding."""
    log_probs, entropies = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for row, real in enumerate(attention):
        tokens = ids[row][real]
        log_p = (model(input_ids=tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        zero = torch.zeros(1)
        log_probs[row, real] = torch.cat([zero, log_p.gather(1, tokens[1:, None]).squeeze(1)])
        entropies[row, real] = torch.cat([zero, -(log_p.exp() * log_p).sum(-1)])
    return log_probs.masked_fill(~select, 0.0), entropies.masked_fill(~select, 0.0)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def weighted_gradients(model: nn.Module, scores: tuple[Tensor, ...], with_entropy: bool = True) -> dict[str, Tensor]:
    """Gradients of a sum of log-probs and entropies in which every token counts differently."""
    weights = torch.linspace(-1, 2, scores[0].numel()).view_as(scores[0])
    loss = (scores[0] * weights).sum() + (0.3 * (scores[1] * weights.flip(0)).sum() if with_entropy else 0.0)
    return gradients(model, loss)


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)
