"""`IFEvalEnv`: prompts with instructions that can be checked, and the scorer that checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrl.envs.llm.ifeval.evaluation import Instructions
from llmrl.envs.llm.ifeval.scorer import IfEvalScorer
from llmrl.envs.llm.task import Row, TaskEnv
from llmrl.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IFEvalEnv"]


class IFEvalEnv(TaskEnv):
    """IFEval as an environment: a prompt with instructions, a reward for following them (see `IfEvalScorer`).

    Reads   rows with "prompt", "instruction_id_list" and "kwargs", as the public files have them; "key" where present
    Raises  DataError naming the row for an unknown instruction, MissingDependencyError where one needs langdetect

    The arguments are those of `TaskEnv`; the public dataset has one split, "train". For the public benchmark, in which
    nothing asks for answer blocks, give ``system_prompt`` a text of your own.

    >>> rows = [{"prompt": "Hi! No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> IFEvalEnv(dataset=rows).reset().get("instruction_id_list").tolist()
    [['punctuation:no_comma']]
    """

    DATASET = "google/IFEval"
    SYSTEM_PROMPT = (
        "You follow instructions exactly. Think between <think> and </think> about what is asked for, then give the "
        "whole response, and nothing else, between <answer> and </answer>."
    )

    @classmethod
    def prompt_row(cls, row: Row, number: int | None = None) -> dict[str, Any]:
        where = "a row" if number is None else f"row {number}"
        for name in ("instruction_id_list", "kwargs"):
            if row.get(name) is None:
                raise DataError(
                    f"IFEvalEnv: {where} must have the column {name!r}: its columns are {', '.join(row)}."
                    f"{did_you_mean(name, row)}"
                )
        instructions = Instructions.of(row["instruction_id_list"], row["kwargs"], where)
        kept = {name: value for name, value in super().prompt_row(row, number).items() if name != "answer"}
        return {**kept, "instruction_id_list": instructions.names, "kwargs": instructions.arguments}

    @classmethod
    def scorer(cls, tokenizer: PreTrainedTokenizerBase | None = None) -> IfEvalScorer:
        return IfEvalScorer(tokenizer=tokenizer)
