"""Generation and scoring with a Hugging Face causal language model, in this process.

It has its own decode loop: each row has its own seed, so its sample does not depend on other rows; equal prompts are
prefilled once; finished rows leave the batch. The arithmetic of one draw is in ``sampling``.

Shapes: B rows of a batch, N unfinished rows, U distinct prompts, P prompt and R response length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.engines.base import (
    Generation,
    Hear,
    MediaRows,
    Rows,
    SamplingParams,
    SeededEngine,
    StopReason,
    check_ids,
)
from llmrl.modules.llm.engines.sampling import draw, penalize_repetition, row_uniforms, truncate
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.packing import evaluating, unwrapped
from llmrl.modules.llm.vision import has_images, media_inputs, only_given_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmrl.modules.llm.routers import Routers

_Row = tuple[Tensor, Tensor, Tensor, StopReason, Tensor | None]  # ids, log-probs, plain log-probs, reason, routes
_Step = tuple[Tensor, Tensor, Tensor]  # [N]: tokens, log-probs as sampled, log-probs with temperature only


class TransformersEngine(SeededEngine):
    """An ``Engine`` over a Hugging Face causal language model.

    The model may be the trainer's own module: each call puts it in evaluation mode and restores its mode afterwards,
    and ``update_weights(None, version=...)`` then only sets the version.

    In float32 the log-probs of generating equal those of scoring to 1e-5, whatever the padding; in bfloat16 they round
    differently (docs/engines.md).

    eos_token_ids     ids that end a response; included in the response
    pad_token_id      padding id; may equal an end-of-sequence id, because masks are derived from lengths
    pad_inputs        False: rows are run in groups of equal length, so the model never sees a padding token
    max_batch_tokens  maximum tokens (rows times prompt + response length) per batch; larger calls are split
    tokenizer         needed only for ``SamplingParams.stop_strings``
    seed              seeds the generator of row seeds, used if a call passes none

    Attributes  ``on_tokens``, default None: called after each draw with int64[N] tokens and float32[N] log-probs
                ``max_cached_tokens``, default None: maximum tokens per batch of `generate`, whose KV cache must fit;
                the rows of a call then run in waves of similar length
                ``reports_routes``, default False: fills `Generation.routes` for a mixture of experts
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
        super().__init__(seed)
        self.model = model
        self.eos_token_ids = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.pad_inputs = pad_inputs
        self.tokenizer = tokenizer
        self.on_tokens: Callable[[Tensor, Tensor], None] | None = None
        self.max_cached_tokens: int | None = None
        self.reports_routes = False
        self._accepts = frozenset(inspect.signature(unwrapped(model).forward).parameters)
        # The argument for the KV cache was renamed by Transformers, model by model.
        newly_named = "cache" in self._accepts and "past_key_values" not in self._accepts
        self._cache_argument = "cache" if newly_named else "past_key_values"

    streams = True

    @property
    def context_length(self) -> int | None:
        """The positions that the model was made for; None if its configuration has no such number."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    # --- generation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()  # not inference_mode: buffers that a model caches in its forward must stay usable by the trainer
    def generate(
        self,
        prompts: Rows,
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        media: MediaRows = None,
        hear: Hear | None = None,
    ) -> Generation:
        """Samples one response per prompt: see `Engine`. Raises ShapeError, ConfigError."""
        seeds = self._seeds(seeds, len(prompts))
        self._check_ids(prompts, "prompt")
        if params.extra:
            raise ConfigError(f"TransformersEngine: {params.extra[0][0]} is an option of another engine: leave it out.")
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError(
                "TransformersEngine: stop_strings need tokenizer= at construction, to decode sampled tokens."
            )
        rows: list[_Row] = [None] * len(prompts)  # type: ignore[list-item]
        with evaluating(self.model):
            lengths = [len(prompt) + params.max_new_tokens for prompt in prompts]
            limits = [limit for limit in (self.max_batch_tokens, self.max_cached_tokens) if limit is not None]
            for batch in _batches(lengths, min(limits, default=None), self.pad_inputs):
                own, own_seeds = [prompts[row] for row in batch], [seeds[row] for row in batch]
                own_media = [media[row] for row in batch] if media else None
                decoding = _Decoding(self, own, own_seeds, params, own_media)
                if hear is not None:  # of rows of the call, where the batch has its own numbers
                    decoding.hear = lambda row, ids, log_probs, batch=batch: hear(batch[row], ids, log_probs)
                for row, result in zip(batch, decoding.run(), strict=True):
                    rows[row] = result
        ids, log_probs, plain, reasons, routes = ([row[part] for row in rows] for part in range(5))
        given = {"routes": routes if self.reports_routes else None}
        return Generation(ids, log_probs, plain if params.truncates else None, reasons, self.version, **given)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any,
        media: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits of the last position, float32[N, V]. Passes only arguments that the model's forward declares."""
        inputs: dict[str, Any] = {"input_ids": input_ids, self._cache_argument: cache, "use_cache": True}
        inputs |= {name: value for name, value in (media or {}).items() if name in self._accepts}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
            if "position_ids" in self._accepts and position_ids is not None:
                inputs["position_ids"] = position_ids
        if "logits_to_keep" in self._accepts:  # otherwise the head computes the logits of the whole prompt
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1].float()

    # --- scoring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self, sequences: Rows, *, temperature: float = 1.0, masks: Rows | None = None, media: MediaRows = None
    ) -> list[Tensor]:
        """Log-probs of the tokens of each sequence: see `Engine`."""
        self._check_ids(sequences, "sequence")
        scores: list[Tensor] = [None] * len(sequences)  # type: ignore[list-item]
        lengths = [len(sequence) for sequence in sequences]
        device = model_device(self.model)
        with evaluating(self.model):
            for rows in _batches(lengths, self.max_batch_tokens or 16384, self.pad_inputs):
                ids_BT = pad_rows([sequences[row] for row in rows], value=self.pad_token_id).to(device)
                attention_BT = lengths_mask([lengths[row] for row in rows], ids_BT.shape[1]).to(device)
                select_BT = attention_BT.clone()
                if masks is not None:
                    select_BT &= pad_rows([masks[row].bool() for row in rows], value=False).to(device)
                select_BT[:, 0] = False
                own_media = [media[row] for row in rows] if media else None
                result = token_logprobs(
                    self.model, ids_BT, attention_BT, select_BT, temperature=temperature, media=own_media
                )
                for row, row_scores in zip(rows, result.log_probs.to(sequences[rows[0]].device), strict=True):
                    scores[row] = row_scores[: lengths[row]].clone()
        return scores

    def _check_ids(self, rows: Rows, what: str) -> None:
        check_ids(rows, vocabulary_size(self.model), who="TransformersEngine", what=what)

    # --- weights and state --------------------------------------------------------------------------------------------

    @property
    def unsaved_buffers(self) -> frozenset[str]:
        """Names that a set of weights may leave out: buffers that the model creates itself."""
        from llmrl.modules.llm.engines.weights import unsaved_buffers

        return unsaved_buffers(self.model)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Copies ``weights`` into the model, then sets the version. None: the weights are shared already.

        Names are those of ``model.state_dict()``; of tied weights one name is enough. Everything is checked before
        anything is written.

        Raises  WeightSyncError  naming a weight that is unknown, missing, misshapen, or tied but different
        """
        if weights is not None:
            from llmrl.weight_update.target import ModelTarget

            ModelTarget(self.model).update_weights(weights, version=version)  # in place: it may be the trainer's own
        self.version = version

    def close(self) -> None:
        """Does nothing: the caller owns the model."""


class _Decoding:
    """One batch of one ``generate`` call: left-padded prompts, their KV cache, and the unfinished rows."""

    def __init__(
        self, engine: TransformersEngine, prompts: Rows, seeds: Sequence[int], params: SamplingParams, media: MediaRows
    ):
        self.engine, self.model = engine, engine.model
        self.routers: Routers | None = None
        if engine.reports_routes:
            from llmrl.modules.llm.routers import Routers

            self.routers = Routers.of(engine.model)
        self.prompts, self.params, self.media = prompts, params, media
        self.hear: Hear | None = None
        self.left: dict[int, int] = {}  # rows whose client has left: their number of ids
        self.home = prompts[0].device  # results are returned on the caller's device
        self.device = device = model_device(engine.model)
        stop_ids = {*(() if params.ignore_eos else engine.eos_token_ids), *params.stop_token_ids}
        self.uniforms_BR = None if params.greedy else row_uniforms(seeds, params.max_new_tokens).to(device)
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self.check_every = 1 if device.type == "cpu" else 4  # each check synchronises an accelerator
        # Where a row would leave the model's positions: with learned ones the next token would be an index error.
        context = engine.context_length
        rooms = [params.max_new_tokens if context is None else context - len(prompt) for prompt in prompts]
        self.room_B = torch.tensor(rooms, device=device) if min(rooms) < params.max_new_tokens else None
        if min(rooms) < 1:
            row = next(row for row, room in enumerate(rooms) if room < 1)
            raise ShapeError(
                f"TransformersEngine: a prompt must have at most {context - 1} tokens, so that one can be added "
                f"(max_position_embeddings={context}): got {len(prompts[row])} in row {row}."
            )

    def run(self) -> Iterator[_Row]:
        """Prefills, decodes until every row has ended, and yields each row's results."""
        params, stop_ids = self.params, self.stop_ids
        logits_NV = self._prefill()
        rows_N = torch.arange(len(self.prompts), device=self.device)
        ended_N = torch.zeros(len(self.prompts), dtype=torch.bool, device=self.device)
        seen_NV = self._seen(logits_NV.shape[-1]) if params.repetition_penalty != 1.0 else None
        string_end_B: list[int | None] = [None] * len(self.prompts)  # length at which a stop string was complete
        segments: list[tuple[Tensor, list[_Step]]] = []  # the rows of a batch, and its steps until rows were removed
        steps: list[_Step] = []
        tails: list[list[int]] = [[] for _ in self.prompts]
        uniforms_NR, room_N = self.uniforms_BR, self.room_B
        for step in range(params.max_new_tokens):
            steps.append(self._draw(logits_NV, seen_NV, None if uniforms_NR is None else uniforms_NR[:, step]))
            token_N, drawn_N, _ = steps[-1]
            if self.engine.on_tokens is not None:
                self.engine.on_tokens(token_N, drawn_N)
            if self.hear is not None:
                ended_N = ended_N | self._unheard(token_N, drawn_N, rows_N, ended_N, step)
            # A comparison takes less than half the time of isin, and nearly every call has one stop id.
            ended_N = ended_N | (token_N == stop_ids if len(stop_ids) == 1 else torch.isin(token_N, stop_ids))
            if params.stop_strings:
                ended_N = ended_N | self._string_ends(token_N, rows_N, tails, string_end_B, step)
            if step + 1 == params.max_new_tokens:
                break
            is_full = False
            if room_N is not None:
                is_full_N = room_N <= step + 1
                ended_N, is_full = ended_N | is_full_N, bool(is_full_N.any())
            if (step + 1) % self.check_every == 0 or is_full:
                num_left = int((~ended_N).sum())
                if num_left == 0:
                    break
                # Ended rows are removed only when they are half of the batch, because removal copies the whole cache;
                # but a full one at once, because it has no further position.
                if num_left * 2 <= len(token_N) or is_full:
                    segments.append((rows_N, steps))
                    steps = []
                    keep = (~ended_N).nonzero().squeeze(1)
                    token_N, rows_N, ended_N = token_N[keep], rows_N[keep], ended_N[keep]
                    seen_NV = None if seen_NV is None else seen_NV[keep]
                    uniforms_NR = None if uniforms_NR is None else uniforms_NR[keep]
                    room_N = None if room_N is None else room_N[keep]
                    self._keep(keep)
            if seen_NV is not None:
                seen_NV.scatter_(1, token_N[:, None], True)
            logits_NV = self._step(token_N)
            if self.routers is not None:
                self.drawn_routes[rows_N, step] = self.read_routes
        segments.append((rows_N, steps))
        yield from self._collect(segments, string_end_B)

    def forward(self, *inputs: Any) -> Tensor:
        if self.routers is None:
            return self.engine.forward(*inputs)
        with self.routers.recording():
            logits_NV = self.engine.forward(*inputs)
            self.read_routes = self.routers.choices()  # for the input tokens of this pass
        return logits_NV

    def _prefill(self) -> Tensor:
        """Logits after each prompt, float32[N, V]. Sets the cache, mask and positions of all rows."""
        from transformers import DynamicCache

        # The prompts of a group are equal: each is prefilled once, and its cache repeated for its rows.
        distinct: dict[Any, int] = {}
        keys = [prompt.cpu().numpy().tobytes() for prompt in self.prompts]
        if self.media:  # equal ids and identical tensor objects
            keys = [(key, *map(id, row.values())) for key, row in zip(keys, self.media, strict=True)]
        which_B = [distinct.setdefault(key, len(distinct)) for key in keys]
        firsts = [which_B.index(u) for u in range(len(distinct))]
        unique = [self.prompts[first] for first in firsts]
        lengths = [len(prompt) for prompt in unique]
        self.width = max(lengths)
        ids_UP = pad_rows(unique, value=self.engine.pad_token_id, side="left").to(self.device)
        self.mask_NT: Tensor | None = None  # rows of equal length need no mask, and run faster without one
        self.position_N1: Tensor | None = None
        position_UP = None
        # Without a mask, a vision model would compute positions from the images of the previous call.
        is_vision = getattr(self.model.config, "vision_config", None) is not None
        if min(lengths) != self.width or is_vision:
            mask_UP = lengths_mask(lengths, self.width, side="left").to(self.device)
            position_UP = (mask_UP.cumsum(-1) - 1).clamp_(min=0)
            response = torch.ones(len(unique), self.params.max_new_tokens, dtype=torch.bool, device=self.device)
            self.mask_NT = torch.cat([mask_UP, response], dim=1).long()
            self.position_N1 = position_UP[:, -1:]
        self.cache = DynamicCache(config=self.model.config)
        mask_UP = None if self.mask_NT is None else self.mask_NT[:, : self.width]
        own_media = [self.media[first] for first in firsts] if self.media else None
        if has_images(own_media):
            inputs = {"input_ids": ids_UP, **media_inputs(mask_UP, own_media)}
            with only_given_images(self.model, inputs) as inputs:
                ids_UP = inputs.pop("input_ids")
                logits_NV = self.forward(ids_UP, mask_UP, None, self.cache, inputs)
            self.position_N1 = self.position_N1 + self._steps_behind(len(unique))
        else:
            logits_NV = self.forward(ids_UP, mask_UP, position_UP, self.cache)
        if self.routers is not None:
            # Allocated here: the numbers of layers and of experts per token are known only after the first pass.
            of_prompts = self.read_routes.unflatten(0, (len(unique), self.width))
            self.prompt_routes = [of_prompts[u, self.width - lengths[u] :] for u in which_B]
            steps = (len(self.prompts), self.params.max_new_tokens)
            self.drawn_routes = self.read_routes.new_full((*steps, *self.read_routes.shape[1:]), -1)
        if len(unique) != len(self.prompts):
            repeat_B = torch.tensor(which_B, device=self.device)
            self._keep(repeat_B)
            logits_NV = logits_NV[repeat_B]
        return logits_NV

    def _steps_behind(self, num_rows: int) -> Tensor:
        """Offset int64[U, 1] of positions after each prompt from the token count; images take fewer positions."""
        found = (getattr(module, "rope_deltas", None) for module in self.model.modules())
        behind = next((deltas for deltas in found if deltas is not None), None)
        zeros = torch.zeros(num_rows, 1, dtype=torch.int64, device=self.device)
        return zeros if behind is None else behind.view(num_rows, 1)

    def _step(self, token_N: Tensor) -> Tensor:
        self.width += 1
        mask_NT = None
        if self.mask_NT is not None:
            mask_NT = self.mask_NT[:, : self.width]
            self.position_N1 = self.position_N1 + 1
        return self.forward(token_N[:, None], mask_NT, self.position_N1, self.cache)

    def _keep(self, index: Tensor) -> None:
        """Selects rows of the cache, mask and positions; an index may repeat."""
        self.cache.batch_select_indices(index)
        if self.mask_NT is not None:
            self.mask_NT = self.mask_NT[index]
            self.position_N1 = self.position_N1[index]

    def _draw(self, logits_NV: Tensor, seen_NV: Tensor | None, uniforms_N: Tensor | None) -> _Step:
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

    def _unheard(self, token_N: Tensor, drawn_N: Tensor, rows_N: Tensor, ended_N: Tensor, step: int) -> Tensor:
        """Tells ``hear`` of the draws of rows that have not ended; the rows that it does not go on with, bool[N]."""
        draws = zip(rows_N.tolist(), token_N.tolist(), drawn_N.tolist(), ended_N.tolist(), strict=True)
        for row, token, log_prob, ended in draws:
            if not ended and not self.hear(row, [token], [log_prob]):
                self.left[row] = step + 1
        return torch.tensor([row in self.left for row in rows_N.tolist()], device=self.device)

    def _string_ends(
        self, token_N: Tensor, rows_N: Tensor, tails: list[list[int]], ends: list[int | None], step: int
    ) -> Tensor:
        """Rows that have just completed a stop string, bool[N]. Only the last tokens are decoded."""
        stop_strings = self.params.stop_strings
        window = max(len(stop.encode()) for stop in stop_strings) + 4  # a token holds at least one byte
        rows = rows_N.tolist()
        for row, token in zip(rows, token_N.tolist(), strict=True):
            tails[row] = [*tails[row][-window + 1 :], token]
        texts = self.engine.tokenizer.batch_decode([tails[row] for row in rows], skip_special_tokens=False)
        hits = []
        for row, text in zip(rows, texts, strict=True):
            hit = ends[row] is None and any(stop in text for stop in stop_strings)
            if hit:
                ends[row] = step + 1
            hits.append(hit)
        return torch.tensor(hits, device=self.device)

    def _collect(self, segments: list[tuple[Tensor, list[_Step]]], string_end_B: list[int | None]) -> Iterator[_Row]:
        """Assembles rows from the steps of all segments, and cuts each row where it ended."""
        shape = len(self.prompts), sum(len(steps) for _, steps in segments)
        num_steps, start = shape[1], 0
        kinds = [torch.int64, torch.float32, torch.float32][: 3 if self.params.truncates else 2]
        columns = [torch.zeros(shape, dtype=kind, device=self.device) for kind in kinds]
        for rows_N, steps in segments:
            stop = start + len(steps)
            for column_BR, values in zip(columns, zip(*steps, strict=True), strict=False):
                column_BR[rows_N, start:stop] = torch.stack(values, 1)
            start = stop
        is_stop_BR = torch.isin(columns[0], self.stop_ids)
        eos_end_B = torch.where(is_stop_BR.any(1), is_stop_BR.int().argmax(1) + 1, num_steps + 1).tolist()
        columns = [column_BR.to(self.home) for column_BR in columns]
        room_B = [num_steps] * len(eos_end_B) if self.room_B is None else self.room_B.clamp(max=num_steps).tolist()
        for row, (eos_end, room) in enumerate(zip(eos_end_B, room_B, strict=True)):
            # Cut at the earliest end: sampling continues past it while other rows of the batch run.
            string_end = string_end_B[row] or num_steps + 1
            length = min(eos_end, string_end, room, self.left.get(row, num_steps))
            if eos_end <= length:
                reason = StopReason.EOS
            elif self.left.get(row) == length and string_end > length:
                reason = StopReason.ABORT
            else:
                reason = StopReason.STOP_STRING if string_end <= room else StopReason.LENGTH
            # Cloned, because a view would keep every row alive.
            ids, drawn, plain = (columns[part][row, :length].clone() for part in (0, 1, -1))
            routes = None
            if self.routers is not None:
                self.drawn_routes[row, length - 1] = -1  # the last id may have been read while other rows continued
                routes = torch.cat([self.prompt_routes[row], self.drawn_routes[row, :length]]).to(self.home)
            yield ids, drawn, plain, reason, routes


def vocabulary_size(model: nn.Module | None) -> int | None:
    """Number of ids in a model's embedding; None if unknown."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def model_device(model: nn.Module) -> torch.device:
    """The device that a model computes on, which its inputs need; sharded parameters may be offloaded elsewhere."""
    first = next(model.parameters())
    if not isinstance(first, DTensor) or first.device_mesh.device_type == first.device.type:
        return first.device
    kind = first.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _batches(lengths: Sequence[int], max_tokens: int | None, mixed: bool) -> Iterator[list[int]]:
    """Yields row indices in batches of similar length whose padded size is at most ``max_tokens``, or of a single row.

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
