"""Per-token records of some conversations of a step: log-probs of the engine, and numbers that the loss computes.

The loss passes its numbers to the callback `GRPOLoss.on_tokens`, so that nothing is computed just for the log. A row
may be trained on another rank than the one that sampled it, so rows are identified by their seed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from llmrl.modules.llm.policies.containers import decode_rows
from llmrl.run.rollout_log import TokenRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.objectives.llm import GRPOLoss

_MAX_TOKENS = 2**17  # in all records of a step
_NUMBERS = ("trainer_logp", "advantage", "ratio", "entropy")
Row = tuple[int, int]  # seed and number of tokens: records of one conversation share the seed


class TokenWatch:
    """Keeps the loss's per-token numbers for some rows; ``found`` has lists of "trained" and of the numbers."""

    def __init__(self, rows: set[Row]):
        self.rows = rows
        self.found: dict[Row, dict[str, list[Any]]] = {}

    @contextmanager
    def active(self, loss: GRPOLoss) -> Iterator[None]:
        """Context in which the loss's forward passes are watched."""
        loss.on_tokens = self._keep if self.rows else None
        try:
            yield
        finally:
            loss.on_tokens = None

    def _keep(self, batch: TensorDictBase, mask_BT: Tensor, known: Mapping[str, Tensor]) -> None:
        seeds = batch.get("seed", None)
        if seeds is None:  # the placeholder batch of a rank without rows
            return
        lengths = [len(ids) for ids in batch.get(("tokens", "full"), as_list=True)]
        for place, row in enumerate(zip(seeds.tolist(), lengths, strict=True)):
            if row in self.rows:
                mask = mask_BT[place, : row[1]]
                numbers = {name: known[name][place, : row[1]] for name in _NUMBERS if name in known}
                self.found[row] = {"trained": mask.tolist()}
                self.found[row] |= {name: value.tolist() for name, value in numbers.items()}


def choose_conversations(
    groups: Sequence[int], prompt_ids: Sequence[str], lengths: Sequence[int], count: int
) -> set[int]:
    """The indices of at most ``count`` conversations whose tokens are kept: whole groups in the order of prompt ids.

    That order is as good as random but the same at every step, so the same prompts are chosen again.

    >>> sorted(choose_conversations([0, 0, 1, 1], ["b", "b", "a", "a"], [9, 9, 9, 9], 3))
    [0, 2, 3]
    """
    chosen, tokens = set(), 0
    for place in sorted(range(len(groups)), key=lambda place: (prompt_ids[place], groups[place], place)):
        if len(chosen) == count:
            break
        if tokens + lengths[place] <= _MAX_TOKENS:
            chosen.add(place)
            tokens += lengths[place]
    return chosen


def prompt_id(ids: Tensor, mask: Tensor) -> str:
    """A hash, in 16 hexadecimal digits, of the tokens before the first sampled one (``mask`` True).

    >>> prompt_id(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]))
    'fdf469c97e4865d2'
    """
    length = int(mask.to(torch.uint8).argmax()) if mask.any() else len(ids)
    return hashlib.blake2b(ids[:length].cpu().numpy().tobytes(), digest_size=8).hexdigest()


def token_record(
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    mask: Tensor,
    engine_logp: Tensor,
    messages: Sequence[Mapping[str, Any]] | None,
    found: Mapping[str, list[Any]] | None,
) -> TokenRecord:
    """The record of one conversation; ``mask``: the sampled tokens, ``messages``: its history, if it has one.

    ``found`` is the entry of `TokenWatch`; None for a conversation that was not trained on.
    """
    numbers, sampled = ids.tolist(), mask.tolist()
    found = found or {"trained": [False] * len(numbers)}
    roles, turns = _roles_and_turns(sampled, None if messages is None else [message["role"] for message in messages])
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    values = {
        name: [
            value if is_trained and math.isfinite(value) else None
            for value, is_trained in zip(row, found["trained"], strict=True)
        ]
        for name in _NUMBERS
        if (row := found.get(name)) is not None
    }
    return TokenRecord(
        ids=numbers,
        texts=token_texts(tokenizer, numbers),
        roles=roles,
        turns=turns,
        control=[number in special for number in numbers],
        trained=found["trained"],
        engine_logp=[value if drawn else None for value, drawn in zip(engine_logp.tolist(), sampled, strict=True)],
        **values,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token, decoded alone; bytes that are not a complete character are written as <0xE2>.

    >>> from llmrl.testing import tiny_tokenizer
    >>> tokenizer = tiny_tokenizer()
    >>> token_texts(tokenizer, tokenizer("é a<|im_end|>")["input_ids"])
    ['<0xC3>', '<0xA9>', ' a', '<|im_end|>']
    """
    different = list(dict.fromkeys(ids))
    decoded = decode_rows(tokenizer, [[number] for number in different])
    texts = {}
    for number, text, token in zip(different, decoded, tokenizer.convert_ids_to_tokens(different), strict=True):
        if token is None:  # the model's vocabulary is larger than the tokenizer's
            text = f"<id {number}>"
        elif token.startswith("▁"):  # SentencePiece's space, which is lost at the beginning of a text
            text = token.replace("▁", " ")
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            text = token
        elif "\ufffd" in text:
            text = _from_bytes(token) or text
        texts[number] = text
    return [texts[number] for number in ids]


@cache
def _byte_letters() -> dict[str, int]:
    """Maps each letter of a byte-level vocabulary to its byte: GPT-2's table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _from_bytes(token: str) -> str | None:
    """The text of a token of a byte-level vocabulary; None if it is not one."""
    known = _byte_letters()
    if not all(letter in known for letter in token):
        return None
    raw = bytes(known[letter] for letter in token)
    # surrogateescape decodes a byte that is not UTF-8 as code point U+DC80 + byte - 0x80, which is written as <0xNN>.
    return re.sub(
        "[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) & 0xFF:02X}>", raw.decode("utf-8", "surrogateescape")
    )


def _roles_and_turns(sampled: Sequence[bool], roles: Sequence[str] | None) -> tuple[list[str], list[int]]:
    """The role and the turn of each token; the runs of sampled tokens are the last answers of the conversation.

    >>> _roles_and_turns([False, True, False, True], ["system", "user", "assistant", "tool", "assistant"])
    (['system+user', 'assistant', 'tool', 'assistant'], [0, 0, 1, 1])
    """
    # Template tokens cannot be assigned to single messages, so all tokens between two answers get the joined roles of
    # the messages between them.
    starts = {place for place, drawn in enumerate(sampled) if drawn and not (place and sampled[place - 1])}
    before = ["prompt"] + ["environment"] * len(starts)  # before each run, and at the end
    if roles is not None:
        parts: dict[int, list[str]] = defaultdict(list)
        answers = 0
        for role in reversed(roles):  # from the end: the first answers may belong to an earlier record
            if role == "assistant" and answers < len(starts):
                answers += 1
            else:
                parts[len(starts) - answers].append(role)
        before = ["+".join(reversed(parts[place])) or before[place] for place in range(len(starts) + 1)]
    out_roles, turns, turn = [], [], 0
    for place, drawn in enumerate(sampled):
        turn += drawn and place in starts
        out_roles.append("assistant" if drawn else before[turn])
        turns.append(max(turn - 1, 0) if drawn else turn)
    return out_roles, turns
