"""An engine from nothing but public names: a bigram table as the language model, and the policy over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmrl.errors import ConfigError, ShapeError, WeightSyncError
from llmrl.modules.llm import Backend, Engine, Generation, LLMWrapperBase, SamplingParams, StopReason, TokenScores


class Bigram(nn.Module):
    """p(token | token before it) = softmax of a row of a table."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(
            2 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
        )

    def log_probs(self, ids: Tensor, temperature: float) -> Tensor:
        """float32[..., T, V]: of what follows each token."""
        return (self.table[ids] / temperature).log_softmax(-1)

    def scores(self, ids: Tensor, temperature: float) -> Tensor:
        following = self.log_probs(ids[..., :-1], temperature).gather(-1, ids[..., 1:, None])[..., 0]
        return torch.cat([torch.zeros_like(ids[..., :1], dtype=torch.float32), following], -1)


class BigramEngine(Engine):
    """Samples and scores a ``Bigram``. Refuses what it cannot do instead of leaving it out."""

    def __init__(self, model: Bigram, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.version = 0

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Tensor], params: SamplingParams, *, seeds: Sequence[int] | None = None
    ) -> Generation:
        if params.truncates or params.stop_strings:
            raise ConfigError("BigramEngine: neither truncation nor stop strings: leave them out of generate_kwargs.")
        seeds = torch.randint(1 << 62, (len(prompts),)).tolist() if seeds is None else seeds
        if len(seeds) != len(prompts):
            raise ShapeError(f"BigramEngine: one seed per prompt: got {len(seeds)} for {len(prompts)} prompts.")
        stops = {*self.eos_token_ids, *params.stop_token_ids}
        ids, log_probs, reasons = [], [], []
        for prompt, seed in zip(prompts, seeds, strict=True):
            if prompt.ndim != 1 or not len(prompt):
                raise ShapeError(f"BigramEngine: a prompt is a non-empty int64[T]: got {tuple(prompt.shape)}.")
            row = self._row(int(prompt[-1]), params, stops, seed)
            for column, value in zip((ids, log_probs, reasons), row, strict=True):
                column.append(value)
        return Generation(ids, log_probs, None, reasons, self.version)

    def _row(self, last: int, params: SamplingParams, stops: set[int], seed: int) -> tuple[Tensor, Tensor, StopReason]:
        generator = torch.Generator().manual_seed(seed)
        ids, scores = [], []
        while len(ids) < params.max_new_tokens and (not ids or ids[-1] not in stops):
            log_p_V = self.model.log_probs(torch.tensor(last), params.scoring_temperature)
            last = int(log_p_V.argmax() if params.greedy else torch.multinomial(log_p_V.exp(), 1, generator=generator))
            ids.append(last)
            scores.append(log_p_V[last])
        reason = StopReason.EOS if ids[-1] in stops else StopReason.LENGTH
        return torch.tensor(ids), torch.stack(scores), reason

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        scores = [self.model.scores(row, temperature) for row in sequences]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        if weights is not None:
            found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
            if found != (expected := {"table": tuple(self.model.table.shape)}):
                raise WeightSyncError(f"BigramEngine: the weights must be {expected}: got {found}.")
            self.model.load_state_dict(weights)
        self.version = version

    def close(self) -> None:
        """Nothing to release."""


class BigramScorer(nn.Module):
    """The same scores with gradients: what the losses call."""

    def __init__(self, model: Bigram) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, select: Tensor, temperature: float = 1.0, entropy: bool = False
    ) -> TokenScores:
        log_p_BTV = self.model.log_probs(input_ids, temperature)
        entropy_BT = -(log_p_BTV.exp() * log_p_BTV).sum(-1).roll(1, -1) * select if entropy else None
        return TokenScores(self.model.scores(input_ids, temperature) * select, entropy_BT)


class BigramWrapper(LLMWrapperBase):
    """The policy over a ``Bigram``: all arguments are LLMWrapperBase's."""

    def _build(self, model: Any) -> Backend:
        engine = BigramEngine(model, (self.tokenizer.eos_token_id,))
        return Backend(engine, BigramScorer(model), self.tokenizer.pad_token_id)
