"""The decode loop of ``TransformersEngine``: one batch from its prefill to its last row.

What the loop is for is said in ``transformers.py``, the arithmetic of one draw is in ``sampling.py``. ``forward`` runs
the model: (input ids, mask or None, positions or None, cache) -> logits of the last position.

Shapes: B rows of the batch, N rows that still run, U distinct prompts, P prompt and R response length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.modules.llm.engines.base import SamplingParams, StopReason
from llmrl.modules.llm.engines.sampling import draw, penalize_repetition, row_uniforms, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Decoding"]


class Decoding:
    """One batch of one ``generate`` call: left-padded prompts, their cache, and the rows that still run."""

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor | None, Tensor | None, Any], Tensor],
        config: Any,
        prompts: list[Tensor],
        seeds: list[int],
        params: SamplingParams,
        *,
        stop_ids: set[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.config = config
        self.params = params
        self.prompts = prompts
        self.home = prompts[0].device  # where the caller keeps its rows
        self.device = device
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.uniforms_BR = None if params.greedy else row_uniforms(seeds, params.max_new_tokens).to(device)
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self.check_every = 1 if device.type == "cpu" else 4  # asking an accelerator whether rows ended makes it wait

    def run(self) -> Iterator[tuple[Tensor, Tensor, Tensor, StopReason]]:
        """Prefills, decodes until every row ended, and yields each row's ids, log-probs, plain log-probs and stop
        reason.
        """
        params, stop_ids = self.params, self.stop_ids
        logits_NV = self._prefill()
        rows_N = torch.arange(len(self.prompts), device=self.device)
        ended_N = torch.zeros(len(self.prompts), dtype=torch.bool, device=self.device)
        seen_NV = self._seen(logits_NV.shape[-1]) if params.repetition_penalty != 1.0 else None
        string_end_B: list[int | None] = [None] * len(
            self.prompts
        )  # length of the response when it completed a stop string
        segments: list[tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]] = []
        tokens: list[Tensor] = []
        drawn_lp: list[Tensor] = []
        plain_lp: list[Tensor] = []
        tails: list[list[int]] = [[] for _ in self.prompts]
        uniforms_NR = self.uniforms_BR
        for step in range(params.max_new_tokens):
            token_N, drawn_N, plain_N = self._draw(
                logits_NV, seen_NV, None if uniforms_NR is None else uniforms_NR[:, step]
            )
            tokens.append(token_N)
            drawn_lp.append(drawn_N)
            plain_lp.append(plain_N)
            ended_N = ended_N | torch.isin(token_N, stop_ids) if len(stop_ids) != 1 else ended_N | (token_N == stop_ids)
            if params.stop_strings:
                ended_N = ended_N | self._string_ends(token_N, rows_N, tails, string_end_B, step)
            if step + 1 == params.max_new_tokens:
                break
            if (step + 1) % self.check_every == 0:
                num_left = int((~ended_N).sum())
                if num_left == 0:
                    break
                if num_left * 2 <= len(token_N):
                    segments.append((rows_N, tokens, drawn_lp, plain_lp))
                    tokens, drawn_lp, plain_lp = [], [], []
                    keep = (~ended_N).nonzero().squeeze(1)
                    token_N, rows_N, ended_N = token_N[keep], rows_N[keep], ended_N[keep]
                    seen_NV = None if seen_NV is None else seen_NV[keep]
                    uniforms_NR = None if uniforms_NR is None else uniforms_NR[keep]
                    self._keep(keep)
            if seen_NV is not None:
                seen_NV.scatter_(1, token_N[:, None], True)
            logits_NV = self._step(token_N)
        segments.append((rows_N, tokens, drawn_lp, plain_lp))
        yield from self._collect(segments, string_end_B)

    def _prefill(self) -> Tensor:
        """float32[N, V]: the logits after each prompt. Leaves the cache, mask and positions of all rows behind."""
        from transformers import DynamicCache

        distinct: dict[bytes, int] = {}
        which_B = [distinct.setdefault(prompt.cpu().numpy().tobytes(), len(distinct)) for prompt in self.prompts]
        firsts = [which_B.index(u) for u in range(len(distinct))]
        unique = [self.prompts[first] for first in firsts]
        lengths = [len(prompt) for prompt in unique]
        self.width = max(lengths)
        ids_UP = pad_rows(unique, value=self.pad_token_id, side="left").to(self.device)
        self.mask_NT: Tensor | None = None  # rows of one length need no mask, and are faster without
        self.position_N1: Tensor | None = None
        position_UP = None
        if min(lengths) != self.width:
            mask_UP = lengths_mask(lengths, self.width, side="left").to(self.device)
            position_UP = (mask_UP.cumsum(-1) - 1).clamp_(min=0)
            response = torch.ones(len(unique), self.params.max_new_tokens, dtype=torch.bool, device=self.device)
            self.mask_NT = torch.cat([mask_UP, response], dim=1).long()
            self.position_N1 = position_UP[:, -1:]
        self.cache = DynamicCache(config=self.config)
        mask_UP = None if self.mask_NT is None else self.mask_NT[:, : self.width]
        logits_NV = self.forward(ids_UP, mask_UP, position_UP, self.cache)
        if len(unique) != len(self.prompts):
            repeat_B = torch.tensor(which_B, device=self.device)
            self._keep(repeat_B)
            logits_NV = logits_NV[repeat_B]
        return logits_NV

    def _step(self, token_N: Tensor) -> Tensor:
        self.width += 1
        mask_NT = None
        if self.mask_NT is not None:
            mask_NT = self.mask_NT[:, : self.width]
            self.position_N1 = self.position_N1 + 1
        return self.forward(token_N[:, None], mask_NT, self.position_N1, self.cache)

    def _keep(self, index: Tensor) -> None:
        """Selects rows of everything the next forward reads; an index may repeat."""
        self.cache.batch_select_indices(index)
        if self.mask_NT is not None:
            self.mask_NT = self.mask_NT[index]
            self.position_N1 = self.position_N1[index]

    def _draw(
        self, logits_NV: Tensor, seen_NV: Tensor | None, uniforms_N: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """int64[N], float32[N], float32[N]: the tokens, their log-probs as drawn, and under the temperature alone."""
        params = self.params
        temperature = params.scoring_temperature
        scaled_NV = logits_NV if temperature == 1.0 else logits_NV / temperature
        plain_NV = log_probs_NV = scaled_NV.log_softmax(-1)
        if params.truncates:
            if seen_NV is not None:
                scaled_NV = penalize_repetition(logits_NV, seen_NV, params.repetition_penalty) / temperature
            log_probs_NV = (scaled_NV if params.greedy else truncate(scaled_NV, params)).log_softmax(-1)
        token_N = log_probs_NV.argmax(-1) if uniforms_N is None else draw(log_probs_NV, uniforms_N)
        drawn_N = log_probs_NV.gather(1, token_N[:, None]).squeeze(1)
        plain_N = plain_NV.gather(1, token_N[:, None]).squeeze(1) if params.truncates else drawn_N
        return token_N, drawn_N, plain_N

    def _seen(self, vocabulary: int) -> Tensor:
        seen_BV = torch.zeros(len(self.prompts), vocabulary, dtype=torch.bool, device=self.device)
        for row, prompt in enumerate(self.prompts):
            seen_BV[row, prompt.to(self.device)] = True
        return seen_BV

    def _string_ends(
        self, token_N: Tensor, rows_N: Tensor, tails: list[list[int]], ends: list[int | None], step: int
    ) -> Tensor:
        """bool[N]: rows whose text has just completed a stop string. Only the last tokens are decoded."""
        stop_strings = self.params.stop_strings
        window = max(len(stop.encode()) for stop in stop_strings) + 4  # a token holds at least one byte
        rows = rows_N.tolist()
        for row, token in zip(rows, token_N.tolist(), strict=True):
            tails[row] = [*tails[row][-window + 1 :], token]
        texts = self.tokenizer.batch_decode([tails[row] for row in rows], skip_special_tokens=False)
        hits = []
        for row, text in zip(rows, texts, strict=True):
            hit = ends[row] is None and any(stop in text for stop in stop_strings)
            if hit:
                ends[row] = step + 1
            hits.append(hit)
        return torch.tensor(hits, device=self.device)

    def _collect(
        self, segments: list[tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]], string_end_B: list[int | None]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, StopReason]]:
        """Puts the per-step columns of every segment back into rows, and cuts each row where it ended."""
        num_rows, num_steps = len(self.prompts), sum(len(tokens) for _, tokens, _, _ in segments)
        ids_BR = torch.zeros(num_rows, num_steps, dtype=torch.int64, device=self.device)
        drawn_BR = torch.zeros(num_rows, num_steps, device=self.device)
        plain_BR = torch.zeros(num_rows, num_steps, device=self.device) if self.params.truncates else drawn_BR
        start = 0
        for rows_N, tokens, drawn, plain in segments:
            stop = start + len(tokens)
            ids_BR[rows_N, start:stop] = torch.stack(tokens, 1)
            drawn_BR[rows_N, start:stop] = torch.stack(drawn, 1)
            if self.params.truncates:
                plain_BR[rows_N, start:stop] = torch.stack(plain, 1)
            start = stop
        is_stop_BR = torch.isin(ids_BR, self.stop_ids)
        eos_end_B = torch.where(is_stop_BR.any(1), is_stop_BR.int().argmax(1) + 1, num_steps + 1).tolist()
        columns = [ids_BR.to(self.home), drawn_BR.to(self.home)]
        columns.append(plain_BR.to(self.home) if self.params.truncates else columns[1])
        for row, eos_end in enumerate(eos_end_B):
            string_end = string_end_B[row] or num_steps + 1
            length = min(eos_end, string_end, num_steps)
            if eos_end <= min(string_end, num_steps):
                reason = StopReason.EOS
            else:
                reason = StopReason.STOP_STRING if string_end <= num_steps else StopReason.LENGTH
            ids, drawn, plain = (
                column[row, :length].clone() for column in columns
            )  # a view would keep every row alive
            yield ids, drawn, plain, reason
