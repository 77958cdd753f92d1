"""Calls a causal language model's body separately from its output head, and on padding-free batches.

A padding-free batch holds sequences end to end in one row, a pack, where each sequence attends only to itself. Only the
position ids mark where sequences begin: they restart at 0. Without an attention mask, transformers derives from them
the block-diagonal causal mask (or the boundaries for flash-attention). Whether a given model does so, and whether it
returns head(body), is tested once per model on a few tokens.

Shapes: B sequences of at most T tokens, N tokens in all, P packs of S tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.errors import ConfigError, ShapeError
from llmrl.modules.llm.row_attention import no_mask, rows_apart

Packing = Literal["auto", "on", "off"]

WORTH_PACKING = 0.8  # "auto" packs a batch if at most this share of its padded tokens remains
LEAST_HIDDEN_SIZE = 512  # of a model whose layers cost more than the calls and masks that save some of their work


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of each sequence: i is at [starts[i] : starts[i] + lengths[i]] of the flattened packs."""

    lengths: Sequence[int]
    starts: Sequence[int]
    num_packs: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, including the filling at the ends of packs."""
        return self.num_packs * self.width


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences laid end to end, with the index to unpack them.

    ``input_ids``     int64[P, S]  0 in the filling at the end of a pack
    ``position_ids``  int64[P, S]  counted from 0 in each sequence; 0 in the filling, whose tokens are thus separate
    ``segment_ids``   int64[P, S]  number of the sequence, -1 in the filling
    ``index``         int64[N]     where each token is in the flattened packs, sequence after sequence
    ``lengths``       of the sequences
    ``attention``     bool[P, 1, S, S]: what each token attends to, if positions do not say it (`share_prefixes`)
    ``by_row``        the lengths in the order of the pack, if attention is computed row by row: needs ``attending``
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    index: Tensor
    lengths: Sequence[int]
    attention: Tensor | None = None
    by_row: Sequence[int] | None = None

    def attending(self) -> AbstractContextManager[None]:
        """What the model's pass runs in."""
        return nullcontext() if self.by_row is None else rows_apart(self.by_row)

    def inputs(self, model: nn.Module) -> dict[str, Tensor]:
        """The inputs of the model, or of its body."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.by_row is not None:
            return inputs | {"attention_mask": no_mask(self.input_ids.numel(), self.input_ids.device)}
        if self.attention is None:
            return inputs
        if attention_of(model) == "sdpa":
            return inputs | {"attention_mask": self.attention}
        weight = next(model.parameters())  # a mask that is added to the scores
        added = torch.zeros(self.attention.shape, dtype=weight.dtype, device=weight.device)
        return inputs | {"attention_mask": added.masked_fill_(~self.attention, torch.finfo(weight.dtype).min)}

    def unpack(self, value_PS: Tensor) -> list[Tensor]:
        """Splits one value (or vector) per token of the packs into one tensor per sequence, in the original order."""
        return list(value_PS.flatten(0, 1)[self.index].split(list(self.lengths)))


def pack(rows: Sequence[Tensor], budget: int | None = None) -> Packed:
    """Lays the sequences int64[T_i] end to end, in packs of at most ``budget`` tokens (None: the longest length).

    Raises  ShapeError without any sequence; ConfigError if one is longer than the budget

    >>> packed = pack([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7]), torch.tensor([8])])
    >>> packed.input_ids
    tensor([[4, 5, 6, 7],
            [1, 2, 3, 8]])
    >>> packed.position_ids
    tensor([[0, 1, 2, 3],
            [0, 1, 2, 0]])
    >>> [row.tolist() for row in packed.unpack(packed.input_ids)]
    [[1, 2, 3], [4, 5, 6, 7], [8]]
    """
    if not rows:
        raise ShapeError("pack: there must be at least one sequence: got none.")
    return _place(torch.cat(list(rows)), lay_out([len(row) for row in rows], budget))


def lay_out(lengths: Sequence[int], budget: int | None = None) -> Layout:
    """Assigns sequences to packs, the longest first, each to the fullest pack that still takes it.

    >>> lay_out([2, 9, 4, 3]).num_tokens  # [9] and [4, 3, 2]: no filling
    18
    """
    longest = max(lengths, default=0)
    budget = longest if budget is None else budget
    if longest > budget:
        raise ConfigError(
            f"pack: a pack must hold the longest sequence: got a budget of {budget} tokens and a sequence of {longest};"
            " raise the budget, or leave it out."
        )
    # Best fit, decreasing. ``room`` is sorted, so the first pack that is not too small is the fullest one that fits.
    room: list[tuple[int, int]] = []  # (tokens left, number of the pack), ascending
    places = [(0, 0)] * len(lengths)
    num_packs = width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        found = bisect_left(room, (lengths[row], -1))
        left, number = room.pop(found) if found < len(room) else (budget, num_packs)
        num_packs = max(num_packs, number + 1)
        places[row] = (number, budget - left)
        insort(room, (left - lengths[row], number))
        width = max(width, budget - left + lengths[row])
    starts = [number * width + offset for number, offset in places]
    return Layout(lengths, starts, max(num_packs, 1), max(width, 1))


def _place(ids_N: Tensor, layout: Layout) -> Packed:
    device = ids_N.device
    length_B = torch.tensor(layout.lengths, device=device)
    # output_size avoids a device synchronisation to read the size.
    row_N = torch.arange(len(length_B), device=device).repeat_interleave(length_B, output_size=len(ids_N))
    position_N = torch.arange(len(ids_N), device=device) - (length_B.cumsum(0) - length_B)[row_N]
    index_N = torch.tensor(layout.starts, device=device)[row_N] + position_N

    def grid(value_N: Tensor, filling: int) -> Tensor:
        flat = torch.full((layout.num_tokens,), filling, dtype=torch.int64, device=device)
        return flat.index_copy_(0, index_N, value_N).view(layout.num_packs, layout.width)

    # Position 0 makes each filling token a separate sequence, which nothing else attends to.
    return Packed(grid(ids_N, 0), grid(position_N, 0), grid(row_N, -1), index_N, layout.lengths)


def pack_batch(
    model: nn.Module, input_ids: Tensor, attended_BT: Tensor, packing: Packing, *, has_positions: bool = False
) -> Packed | None:
    """Packs the real tokens of a padded batch, with ``index`` in the order of the mask; None if it stays padded.

    Raises  ConfigError for "on" if the model cannot be packed, or its positions were given
    """
    if not can_pack(model, packing):  # first, as it may call a sharded model: all ranks must, whatever their batch
        return None
    if has_positions:
        if packing == "on":
            raise ConfigError("packing: 'on' must not get position_ids: packs have their own; leave them out.")
        return None
    lengths = attended_BT.sum(-1).tolist()
    most = WORTH_PACKING * input_ids.numel() if packing == "auto" else float("inf")
    if not 0 < sum(lengths) <= most:
        return None
    # Attention with a mask is quadratic in the pack width, so packs are only as wide as the longest row.
    # flash-attention, and `rows_apart` on a CPU, compute each sequence separately, so a single pack is best.
    by_row = attends_by_row(model)
    layout = lay_out(lengths, sum(lengths) if by_row or has_varlen_attention(model) else None)
    if layout.num_tokens > most:
        return None
    packed = _place(input_ids[attended_BT], layout)
    return replace(packed, by_row=_in_order(layout)) if by_row else packed


def _in_order(layout: Layout) -> list[int]:
    """The lengths of the sequences of a single pack, in their order there."""
    return [length for _, length in sorted(zip(layout.starts, layout.lengths, strict=True)) if length]


def can_pack(model: nn.Module, packing: Packing) -> bool:
    """True if this model keeps packed rows apart and ``packing`` is not "off".

    Raises  ConfigError for "on" if the model cannot be packed, and for an unknown ``packing``
    """
    if packing not in get_args(Packing):
        raise ConfigError(f"packing: must be one of {', '.join(get_args(Packing))}: got {packing!r}.")
    if packing == "off":
        return False
    fault = why_not_packed(model)
    if fault is not None and packing == "on":
        raise ConfigError(
            f"packing: 'on' needs a model that keeps packed rows apart: got {type(model).__name__} with "
            f"{attention_of(model)} attention: {fault}; use 'auto', which pads its batches."
        )
    if fault is None:
        attends_by_row(model)  # now: all ranks call this function, but not all of them pack their batch
    return fault is None


def has_varlen_attention(model: nn.Module) -> bool:
    """True for any version of flash-attention, which needs a GPU and half precision."""
    return "flash" in attention_of(model)


def may_attend_by_row(model: nn.Module) -> bool:
    """False if the model's configuration rules out that packs on a CPU have their attention computed row by row."""
    if attention_of(model) != "sdpa":
        return False
    config = model.config.get_text_config()
    return config.hidden_size >= LEAST_HIDDEN_SIZE and has_full_attention(config)


def has_full_attention(config: Any) -> bool:
    """True if every layer attends to all earlier tokens: none has a window, chunks or a state."""
    kinds = getattr(config, "layer_types", None) or ()
    return not getattr(config, "sliding_window", None) and all(kind == "full_attention" for kind in kinds)


def attends_by_row(model: nn.Module) -> bool:
    """True if the model's attention is computed row by row in packs; tested once on a few tokens, like `can_pack`."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and may_attend_by_row(model) and not _is_compiled(model) and _fault(model, by_row=True) is None


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def attention_of(model: nn.Module) -> str:
    """The name of the model's attention implementation."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


# --- body and head, called separately ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadPath:
    """A model's body and head: logits = cap tanh(scale head(body) / cap), or scale head(body) without ``softcap``."""

    body: nn.Module
    head: nn.Module
    scale: float
    softcap: float | None


# model -> index of the split that reproduces the model's own logits, None if none does. The parts themselves are looked
# up at each call, so that a replaced head (LoRA, a larger vocabulary) is used.
_probed: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


def find_head_path(model: nn.Module) -> HeadPath | None:
    """The split of ``model`` into body and head that reproduces its logits on a few tokens; None if there is none."""
    candidates = _candidate_paths(model)
    if model not in _probed:
        _probed[model] = _probe(model, candidates)
    choice = _probed[model]
    return None if choice is None else candidates[choice]


def _candidate_paths(model: nn.Module) -> list[HeadPath]:
    causal_lm = unwrapped(model)
    head = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        return []
    config = causal_lm.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies
        scale = float(config.logit_scale)
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    bodies = [causal_lm.base_model, causal_lm.get_decoder()]
    maps = [(scale, softcap), (1.0, None)]  # some families have a scale in their configuration but do not apply it
    return [HeadPath(body, head, *map_) for body in bodies if body is not causal_lm for map_ in maps]


@torch.no_grad()
def _probe(model: nn.Module, candidates: list[HeadPath]) -> int | None:
    if not candidates:
        return None
    head_weight = next(candidates[0].head.parameters())
    ids = torch.arange(5, device=head_weight.device)[None]
    inputs = padded_inputs(ids, torch.ones_like(ids))
    with evaluating(model):
        expected = model(**accepted(model, inputs)).logits.double()
        # Both run the same operations, so any real difference (a cap, a scale, a norm) is far above rounding.
        bound = tolerance_of(head_weight.dtype) * expected.abs().max()
        for index, path in enumerate(candidates):
            hidden = path.body(**accepted(path.body, inputs)).last_hidden_state
            got = map_logits(path.head(hidden), path, 1.0).double()
            if got.shape == expected.shape and (got - expected).abs().max() <= bound:
                return index
        return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode inside the block, and restores each module's own mode afterwards."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest rounding difference of two computations of the same values, relative to the largest value."""
    return 1e-5 if dtype in (torch.float32, torch.float64) else 1e-2


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of peft's wrapper, which hides its signature; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accepted(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The entries of ``inputs`` that ``module.forward`` declares, plus ``use_cache=False`` if it declares that."""
    named = inspect.signature(unwrapped(module).forward).parameters
    arguments: dict[str, Any] = {name: value for name, value in inputs.items() if name in named}
    if "use_cache" in named:
        arguments["use_cache"] = False
    return arguments


def padded_inputs(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
    """The inputs of a model for a padded batch; positions are counted from the mask if they are not given."""
    if position_ids is None:
        position_ids = (attention_mask.bool().long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}


def map_logits(logits: Tensor, path: HeadPath | None, temperature: float) -> Tensor:
    """Applies scale, cap and temperature to the head's output: float32 logits of the sampling distribution."""
    logits = logits.to(reduction_dtype(logits.dtype))
    if path is None:
        return logits / temperature
    if path.softcap is None:
        return logits * (path.scale / temperature)
    return torch.tanh(logits * (path.scale / path.softcap)) * (path.softcap / temperature)


def reduction_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- test that packed rows do not affect each other -------------------------------------------------------------------

# model -> {attention implementation, whether by row: the reason that it cannot be packed, or None}
_faults: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], str | None]] = weakref.WeakKeyDictionary()


def why_not_packed(model: nn.Module) -> str | None:
    """The reason that this model cannot compute packed rows; None if it can.

    Calls  the model's body three times on a few tokens, once per model and attention implementation: packed rows must
           get the hidden states of padded ones, and must not change with their neighbours

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=2))
    >>> print(why_not_packed(model))
    None
    """
    return _fault(model, by_row=False)


def _fault(model: nn.Module, *, by_row: bool) -> str | None:
    faults, attention = _faults.setdefault(model, {}), (attention_of(model), by_row)
    if attention not in faults:
        faults[attention] = _try(model, by_row)
    return faults[attention]


def _try(model: nn.Module, by_row: bool) -> str | None:
    path = find_head_path(model)
    if path is None:
        return "its body and its output head cannot be called separately"
    if "position_ids" not in inspect.signature(path.body.forward).parameters:
        return "its forward takes no position_ids"
    config = model.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention is chunked at fixed positions of a row"  # thousands of tokens apart: not seen on a few

    def body(**inputs: Tensor) -> Tensor:
        return path.body(**accepted(path.body, inputs)).last_hidden_state.double()

    weight = next(path.head.parameters())
    in_autocast = torch.is_autocast_enabled(weight.device.type)
    dtype = torch.get_autocast_dtype(weight.device.type) if in_autocast else weight.dtype
    with evaluating(model):
        try:
            return _compare(model, body, tolerance_of(dtype), by_row)
        except Exception as error:  # third-party code: any error means that it does not run packed
            return f"it fails on packed rows: {type(error).__name__}: {error}"


@torch.no_grad()
def _compare(model: nn.Module, body: Callable[..., Tensor], tolerance: float, by_row: bool) -> str | None:
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    lengths = [6, 5, 4]  # already in the order of packing, so the perturbed row is in the middle
    stride = max(1, vocabulary // (sum(lengths) + 1))
    rows = [ids % vocabulary for ids in (1 + stride * torch.arange(sum(lengths), device=device)).split(lengths)]

    def hidden(rows: list[Tensor]) -> list[Tensor]:
        packed = replace(pack(rows, sum(lengths)), by_row=lengths if by_row else None)
        with packed.attending():
            return packed.unpack(body(**packed.inputs(model)))

    first, _, last = packed_rows = hidden(rows)
    other_first, _, other_last = hidden([rows[0], (rows[1] + 1) % vocabulary, rows[2]])
    ids_BT = pad_rows(rows)
    attended_BT = lengths_mask(lengths, ids_BT.shape[1]).to(device)
    padded_NH = body(**padded_inputs(ids_BT, attended_BT.long()))[attended_BT]

    bound = tolerance * padded_NH.abs().max()
    # The comparisons are written so that NaN fails them.
    if not max((first - other_first).abs().max(), (last - other_last).abs().max()) <= bound:
        return "a packed row attends to its neighbour"
    if not (torch.cat(packed_rows) - padded_NH).abs().max() <= bound:
        return "a packed row gets other hidden states than a padded one"
    return None
