"""Log-probabilities of chosen tokens under a causal language model, without a ``[B, T, V]`` tensor of logits.

The model's body runs once over the batch. The output head then runs over the *selected* positions only, a chunk at a
time (see ``head_scores``), so neither pass holds the logits of the whole batch.

Where padding would be much of the work, the body gets packs instead (see ``packing``), with the same results.

Shapes: B sequences, T tokens, V vocabulary, H hidden size, N selected tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.head_scores import (
    HeadFunction,
    HeadOptions,
    Scores,
    chunk_rows,
    concatenate,
    score_hidden,
    score_logits,
)
from llmrl.modules.llm.packing import (
    HeadPath,
    Packing,
    accepted,
    find_head_path,
    has_varlen_attention,
    map_logits,
    pack_batch,
    padded_inputs,
)
from llmrl.modules.llm.sequence_split import SequenceSplit, active_split
from llmrl.modules.llm.shared_prefixes import can_share_prefixes, share_prefixes
from llmrl.modules.llm.vision import Media, has_images, media_inputs, only_given_images, reach_vision_tower

__all__ = ["TokenScorer", "TokenScores", "hidden_before", "token_logprobs", "with_predecessor"]


class TokenScores(NamedTuple):
    """Scores of the selected tokens of a padded batch; 0 (False) where a token was not selected.

    ``log_probs``  float32[B, T]          log p(token t | tokens before t), with grad
    ``entropy``    float32[B, T] or None  entropy of the distribution that token t was drawn from, with grad
    ``top1``       bool[B, T] or None     token t is the most likely one
    ``own``        float32[B, T] or None  what ``head`` measured beside them, see `token_logprobs`
    """

    log_probs: Tensor
    entropy: Tensor | None
    top1: Tensor | None = None
    own: Tensor | None = None


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    position_ids: Tensor | None = None,
    packing: Packing = "off",
    media: Sequence[Media] | None = None,
    routes: Tensor | None = None,
    head: HeadFunction | None = None,
) -> TokenScores:
    """Scores the selected tokens of a padded batch, left- or right-padded.

    Reads    input_ids int64[B, T], attention_mask bool or int[B, T] (true on real tokens), select bool[B, T]
    Returns  TokenScores, float32 (float64 for a float64 model); a selected token that has no predecessor scores 0
    Calls    the model's body and output head by keyword, without a cache; positions are counted from the mask.
             If head(body) does not equal the model's logits: the whole model, a few rows at a time
    Raises   ShapeError if the three tensors differ in shape, ConfigError for a temperature or chunk not above 0, for
             packing="on" with position_ids or with a model that cannot be packed

    chunk    number of tokens whose logits exist at a time; the default depends on the vocabulary size
    packing  lays the rows end to end, with the same result up to rounding; "auto": only if the model supports it
             (`why_not_packed`) and at least a fifth of the tokens is saved
    media    image tensors of each row (``llmrl.modules.llm.vision``); a batch with images is not packed, and the model
             computes its own positions
    routes   int16[B, T, layers, K]: experts to replay for each token, -1 where the model's routers choose; ignored for
             batches with images (``llmrl.modules.llm.routers``)
    head     in place of `score_hidden`: what is computed from the hidden states; needs a model that is head(body)

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=2)
    >>> model = Qwen2ForCausalLM(config)
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> response = torch.tensor([[False, False, True, True]])
    >>> token_logprobs(model, ids, torch.ones_like(ids), response).log_probs.lt(0).tolist()
    [[False, False, True, True]]
    """
    if not (input_ids.shape == attention_mask.shape == select.shape) or input_ids.ndim != 2:
        raise ShapeError(
            "token_logprobs: input_ids, attention_mask and select must have one shape [B, T]: got "
            f"{tuple(input_ids.shape)}, {tuple(attention_mask.shape)} and {tuple(select.shape)}."
        )
    if not temperature > 0:
        raise ConfigError(
            f"token_logprobs: temperature must be above 0, got {temperature}; greedy decoding has no distribution, "
            "score its tokens at temperature 1."
        )
    if chunk is not None and chunk < 1:
        raise ConfigError(f"token_logprobs: chunk counts tokens and must be at least 1, got {chunk}.")
    options = HeadOptions(temperature, chunk, entropy, head)
    arguments = (input_ids, attention_mask, select, options, position_ids, packing, media, routes)
    # Body and head are called separately, which bypasses the model's forward, so a sharded model is gathered first.
    return model.call_whole(_score, *arguments) if hasattr(model, "call_whole") else _score(model, *arguments)


def _score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    select: Tensor,
    options: HeadOptions,
    position_ids: Tensor | None,
    packing: Packing,
    media: Sequence[Media] | None,
    routes: Tensor | None,
) -> TokenScores:
    scored_BT = with_predecessor(select, attention_mask)
    path = find_head_path(model)
    if path is None and options.function is not None:
        raise ConfigError(
            f"token_logprobs: {type(model).__name__} must compute its logits as head(body) for what is computed from "
            "its hidden states: it does not."
        )
    replay: Callable[[], AbstractContextManager[None]] = nullcontext
    if routes is not None:
        from llmrl.modules.llm.routers import replaying

        replay = partial(replaying, model, routes, attention_mask)
    inputs = padded_inputs(input_ids, attention_mask, position_ids)
    if has_images(media):
        # No position ids: an image's positions count its rows and columns, and the model computes those itself.
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **media_inputs(attention_mask, media)}
        with only_given_images(model, inputs) as inputs:
            if path is None:  # in one piece: all images are concatenated, so they cannot be split by row
                found = _score_with_whole_model(model, inputs, scored_BT, options, rows=len(input_ids))
            else:
                found = _from_hidden(path, hidden_before(path, inputs, scored_BT), input_ids[scored_BT], options)
    elif (split := active_split()) is not None:
        with replay():
            return _score_slice(model, path, inputs, scored_BT, options, split)
    else:
        batch = (model, input_ids, attention_mask.bool(), packing)
        # Replayed experts are given for each token of each row.
        packed = share_prefixes(*batch) if position_ids is None and routes is None and path is not None else None
        packed = packed or pack_batch(*batch, has_positions=position_ids is not None)
        if path is None:
            found = _score_with_whole_model(model, inputs, scored_BT, options)
        elif packed is None:
            _tell_routers(model, attention_mask.bool())
            with replay():
                hidden_NH = hidden_before(path, inputs, scored_BT)
            found = _from_hidden(path, hidden_NH, input_ids[scored_BT], options)
        else:
            _tell_routers(model, packed.segment_ids >= 0)
            with replay(packed), packed.attending():
                hidden_PSH = path.body(**accepted(path.body, packed.inputs(model))).last_hidden_state
            before_N = packed.index.roll(1)[scored_BT[attention_mask.bool()]]  # the predecessor, in the same row
            found = _from_hidden(path, hidden_PSH.flatten(0, 1)[before_N], input_ids[scored_BT], options)
    scores = _in_place(found, scored_BT)
    return scores._replace(log_probs=reach_vision_tower(model, scores.log_probs))


def _score_slice(
    model: nn.Module,
    path: HeadPath | None,
    inputs: dict[str, Tensor],
    scored_BT: Tensor,
    options: HeadOptions,
    split: SequenceSplit,
) -> TokenScores:
    """Scores a batch on all ranks of ``split``, each from its slice of the hidden states; see `SequenceSplit`."""
    if path is None:
        raise ConfigError(
            f"token_logprobs: {type(model).__name__} must compute its logits as head(body) for sequences to be split "
            "over ranks: it does not; use parallel.context=1."
        )
    ids_BT, attention_BT, position_BT = (split.widen(value.long()) for value in inputs.values())
    split.width = ids_BT.shape[1]
    local = {"input_ids": split.cut(ids_BT)}
    if bool((attention_BT[:, 1:] <= attention_BT[:, :-1]).all()):  # right padding: no token attends to it
        position_BT = torch.arange(split.width, device=ids_BT.device).expand_as(ids_BT)
    else:
        local["attention_mask"] = attention_BT
    local["position_ids"] = split.cut(position_BT)  # positions in the whole sequence, not in the slice
    _tell_routers(model, split.cut(attention_BT).bool())
    hidden_BSH = path.body(**accepted(path.body, local)).last_hidden_state
    # A token's hidden state predicts the next token, which may be the first of the next slice.
    target_BS = split.cut(ids_BT.roll(-1, dims=1))
    next_BS = split.cut(split.widen(scored_BT.long()).roll(-1, dims=1)).bool()
    scores = _in_place(_from_hidden(path, hidden_BSH[next_BS], target_BS[next_BS], options), next_BS)

    def join(value_BS: Tensor) -> Tensor:
        return split.join(value_BS).roll(1, dims=1)[:, : scored_BT.shape[1]]

    # Every rank needs the scores of all tokens, for losses over whole sequences.
    entropy_BT = None if scores.entropy is None else join(scores.entropy)
    own_BT = None if scores.own is None else join(scores.own)
    return TokenScores(join(scores.log_probs), entropy_BT, join(scores.top1.float()).bool(), own_BT)


def _tell_routers(model: nn.Module, is_real: Tensor) -> None:
    """Tells the model's `Routers` which positions of the next pass are tokens."""
    if (routers := getattr(model, "routers", None)) is not None:
        routers.is_real = is_real.flatten()


def hidden_before(path: HeadPath, inputs: dict[str, Tensor], scored_BT: Tensor) -> Tensor:
    """The hidden states [N, H] that predict the scored tokens of a padded batch."""
    hidden_BTH = path.body(**accepted(path.body, inputs)).last_hidden_state
    return hidden_BTH[:, :-1][scored_BT[:, 1:]]


def with_predecessor(select: Tensor, attention_mask: Tensor) -> Tensor:
    """bool[B, T]: the selected real tokens that follow another token of their row.

    The first token of a row has no log-prob, as nothing precedes it, and must not count in a mean of log-probs.

    >>> with_predecessor(torch.tensor([[True, True, True]]), torch.tensor([[0, 1, 1]]))
    tensor([[False, False,  True]])
    """
    attended_BT = attention_mask.bool()
    scored_BT = select.bool() & attended_BT
    scored_BT[:, 1:] &= attended_BT[:, :-1]
    scored_BT[:, :1] = False
    return scored_BT


class TokenScorer(nn.Module):
    """``token_logprobs`` as a module for DDP and FSDP2 to wrap: every parameter is used inside its ``forward``.

    Reads    input_ids int64[B, T], attention_mask bool[B, T], select bool[B, T]
    Returns  TokenScores; a batch without any selected token still reaches every parameter, with zero gradients
    Calls    the model a few times on a few tokens at construction, to test whether it returns head(body) and whether
             it can be packed

    ``.model`` is the language model itself. A loss takes the scorer as its ``actor_network``: ``token_scores`` is the
    same call at the scorer's own ``temperature``. A call with position ids is not packed, unless it sets ``packing``.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, chunk: int | None = None, packing: Packing = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk
        if not any(parameter.is_meta for parameter in model.parameters()):
            find_head_path(model)  # now, not between the collectives of the first sharded step
        self.use_packing(packing)

    def use_packing(self, packing: Packing) -> None:
        """Sets ``packing`` for the following calls; see ``token_logprobs``.

        Raises  ConfigError for "on" if the model cannot be packed (flash-attention: at the first call, on its GPU)
        """
        if not has_varlen_attention(self.model) and not any(parameter.is_meta for parameter in self.model.parameters()):
            can_share_prefixes(self.model, packing)
        self.packing: Packing = packing

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        select: Tensor,
        temperature: float | None = None,
        *,
        packing: Packing | None = None,
        **options: Any,
    ) -> TokenScores:
        """Calls `token_logprobs`; keywords given here override the scorer's own settings."""
        temperature = self.temperature if temperature is None else temperature
        packing = packing or ("off" if options.get("position_ids") is not None else self.packing)
        options = {"temperature": temperature, "chunk": self.chunk, "packing": packing, **options}
        return token_logprobs(self.model, input_ids, attention_mask, select, **options)

    def token_scores(self, *batch: Tensor, **options: Any) -> TokenScores:
        return self(*batch, **options)  # not `forward` itself: the hooks of a sharded module run around a call


# ------------------------------------------------------------------------------------------------- scores from hidden


def _from_hidden(path: HeadPath, hidden_NH: Tensor, targets_N: Tensor, options: HeadOptions) -> tuple[Any, ...]:
    return (options.function or score_hidden)(path, hidden_NH, targets_N, options)


def _score_with_whole_model(
    model: nn.Module, inputs: dict[str, Tensor], scored_BT: Tensor, options: HeadOptions, rows: int = 0
) -> Scores:
    def score(rows: dict[str, Tensor], scored: Tensor) -> Scores:
        output = model(**accepted(model, rows))
        logits = getattr(output, "logits", output)[:, :-1][scored[:, 1:]]
        logits = map_logits(logits, None, options.temperature)
        return score_logits(logits, rows["input_ids"][scored], options.entropy)

    num_tokens = scored_BT.shape[1]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1 << 17
    size = rows or max(1, chunk_rows(vocabulary, scored_BT.device.type) // max(num_tokens, 1))
    pieces = []
    for start in range(0, scored_BT.shape[0], size):
        part = slice(start, start + size)
        own = inputs if rows else {key: value[part] for key, value in inputs.items()}
        pieces.append(checkpoint(score, own, scored_BT[part], use_reentrant=False))
    return concatenate(pieces)


def _in_place(scores: tuple[Tensor | None, ...], scored_BT: Tensor) -> TokenScores:
    """Scatters one value per scored token to [B, T], 0 elsewhere."""
    placed = (
        None if value_N is None else value_N.new_zeros(scored_BT.shape).masked_scatter(scored_BT, value_N)
        for value_N in scores
    )
    return TokenScores(*placed)
