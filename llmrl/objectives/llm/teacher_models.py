"""The models behind a run's `TeacherTerm`: one beside the student, the student itself, or one behind a URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.data.ragged.stack import stack_columns
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.log_probs import TokenScorer, TokenScores
from llmrl.modules.llm.policies.containers import LogProbs
from llmrl.objectives.llm.batch import TOKENS
from llmrl.objectives.llm.teacher import SAMPLED, TOP_IDS, TeacherTerm
from llmrl.objectives.llm.teacher_settings import DivergenceSettings

if TYPE_CHECKING:
    from llmrl.objectives.llm.algorithm import Context
    from llmrl.objectives.llm.grpo import GRPOLoss


class FrozenTeacher:
    """A teacher beside the student, or the student itself, in the precision of the run's arithmetic.

    ``around()`` is the block in which the model is the teacher.
    """

    def __init__(
        self, model: nn.Module, context: Context, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ):
        self._scorer, self.model = TokenScorer(model, packing=context.config.packing), model
        self._precision, self._around = context.session.autocast, around

    @classmethod
    def load(cls, options: DivergenceSettings, context: Context) -> FrozenTeacher:
        if options.is_self:
            return cls(context.actor.model, context)
        if options.is_base:
            return cls(context.actor.model, context, context.without_adapters)
        model = context.load_model(options.source).requires_grad_(False)
        if context.session.low_precision and not context.session.sharded:
            model.to(torch.bfloat16)  # it is never updated
        return cls(model, context)

    def token_scores(self, *batch: Tensor, **options: Any) -> TokenScores:
        with self._precision(), self._around():
            return self._scorer.token_scores(*batch, **options)

    def write(self, loss: GRPOLoss, batch: TensorDictBase | None, context: Context) -> None:
        """Writes the columns that the loss reads, by passes over the micro-batches of its updates."""
        found = context.updater.score(loss, batch, loss.ask_teacher)
        if batch is not None:
            lengths = [len(ids) for ids in batch.get(TOKENS, as_list=True)]
            write_columns(batch, [row[:length] for row, length in zip(found, lengths, strict=True)])


class ServedTeacher:
    """A teacher behind the URL of a vLLM server, which scores the ids that it is sent, at temperature 1.

    Raises  ConfigError for a server that gives fewer than ``k`` log-probs
    """

    def __init__(self, options: DivergenceSettings):
        self._engine, self._k = VLLMEngine(options.source, eos_token_ids=()), options.num_likeliest
        try:
            if options.estimator == "topk":
                self._engine.likeliest([torch.arange(2)], self._k)  # now, not after the first rollouts
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections; the server goes on."""
        self._engine.close()

    def write(self, loss: GRPOLoss, batch: TensorDictBase | None, context: Context) -> None:
        """Writes the columns that the loss reads."""
        if batch is None:
            return
        rows = batch.get(TOKENS, as_list=True)
        if loss.teacher.options.estimator == "sample":
            write_columns(batch, [row.float() for row in self._engine.score(rows)])
        else:
            write_columns(batch, self._engine.likeliest(rows, self._k))


def write_columns(batch: TensorDictBase, found: Sequence[Tensor]) -> None:
    """Log-probs [T] of the sampled tokens, or [T, 2K]: the ids of the likeliest, then their log-probs."""
    if found[0].ndim == 1:
        batch.set(SAMPLED[1], LogProbs.from_rows({"full": list(found)}))
        return
    ids, log_probs = zip(*(row.chunk(2, -1) for row in found), strict=True)
    columns = {"ids": [row.int() for row in ids], "log_probs": [row.float() for row in log_probs]}
    batch.set(TOP_IDS[0], stack_columns(columns, [len(found)]))


def make_term(options: DivergenceSettings, context: Context) -> TeacherTerm:
    """The term of a run, with its teacher loaded, or connected to."""
    if options.is_server:
        teacher: Any = context.run.close_at_end(ServedTeacher(options))
    else:
        teacher = FrozenTeacher.load(options, context)
    heat = options.temperature or context.config.sampling.temperature
    return TeacherTerm(options, teacher, temperature=heat, vocabulary=len(context.tokenizer))
