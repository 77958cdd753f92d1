"""Settings of ``llmrl sft``. The loop that reads them is `llmrl.recipes.sft`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from llmrl.train.settings import EnvSettings, EvalSettings, ModelSource, Settings

__all__ = ["SFTConfig", "SFTData", "StopSettings"]


class SFTData(Settings):
    """Conversations: rows with ``messages``, with ``prompt`` and ``completion``, or with a question and an answer."""

    path: str = Field(
        description="a .jsonl, .json, .parquet or .csv file, a hub name, or an embedded task: sums, big_sums"
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset or of an embedded task")
    rows: int | None = Field(None, ge=1, description="the first so many conversations; null: all")
    prompt_column: str | None = Field(None, description="where the prompt is, if it goes by another name")
    completion_column: str | None = Field(None, description="where the answer is, if it goes by another name")
    system_prompt: str | None = Field(None, description="first message of conversations that have none of their own")
    train_on: Literal["assistant", "last"] = Field(
        "assistant", description="assistant: every turn of the assistant; last: the last one only"
    )


class StopSettings(Settings):
    """Stops as soon as the evaluation, on a split of its own, is good enough."""

    at_least: float = Field(description="mean score at which training ends")
    split: str = Field("validation", description="problems that are neither trained on nor reported")
    rows: int = Field(200, ge=1, description="how many of them")
    every: int = Field(10, ge=1, description="steps between looks")
    after: int = Field(0, ge=0, description="first step that looks")


class SFTConfig(ModelSource):
    """Supervised fine-tuning: the mean negative log-likelihood of the tokens that the assistant wrote."""

    FIXED: ClassVar[tuple[str, ...]] = (*ModelSource.FIXED, "data", "max_length", "too_long")

    data: SFTData
    max_length: int = Field(2048, ge=2, description="longest conversation, in tokens")
    too_long: Literal["error", "split", "truncate"] = Field(
        "error", description="what becomes of a longer one: an error; cut into pieces; its end cut off"
    )
    batch_size: int = Field(64, ge=1, description="conversations per optimizer step, over all processes")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    steps: int | None = Field(None, ge=1, description="optimizer steps; null: as many as the epochs have")
    env: EnvSettings | None = Field(None, description="the task that evaluation asks; null: no evaluation")
    eval: EvalSettings = EvalSettings()
    stop: StopSettings | None = Field(None, description="end early")
    samples: int = Field(2, ge=0, description="conversations printed with their trained tokens marked")

    @model_validator(mode="after")
    def _stopping_needs_a_measure(self) -> SFTConfig:
        if self.stop is not None and self.env is None:
            raise ValueError("stop needs env: what is measured to decide that it is time to stop?")
        return self
