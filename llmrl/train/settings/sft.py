"""The settings of ``llmrl sft``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from llmrl.settings import Settings
from llmrl.train.settings.environment import EnvSettings, EvalSettings
from llmrl.train.settings.model import ModelSource


class SFTData(Settings):
    """Conversations: rows with ``messages``, with a prompt and an answer, or in another public format."""

    path: str = Field(
        description="a file, a pattern, a folder or a hub name (docs/data.md); or embedded: sums, big_sums, colours, "
        "arithmetic"
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a folder, a hub dataset or an embedded task")
    rows: int | None = Field(None, ge=1, description="only the first conversations, this many; null: all")
    prompt_column: str | None = Field(None, description="column of the prompt, if it has another name")
    completion_column: str | None = Field(None, description="column of the answer, if it has another name")
    system_prompt: str | None = Field(None, description="system message of conversations without one")
    train_on: Literal["assistant", "last"] = Field(
        "assistant", description="assistant: every turn of the assistant; last: the last one only"
    )


class RowsEvalSettings(EvalSettings):
    """Evaluation of what is trained on rows."""

    loss: bool = Field(
        False,
        description="with an env: also the loss on the rows of data.path in eval.split, the first eval.rows of them",
    )


class StopSettings(Settings):
    """Early stopping, once the score on a separate split is high enough."""

    at_least: float = Field(description="mean score at which training ends")
    split: str = Field("validation", description="split that is neither trained on nor reported")
    rows: int = Field(200, ge=1, description="how many of them")
    every: int = Field(10, ge=1, description="steps between evaluations")
    after: int = Field(0, ge=0, description="first step that is evaluated")


class SFTConfig(ModelSource):
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens that the assistant wrote."""

    FIXED: ClassVar[tuple[str, ...]] = (*ModelSource.FIXED, "data", "max_length", "too_long")
    measures_rows: ClassVar[bool] = False  # True: rows like the trained ones are measured without eval.dataset too

    data: SFTData
    max_length: int = Field(2048, ge=2, description="longest conversation, in tokens")
    too_long: Literal["error", "split", "truncate"] = Field(
        "error", description="longer conversations: an error; split into pieces; or truncated"
    )
    batch_size: int = Field(64, ge=1, description="conversations per optimizer step, over all processes")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(None, ge=1, description="optimizer steps; null: as many as the epochs have")
    env: EnvSettings | None = Field(None, description="the task that is evaluated; null: the loss on eval.dataset")
    eval: RowsEvalSettings = RowsEvalSettings()
    stop: StopSettings | None = Field(None, description="early stopping; null: none")
    samples: int = Field(2, ge=0, description="conversations printed with their trained tokens marked")

    @property
    def row_length(self) -> int:
        """The largest number of tokens in a row of a batch."""
        return self.max_length

    @property
    def loss_in_words(self) -> str:
        return "-log p, sum over the assistant's tokens / tokens of the step"

    @property
    def stop_eval(self) -> EvalSettings | None:
        """The evaluation that decides when to stop; None without ``stop``."""
        return self.stop and self.eval.model_copy(
            update={"split": self.stop.split, "rows": self.stop.rows, "sets": None}
        )

    @model_validator(mode="before")
    @classmethod
    def _measure_all_held_out_rows(cls, data: Any) -> Any:
        """Without env all rows of ``eval.dataset`` are measured, unless ``eval.rows`` is given."""
        section = data.get("eval") if isinstance(data, dict) and data.get("env") is None else None
        if isinstance(section, dict) and section.get("dataset") is not None:
            data = data | {"eval": {"rows": None} | section}
        return data

    @model_validator(mode="after")
    def _stopping_needs_a_measure(self) -> SFTConfig:
        if self.env is not None and self.env.agent is not None:
            raise ValueError("env.agent is for recipes that sample, such as grpo: here leave it out")
        if self.env is not None and self.env.is_mix:
            raise ValueError("env.mix is for recipes that sample, such as grpo: here name one task")
        if self.eval.loss and (self.env is None or self.eval.split == self.data.split):
            wrong = (
                f"eval.split {self.eval.split} is trained on" if self.env else "without env, eval.dataset is measured"
            )
            raise ValueError(f"eval.loss is the loss on rows beside the task env, of another split: {wrong}")
        if self.stop is not None and self.env is None:
            raise ValueError("stop needs env: a task that is measured to decide when to stop")
        return self
