"""Pairs of answers, rendered and tokenised once, and their log-probs under DPO's reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.llm.row_reading import place_of
from llmrl.data.llm.rows import read_pair
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences
from llmrl.errors import DataError, did_you_mean
from llmrl.modules.llm.packing import evaluating
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.modules.llm.vision import POSITIONS
from llmrl.objectives.llm import DPOLoss
from llmrl.run.console import Sample
from llmrl.train.environments import is_file
from llmrl.train.held_out import tokenize_held_out
from llmrl.train.preference_settings import PairsConfig, RewardConfig
from llmrl.train.sft_data import AT_ONCE, TokenizedRows, last_answer, load_split, marked_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.train.updater import Updater

Row = Mapping[str, Any]

_EMBEDDED = {"sums": sums_preferences, "sums_mistakes": sums_mistakes}


@dataclass
class TokenizedPairs(TokenizedRows):
    """Each row is a pair: the chosen conversation, of ``num_chosen`` tokens, then the rejected one."""

    num_chosen: list[int] = field(default_factory=list)
    unit: ClassVar[str] = "pairs"

    def columns(self) -> dict[str, Any]:
        """The columns that `DPOLoss` and `RewardLoss` read, except the reference, and "row", the index of the pair."""
        margins = {"margin": torch.tensor(self.margins)} if self.margins else {}
        numbers = {"num_chosen": torch.tensor(self.num_chosen), "row": torch.arange(len(self.ids))}
        return super().columns() | numbers | margins

    def samples(self, count: int) -> list[Sample]:
        """Both conversations of the first pairs, with the tokens that count in the loss marked."""
        found = []
        for ids, mask, cut in list(zip(self.ids, self.masks, self.num_chosen, strict=True))[:count]:
            for label, part in (("chosen", slice(None, cut)), ("rejected", slice(cut, None))):
                found.append(Sample(marked_pieces(self.renderer.tokenizer, ids[part], mask[part]), label=label))
        return found


def tokenize_with_held_out(config: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedPairs:
    """The pairs to train on, with `held_out_pairs` as ``held_out``."""
    held_out, part = held_out_pairs(config, tokenizer)
    pairs = tokenize_pairs(config, tokenizer, part=part)
    pairs.held_out = held_out
    return pairs


def held_out_pairs(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenizedPairs | None, range | None]:
    """The held-out pairs for evaluation (None: there are none), and the rows left to train on (None: the first
    ``data.rows``).

    Held-out pairs are those of ``eval.split`` or ``eval.dataset``. If a hub dataset does not have that split, they are
    the last pairs of the training split, at most a tenth. Fewer than ten pairs, or a local file alone, have none.

    Raises  DataError like `tokenize_pairs`, and if the evaluation split is the training split
    """
    data, held_out = config.data, config.eval
    if held_out.dataset is None and data.path not in _EMBEDDED and is_file(data.path):
        return None, None
    if held_out.dataset is None and held_out.split == data.split:
        raise DataError(f"reward: eval.split must be pairs that are not trained on: got {held_out.split} for both.")
    try:
        measured = data.model_copy(update={"path": held_out.dataset or data.path})
        rows = load_split(measured, held_out.split, _EMBEDDED)
    except DataError:
        # Only the default split may be missing: a missing split that the user named is an error. A resumed run's
        # settings are all given, so they are compared with the default.
        if data.path in _EMBEDDED or held_out.dataset is not None or held_out.split != "test":
            raise
        rows = load_split(data, data.split, _EMBEDDED)
        count = min(data.rows or len(rows), len(rows))
        first = count - min(held_out.rows or count, count // 10)
        if first == count:
            return None, None  # fewer than ten pairs: all are trained on
        other = tokenize_pairs(config, tokenizer, rows, range(first, count))
        place = f"the last {len(other)} pairs of split {data.split}"
        other.described = f"{place}, not trained on: there is no split {held_out.split}"
        return other, range(first)
    return tokenize_held_out(partial(tokenize_pairs, rows=rows), config, tokenizer), None


def tokenize_pairs(
    config: PairsConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row] | None = None,
    part: range | None = None,
) -> TokenizedPairs:
    """The pairs of ``rows`` (default: the data of ``config``) at ``part`` (default: the first ``data.rows``). The loss
    counts the last answer of each conversation, including its end of turn.

    Raises  DataError for data that are missing, empty or too long, or for a pair that cannot be compared; TemplateError
            if the template does not mark the assistant's tokens
    """
    data = config.data
    rows = load_split(data, data.split, _EMBEDDED) if rows is None else rows
    part = range(min(data.rows or len(rows), len(rows))) if part is None else part
    columns = data.model_dump(include={"prompt_column", "chosen_column", "rejected_column", "system_prompt"})
    pairs = TokenizedPairs(data.path, Renderer(tokenizer))
    for start in range(part.start, part.stop, AT_ONCE):
        numbers = range(start + 1, min(start + AT_ONCE, part.stop) + 1)
        block = [(n, place_of(rows[n - 1], n), read_pair(rows[n - 1], number=n, **columns)) for n in numbers]
        block = [(number, place, row) for number, place, row in block if pairs.note(row)]
        places = [place for _, place, _ in block for _ in range(2)]
        rendered = pairs.render([chat for *_, row in block for chat in row.chats], places)
        for (number, place, _), chosen, rejected in zip(block, rendered[::2], rendered[1::2], strict=True):
            if _add(pairs, chosen, rejected, place, config) and data.margin_column is not None:
                pairs.margins.append(_margin(rows[number - 1], data.margin_column, place))
    pairs.unused.pop(data.margin_column or "", None)
    if not pairs.ids:
        raise DataError(f"{data.path}: no pair is left: all are longer than max_length={config.max_length}.")
    return pairs


def _add(pairs: TokenizedPairs, chosen: Rendered, rejected: Rendered, place: str, config: PairsConfig) -> bool:
    """Appends a pair; returns False if it is dropped."""
    longest = max(len(chosen.ids), len(rejected.ids))
    if longest > config.max_length:
        if config.too_long == "error":
            raise DataError(
                f"{place}: a conversation must be at most max_length = {config.max_length} tokens long: one has "
                f"{longest}; raise max_length, or choose too_long=drop."
            )
        pairs.num_too_long += 1
        return False
    if torch.equal(chosen.ids, rejected.ids):
        raise DataError(f"{place}: the answers of a pair must differ in their tokens: they do not.")
    if chosen.media is not None:
        places = torch.cat([chosen.media[POSITIONS], rejected.media[POSITIONS] + len(chosen.ids)])
        pairs.media.append({**chosen.media, POSITIONS: places})  # images are in the prompt: both have the same
    pairs.ids.append(torch.cat([chosen.ids, rejected.ids]))
    pairs.masks.append(torch.cat([last_answer(chosen), last_answer(rejected)]))
    pairs.num_chosen.append(len(chosen.ids))
    return True


def _margin(row: Mapping[str, Any], column: str, place: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"dataset: {column!r} must be a number: {place} has {row.get(column)!r:.40}.{did_you_mean(column, row)}"
        ) from None


class ReferenceLogProbs:
    """The log-probs of all answers under the model that a run starts from, float32[N, 2].

    They are computed once, before the first step, with the model that is then trained, and stored in checkpoints, so a
    second model is never loaded.

    held_out  pairs that are measured, scored as well
    """

    def __init__(self, held_out: TokenizedPairs | None = None) -> None:
        self.values: Tensor | None = None
        self._held_out, self._held_out_values = held_out, None

    def compute(self, updater: Updater, loss: DPOLoss, rows: TensorDict, held_out: TensorDict | None = None) -> None:
        """Writes "reference_log_probs" in ``rows`` and ``held_out`` (`TokenizedPairs.as_rows`): those of a checkpoint,
        or scores, divided over ranks.
        """
        if self.values is None:
            self.values = reference_log_probs(updater, loss, rows)
        rows.set("reference_log_probs", self.values)
        if held_out is not None:
            if self._held_out_values is None:
                self._held_out_values = reference_log_probs(updater, loss, held_out)
            held_out.set("reference_log_probs", self._held_out_values)

    def state_dict(self) -> dict[str, Any]:
        if self._held_out is None:
            return {"values": self.values}
        held_out = {"values": self._held_out_values, **self._held_out.record.state_dict()}
        return {"values": self.values, "held_out": held_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises  DataError if the state has log-probs, but not those of these held-out pairs"""
        if not isinstance(state["values"], Tensor | None):
            raise TypeError(f"values must be a tensor: got {type(state['values']).__name__}")
        self.values = state["values"]
        if self._held_out is None or self.values is None:
            return
        known = dict(state.get("held_out", {}))
        self._held_out_values = known.pop("values", None)
        if known != self._held_out.record.state_dict():
            raise DataError(
                f"{self._held_out.source}: a dpo run goes on with the held-out pairs that it began with, because the "
                f"starting model scored them: it had {known.get('rows', 'none')}, now there are {len(self._held_out)}, "
                "or others; put eval.dataset back, leave it out, or start a new run from this one (model=RUN)."
            )


def reference_log_probs(updater: Updater, loss: DPOLoss, rows: TensorDict) -> Tensor:
    """float32[N, 2]: the log-probs of the answers of all pairs, divided over ranks; a collective."""
    values = torch.empty(len(rows), 2)
    for start in range(0, len(rows), AT_ONCE):
        mine, _ = updater.deal(rows[start : start + AT_ONCE], everywhere=True)
        with evaluating(updater.scorer):  # turns off the dropout of adapters, which would draw random numbers
            scores = updater.score(loss, mine, loss.sequence_log_probs)
        numbers = [] if mine is None else mine["row"].tolist()
        own = [(number, pair.tolist()) for number, pair in zip(numbers, scores, strict=bool(numbers))]
        for number, pair in updater.session.gather(own):
            values[number] = torch.tensor(pair)
    return values
