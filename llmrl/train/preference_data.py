"""Pairs of answers: rendered and tokenised once, and their log-probs under the reference of DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.llm.dataset_files import FILE_FORMATS, load_rows, to_pair
from llmrl.envs.llm.tasks.sums import sums_mistakes, sums_preferences
from llmrl.errors import DataError, TemplateError, did_you_mean
from llmrl.modules.llm.policies.containers import Masks, Tokens
from llmrl.modules.llm.rendering import Rendered, Renderer
from llmrl.objectives.llm import DPOLoss
from llmrl.train.dealing import deal_batch
from llmrl.train.preference_settings import PairsConfig, PreferenceData, RewardConfig
from llmrl.train.sft_data import marked_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.train.distributed import Session
    from llmrl.train.updater import Updater

__all__ = ["ReferenceLogProbs", "TokenizedPairs", "tokenize_pairs", "train_and_held_out"]

Row = Mapping[str, Any]

_EMBEDDED = {"sums": sums_preferences, "sums_mistakes": sums_mistakes}
_AT_ONCE = 1024  # pairs per call of the tokenizer, and per round of scoring


@dataclass
class TokenizedPairs:
    """``ids`` int64[T] and ``masks`` bool[T] of each pair: the chosen conversation (``num_chosen``), the other."""

    source: str
    ids: list[Tensor]
    masks: list[Tensor]
    num_chosen: list[int]
    renderer: Renderer
    margins: list[float] = field(default_factory=list)  # where the data have them
    num_dropped: int = 0  # pairs that were longer than allowed

    def __len__(self) -> int:
        return len(self.ids)

    def as_rows(self) -> TensorDict:
        """A batch as `DPOLoss` and `RewardLoss` read it, without the reference, and "row", the number of the pair."""
        margins = {"margin": torch.tensor(self.margins)} if self.margins else {}
        return TensorDict(
            {
                "tokens": Tokens.from_rows({"full": self.ids}),
                "masks": Masks.from_rows({"all_assistant_mask": self.masks}),
                "num_chosen": torch.tensor(self.num_chosen),
                "row": torch.arange(len(self.ids)),
                **margins,
            },
            batch_size=[len(self.ids)],
        )

    def trained_share(self) -> float:
        return sum(int(mask.sum()) for mask in self.masks) / sum(map(len, self.ids))

    def samples(self, count: int) -> list[tuple[str, list[tuple[str, bool]]]]:
        """The conversations of the first pairs: "chosen" or "rejected", and pieces of text, each whether it counts."""
        found = []
        for ids, mask, cut in list(zip(self.ids, self.masks, self.num_chosen, strict=True))[:count]:
            for label, part in (("chosen", slice(None, cut)), ("rejected", slice(cut, None))):
                found.append((label, marked_pieces(self.renderer.tokenizer, ids[part], mask[part])))
        return found


def train_and_held_out(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenizedPairs, TokenizedPairs | None, str]:
    """The pairs to train on, those that are only measured, and what the latter are, in words for the plan.

    The latter are the pairs of ``eval.split``, or of ``eval.dataset``. A dataset of the hub without that split gives
    the last pairs of the one that is trained on, a tenth at most; a file alone gives none.

    Raises  DataError as `tokenize_pairs`, and where a split would be measured that is trained on
    """
    data, held_out = config.data, config.eval
    if held_out.dataset is None and data.path.endswith(FILE_FORMATS):
        return tokenize_pairs(config, tokenizer), None, "none; eval.dataset=FILE names pairs to measure"
    if held_out.dataset is None and held_out.split == data.split:
        raise DataError(f"reward: eval.split must be pairs that are not trained on: got {held_out.split} for both.")
    measured = config.model_copy(
        update={"data": data.model_copy(update={"path": held_out.dataset or data.path, "rows": held_out.rows})}
    )
    try:
        rows = _load(measured.data, held_out.split)
    except DataError:
        if data.path in _EMBEDDED or held_out.model_fields_set & {"dataset", "split"}:
            raise
        rows = _load(data, data.split)
        count = min(data.rows or len(rows), len(rows))
        first = count - min(held_out.rows or count, count // 10)
        train, other = (tokenize_pairs(config, tokenizer, rows, part) for part in (range(first), range(first, count)))
        words = f"the last {len(other)} pairs of split {data.split}, not trained on: there is no split {held_out.split}"
        return train, other, words
    other = tokenize_pairs(measured, tokenizer, rows)
    return tokenize_pairs(config, tokenizer), other, f"{other.source} {held_out.split} · {len(other)} pairs"


def _load(data: PreferenceData, split: str) -> Sequence[Row]:
    if data.path in _EMBEDDED:
        return _EMBEDDED[data.path](split)
    return load_rows(data.path, split=split, name=data.name)


def tokenize_pairs(
    config: PairsConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row] | None = None,
    part: range | None = None,
) -> TokenizedPairs:
    """The pairs of ``rows``, by default the data of ``config``; those at ``part``, by default the first ``data.rows``.
    Of each conversation the last answer counts, its end of turn included.

    Raises  DataError for data that are missing, empty or too long, or for a pair that cannot be compared; TemplateError
            if the template does not say what the assistant wrote
    """
    data = config.data
    rows = _load(data, data.split) if rows is None else rows
    part = range(min(data.rows or len(rows), len(rows))) if part is None else part
    columns = data.model_dump(include={"prompt_column", "chosen_column", "rejected_column", "system_prompt"})
    pairs = TokenizedPairs(data.path, [], [], [], Renderer(tokenizer))
    for start in range(part.start, part.stop, _AT_ONCE):
        numbers = range(start + 1, min(start + _AT_ONCE, part.stop) + 1)
        both = [messages for number in numbers for messages in to_pair(rows[number - 1], number=number, **columns)]
        try:
            rendered = pairs.renderer.render(both)
        except TemplateError as error:
            raise TemplateError(f"{data.path}, pairs from row {start + 1} on: {error}") from error
        for number, chosen, rejected in zip(numbers, rendered[::2], rendered[1::2], strict=True):
            if _add(pairs, chosen, rejected, number, config) and data.margin_column is not None:
                pairs.margins.append(_margin(rows[number - 1], data.margin_column, number))
    if not pairs.ids:
        raise DataError(f"{data.path}: no pair is left: all are longer than max_length={config.max_length}.")
    return pairs


def _add(pairs: TokenizedPairs, chosen: Rendered, rejected: Rendered, number: int, config: PairsConfig) -> bool:
    """False for a pair that is dropped."""
    longest = max(len(chosen.ids), len(rejected.ids))
    if longest > config.max_length:
        if config.too_long == "error":
            raise DataError(
                f"{config.data.path}: a conversation must be at most max_length = {config.max_length} tokens long: row "
                f"{number} has one of {longest}; raise max_length, or choose too_long=drop."
            )
        pairs.num_dropped += 1
        return False
    masks = []
    for one in (chosen, rejected):
        mask = torch.zeros_like(one.assistant_mask)
        mask[slice(*one.spans[-1])] = True
        masks.append(mask)
    if torch.equal(chosen.ids, rejected.ids):
        raise DataError(
            f"{config.data.path}: the answers of a pair must differ in their tokens: row {number}'s do not."
        )
    pairs.ids.append(torch.cat([chosen.ids, rejected.ids]))
    pairs.masks.append(torch.cat(masks))
    pairs.num_chosen.append(len(chosen.ids))
    return True


def _margin(row: Mapping[str, Any], column: str, number: int) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"dataset: {column!r} must be a number: row {number} has {row.get(column)!r:.40}."
            f"{did_you_mean(column, row)}"
        ) from None


class ReferenceLogProbs:
    """The log-probs of all answers under the model that a run starts from, float32[N, 2].

    They are computed once, before the first step, by the model that is going to be trained, and kept in checkpoints: a
    second model is never loaded.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def compute(self, session: Session, updater: Updater, loss: DPOLoss, rows: TensorDict, share: float) -> None:
        """Scores ``rows`` (`TokenizedPairs.as_rows`), dealt over the ranks; nothing where a checkpoint had them."""
        if self.values is not None:
            return
        self.values = torch.empty(len(rows), 2)
        for start in range(0, len(rows), _AT_ONCE):
            mine, _ = deal_batch(session, rows[start : start + _AT_ONCE], share, everywhere=True)
            scores = updater.score(mine, loss.sequence_log_probs)
            numbers = [] if mine is None else mine["row"].tolist()
            own = [(number, pair.tolist()) for number, pair in zip(numbers, scores, strict=bool(numbers))]
            for number, pair in session.gather(own):
                self.values[number] = torch.tensor(pair)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]
