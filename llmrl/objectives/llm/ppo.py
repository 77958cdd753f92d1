"""PPO with a critic: advantages from the values of each token (GAE), and the loss of the critic.

`PPO` puts them together for ``llmrl ppo``. The policy's loss is `GRPOLoss` with one advantage per token. The value of a
token is the critic's output at the token before it: the expected return before the token was sampled.

Shapes: B conversations, T tokens; ``mask_BT`` is True on the trained tokens. All others are observations (prompts, tool
results, users' messages), which the policy did not choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorClass, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from llmrl.data.ragged.padding import pad_rows
from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.columns import placeholders
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.objectives.base import LossModule, shows_values
from llmrl.objectives.llm import batch as reading
from llmrl.objectives.llm import functional as fn
from llmrl.objectives.llm.algorithm import Algorithm, Context
from llmrl.objectives.llm.batch import PaddedBatch
from llmrl.objectives.llm.functional import StepCounts
from llmrl.objectives.llm.grpo import GRPOLoss
from llmrl.objectives.metric import Metric

__all__ = ["PPO", "PPOLoss", "ValueLoss", "ValueLossOutput", "gae", "value_loss"]

ADVANTAGES, VALUES, RETURNS = ("advantages", "full"), ("values", "full"), ("returns", "full")


def gae(
    value_BT: Tensor,
    reward_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    last_value_B: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates of the trained tokens, float64[B, T]; 0 elsewhere.

    With V_k and r_k the value and reward of the k-th trained token of a row, observations left out:

        A_k = sum_j (gamma lam)^j d_{k+j}     d_k = r_k + gamma V_{k+1} - V_k

    ``last_value_B`` follows the last trained token; None: 0, the conversation has ended. The return that a critic
    learns is A + V. An observation between two tokens neither discounts nor ends anything.

    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.

    >>> mask = torch.tensor([[False, True, False, True]])
    >>> gae(torch.tensor([[9.0, 0.5, 9.0, 0.25]]), torch.tensor([[0.0, 0.0, 0.0, 1.0]]), mask, lam=0.5)
    tensor([[0.0000, 0.1250, 0.0000, 0.7500]], dtype=torch.float64)
    """
    order_BT = (~mask_BT).to(torch.uint8).argsort(dim=-1, stable=True)  # trained tokens first, in their order
    value_BK, reward_BK = (
        column.double().masked_fill(~mask_BT, 0.0).gather(-1, order_BT) for column in (value_BT, reward_BT)
    )
    next_BK = torch.cat([value_BK[:, 1:], torch.zeros_like(value_BK[:, :1])], -1)
    if last_value_B is not None:
        place_T = torch.arange(mask_BT.shape[-1], device=mask_BT.device)
        is_last_BK = place_T == mask_BT.sum(-1, keepdim=True) - 1
        next_BK = torch.where(is_last_BK, last_value_B.double().unsqueeze(-1), next_BK)
    sum_BK = reward_BK + gamma * next_BK - value_BK
    # Sums over 1, 2, 4 ... tokens, each from two of half the length: no loop over tokens.
    reach = 1
    while reach < mask_BT.shape[-1]:
        sum_BK = sum_BK + (gamma * lam) ** reach * nn.functional.pad(sum_BK[:, reach:], (0, reach))
        reach *= 2
    return torch.zeros_like(sum_BK).scatter(-1, order_BT, sum_BK).masked_fill(~mask_BT, 0.0)


def token_values(after_BT: Tensor) -> Tensor:
    """The value of each token, from a critic's outputs after each token: the one before it; 0 for the first token."""
    return torch.cat([torch.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], -1)


def value_loss(value_BT: Tensor, old_BT: Tensor, return_BT: Tensor, *, clip: float | None = None) -> Tensor:
    """(V - R)^2 / 2 per token; with ``clip`` the larger of it and the same for V held within ``clip`` of the old value.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; the clip is that of the authors' code, described by Engstrom
    et al. 2020 (arXiv:2005.12729), section 3.

    >>> value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.3200])
    """
    error_BT = (value_BT - return_BT).square()
    if clip is not None:
        held_BT = old_BT + (value_BT - old_BT).clamp(-clip, clip)
        error_BT = torch.maximum(error_BT, (held_BT - return_BT).square())
    return error_BT / 2


@shows_values
class ValueLossOutput(TensorClass["nocast"]):
    """``loss_value``, to differentiate, and metrics: means over the trained tokens of the step; ``tokens`` counts."""

    loss_value: Tensor
    clip_fraction: Tensor | None = None  # tokens whose gradient the clip removes
    tokens: Tensor | None = None


class ValueLoss(LossModule):
    """The loss of a critic: its values against returns, a mean over the trained tokens of the step.

    Reads   ("tokens", "full"), ("masks", "all_assistant_mask"), ("masks", "trained_from")  as `GRPOLoss`
            ("values", "full"), ("returns", "full")  float32 ragged[T]  of before the first update; what it should learn
    Calls   critic(ids int64[B, T], attention mask bool[B, T]) -> float[B, T], the value after each token
    Returns ValueLossOutput; pass ``normalizer``, the StepCounts of the optimizer step, and micro-batches add up
    Raises  MissingKeyError, ShapeError for a column that does not fit the tokens; DataError for NaN on a trained token

    clip    see `value_loss`; None: no clip
    """

    default_keys: ClassVar = {
        "tokens": reading.TOKENS,
        "response": reading.RESPONSE,
        "attention_mask": reading.ATTENTION_MASK,
        "assistant_mask": reading.ASSISTANT_MASK,
        "value": VALUES,
        "return": RETURNS,
    }
    metrics: ClassVar = {"clip_fraction": Metric("critic/clip_frac", "share of trained tokens whose value is clipped")}

    def __init__(self, critic: nn.Module, *, clip: float | None = None):
        super().__init__()
        if clip is not None and clip <= 0:
            raise ConfigError(f"ValueLoss: clip must be above 0, or None: got {clip}.")
        self.critic, self.clip = critic, clip

    def count_step(self, td: TensorDictBase) -> StepCounts:
        """Counts the trained tokens in the whole batch of an optimizer step, on this rank."""
        return StepCounts.of(self._read(td)[1])

    @torch.no_grad()
    def values(self, td: TensorDictBase) -> Tensor:
        """float[B, T]: the value of each token; ragged rows are padded on the right."""
        return self._values(self._read(td)[0])

    def forward(self, td: TensorDictBase, normalizer: StepCounts | None = None) -> ValueLossOutput:
        batch, mask_BT = self._read(td)
        counts = normalizer or StepCounts.of(mask_BT)
        remedy = "score the batch with the critic again"
        old_BT, return_BT = (
            batch.finite(
                td, getattr(self.tensor_keys, name), mask_BT, missing=f"no {name} of the critic", remedy=remedy
            )
            for name in ("value", "return")
        )
        value_BT = self._values(batch)
        error_BT = value_loss(value_BT, old_BT.to(value_BT), return_BT.to(value_BT), clip=self.clip)
        weight_BT = fn.token_weights(mask_BT, "token", counts, dtype=value_BT.dtype)

        def mean(each_BT: Tensor) -> Tensor:
            return (each_BT.masked_fill(~mask_BT, 0.0) * weight_BT).sum()

        is_clipped_BT = torch.zeros_like(mask_BT)
        if self.clip is not None:
            is_clipped_BT = 2 * error_BT.detach() > (value_BT.detach() - return_BT.to(value_BT)).square()
        return ValueLossOutput(
            loss_value=mean(error_BT),
            clip_fraction=mean(is_clipped_BT.to(error_BT)),
            tokens=mask_BT.sum().to(error_BT),
            batch_size=[],
        )

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        log_probs = placeholders(device)["log_probs"]
        return {"values": log_probs.clone(), "returns": log_probs}

    def _read(self, td: TensorDictBase) -> tuple[PaddedBatch, Tensor]:
        batch = PaddedBatch.read(td, self.tensor_keys, reader="ValueLoss")
        return batch, batch.trained_mask(td, self.tensor_keys, "sft")

    def _values(self, batch: PaddedBatch) -> Tensor:
        return token_values(self.critic(batch.input_ids, batch.attention_mask))


class PPOLoss(GRPOLoss):
    """`GRPOLoss` with an advantage per token, ("advantages", "full") float32 ragged[T]."""

    default_keys: ClassVar = {**GRPOLoss.default_keys, "advantage": ADVANTAGES}

    def placeholder(self, device: torch.device) -> dict[str, Any]:
        return {**super().placeholder(device), "advantages": placeholders(device)["log_probs"]}


class PPO(Algorithm):
    """Proximal policy optimisation with a critic: ``llmrl ppo``, whose ``ppo`` section are the ``options``."""

    loss = PPOLoss
    metrics: ClassVar = {
        "loss": Metric("critic/loss", "half the squared error of the critic's values", chart="Critic"),
        "variance": Metric(
            "critic/explained_var",
            "share of the variance of returns that the values explain, before the updates",
            label="explained",
        ),
        "return": Metric("critic/return_mean", "mean return of the trained tokens, which the critic learns"),
        "grad_norm": Metric("critic/grad_norm", "of the critic, before clipping"),
        "lr": Metric("critic/lr", "learning rate of the critic"),
        **ValueLoss.metrics,
    }
    reads: ClassVar = ("stop_reason",)
    without: ClassVar = ("grpo.scale", "grpo.multi_objective_aggregation", "min_group_size")
    compares_groups = False

    def describe(self) -> dict[str, str]:
        own = self.options
        clip = "" if own.value_clip is None else f", values clipped at {own.value_clip:g}"
        alone = f", alone for {own.critic_warmup} steps" * bool(own.critic_warmup)
        critic = f"critic: {own.critic or 'starts as the policy'}, lr {own.critic_optim.lr:g}{clip}{alone}"
        return {"advantage": f"GAE, gamma {own.gamma:g}, lambda {own.lam:g}, whitened over the step's tokens; {critic}"}

    def build(self, context: Context) -> None:
        super().build(context)
        self.critic = context.load_critic(self.options.critic, self.options.critic_optim)
        self.value_loss = ValueLoss(self.critic.updater.scorer, clip=self.options.value_clip)

    def advantages(self, rows: TensorDictBase) -> TensorDictBase | None:
        """Scores the rows with the critic (a collective), and writes `conversation_advantages`."""
        rows = scored_rows(rows)
        batch = None if rows is None else rows.to(self.context.session.device)
        values = self.critic.updater.score(self.value_loss, batch, self.value_loss.values)
        own = self.options
        gae_settings = {"gamma": own.gamma, "lam": own.lam, "bootstrap": own.bootstrap}
        return None if rows is None else conversation_advantages(rows, values, **gae_settings)

    def prepare(self, batches: Sequence[TensorDictBase | None]) -> dict[str, float]:
        """Whitens the advantages: mean 0 and standard deviation 1 over the trained tokens of the step, of all ranks."""
        metrics = super().prepare(batches)
        present = [batch for batch in batches if batch is not None]
        masks = [_trained(batch) for batch in present]
        columns = {
            key: torch.cat([torch.zeros(0), *(_flat(*pair, key) for pair in zip(present, masks, strict=True))]).double()
            for key in (ADVANTAGES, VALUES, RETURNS)
        }
        advantage_N, return_N = columns[ADVANTAGES], columns[RETURNS]
        error_N = return_N - columns[VALUES]
        measured = {"advantage": advantage_N, "return": return_N, "error": error_N}
        session = self.context.session
        totals = session.sum({name: float(each.sum()) for name, each in measured.items()} | {"tokens": len(return_N)})
        tokens = max(totals["tokens"], 1)
        mean = {name: totals[name] / tokens for name in measured}
        # In a second pass: a difference of sums of squares would lose the digits of a small variance.
        squares = session.sum({name: float((each - mean[name]).square().sum()) for name, each in measured.items()})
        deviation = math.sqrt(max(squares["advantage"] / tokens, 1e-8))
        for batch, rows in zip(present, masks, strict=True):
            advantages = batch.get(ADVANTAGES, as_list=True)
            whitened = [
                ((row - mean["advantage"]) / deviation).masked_fill(~mask, 0.0)
                for row, mask in zip(advantages, rows, strict=True)
            ]
            batch.set("advantages", LogProbs.from_rows({"full": whitened}))
        explained = 1 - squares["error"] / squares["return"] if squares["return"] else 0.0
        return metrics | {"critic/return_mean": mean["return"], "critic/explained_var": explained}

    def train(self, batches: Sequence[TensorDictBase | None], step: int) -> dict[str, float]:
        """Trains the policy, unless the critic is still warming up, and the critic, on the same batches."""
        metrics = super().train(batches, step) if step > self.options.critic_warmup else {}
        return metrics | self.critic.updater.train(self.value_loss, batches, step, family="critic")

    def state_dict(self) -> dict[str, Any]:
        return self.critic.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.critic.load_state_dict(state)


def scored_rows(rows: TensorDictBase) -> TensorDictBase | None:
    """The rows of conversations whose rewards are all numbers: a failed one says nothing. None if there are none."""
    failed_N = ~rows.get(("next", "reward")).flatten(1).isfinite().all(1)
    kept = [place for places in _conversations(rows) if not failed_N[places].any() for place in places]
    return rows if len(kept) == len(failed_N) else rows[torch.tensor(kept)] if kept else None


def conversation_advantages(
    rows: TensorDictBase, values: Sequence[Tensor], *, gamma: float, lam: float, bootstrap: bool = False
) -> TensorDictBase:
    """Writes advantages and returns of the trained tokens, over all rows of a conversation; 0 at other tokens.

    Reads   ("masks", "all_assistant_mask"), ("masks", "trained_from"), ("next", "reward" | "done") of rows that follow
            each other up to a done one; ("tokens", "rewards") if present; "stop_reason" int64[N] with ``bootstrap``;
            ``values`` float[at least T] of each row
    Writes  ("advantages" | "values" | "returns", "full")  float32 ragged[T]
            "advantage"  float32[N, 1, 1], the mean over the row's trained tokens

    A reward is that of the last trained token of the turn that earned it, or of the conversation. ``bootstrap``: after
    a last answer that was cut off at its limit, the value of its last trained token, the nearest place at which the
    critic is trained, stands for what would have followed; else nothing follows.
    """
    masks = _trained(rows)
    rewards = rows.get(("tokens", "rewards"), None, as_list=True)
    if rewards is None:
        last_N = rows.get(("next", "reward")).flatten(1).sum(1).float()
        rewards = [
            nn.functional.pad(last, (len(mask) - 1, 0)) for last, mask in zip(last_N[:, None], masks, strict=True)
        ]
    values = [value[: len(mask)].to(mask.device).float() for value, mask in zip(values, masks, strict=True)]
    conversations = _conversations(rows)

    def joined(column: Sequence[Tensor]) -> Tensor:  # [C, T]: the tokens of all rows of a conversation
        return pad_rows([torch.cat([column[place] for place in places]) for places in conversations])

    mask_CT, value_CT = joined(masks), joined(values)
    place_T = torch.arange(mask_CT.shape[-1], device=mask_CT.device)
    earner_CT = (place_T * mask_CT).cummax(-1).values  # the last trained token up to each token
    last_value_C = None
    if bootstrap:
        cut_C = rows.get("stop_reason").flatten()[[places[-1] for places in conversations]] == StopReason.LENGTH
        last_value_C = cut_C * value_CT.gather(-1, earner_CT[:, -1:]).squeeze(-1)
    advantage_CT = gae(
        value_CT,
        torch.zeros_like(value_CT).scatter_add(-1, earner_CT, joined(rewards)),
        mask_CT,
        gamma=gamma,
        lam=lam,
        last_value_B=last_value_C,
    )
    lengths = [[len(masks[place]) for place in places] for places in conversations]
    advantages = [
        part.float()
        for row_T, parts in zip(advantage_CT, lengths, strict=True)
        for part in row_T[: sum(parts)].split(parts)
    ]
    learned = [(advantage + value) * mask for advantage, value, mask in zip(advantages, values, masks, strict=True)]
    means = [advantage.sum() / mask.sum().clamp(min=1) for advantage, mask in zip(advantages, masks, strict=True)]
    rows = rows.copy()
    for name, column in (("advantages", advantages), ("values", values), ("returns", learned)):
        rows.set(name, LogProbs.from_rows({"full": column}))
    return rows.set("advantage", torch.stack(means).view(-1, 1, 1))


def _conversations(rows: TensorDictBase) -> list[list[int]]:
    """The rows of each conversation, which follow each other up to a done one."""
    conversations: list[list[int]] = [[]]
    for place, done in enumerate(rows.get(("next", "done")).flatten().tolist()):
        conversations[-1].append(place)
        if done:
            conversations.append([])
    return [places for places in conversations if places]


def _trained(rows: TensorDictBase) -> list[Tensor]:
    """The mask of each row's trained tokens, bool[T]."""
    mask_BT, lengths = reading.trained_tokens(rows, reading.ASSISTANT_MASK, "PPO")
    return [mask[:length] for mask, length in zip(mask_BT, lengths, strict=True)]


def _flat(rows: TensorDictBase, masks: Sequence[Tensor], key: NestedKey) -> Tensor:
    """A column's values at the trained tokens of all rows, on the CPU."""
    return torch.cat([row[mask].cpu() for row, mask in zip(rows.get(key, as_list=True), masks, strict=True)])
