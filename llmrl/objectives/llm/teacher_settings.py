"""The settings of a teacher: a recipe's sections ``distill`` and ``grpo.teacher``. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from llmrl.settings import Settings


def _by_name(teacher: Any) -> Any:
    return {"model": teacher} if isinstance(teacher, str) else teacher


class DivergenceSettings(Settings):
    """How far the student is from a teacher: what ``grpo.teacher`` and ``distill`` have in common.

    ``source``  what is set as the teacher, whatever the setting's name
    """

    TEACHER: ClassVar[str]  # the setting that names the teacher

    divergence: Literal["reverse", "forward", "jsd"] = Field(
        default="reverse",
        description="reverse: KL(student || teacher); forward: KL(teacher || student); jsd: between the two",
    )
    beta: float | None = Field(
        default=None, gt=0, lt=1, description="with jsd, the weight of the teacher in the mixture; null: 0.5"
    )
    estimator: Literal["full", "topk", "sample"] = Field(
        default="full",
        description="full: over the whole vocabulary; topk: over the teacher's k likeliest tokens and all others "
        "together; sample: from the sampled token alone",
    )
    k: int | None = Field(
        default=None, ge=1, description="with topk, how many; null: 64; a server gives at most its --max-logprobs"
    )
    temperature: float | None = Field(
        default=None, gt=0, description="of both distributions; null: that of sampling, which sample needs"
    )
    demonstration: str | None = Field(
        default=None, description="a column with a good answer to the row's prompt, which the teacher alone reads"
    )
    demonstration_text: str = Field(
        default="\n\nThis is an example of a good answer:\n{demonstration}\n\nNow give an answer of your own.",
        description="what follows the last user message in the teacher's prompt; {demonstration} stands for the column",
    )

    @property
    def coefficient(self) -> float:
        """The weight of the divergence in the loss."""
        return 1.0

    @property
    def source(self) -> str:
        return getattr(self, self.TEACHER)

    def at(self, source: str) -> Self:
        """These settings with another teacher."""
        return self.model_copy(update={self.TEACHER: source})

    @property
    def mixture(self) -> float:
        """The beta of `functional.divergence`."""
        return {"reverse": 1.0, "forward": 0.0}.get(self.divergence, 0.5 if self.beta is None else self.beta)

    @property
    def num_likeliest(self) -> int:
        return 64 if self.k is None else self.k

    @property
    def is_server(self) -> bool:
        return self.source.startswith(("http://", "https://"))

    @property
    def is_base(self) -> bool:
        """The teacher is the student without its adapters."""
        return self.source == "base"

    @property
    def is_self(self) -> bool:
        """The teacher is the student as it is, with a demonstration in its prompt."""
        return self.source == "self"

    @property
    def is_loaded(self) -> bool:
        """The teacher is a model of its own beside the student."""
        return not (self.is_server or self.is_base or self.is_self)

    def in_words(self) -> str:
        kinds = {"reverse": "KL(student, teacher)", "forward": "KL(teacher, student)"}
        value = kinds.get(self.divergence, f"Jensen-Shannon, beta {self.mixture:g}")
        places = {
            "full": "the whole vocabulary",
            "topk": f"its {self.num_likeliest} likeliest tokens and all others together",
        }
        over = places.get(self.estimator, "the sampled token")
        heat = "that of sampling" if self.temperature is None else f"{self.temperature:g}"
        reads = "" if self.demonstration is None else f", which reads {self.demonstration} in its prompt"
        return f"{value} over {over} · temperature of both: {heat} · teacher {self.source}{reads}"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        fields = type(self).model_fields
        for holds, problem in (
            (self.beta is None or self.divergence == "jsd", f"beta is for divergence jsd: got {self.divergence}"),
            (
                self.estimator != "sample" or self.divergence == "reverse",
                f"estimator sample estimates divergence reverse: got {self.divergence}; use topk",
            ),
            (
                self.k is None or self.estimator == "topk",
                f"k is for estimator topk: got {self.estimator}",
            ),
            (
                not self.is_server or self.estimator != "full",
                "estimator full needs the teacher's logits, which a server does not give: use topk or sample",
            ),
            (
                not self.is_self or self.demonstration is not None,
                f"{self.TEACHER} self is the student as it is, which teaches nothing without a demonstration: set "
                "demonstration to its column, or name another model (./self for a folder of this name)",
            ),
            (
                not self.is_server or self.demonstration is None,
                f"demonstration is for a teacher beside the student: got {self.source}",
            ),
            (
                "{demonstration}" in self.demonstration_text,
                f"demonstration_text must have {{demonstration}} in it: got {self.demonstration_text!r}",
            ),
            (
                self.demonstration is not None or self.demonstration_text == fields["demonstration_text"].default,
                "demonstration_text needs demonstration, a column of the data; it has no effect",
            ),
        ):
            if not holds:
                raise ValueError(problem)
        return self


_TEACHER = (
    "a folder, hub name or run, beside the student; base: the student without its adapters; self: the student, with "
    "demonstration; or a vLLM server's http://host:port"
)


class DistillSettings(DivergenceSettings):
    """The teacher, and how far the student is from it: a recipe's ``distill:`` section."""

    TEACHER: ClassVar[str] = "teacher"

    teacher: str = Field(default="", description=_TEACHER)
    weight_reward: float = Field(
        default=0.0, ge=0, description="weight of GRPO's own loss, by reward, beside the divergence; 0: none is needed"
    )


class TeacherSettings(DivergenceSettings):
    """A teacher beside the reward: the section ``teacher`` of ``grpo``, or the teacher's name alone."""

    TEACHER: ClassVar[str] = "model"

    model: str = Field(min_length=1, description=_TEACHER)
    weight: float = Field(default=1.0, gt=0, description="of the divergence, beside the loss by reward")

    @property
    def coefficient(self) -> float:
        return self.weight


NamedTeacher = Annotated[TeacherSettings | None, BeforeValidator(_by_name)]
