"""`IfEvalScorer`: the transform that scores how well a turn follows the instructions of its prompt.

Which instructions are followed is decided in `evaluation`; here the answer is found, and verdicts become a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.answers.blocks import find_blocks
from llmrl.envs.llm.answers.parser import end_where
from llmrl.envs.llm.completions import completion_texts, tokenizer_of
from llmrl.envs.llm.ifeval.evaluation import Instructions, evaluate
from llmrl.envs.llm.scoring import ScoringTransform
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.modules.llm.engines import StopReason

__all__ = ["IFEvalScoreData", "IfEvalScorer"]


class IFEvalScoreData(TensorClass["nocast"]):
    """The four numbers that IFEval reports, per response.

    prompt_level_*  float32[B, 1]  1 where every instruction is followed
    inst_level_*    float32[B, 1]  the share of the instructions that are followed
    *_strict_acc    as it stands; *_loose_acc: after the eight simplifications

    >>> score = IFEvalScoreData.of([True, False], [True, True])
    >>> [score.get(name).item() for name in IFEvalScoreData.NAMES]
    [0.0, 0.5, 1.0, 1.0]
    """

    prompt_level_strict_acc: Tensor
    inst_level_strict_acc: Tensor
    prompt_level_loose_acc: Tensor
    inst_level_loose_acc: Tensor

    NAMES: ClassVar[tuple[str, ...]] = (
        "prompt_level_strict_acc",
        "inst_level_strict_acc",
        "prompt_level_loose_acc",
        "inst_level_loose_acc",
    )

    @classmethod
    def of(cls, strict: Sequence[bool], loose: Sequence[bool]) -> IFEvalScoreData:
        """The score of one response."""
        values = [float(all(strict)), sum(strict) / len(strict), float(all(loose)), sum(loose) / len(loose)]
        return cls(*(torch.tensor([value]) for value in values), batch_size=[])

    @classmethod
    def default_spec(cls, shape: Sequence[int]) -> Composite:
        """The spec of a batch of scores."""
        return Composite({name: Unbounded((*shape, 1)) for name in cls.NAMES}, shape=shape)


Aggregate = Callable[[IFEvalScoreData, list[str], list[str], bool], float | Tensor]


class IfEvalScorer(ScoringTransform):
    """Scores a response by the instructions of its prompt.

    Reads   the response as text (`completion_texts`): its last answer block outside thinking, or else all of it but the
            thinking; ``instruction_ids_key``, ``keyword_args_key``: the instructions; ``id_key``: the row's name, for
            errors, where there is one; "stop_reason" where there is one
    Writes  ``score_key``  IFEvalScoreData [B]
            "reward"       float32[B, 1, 1]  += the aggregated score, in the ``next`` tensordict
            "done", "terminated"  bool[B, 1]  True where there is an answer block, unless ``set_done_if_answer=False``
    Raises  DataError naming the row for an unknown instruction (with the nearest known one) or a missing argument

    The aggregate is the mean of the four numbers of the score, weighted by ``format_weights``, plus 0.1 for exactly one
    answer block and 0.05 for exactly one thinking block: at most 1.15, and 0 for an empty response.
    ``aggregate_reward`` replaces it: ``fn(score, think_blocks, answer_blocks, complete) -> float`` per response, where
    ``complete`` is False for one that was cut off; with False there is no reward.

    >>> from llmrl.envs.llm import IFEvalEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> rows = [{"prompt": "Hi! No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> env = IFEvalEnv(dataset=rows, num_envs=2)  # appends one
    >>> policy = ScriptedPolicy(["<think>None.</think><answer>Hi there!</answer>", "<answer>Well, hi!</answer>"])
    >>> [round(reward, 2) for reward in env.step(policy(env.reset()))["next", "reward"].flatten().tolist()]
    [1.15, 0.1]
    """

    def __init__(
        self,
        *,
        instruction_ids_key: str = "instruction_id_list",
        keyword_args_key: str = "kwargs",
        id_key: str = "key",
        score_key: str = "ifeval_score",
        aggregate_reward: bool | Aggregate = True,
        format_weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
        set_done_if_answer: bool = True,
        tokenizer: Any | None = None,
        input_mode: str | None = None,
    ):
        super().__init__()
        if len(format_weights) != 4 or abs(sum(format_weights) - 1) > 1e-6:
            raise ConfigError(
                f"IfEvalScorer: format_weights must be four numbers that add up to 1: got {list(format_weights)}."
            )
        if input_mode not in (None, "history", "text", "tokens"):
            raise ConfigError(f"IfEvalScorer: input_mode must be history, text or tokens: got {input_mode!r}.")
        self.instruction_ids_key = instruction_ids_key
        self.keyword_args_key = keyword_args_key
        self.id_key = id_key
        self.score_key = score_key
        self.aggregate_reward = aggregate_reward
        self.format_weights = tuple(format_weights)
        self.set_done_if_answer = set_done_if_answer
        self.tokenizer = tokenizer
        self.input_mode = input_mode

    def default_reward_aggregator(
        self,
        score: IFEvalScoreData,
        think_blocks: list[str] | None = None,
        answer_blocks: list[str] | None = None,
        complete: bool = True,
    ) -> Tensor:
        """The score's four numbers weighted, plus what having one answer and one thinking block is worth: float32 in
        the batch size of ``score``."""
        numbers = torch.stack([score.get(name).reshape(score.batch_size) for name in IFEvalScoreData.NAMES], -1)
        followed = (numbers * numbers.new_tensor(self.format_weights)).sum(-1)
        return followed + 0.1 * (len(answer_blocks or ()) == 1) + 0.05 * (len(think_blocks or ()) == 1)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        texts = completion_texts(td, tokenizer_of(self), who="IfEvalScorer", mode=self.input_mode)
        blocks = [find_blocks(text) for text in texts]
        scores = []
        for found, instructions in zip(blocks, self._instructions(td), strict=True):
            verdict = evaluate(found.answers[-1] if found.answers else found.outside, instructions)
            scores.append(IFEvalScoreData.of(verdict.strict, verdict.loose))
        next_td.set(self.score_key, torch.stack(scores).to(td.device) if td.device else torch.stack(scores))
        if self.aggregate_reward is not False:
            aggregate = self.default_reward_aggregator if self.aggregate_reward is True else self.aggregate_reward
            values = [
                float(aggregate(score, found.thoughts, found.answers, complete))
                for score, found, complete in zip(scores, blocks, _complete(td, len(texts)), strict=True)
            ]
            reward_B = torch.tensor(values, dtype=torch.float32, device=td.device).view(-1, 1, 1)
            before = next_td.get("reward", None)
            next_td.set("reward", reward_B if before is None else before + reward_B)
        if self.set_done_if_answer:
            end_where(next_td, torch.tensor([bool(b.answers) for b in blocks], device=td.device).view(-1, 1))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        if self.aggregate_reward is not False:
            reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        reward_spec[self.score_key] = IFEvalScoreData.default_spec(reward_spec.shape)
        return reward_spec

    def _instructions(self, td: TensorDictBase) -> list[Instructions]:
        names, arguments = (column_values(td, key) for key in (self.instruction_ids_key, self.keyword_args_key))
        if names is None or arguments is None:
            missing = self.instruction_ids_key if names is None else self.keyword_args_key
            raise MissingKeyError(
                f"IfEvalScorer: the instructions must be in {missing!r}: the batch has "
                f"{', '.join(map(str, td.keys()))}."
            )
        keys = column_values(td, self.id_key) or [None] * len(names)
        return [
            Instructions.of(ids, kwargs, f"row {row} of the batch" if key is None else f"the row with key {key}")
            for row, (ids, kwargs, key) in enumerate(zip(names, arguments, keys, strict=True), 1)
        ]


def _complete(td: TensorDictBase, count: int) -> list[bool]:
    reasons = column_values(td, "stop_reason")
    if reasons is None:
        return [True] * count
    return [reason not in (StopReason.LENGTH, StopReason.ABORT) for reason in reasons]
