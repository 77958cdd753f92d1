"""The settings of ``llmrl dpo`` and ``llmrl reward``; no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from llmrl.settings import Settings
from llmrl.train.settings.sft import SFTConfig


class PreferenceData(Settings):
    """Pairs of answers to one prompt: rows with ``prompt``, ``chosen`` and ``rejected``, each text or messages. For kto
    also rows with ``prompt``, ``completion`` and ``label``.
    """

    path: str = Field(
        description="a file, a pattern, a folder or a hub name (docs/data.md); or embedded: sums, sums_mistakes"
    )
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a folder, a hub dataset or an embedded task")
    rows: int | None = Field(None, ge=1, description="only the first pairs, this many; null: all")
    prompt_column: str | None = Field(None, description="column of the prompt, if it has another name")
    chosen_column: str = Field("chosen", description="column of the better answer")
    rejected_column: str = Field("rejected", description="column of the worse answer")
    completion_column: str | None = Field(None, description="kto: column of a single answer, if it has another name")
    label_column: str | None = Field(None, description="kto: column of its label, true or false; null: label, kto_tag")
    margin_column: str | None = Field(None, description="llmrl reward: column of the minimum reward difference")
    system_prompt: str | None = Field(None, description="system message of conversations without one")


PAIR_COLUMNS = ("prompt_column", "chosen_column", "rejected_column", "system_prompt")
ANSWER_COLUMNS = (*PAIR_COLUMNS, "completion_column", "label_column")  # of KTO


class DPOSettings(Settings):
    """The DPO loss of a pair."""

    kind: Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "kto"] = Field(
        "sigmoid",
        description="sigmoid: DPO; ipo: a squared distance; hinge: SLiC; simpo, orpo: without a reference; kto: single "
        "answers with labels",
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="larger values keep the model closer to the reference; of orpo the weight of the preference; null: "
        "0.1, for simpo 2",
    )
    desirable_weight: float | None = Field(None, gt=0, description="for kto: weight of desirable answers; null: 1")
    undesirable_weight: float | None = Field(None, gt=0, description="for kto: weight of the others; null: 1")
    gamma: float | None = Field(None, ge=0, description="for simpo: the margin to reach, times beta; null: 1")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed share of wrong labels; for sigmoid")
    normalize_by_seq_length: bool | None = Field(
        None, description="mean log-prob over an answer's tokens, not the sum; null: true for ipo, simpo and orpo"
    )
    reference: Literal["start", "none"] = Field(
        "start", description="start: the starting model, scored once; none: a uniform distribution"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `DPOLoss`; for kto of `KTOLoss`."""
        weights = {"desirable_weight", "undesirable_weight"}
        if self.kind == "kto":
            return self.model_dump(include={"beta", *weights}, exclude_none=True)
        return self.model_dump(exclude={"reference", *weights}) | {"reference_free": self.reference == "none"}

    @property
    def has_reference(self) -> bool:
        return self.reference == "start" and self.kind not in ("simpo", "orpo")

    @model_validator(mode="after")
    def _fits_the_kind(self) -> DPOSettings:
        if self.label_smoothing and self.kind != "sigmoid":
            raise ValueError(f"label_smoothing is for kind sigmoid: got {self.kind}")
        if self.gamma is not None and self.kind != "simpo":
            raise ValueError(f"gamma is for kind simpo: got {self.kind}")
        if self.kind != "kto" and (self.desirable_weight or self.undesirable_weight):
            raise ValueError(f"desirable_weight and undesirable_weight are for kind kto: got {self.kind}")
        if self.kind == "kto" and (self.normalize_by_seq_length or self.reference == "none"):
            raise ValueError("kind kto compares whole answers with a reference: leave these settings out")
        if self.normalize_by_seq_length is False and self.kind in ("simpo", "orpo"):
            raise ValueError(f"normalize_by_seq_length false is not for kind {self.kind}, which compares means")
        return self


class PairsConfig(SFTConfig):
    """The settings common to both recipes."""

    data: PreferenceData
    max_length: int = Field(2048, ge=2, description="longest conversation of a pair, in tokens")
    too_long: Literal["error", "drop"] = Field(
        "error", description="pairs with a longer one end the run, or are dropped"
    )
    batch_size: int = Field(64, ge=1, description="pairs per optimizer step, over all processes")

    @property
    def row_length(self) -> int:
        return 2 * self.max_length

    @property
    def reads_answers(self) -> bool:
        """True if the data are single answers with labels; pairs are then read as two."""
        return False

    @model_validator(mode="after")
    def _columns_are_read(self) -> PairsConfig:
        if not self.reads_answers and (self.data.completion_column or self.data.label_column):
            raise ValueError("data.completion_column and data.label_column are for dpo.kind kto: leave them out")
        return self


class DPOConfig(PairsConfig):
    """Direct preference optimisation: chosen answers become more likely than rejected ones."""

    dpo: DPOSettings = DPOSettings()

    @property
    def reads_answers(self) -> bool:
        return self.dpo.kind == "kto"

    @property
    def loss_in_words(self) -> str:
        dpo = self.dpo
        smoothed = f", {dpo.label_smoothing:.0%} of the labels assumed wrong" if dpo.label_smoothing else ""
        reference = "the starting model, scored once" if dpo.has_reference else "none"
        beta = dpo.beta if dpo.beta is not None else 2.0 if dpo.kind == "simpo" else 0.1
        target = f", gamma {1.0 if dpo.gamma is None else dpo.gamma:g}" if dpo.kind == "simpo" else ""
        if dpo.kind == "kto":
            target = f", weights {dpo.desirable_weight or 1:g} desirable, {dpo.undesirable_weight or 1:g} undesirable"
        return f"{dpo.kind}, beta {beta:g}{target}{smoothed} · reference: {reference}"


class RewardLossSettings(Settings):
    """The loss of a reward model."""

    level: Literal["sequence", "token"] = Field(
        "sequence", description="sequence: one reward for the answer; token: one per token from the first difference on"
    )
    first_share: float = Field(
        0.0, ge=0, le=1, description="with token, the share of the loss at the first token that differs"
    )

    @model_validator(mode="after")
    def _first_token_is_for_tokens(self) -> RewardLossSettings:
        if self.first_share and self.level != "token":
            raise ValueError(f"first_share is for level token: got {self.level}")
        return self


class RewardConfig(PairsConfig):
    """A reward model: chosen answers get larger rewards than rejected ones."""

    measures_rows: ClassVar[bool] = True
    reward: RewardLossSettings = RewardLossSettings()

    @property
    def loss_in_words(self) -> str:
        tokens = "mean over the tokens from the first difference on"
        place = "after the last token" if self.reward.level == "sequence" else tokens
        share = self.reward.first_share
        first = f"; {share:.0%} of it at the first of them" if share else ""
        return f"-log sigmoid(r chosen - r rejected), {place}{first}"

    @model_validator(mode="after")
    def _cannot_generate(self) -> RewardConfig:
        if self.env is not None:
            raise ValueError("env is for models that generate: a reward model is evaluated on pairs of eval.split")
        given = {"packing": self.packing == "on", "parallel.context": self.parallel.context > 1}
        given["model_options.float32_head"] = self.model_options.float32_head
        if names := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"{names[0]} is for models that generate: leave it out")
        return self
