"""The rollouts of one step over all ranks: metrics, records for the log, sample conversations, columns to train on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey

from llmrl.data.ragged.tensordicts import column_values
from llmrl.envs.llm.transforms.tool_use import read_calls, tool_metrics
from llmrl.errors import RolloutError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.columns import SEAT, is_plain, trained_keys
from llmrl.modules.llm.rendering import text_tokenizer
from llmrl.run.console import Sample
from llmrl.run.rollout_log import ModelCallRecord, Rollout, ToolCallRecord
from llmrl.train.data.sft import marked_pieces
from llmrl.train.mixed_env import SOURCE
from llmrl.train.rollouts.token_records import TokenWatch, choose_conversations, prompt_id, token_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from llmrl.objectives.llm import GRPOLoss
    from llmrl.train.distributed import Session

_TRAINED = ("group_id", "policy_version", "seed", ("next", "reward"), ("next", "done"))  # beside those of the table
_QUANTILES = torch.tensor((0.1, 0.5, 0.9), dtype=torch.float64)


def select_training_columns(data: TensorDictBase, reads: Sequence[NestedKey] = ()) -> TensorDictBase:
    """Selects the columns that advantages and loss read, with those in ``reads``; the others need not be stored."""
    seat = [SEAT] if SEAT in data.keys() else []
    return data.select(*dict.fromkeys((*_TRAINED, *trained_keys(data), *seat, *reads)))


def data_columns(data: TensorDictBase) -> dict[str, list[Any]]:
    """The columns of the data that a JSON object can hold, but for the prompt, which is in the text."""
    found = {key: column_values(data, key) for key in data.keys() if is_non_tensor(data.get(key))}
    return {key: values for key, values in found.items() if is_plain(values) and values != found.get("query")}


def oldest_versions(data: TensorDictBase) -> list[int]:
    """For each row, the version of the weights that sampled its oldest token."""
    versions = data.get("policy_version").tolist()
    rows = data.get(("log_probs", "versions"), None, as_list=True)
    if rows is None:
        return versions
    masks = data.get(("masks", "all_assistant_mask"), as_list=True)
    return [
        int(row[mask].min()) if mask.any() else version
        for row, mask, version in zip(rows, masks, versions, strict=True)
    ]


class StepRollouts:
    """The rollouts ``data`` of this rank and, through the session, of the others.

    A conversation is one row, or several consecutive rows of which the last is done (``yield_only_last_steps``).
    ``trained`` are the rows that the loss trains on, with advantages; None: there are none. The tokens of
    ``keep_tokens`` conversations, over all ranks, are kept. ``sources``: the names of those of a mix.

    ``records``  one per conversation of all ranks, in rank order, without tokens: on the first rank, which logs them;
                 the other ranks have the numbers alone
    """

    def __init__(
        self,
        session: Session,
        data: TensorDictBase,
        trained: TensorDictBase | None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        keep_tokens: int = 0,
        sources: Sequence[str] = (),
    ):
        self._session, self._data, self._tokenizer = session, data, text_tokenizer(tokenizer)
        self._sources = sources
        trained_seeds = [] if trained is None else trained.get("seed").tolist()
        self._advantages: dict[int, float] = {}  # by the row's seed
        if trained is not None and (values := trained.get("advantage", None, as_list=True)) is not None:
            first = (float(value.flatten()[0]) for value in values)
            self._advantages = dict(zip(trained_seeds, first, strict=True))
        self._first, self._last, lengths = _conversations(data)
        self._seeds, self._rewards = data.get("seed").tolist(), data.get(("next", "reward")).flatten(1).sum(1).tolist()
        self._ids = data.get(("tokens", "full"), as_list=True)
        self._masks = data.get(("masks", "all_assistant_mask"), as_list=True)
        prompts, responses = data.get("text").rows("prompt"), data.get("text").rows("response")
        groups, versions = data.get("group_id").tolist(), oldest_versions(data)
        reasons = data.get("stop_reason").tolist()
        prompt_ids: dict[int, str] = {}
        for row in self._first:  # a group has one prompt: hash it once
            if groups[row] not in prompt_ids:
                prompt_ids[groups[row]] = prompt_id(self._ids[row], self._masks[row])
        calls = [lines or "" for lines in column_values(data.get("next"), "tool_calls") or [""] * len(groups)]
        asked = [
            json.loads(text or "[]") for text in column_values(data.get("next"), "model_calls") or [""] * len(groups)
        ]
        parts = {key.removeprefix("reward_"): values.tolist() for key, values in _reward_parts(data).items()}
        columns = data_columns(data)
        mine = [
            Rollout(
                prompt=prompts[row],
                completion=responses[row],
                reward=self._rewards[row] if math.isfinite(self._rewards[row]) else None,
                advantage=self._advantages.get(self._seeds[row]),
                stop_reason=StopReason(reasons[row]).name.lower(),
                version=versions[row],
                tokens=length,
                group=groups[row],
                prompt_id=prompt_ids[groups[row]],
                rewards={name: values[row] for name, values in parts.items()},
                columns={name: values[row] for name, values in columns.items()},
                tool_calls=tuple(ToolCallRecord(**call) for call in read_calls(calls[row])),
                model_calls=tuple(ModelCallRecord(**call) for call in asked[row]),
            )
            for row, length in zip(self._last, lengths, strict=True)
        ]
        self.records = session.gather_on_first(mine)
        self._numbers = _Numbers.of_all(session, mine, _num_turns(data))
        self._watch = self._choose(mine, keep_tokens)
        reached, compared = set(trained_seeds), zip(groups, columns.get(SEAT) or [None] * len(groups), strict=True)
        kept_groups = {own for seed, own in zip(self._seeds, compared, strict=True) if seed in reached}
        self._num_kept = sum(session.gather([len(kept_groups)]))

    def _choose(self, mine: list[Rollout], keep_tokens: int) -> TokenWatch:
        """Chooses the rows of all ranks whose tokens are kept; ``_kept`` are this rank's conversations of them."""
        sizes = self._session.gather([len(mine)])
        self._offset = sum(sizes[: self._session.rank])
        lengths = [len(self._ids[row]) for row in self._last]
        count = math.ceil(keep_tokens / self._session.world_size)  # each rank chooses among its own conversations
        self._kept = sorted(choose_conversations([r.group for r in mine], [r.prompt_id for r in mine], lengths, count))
        rows = [(self._seeds[self._last[place]], lengths[place]) for place in self._kept]
        return TokenWatch(set(self._session.gather(rows)))

    def watch(self, loss: GRPOLoss) -> AbstractContextManager[None]:
        """Context for the step's updates: keeps the loss's per-token numbers of the chosen conversations."""
        return self._watch.active(loss)

    def records_with_tokens(self) -> list[Rollout]:
        """`records`, with the tokens of the chosen conversations, on the first rank; a collective."""
        found = {row: numbers for part in self._session.gather([self._watch.found]) for row, numbers in part.items()}
        engine = self._data.get(("log_probs", "full"), as_list=True)
        history = self._data.get("history", None)
        made = []
        for place in self._kept:
            row = self._last[place]
            chats = None if history is None else history[row : row + 1].chats("full")
            messages = chats[0] if chats else None
            ids, mask = self._ids[row], self._masks[row]
            numbers = found.get((self._seeds[row], len(ids)))
            made.append(
                (self._offset + place, token_record(self._tokenizer, ids, mask, engine[row], messages, numbers))
            )
        records = list(self.records)
        for place, record in self._session.gather_on_first(made):
            records[place] = replace(records[place], token_record=record)
        return records

    def metrics(self, *, version: int, seconds: float) -> dict[str, float]:
        """Metrics of the rollouts of all ranks, which took ``seconds`` to collect."""
        rows = self._numbers
        rewards = rows.rewards()
        mean = sum(rewards) / len(rewards) if rewards else math.nan
        groups: dict[tuple[int, str | None], set[float]] = {}
        for group, reward in zip(rows.groups, rows.all_rewards, strict=True):
            groups.setdefault(group, set()).update({reward} if math.isfinite(reward) else ())
        # A group of one says nothing of this; failed completions are ignored.
        equal = sum(len(rewards_of_group) <= 1 for rewards_of_group in groups.values())
        compared = {"group/zero_var_frac": equal / len(groups)} if len(groups) < len(rows) else {}
        ages = [version - own for own in rows.versions]
        p10, p50, p90 = torch.tensor(rewards or [math.nan], dtype=torch.float64).quantile(_QUANTILES).tolist()
        return {
            "reward/mean": mean,
            "reward/std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)) if rewards else math.nan,
            "reward/p10": p10,
            "reward/p50": p50,
            "reward/p90": p90,
            **compared,
            "group/kept_frac": self._num_kept / len(groups),
            "tokens/completion_mean": sum(rows.tokens) / len(rows),
            "tokens/completion_max": max(rows.tokens),
            "tokens/truncated_frac": sum(rows.truncated) / len(rows),
            "rollout/failed": len(rows) - len(rewards),
            "rollout/turns_mean": sum(rows.turns) / len(rows),
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": max(ages),
            "time/generate": seconds,
            "perf/gen_tok_s": sum(rows.tokens) / seconds,
            **_env_metrics(self._session, self._data),
            **self._source_metrics(),
        }

    def _source_metrics(self) -> dict[str, float]:
        """The metrics of each source; without prompts in this step it has no others."""
        metrics: dict[str, float] = {}
        for name in self._sources:
            rows = self._numbers.of_source(name)
            rewards = rows.rewards()
            metrics[f"source/{name}/prompts"] = len(set(rows.groups))
            if len(rows):
                metrics[f"source/{name}/truncated_frac"] = sum(rows.truncated) / len(rows)
                metrics[f"source/{name}/failed"] = len(rows) - len(rewards)
            if rewards:
                metrics[f"source/{name}/reward"] = sum(rewards) / len(rewards)
        return metrics

    def check_failed(self, max_failed: float, step: int, failure: RolloutError) -> None:
        """Raises RolloutError, with what ``failure`` says, if a larger share of the rollouts failed than allowed."""
        total = len(self._numbers)
        failed = total - len(self._numbers.rewards())
        if failed > max_failed * total:
            error = RolloutError(
                f"rollouts: at most max_failed = {max_failed:.0%} of a step's rollouts may fail: got {failed} of "
                f"{total} in step {step}: {failure}"
            )
            for note in getattr(failure, "__notes__", ()):
                error.add_note(note)
            raise error

    def samples(self, count: int) -> list[Sample]:
        """Conversations of this rank with sampled tokens marked, alternating between highest and lowest advantage."""
        # The best, the worst, the second best and so on: encouraged answers next to discouraged ones.
        best = sorted(self._last, key=lambda row: -self._advantages.get(self._seeds[row], 0.0))
        order = [best[-1 - place // 2] if place % 2 else best[place // 2] for place in range(min(count, len(best)))]
        return [
            Sample(
                marked_pieces(self._tokenizer, self._ids[row], self._masks[row]),
                reward=self._rewards[row],
                advantage=self._advantages.get(self._seeds[row], 0.0),
            )
            for row in order
        ]


@dataclass
class _Numbers:
    """What metrics need of conversations: one number each; ``turns`` of their rows."""

    groups: list[tuple[int, str | None]]  # whose rewards are compared: the group, and the seat
    all_rewards: list[float]  # NaN for those that failed
    versions: list[int]
    tokens: list[int]
    truncated: list[bool]
    sources: list[str | None]
    turns: list[int]

    @classmethod
    def of_all(cls, session: Session, mine: Sequence[Rollout], turns: list[int]) -> _Numbers:
        """Those of all ranks, in rank order; a collective."""
        columns = [
            ((r.group, r.columns.get(SEAT)), r.reward, r.version, r.tokens, r.stop_reason, r.columns.get(SOURCE))
            for r in mine
        ]
        groups, rewards, versions, tokens, reasons, sources = zip(*columns, strict=True) if mine else ((),) * 6
        own = cls(
            [*groups],
            [math.nan if reward is None else reward for reward in rewards],
            [*versions],
            [*tokens],
            [reason == "length" for reason in reasons],
            [*sources],
            turns,
        )
        parts = session.gather([vars(own)])
        return cls(**{name: [value for part in parts for value in part[name]] for name in vars(own)})

    def __len__(self) -> int:
        return len(self.groups)

    def rewards(self) -> list[float]:
        return [reward for reward in self.all_rewards if math.isfinite(reward)]

    def of_source(self, name: str) -> _Numbers:
        places = [place for place, source in enumerate(self.sources) if source == name]
        of_rows = {key: [values[place] for place in places] for key, values in vars(self).items() if key != "turns"}
        return _Numbers(**of_rows, turns=[])


def _conversations(data: TensorDictBase) -> tuple[list[int], list[int], list[int]]:
    """The first and last row of each conversation, and the number of tokens sampled in all its rows."""
    ends: list[int] = []
    lengths: list[int] = []
    sampled = 0
    masks, done = data.get(("masks", "all_assistant_mask"), as_list=True), data.get(("next", "done")).flatten().tolist()
    for row, (mask, is_done) in enumerate(zip(masks, done, strict=True)):
        sampled += int(mask.sum())
        if is_done:
            ends.append(row)
            lengths.append(sampled)
            sampled = 0
    return [0, *(end + 1 for end in ends[:-1])][: len(ends)], ends, lengths


def _reward_parts(data: TensorDictBase) -> dict[str, torch.Tensor]:
    """float64[B] for each reward function, if there are several or one has a name; and for each number of an agent."""
    after = data.get("next")
    keys = sorted(key for key in after.keys() if key.startswith("reward_"))
    parts = {key: after.get(key).double().flatten(1).sum(1) for key in keys}
    scores = [json.loads(text or "{}") for text in column_values(after, "scores") or ()]
    for name in sorted({name for row in scores for name in row}):
        parts[f"reward_{name}"] = torch.tensor([row.get(name, math.nan) for row in scores], dtype=torch.float64)
    return parts


def _num_turns(data: TensorDictBase) -> list[int]:
    """The number of answers in each row: its runs of sampled tokens."""
    masks = data.get(("masks", "all_assistant_mask"), as_list=True)
    return [int((mask[1:] & ~mask[:-1]).sum()) + int(mask[:1].sum()) for mask in masks]


def _env_metrics(session: Session, data: TensorDictBase) -> dict[str, float]:
    """Metrics that the environment writes besides the reward: values of each reward function, tool calls.

    Reads    ("next", "reward_<name>") float32[B, 1, 1], ("next", "scores"), ("next", "tool_use"), if present, of rows
             that are done
    Returns  "reward/<name>/mean" over conversations (their last turn) that did not fail; the metrics of `tool_metrics`
    """
    after = data.get("next")
    done = after.get("done").flatten()
    metrics = {}
    parts = _reward_parts(data)
    for key in sorted(set(session.gather(list(parts)))):  # the agents of other ranks may have returned others
        values = session.gather(parts[key][done].tolist() if key in parts else [])
        valid = [value for value in values if math.isfinite(value)]
        metrics[f"reward/{key.removeprefix('reward_')}/mean"] = sum(valid) / len(valid) if valid else math.nan
    if (use := after.get("tool_use", None)) is not None:
        columns = {name: torch.tensor(session.gather(value[done].tolist())) for name, value in use.items()}
        count = len(columns["calls"])
        ended = torch.ones(count, 1, dtype=torch.bool)
        metrics |= tool_metrics(TensorDict({"next": {"tool_use": columns, "done": ended}}, batch_size=[count]))
    return metrics
