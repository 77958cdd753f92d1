"""IFEval: prompts with instructions that a program can check (the ``ifeval`` extra for those about language).

`ifeval_checks` has the 25 instructions. Loose evaluation ignores common additions of models: an instruction counts as
followed if it holds after removing any combination of the first line, the last line and the asterisks of markdown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column_values
from llmrl.data.specs import Composite, Unbounded
from llmrl.envs.llm.answers import end_where, find_blocks
from llmrl.envs.llm.completions import ScoringTransform, add_reward, completion_texts, required_column, tokenizer_of
from llmrl.envs.llm.options import MODES
from llmrl.envs.llm.tasks.ifeval_checks import CHECKS, NEEDS_LANGUAGE
from llmrl.envs.llm.tasks.task import Row, TaskEnv, row_label
from llmrl.errors import ConfigError, DataError, check_choice, did_you_mean
from llmrl.modules.llm.engines import StopReason
from llmrl.optional import require

RELATIONS = ("less than", "at least")
_CUT = (StopReason.LENGTH, StopReason.ABORT)
_PARAMETERS = {name: list(inspect.signature(check).parameters)[1:] for name, check in CHECKS.items()}


@dataclass(frozen=True)
class Verdict:
    """One verdict per instruction, in their order: True where it was followed."""

    strict: list[bool]
    loose: list[bool]


@dataclass(frozen=True)
class Instructions:
    """The instructions of one prompt: names as in `CHECKS`, and the arguments of each."""

    names: list[str]
    arguments: list[dict[str, Any]]

    @classmethod
    def of(cls, names: Sequence[str], arguments: Sequence[Mapping[str, Any] | None], where: str) -> Instructions:
        """The columns ``instruction_id_list`` and ``kwargs`` of a row, checked.

        Ignores arguments that are None or not a parameter of the check: Parquet rows have every argument of all checks
        Raises  DataError naming ``where`` for an unknown instruction, a missing argument, an unknown relation;
                MissingDependencyError if an instruction needs langdetect and it is not installed

        >>> Instructions.of(["punctuation:no_comma"], [{"num_words": None}], "row 1").arguments
        [{}]
        """
        if isinstance(names, str) or len(names) != len(arguments):
            given = f"{names!r:.80} and {len(arguments)} entries"
            raise DataError(f"IFEval: {where} must have one entry of kwargs per instruction: got {given}.")
        checked = [_arguments(name, given or {}, where) for name, given in zip(names, arguments, strict=True)]
        if NEEDS_LANGUAGE.intersection(names):
            needing = next(name for name in names if name in NEEDS_LANGUAGE)
            require("langdetect", extra="ifeval", used_by=f"IFEval: the instruction {needing!r} of {where}")
        return cls(list(names), checked)


def evaluate(response: str, instructions: Instructions) -> Verdict:
    """Checks a response against its instructions. An empty response follows none of them.

    >>> told = Instructions.of(["startend:quotation", "punctuation:no_comma"], [{}, {}], "row 1")
    >>> evaluate('Sure:\\n"no comma"', told)
    Verdict(strict=[False, True], loose=[True, True])
    """
    if not response.strip():
        return Verdict([False] * len(instructions.names), [False] * len(instructions.names))
    strict, loose = [], []
    for name, arguments in zip(instructions.names, instructions.arguments, strict=True):
        check = CHECKS[name]
        # An instruction that is followed strictly is also followed loosely: its variants need no check.
        strict.append(check(response, **arguments))
        loose.append(strict[-1] or any(check(variant, **arguments) for variant in _variants(response)))
    return Verdict(strict, loose)


def _variants(response: str) -> Iterator[str]:
    """The response without its first line, last line or both, with and without asterisks; no empty or equal ones."""
    lines = response.split("\n")
    parts = (response, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip())
    seen = {response}
    for part in (*parts, *(part.replace("*", "") for part in parts)):
        if part.strip() and part not in seen:
            seen.add(part)
            yield part


def _arguments(name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    if name not in CHECKS:
        hint = did_you_mean(name, CHECKS)
        raise DataError(f"IFEval: an instruction must be one of {len(CHECKS)} known ones: {where} has {name!r}.{hint}")
    arguments = {}
    for parameter in _PARAMETERS[name]:
        value = given.get(parameter)
        if value is None:
            present = [key for key, value in given.items() if value is not None]
            raise DataError(
                f"IFEval: the instruction {name!r} of {where} must have the argument {parameter!r}: it has "
                f"{', '.join(present) or 'none'}.{did_you_mean(parameter, present)}"
            )
        if parameter.endswith("relation") and value not in RELATIONS:
            raise DataError(
                f"IFEval: {parameter} of {name!r} in {where} must be 'less than' or 'at least': got {value!r}."
            )
        arguments[parameter] = value
    return arguments


class IFEvalScoreData(TensorClass["nocast"]):
    """The four numbers that IFEval reports, per response.

    prompt_level_*  float32[B, 1]  1 where every instruction is followed
    inst_level_*    float32[B, 1]  the share of the instructions that are followed
    *_strict_acc    for the unchanged response; *_loose_acc: followed in any of the eight simplified variants

    >>> score = IFEvalScoreData.of([True, False], [True, True])
    >>> [score.get(name).item() for name in IFEvalScoreData.NAMES]
    [0.0, 0.5, 1.0, 1.0]
    """

    prompt_level_strict_acc: Tensor
    inst_level_strict_acc: Tensor
    prompt_level_loose_acc: Tensor
    inst_level_loose_acc: Tensor

    NAMES: ClassVar[tuple[str, ...]] = tuple(
        f"{level}_level_{kind}_acc" for kind in ("strict", "loose") for level in ("prompt", "inst")
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

    Reads   the response as text (`completion_texts`): its last answer block outside thinking, else all text outside
            thinking; ``instruction_ids_key``, ``keyword_args_key``: the instructions; ``id_key``: the row's name for
            errors, optional; "stop_reason", optional
    Writes  ``score_key``  IFEvalScoreData [B]
            "reward"       float32[B, 1, 1]  += the aggregated score, in the ``next`` tensordict
            "done", "terminated"  bool[B, 1]  True if there is an answer block, unless ``set_done_if_answer=False``
    Raises  DataError naming the row for an unknown instruction (with the nearest known one) or a missing argument

    The aggregate is the mean of the score's four numbers, weighted by ``format_weights``, plus 0.1 for exactly one
    answer block and 0.05 for exactly one thinking block: at most 1.15, and 0 for an empty response.
    ``aggregate_reward="structured"`` adds 0.5 for each of the two instead, and 0.2 for a response that was not cut off:
    at most 2.2. ``aggregate_reward=False`` writes no reward. A function replaces the aggregate:
    ``fn(score, think_blocks, answer_blocks, complete) -> float``, where ``complete`` is False for a cut-off response.

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
        aggregate_reward: bool | Literal["structured"] | Aggregate = True,
        format_weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
        set_done_if_answer: bool = True,
        tokenizer: Any | None = None,
        input_mode: str | None = None,
    ):
        super().__init__()
        if len(format_weights) != 4 or abs(sum(format_weights) - 1) > 1e-6:
            raise ConfigError(f"IfEvalScorer: format_weights must be four numbers that sum to 1: got {format_weights}.")
        if not (isinstance(aggregate_reward, bool) or aggregate_reward == "structured" or callable(aggregate_reward)):
            known = "True, False, 'structured' or a function"
            raise ConfigError(f"IfEvalScorer: aggregate_reward must be {known}: got {aggregate_reward!r}.")
        check_choice("IfEvalScorer", "input_mode", input_mode, (None, *MODES))
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
        """The weighted mean of the score's four numbers plus the rewards for form, float32 with the batch size of
        ``score``."""
        numbers = torch.stack([score.get(name).reshape(score.batch_size) for name in IFEvalScoreData.NAMES], -1)
        followed = (numbers * numbers.new_tensor(self.format_weights)).sum(-1)
        one_answer, one_thought = len(answer_blocks or ()) == 1, len(think_blocks or ()) == 1
        if self.aggregate_reward == "structured":
            return followed + 0.5 * one_answer + 0.5 * one_thought + 0.2 * complete
        return followed + 0.1 * one_answer + 0.05 * one_thought

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        texts = completion_texts(td, tokenizer_of(self), who="IfEvalScorer", mode=self.input_mode)
        blocks = [find_blocks(text) for text in texts]
        scores = []
        for found, instructions in zip(blocks, self._instructions(td), strict=True):
            # Without an answer block the whole response counts, as in the public benchmark, which has no such blocks.
            verdict = evaluate(found.answers[-1] if found.answers else found.outside, instructions)
            scores.append(IFEvalScoreData.of(verdict.strict, verdict.loose))
        score = torch.stack(scores)
        next_td.set(self.score_key, score if td.device is None else score.to(td.device))
        if self.aggregate_reward is not False:
            aggregate = self.aggregate_reward
            aggregate = aggregate if callable(aggregate) else self.default_reward_aggregator
            reasons = column_values(td, "stop_reason") or [None] * len(texts)
            values = [
                float(aggregate(score, found.thoughts, found.answers, reason not in _CUT))
                for score, found, reason in zip(scores, blocks, reasons, strict=True)
            ]
            add_reward(next_td, torch.tensor(values, dtype=torch.float32, device=td.device))
        if self.set_done_if_answer:
            end_where(next_td, torch.tensor([bool(b.answers) for b in blocks], device=td.device).view(-1, 1))
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        if self.aggregate_reward is not False:
            reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        reward_spec[self.score_key] = IFEvalScoreData.default_spec(reward_spec.shape)
        return reward_spec

    def _instructions(self, td: TensorDictBase) -> list[Instructions]:
        names, arguments = (
            required_column(td, key, "IfEvalScorer", "the instructions")
            for key in (self.instruction_ids_key, self.keyword_args_key)
        )
        keys = column_values(td, self.id_key) or [None] * len(names)
        return [
            Instructions.of(ids, kwargs, f"row {row} of the batch" if key is None else f"the row with key {key}")
            for row, (ids, kwargs, key) in enumerate(zip(names, arguments, keys, strict=True), 1)
        ]


class IFEvalEnv(TaskEnv):
    """IFEval as an environment: a prompt with instructions, a reward for following them (see `IfEvalScorer`).

    Reads   rows with "prompt", "instruction_id_list" and "kwargs", as in the public files; "key" if present
    Raises  DataError naming the row for an unknown instruction, MissingDependencyError if one needs langdetect

    The arguments are those of `TaskEnv`; the public dataset has one split, "train". To match the public benchmark,
    which does not ask for answer blocks, pass your own ``system_prompt``.

    >>> rows = [{"prompt": "Hi! No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> IFEvalEnv(dataset=rows).reset().get("instruction_id_list").tolist()
    [['punctuation:no_comma']]
    """

    DATASET = "google/IFEval"
    SCORER = IfEvalScorer
    SYSTEM_PROMPT = (
        "You follow instructions exactly. Think between <think> and </think> about what is asked for, then give the "
        "whole response, and nothing else, between <answer> and </answer>."
    )

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        where = row_label(number)
        for name in ("instruction_id_list", "kwargs"):
            if row.get(name) is None:
                columns = f"{', '.join(row)}.{did_you_mean(name, row)}"
                raise DataError(f"IFEvalEnv: {where} must have the column {name!r}: its columns are {columns}")
        instructions = Instructions.of(row["instruction_id_list"], row["kwargs"], where)
        kept = {name: value for name, value in super().prompt_row(row, number).items() if name != "answer"}
        return {**kept, "instruction_id_list": instructions.names, "kwargs": instructions.arguments}
