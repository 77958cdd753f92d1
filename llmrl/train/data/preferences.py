"""Pairs of answers, rendered and tokenised once, and their log-probs under DPO's reference model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.llm.row_reading import place_of
from llmrl.data.llm.rows import read_answers, read_pair
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences
from llmrl.errors import DataError, did_you_mean
from llmrl.modules.llm.packing import evaluating
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.modules.llm.vision import POSITIONS
from llmrl.objectives.llm import DPOLoss, KTOLoss
from llmrl.run.console import Sample
from llmrl.train.data.sft import AT_ONCE, TokenizedRows, last_answer, load_split, marked_pieces
from llmrl.train.environments import is_file
from llmrl.train.held_out import tokenize_held_out
from llmrl.train.settings.preferences import (
    ANSWER_COLUMNS,
    PAIR_COLUMNS,
    DPOConfig,
    DPOSettings,
    PairsConfig,
    RewardConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.modules.llm.policies import TransformersWrapper
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


@dataclass
class TokenizedAnswers(TokenizedPairs):
    """Each row is an answer, of ``num_chosen`` tokens with its conversation, then the same prompt with the answer of
    another row: its log-probs estimate how far the policy is from the reference.
    """

    desirable: list[bool] = field(default_factory=list)
    unit: ClassVar[str] = "answers"

    def columns(self) -> dict[str, Any]:
        return super().columns() | {"desirable": torch.tensor(self.desirable)}

    def samples(self, count: int) -> list[Sample]:
        found = super().samples(count)[::2]
        labels = ["desirable" if label else "undesirable" for label in self.desirable]
        return [Sample(sample.pieces, label=label) for sample, label in zip(found, labels, strict=False)]

    def _beside(self) -> Iterable[Any]:
        return (*super()._beside(), *map(float, self.desirable))

    @property
    def own_ids(self) -> list[Tensor]:
        return [ids[:cut] for ids, cut in zip(self.ids, self.num_chosen, strict=True)]

    def left_out(self) -> str:
        return f" ({sum(self.desirable)} of them desirable){super().left_out()}"

    def add_mismatched(self, limit: int) -> None:
        """Gives each prompt the answer of another prompt, cut at ``limit`` tokens with it; every answer is given once,
        unless one prompt has more than half of the answers.

        Raises  DataError if there is a single prompt
        """
        starts = [int(mask.nonzero()[0]) for mask in self.masks]
        prompts = [ids[:start].numpy().tobytes() for ids, start in zip(self.ids, starts, strict=True)]
        groups: dict[bytes, list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(row)
        if len(groups) < 2:
            raise DataError(f"{self.source}: kto compares answers to at least two different prompts: got one.")
        # In an order by prompt, the row that stands the size of the largest group before has another prompt.
        order = [row for rows in groups.values() for row in rows]
        shift = max(map(len, groups.values()))
        own, masks = list(self.ids), list(self.masks)
        for place, row in enumerate(order):
            other = place - shift
            while prompts[order[other % len(order)]] == prompts[row]:
                other -= 1
            other = order[other % len(order)]
            answer, mask = own[other][starts[other] :], masks[other][starts[other] :]
            mismatched = torch.cat([own[row][: starts[row]], answer])[:limit]
            marks = torch.cat([torch.zeros(starts[row], dtype=torch.bool), mask])[:limit]
            self.ids[row], self.masks[row] = torch.cat([own[row], mismatched]), torch.cat([masks[row], marks])
            if self.media:  # images are in the prompt: both conversations have them
                places = self.media[row][POSITIONS]
                self.media[row] = {**self.media[row], POSITIONS: torch.cat([places, places + len(own[row])])}


def make_loss(policy: TransformersWrapper, dpo: DPOSettings) -> DPOLoss | KTOLoss:
    return KTOLoss(policy, **dpo.options) if dpo.kind == "kto" else DPOLoss(policy, **dpo.options)


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
    if config.reads_answers:
        return _tokenize_answers(config, tokenizer)
    rows = load_split(data, data.split, _EMBEDDED) if rows is None else rows
    part = range(min(data.rows or len(rows), len(rows))) if part is None else part
    columns = data.model_dump(include=set(PAIR_COLUMNS))
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


def _tokenize_answers(config: DPOConfig, tokenizer: PreTrainedTokenizerBase) -> TokenizedAnswers:
    """The answers of ``config``'s rows, one with a label or a pair each, with mismatched ones."""
    data = config.data
    rows = load_split(data, data.split, _EMBEDDED)
    columns = data.model_dump(include=set(ANSWER_COLUMNS))
    answers = TokenizedAnswers(data.path, Renderer(tokenizer))
    count = min(data.rows or len(rows), len(rows))
    for start in range(0, count, AT_ONCE):
        block = []
        for number in range(start + 1, min(start + AT_ONCE, count) + 1):
            row, place = rows[number - 1], place_of(rows[number - 1], number)
            read, labels = read_answers(row, number=number, **columns)
            if answers.note(read):
                block += [(place, label, chat) for chat, label in zip(read.chats, labels, strict=True)]
        rendered = answers.render([chat for *_, chat in block], [place for place, *_ in block])
        for (place, label, _), each in zip(block, rendered, strict=True):
            if not _fits(answers, len(each.ids), place, config):
                continue
            answers.media += [] if each.media is None else [each.media]
            answers.ids.append(each.ids)
            answers.masks.append(last_answer(each))
            answers.num_chosen.append(len(each.ids))
            answers.desirable.append(label)
    if not answers.ids:
        raise DataError(f"{data.path}: no answer is left: all are longer than max_length={config.max_length}.")
    answers.add_mismatched(config.max_length)
    return answers


def _fits(pairs: TokenizedPairs, length: int, place: str, config: PairsConfig) -> bool:
    if length <= config.max_length:
        return True
    if config.too_long == "error":
        raise DataError(
            f"{place}: a conversation must be at most max_length = {config.max_length} tokens long: one has "
            f"{length}; raise max_length, or choose too_long=drop."
        )
    pairs.num_too_long += 1
    return False


def _add(pairs: TokenizedPairs, chosen: Rendered, rejected: Rendered, place: str, config: PairsConfig) -> bool:
    """Appends a pair; returns False if it is dropped."""
    if not _fits(pairs, max(len(chosen.ids), len(rejected.ids)), place, config):
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

    def compute(
        self, updater: Updater, loss: DPOLoss | KTOLoss, rows: TensorDict, held_out: TensorDict | None = None
    ) -> None:
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


def reference_log_probs(updater: Updater, loss: DPOLoss | KTOLoss, rows: TensorDict) -> Tensor:
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
