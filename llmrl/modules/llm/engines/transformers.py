"""Generation and scoring with a Hugging Face causal language model, in this process.

The decode loop is ours: every row has its own seed, so what a row samples does not depend on the rows beside it;
log-probs are those of the distribution that was sampled from; equal prompts are prefilled once; finished rows leave the
batch. The arithmetic of one draw is in ``sampling.py``, scoring is ``log_probs.token_logprobs``.

Shapes: B rows of the call, N rows still in the batch, U distinct prompts, P prompt length, R response length, V
vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.engines.base import Generation, SamplingParams, StopReason, check_ids
from llmrl.modules.llm.engines.decoding import Decoding
from llmrl.modules.llm.engines.weights import check_weights, unsaved_buffers
from llmrl.modules.llm.log_probs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TransformersEngine"]


class TransformersEngine:
    """An ``Engine`` over a Hugging Face causal language model.

    The model may be the trainer's own module: it is put in evaluation mode for the length of a call and put back as it
    was, and ``update_weights(None, version=...)`` then only moves the version.

    In float32 the log-probs of generating equal those of scoring to 1e-5, whatever the padding. In bfloat16 they are
    float32 log-softmaxes of bfloat16 logits: decoding with a cache, a full forward, and the same forward on another
    batch round differently, all three by about the same (6 random layers: mean 1e-3 to 2e-2 nats, up to 0.1, without
    bias). Ratios are exactly 1 only between two scorings of one padded batch, which is what recipes compare there
    (``proximal="recomputed"``); the rest is what the engine/trainer correction of the loss is for.

    eos_token_ids     ids that end a response; they are part of it
    pad_token_id      fills the padding; may equal an end-of-sequence id, because masks come from lengths
    pad_inputs        False: rows are run in groups of equal length, and the model never sees a padding token
    max_batch_tokens  most tokens (rows times prompt + response length) that are in one batch; longer calls are split
    tokenizer         only for ``SamplingParams.stop_strings``
    seed              of the generator that hands out row seeds where a call brings none
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: int | Sequence[int],
        pad_token_id: int,
        max_batch_tokens: int | None = None,
        pad_inputs: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int | None = None,
    ) -> None:
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise ConfigError(f"TransformersEngine: max_batch_tokens must be positive: got {max_batch_tokens}.")
        self.model = model
        self.eos_token_ids = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.pad_inputs = pad_inputs
        self.tokenizer = tokenizer
        self.version = 0
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # an adapter hides the signature
        self._accepts = frozenset(inspect.signature(base.forward).parameters)

    # --- generation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()  # not inference_mode: buffers that a model caches in its forward must stay usable by the trainer
    def generate(
        self, prompts: Sequence[Tensor], params: SamplingParams, *, seeds: Sequence[int] | None = None
    ) -> Generation:
        """Samples one response per prompt.

        prompts  int64[P_i] each, not empty
        seeds    one int per prompt, or None for fresh ones from the engine's generator
        Raises   ShapeError, ConfigError
        """
        if seeds is None:
            seeds = torch.randint(1 << 62, (len(prompts),), generator=self._generator).tolist()
        if len(seeds) != len(prompts):
            raise ShapeError(f"TransformersEngine: one seed per prompt: got {len(seeds)} for {len(prompts)} prompts.")
        self._check_ids(prompts, "prompt")
        if params.extra:
            raise ConfigError(f"TransformersEngine: {params.extra[0][0]} is an option of another engine: leave it out.")
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError(
                "TransformersEngine: stop_strings need tokenizer= at construction, to read what was drawn."
            )
        ids: list[Tensor] = [None] * len(prompts)  # type: ignore[list-item]
        log_probs: list[Tensor] = [None] * len(prompts)  # type: ignore[list-item]
        plain: list[Tensor] = [None] * len(prompts)  # type: ignore[list-item]
        reasons: list[StopReason] = [StopReason.LENGTH] * len(prompts)
        device = model_device(self.model)
        with evaluation_mode(self.model):
            lengths = [len(prompt) + params.max_new_tokens for prompt in prompts]
            for rows in _batches(lengths, self.max_batch_tokens, self.pad_inputs):
                batch = Decoding(
                    self.forward,
                    self.model.config,
                    [prompts[row] for row in rows],
                    [seeds[row] for row in rows],
                    params,
                    stop_ids={*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids},
                    pad_token_id=self.pad_token_id,
                    tokenizer=self.tokenizer,
                    device=device,
                )
                for row, (row_ids, row_log_probs, row_plain, reason) in zip(rows, batch.run(), strict=True):
                    ids[row], log_probs[row], plain[row], reasons[row] = row_ids, row_log_probs, row_plain, reason
        return Generation(ids, log_probs, plain if params.truncates else None, reasons, self.version)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> Tensor:
        """float32[N, V]: the logits of the last position. Keyword arguments only, and only those that the model
        declares.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "past_key_values": cache, "use_cache": True}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
            if "position_ids" in self._accepts:
                inputs["position_ids"] = position_ids
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1].float()

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self, sequences: Sequence[Tensor], *, temperature: float = 1.0, masks: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """float32[T_i] per sequence: [t] = log p(token t | tokens before t), [0] = 0, and 0 where ``masks[i]`` is
        False.
        """
        self._check_ids(sequences, "sequence")
        scores: list[Tensor] = [None] * len(sequences)  # type: ignore[list-item]
        lengths = [len(sequence) for sequence in sequences]
        device = model_device(self.model)
        with evaluation_mode(self.model):
            for rows in _batches(lengths, self.max_batch_tokens or 16384, self.pad_inputs):
                ids_BT = pad_rows([sequences[row] for row in rows], value=self.pad_token_id).to(device)
                attention_BT = lengths_mask([lengths[row] for row in rows], ids_BT.shape[1]).to(device)
                select_BT = attention_BT.clone()
                if masks is not None:
                    select_BT &= pad_rows([masks[row].bool() for row in rows], value=False).to(device)
                select_BT[:, 0] = False
                result = token_logprobs(self.model, ids_BT, attention_BT, select_BT, temperature=temperature)
                for row, row_scores in zip(rows, result.log_probs.to(sequences[rows[0]].device), strict=True):
                    scores[row] = row_scores[: lengths[row]].clone()
        return scores

    def _check_ids(self, rows: Sequence[Tensor], what: str) -> None:
        check_ids(rows, vocabulary_size(self.model), who="TransformersEngine", what=what)

    # --- weights and state --------------------------------------------------------------------------------------------

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """Names that a set of weights may hold and need not: buffers that the model makes by itself."""
        return unsaved_buffers(self.model)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Copies ``weights`` into the model, then moves the version. None: the weights are shared already.

        Names are those of ``model.state_dict()``; of tied weights one name is enough. Everything is checked before
        anything is written.

        Raises  WeightSyncError  naming what is unknown, missing, misshapen, or tied but different
        """
        if weights is not None:
            own = self.model.state_dict(keep_vars=True)
            check_weights(own, weights)
            for name, value in weights.items():
                own[name].copy_(value)
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that it draws the same seeds: the generator and the version."""
        return {"generator": self._generator.get_state(), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self.version = state["version"]

    def close(self) -> None:
        """Nothing to release: the model belongs to whoever built it."""


def vocabulary_size(model: nn.Module | None) -> int | None:
    """How many ids a model can look up; None where it does not say."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def model_device(model: nn.Module) -> torch.device:
    """Where the inputs of a model go: the device of its first parameter."""
    return next(model.parameters()).device


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a block; afterwards every module has the flag that it had, frozen ones
    included.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _batches(lengths: Sequence[int], max_tokens: int | None, mixed: bool) -> Iterator[list[int]]:
    """Row indices, in batches of similar length whose padded size stays within ``max_tokens`` (one row always fits).

    ``mixed`` False: a batch holds rows of one length only.
    """
    if not lengths:
        return
    order: Sequence[int] = range(len(lengths))
    if max_tokens is not None or not mixed:
        order = sorted(order, key=lengths.__getitem__, reverse=True)
    batch: list[int] = []
    for row in order:
        if batch:
            full = max_tokens is not None and lengths[batch[0]] * (len(batch) + 1) > max_tokens
            if full or (not mixed and lengths[row] != lengths[batch[0]]):
                yield batch
                batch = []
        batch.append(row)
    yield batch
