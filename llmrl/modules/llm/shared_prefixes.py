"""Rows that begin alike, such as the answers to one prompt, laid out with their common beginning once.

A group of rows becomes one sequence: the common tokens, then the rest of each row. A mask lets each token attend to the
common tokens and to the earlier ones of its own row, and positions count on from the common tokens, so hidden states
and gradients are those of separate rows. A group of 8 answers computes its prompt once in place of 8 times. Whether a
model takes such a mask is tested once on a few tokens.

Shapes: B sequences, N tokens in all, P packs of S positions, M positions that hold a token.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from llmrl.data.ragged.padding import pad_rows
from llmrl.modules.llm.packing import (
    LEAST_HIDDEN_SIZE,
    WORTH_PACKING,
    Packed,
    Packing,
    accepted,
    attention_of,
    can_pack,
    evaluating,
    find_head_path,
    has_full_attention,
    lay_out,
    padded_inputs,
    tolerance_of,
)

GROUP_WIDTH = 1024  # of a group, unless a row is longer: attention with a mask is quadratic in it


@dataclass(frozen=True, slots=True)
class Group:
    """Rows, by number, that begin with the same ``common`` tokens; ``num_tokens`` counts these once."""

    rows: list[int]
    common: int
    num_tokens: int


def share_prefixes(model: nn.Module, input_ids: Tensor, attended_BT: Tensor, packing: Packing) -> Packed | None:
    """The real tokens of a padded batch with common beginnings once, ``index`` in the order of the mask; None if this
    saves less than a fifth of them, or the model cannot.
    """
    if not can_share_prefixes(model, packing) or len(input_ids) < 2:  # in this order: all ranks call a sharded model
        return None
    lengths = attended_BT.sum(-1).tolist()
    rows = [row.tolist() for row in input_ids[attended_BT].cpu().split(lengths)]
    groups = group_rows(rows)
    if sum(group.num_tokens for group in groups) > WORTH_PACKING * sum(lengths):
        return None
    packed = lay_out_groups(rows, groups, input_ids.device)
    return packed if packed.input_ids.numel() <= WORTH_PACKING * sum(lengths) else None


def group_rows(rows: list[list[int]], width: int = GROUP_WIDTH) -> list[Group]:
    """Groups rows so that common beginnings save tokens; a group has at most ``width`` of them, or one row.

    >>> [(group.rows, group.common) for group in group_rows([[7, 8, 1], [5, 5, 2], [7, 8, 2, 2], [5, 5, 3]])]
    [([1, 3], 2), ([0, 2], 2)]
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)  # neighbours have the longest common beginnings
    groups = [Group([row], len(rows[row]), len(rows[row])) for row in order[:1]]
    for row, alike in zip(order[1:], _common_lengths([rows[row] for row in order]), strict=True):
        last, length = groups[-1], len(rows[row])
        common = min(last.common, alike)
        # The group's other rows share fewer tokens: with an answer to another prompt, the system prompt alone.
        saved = len(last.rows) * common - (len(last.rows) - 1) * last.common
        if saved > 0 and last.num_tokens + length - saved <= width:
            groups[-1] = Group([*last.rows, row], common, last.num_tokens + length - saved)
        else:
            groups.append(Group([row], length, length))
    return groups


def _common_lengths(rows: list[list[int]]) -> list[int]:
    """How many tokens each row but the first begins with as the row before it."""
    ids_BT = pad_rows([torch.tensor(row, dtype=torch.int64) for row in rows], value=-1)
    differs_BT = torch.cat([ids_BT[1:] != ids_BT[:-1], torch.ones(len(rows) - 1, 1, dtype=torch.bool)], dim=1)
    shorter = (min(len(one), len(other)) for one, other in pairwise(rows))  # equal rows differ nowhere
    return [min(pair) for pair in zip(differs_BT.int().argmax(1).tolist(), shorter, strict=True)]


def lay_out_groups(rows: list[list[int]], groups: list[Group], device: torch.device) -> Packed:
    """Lays the groups end to end, in packs as wide as the largest of them."""
    sizes = [group.num_tokens for group in groups]
    layout = lay_out(sizes)
    ids, positions, owners, places = [], [], [], []  # of positions with a token, in the order of the groups
    index: list[list[int]] = [[]] * len(rows)
    for group, start in zip(groups, layout.starts, strict=True):
        shared = range(start, start + group.common)
        ids += rows[group.rows[0]][: group.common]
        positions += range(group.common)
        owners += [-1] * group.common
        place = shared.stop
        for row in group.rows:
            own = range(place, place := place + len(rows[row]) - group.common)
            ids += rows[row][group.common :]
            positions += range(group.common, len(rows[row]))
            owners += [row] * len(own)
            index[row] = [*shared, *own]
        places += range(start, place)
    numbers = torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes))
    place_M = torch.tensor(places)

    def grid(values: Any, filling: int) -> Tensor:
        flat = torch.full((layout.num_tokens,), filling).index_copy_(0, place_M, torch.as_tensor(values))
        return flat.view(layout.num_packs, layout.width).to(device)

    owner_PS, group_PS = grid(owners, -2), grid(numbers, -1)
    causal_SS = torch.ones(layout.width, layout.width, dtype=torch.bool, device=device).tril()
    reads_PSS = (owner_PS[:, None] == -1) | (owner_PS[:, None] == owner_PS[:, :, None])
    attention_PSS = causal_SS & reads_PSS & (group_PS[:, None] == group_PS[:, :, None])
    index_N = torch.tensor([place for row in index for place in row], device=device)
    lengths = [len(row) for row in rows]
    return Packed(grid(ids, 0), grid(positions, 0), owner_PS, index_N, lengths, attention_PSS[:, None])


# model -> {attention implementation: whether it computes rows with common beginnings}
_can_share: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


def can_share_prefixes(model: nn.Module, packing: Packing) -> bool:
    """True if the model computes rows with common beginnings as it does separate ones, and may pack them.

    Calls  the model's body twice on a few tokens, once per model and attention implementation; what `can_pack` calls
           first, because ranks whose rows share nothing pack them, and only all ranks together may call a sharded model
    """
    # Routers count the experts of every row's tokens, so none may be left out.
    if not can_pack(model, packing) or getattr(model, "routers", None) is not None:
        return False
    known, attention = _can_share.setdefault(model, {}), attention_of(model)
    if attention not in known:
        known[attention] = _try(model)
    return known[attention]


def may_share_prefixes(model: nn.Module) -> bool:
    """False if the model's configuration rules it out; it needs no weights."""
    config = model.config.get_text_config()
    if attention_of(model) not in ("sdpa", "eager") or config.hidden_size < LEAST_HIDDEN_SIZE:
        return False  # other kinds of attention read no mask
    return has_full_attention(config)  # the mask would need the window


def _try(model: nn.Module) -> bool:
    path = find_head_path(model)
    if path is None or not may_share_prefixes(model):
        return False
    config = model.config.get_text_config()
    firsts = (0, 8, 0, 8)  # two pairs, whose first three tokens are alike
    steps = [[*range(first, first + 3), *range(first + 3 + row, first + 6 + row)] for row, first in enumerate(firsts)]
    stride = max(1, config.vocab_size // 32)
    rows = [[stride * step % config.vocab_size for step in row] for row in steps]
    weight = next(path.head.parameters())
    in_autocast = torch.is_autocast_enabled(weight.device.type)
    dtype = torch.get_autocast_dtype(weight.device.type) if in_autocast else weight.dtype
    packed = lay_out_groups(rows, group_rows(rows), weight.device)
    ids_BT = torch.tensor(rows, device=weight.device)
    with torch.no_grad(), evaluating(model):
        try:
            shared_PSH = path.body(**accepted(path.body, packed.inputs(model))).last_hidden_state
            alone_BTH = path.body(**accepted(path.body, padded_inputs(ids_BT, ids_BT >= 0))).last_hidden_state
        except Exception:  # third-party code: any error means that it does not take such a mask
            return False
    error_N = (shared_PSH.flatten(0, 1)[packed.index] - alone_BTH.flatten(0, 1)).float().abs().amax(-1)
    # Not the largest: trained models have a few tokens whose hidden states any other order of a sum changes a hundred
    # times as much. A wrong mask changes at least the six tokens that the second row of each pair has for itself.
    return bool(error_N.quantile(0.9) <= tolerance_of(dtype) * alone_BTH.abs().max())
