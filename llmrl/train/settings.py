"""The sections that the YAML files of both recipes share; no torch: config errors are reported before it loads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from llmrl.errors import ConfigError, did_you_mean
from llmrl.loading import load_function, split_name

__all__ = [
    "ENVIRONMENTS",
    "TOOL_FORMATS",
    "CheckpointSettings",
    "EnvSettings",
    "EvalSettings",
    "ModelSource",
    "OptimSettings",
    "ParallelSettings",
    "RewardSettings",
    "SamplingSettings",
    "Settings",
    "TinyModelSettings",
]


class Settings(BaseModel):
    """A section: unknown names are errors, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModelSettings(Settings):
    """A random model and a byte-level BPE tokenizer, made on the spot: what the embedded task trains."""

    architecture: Literal["qwen2", "qwen3", "llama", "mistral", "gpt2"] = Field(
        "qwen2", description="family of the layers"
    )
    hidden_size: int = Field(160, ge=16, description="width")
    layers: int = Field(4, ge=1, description="decoder layers")
    heads: int = Field(5, ge=1, description="attention heads; vllm on a CPU needs hidden_size / heads to be 32 or 64")


class OptimSettings(Settings):
    """AdamW."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate", json_schema_extra={"also": ["learning_rate"]})
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="what follows the warm-up; linear and cosine end at a twentieth of lr"
    )
    warmup: int = Field(0, ge=0, description="optimizer steps until lr is reached")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, on every parameter")
    clip_norm: float = Field(
        1.0, gt=0, description="gradients are scaled down to this norm", json_schema_extra={"also": ["max_grad_norm"]}
    )


class SamplingSettings(Settings):
    """Sampling during rollouts; evaluation is greedy."""

    max_tokens: int = Field(
        1024, ge=1, description="longest completion, in tokens", json_schema_extra={"also": ["max_new_tokens"]}
    )
    temperature: float = Field(1.0, gt=0, description="of the softmax that is sampled from, and trained")
    top_p: float = Field(1.0, gt=0, le=1, description="1 keeps the whole distribution; less makes training off-policy")
    top_k: int = Field(0, ge=0, description="0 keeps the whole distribution; more makes training off-policy")


def _of_own(name: str) -> str:
    """Checks the form of a user's name; it is loaded last, when everything else is right."""
    try:
        split_name(name, what="name")
    except ConfigError as error:
        raise ValueError(str(error).partition(": ")[2]) from None  # without its first word: the setting is named
    return name


FunctionName = Annotated[str, AfterValidator(_of_own)]


class RewardSettings(Settings):
    """One reward of several: exactly one of ``fn``, ``judge``, ``reward_model`` and ``code``, and how it counts."""

    fn: FunctionName | None = Field(None, description="a plain function, as my_pkg.rewards:exact")
    judge: dict[str, Any] | None = Field(None, description="a model behind a URL: the arguments of JudgeReward")
    reward_model: dict[str, Any] | None = Field(None, description="the arguments of RewardModelScorer.load")
    code: dict[str, Any] | None = Field(None, description="tests in a sandbox: the arguments of CodeReward")
    weight: float = Field(1.0, allow_inf_nan=False, description="what its values are multiplied by; 0: only reported")
    name: str | None = Field(None, pattern=r"^[\w.-]+$", description="of its metric; null: the function's")
    deadline_s: float | None = Field(
        None, gt=0, description="seconds for one batch; null: env.reward_deadline_s for fn"
    )
    retries: int | None = Field(None, ge=0, description="null: env.retries")
    concurrency: int | None = Field(None, ge=1, description="rows that are scored at a time")
    answer_key: str | None = Field(None, description="column of the reference; null: answer")
    batched: bool | None = Field(None, description="whether it is called once, with lists of all rows")
    process: bool | None = Field(
        None, description="whether fn runs in a process of its own, which can be killed; null: unless it is llmrl's"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, data: object) -> object:
        return {"fn": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> RewardSettings:
        kinds = ("fn", "judge", "reward_model", "code")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) == 1:
            return self
        raise ValueError(f"must have exactly one of {', '.join(kinds)}: got {' and '.join(given) or 'none of them'}")


def _one_of(known: tuple[str, ...], what: str) -> AfterValidator:
    """Accepts a name that is known here, or one of the user's."""

    def check(name: str) -> str:
        if name not in known and ":" not in name:
            listed = f"{', '.join(known)}, or package.module:name"
            raise ValueError(f"{name!r} is not {what}: must be one of {listed}.{did_you_mean(name, known)}")
        return name if name in known else _of_own(name)

    return AfterValidator(check)


def _known_tool(tool: str | dict[str, dict[str, Any] | None]) -> str | dict[str, dict[str, Any] | None]:
    from llmrl.tools.load import BUILT_IN  # here and not above: most runs have no tools

    if isinstance(tool, dict) and len(tool) != 1:
        raise ValueError(f"must be one tool's name with its options: got {', '.join(tool) or 'nothing'}")
    name = tool if isinstance(tool, str) else next(iter(tool))
    _one_of(tuple(sorted(BUILT_IN)), "a tool").func(name)
    return tool


ToolName = Annotated[str | dict[str, dict[str, Any] | None], AfterValidator(_known_tool)]


ENVIRONMENTS = ("sums", "big_sums", "gsm8k", "math", "countdown", "ifeval", "chat")
TOOL_FORMATS = ("auto", "hermes", "qwen", "llama", "mistral", "deepseek", "harmony", "gpt_oss")
TOOL_FORMATS += ("function", "tagged", "xml", "python")


class EnvSettings(Settings):
    """Prompts, tools, user and rewards."""

    name: Annotated[str, _one_of(ENVIRONMENTS, "an environment")] = Field(
        "chat",
        description="sums, big_sums: the embedded tasks; gsm8k, math, countdown, ifeval: their prompts and rewards; "
        "chat: dataset and reward of your own; my_pkg.envs:MyEnv: a class of your own",
    )
    options: dict[str, Any] = Field({}, description="arguments of an environment of your own, by name")
    dataset: str | None = Field(None, description="a .jsonl, .json, .parquet or .csv file, or a hub name")
    config: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", description="split of a hub dataset or of an embedded task")
    prompt_column: str | None = Field(None, description="where the prompt is, if it goes by another name")
    answer_column: str | None = Field(None, description="where the reference answer is, if it goes by another name")
    system_prompt: str | None = Field(None, description="first message of every conversation")
    reward: FunctionName | None = Field(
        None, description="a plain function, as my_pkg.rewards:exact; called with completion, answer"
    )
    rewards: list[RewardSettings] | None = Field(
        None,
        min_length=1,
        description="several, added up; each {fn: NAME, weight: 1.0}, or judge, reward_model or code for fn",
    )
    reward_deadline_s: float = Field(20.0, gt=0, description="seconds that the rewards of one batch may take")
    tools: list[ToolName] = Field(
        [],
        description="what the model can call: calculator, python, my_pkg.tools:lookup, {python: {limits: {cpu_s: 9}}}",
    )
    tool_format: Annotated[str, _one_of(TOOL_FORMATS, "a format of calls")] = Field(
        "auto",
        description="how it writes calls: hermes, llama, mistral, deepseek, harmony, function, tagged, python, or "
        "my_pkg.calls:MyFormat; auto: as the chat template tells it",
    )
    tool_timeout_s: float = Field(10.0, gt=0, description="seconds that one call may take")
    declare_tools: bool | None = Field(
        None, description="whether prompts describe the tools; null: where the chat template teaches the format"
    )
    user: FunctionName | None = Field(
        None, description="speaks between turns, as my_pkg.users:reply; called with the messages; None ends it"
    )
    max_turns: int = Field(1, ge=1, description="answers of the policy per conversation; tools and a user need 2")
    retries: int = Field(2, ge=0, description="how often a conversation, a reward or a user that failed is tried again")
    on_rewrite: Literal["error", "new_record"] = Field(
        "error",
        description="several turns, and a template that writes earlier ones differently later: stop, or train turns "
        "that do not continue the one before as records of their own",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt")
    too_long: Literal["error", "drop"] = Field("error", description="what becomes of a longer prompt")

    @property
    def max_records(self) -> int:
        """The largest number of training records of one conversation."""
        return self.max_turns if self.on_rewrite == "new_record" else 1

    @property
    def label(self) -> str:
        """The environment's name in metrics: without the module, if it is the user's own."""
        return self.name.rpartition(":")[2]

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> EnvSettings:
        if self.reward is not None and self.rewards is not None:
            raise ValueError("env has reward and rewards: put the one into the list")
        scored = self.reward is not None or self.rewards is not None
        if self.name == "chat" and (self.dataset is None or not scored):
            missing = [key for key, there in (("dataset", self.dataset is not None), ("reward", scored)) if not there]
            raise ValueError(f"env {self.name} needs {' and '.join(missing)}")
        for column in ("prompt_column", "answer_column"):
            if self.name not in ("chat", "sums", "big_sums") and getattr(self, column) is not None:
                raise ValueError(f"env.{column} is for data of your own: env {self.name} knows its columns")
        if self.options and ":" not in self.name:
            raise ValueError(f"env.options is for an environment of your own: {self.name} takes none")
        for name, value in (("tools", self.tools), ("user", self.user)):
            if value and self.max_turns < 2:
                raise ValueError(f"env.{name} needs max_turns of at least 2, to go on after what was answered: got 1")
        return self

    @model_validator(mode="after")
    def _names_can_be_loaded(self) -> EnvSettings:
        """Loads every name of the user's, and reports each fault at its place: last, because it runs their modules."""
        from llmrl.tools.load import check_tool

        functions = {("reward",): self.reward, ("user",): self.user}
        functions |= {("rewards", n, "fn"): reward.fn for n, reward in enumerate(self.rewards or ())}
        checks = [(at, load_function, (name,), {"what": "name"}) for at, name in functions.items() if name]
        for number, tool in enumerate(self.tools):
            settings = (tool, None) if isinstance(tool, str) else next(iter(tool.items()))
            checks.append((("tools", number), check_tool, settings, {}))
        if ":" in self.name:  # here and not above: these two know torch
            from llmrl.train.environments import check_env

            given = {"has_dataset": self.dataset is not None}
            given["has_reward"] = self.reward is not None or self.rewards is not None
            checks.append((("name",), check_env, (self.name, self.options), given))
        if ":" in self.tool_format:
            from llmrl.envs.llm.tool_calls import call_format

            checks.append((("tool_format",), call_format, (self.tool_format,), {}))
        faults = []
        for at, check, arguments, options in checks:
            try:
                check(*arguments, **options)
            except ConfigError as error:
                text = {"text": str(error).partition(": ")[2]}
                fault = PydanticCustomError("value_error", "{text}", text)
                faults.append(InitErrorDetails(type=fault, loc=at, input=None))
        if faults:
            raise ValidationError.from_exception_data(type(self).__name__, faults)
        return self


class EvalSettings(Settings):
    """Greedy accuracy on problems that are never trained on."""

    dataset: str | None = Field(None, description="a file or hub name; none: the environment's own held-out split")
    split: str = Field("test", description="which split of it")
    rows: int | None = Field(500, ge=1, description="the first so many problems; null: all")
    every: int = Field(0, ge=0, description="steps between evaluations; 0: before and after only")
    batch_size: int = Field(512, ge=1, description="conversations generated side by side")
    max_tokens: int = Field(512, ge=1, description="longest answer, in tokens")


class CheckpointSettings(Settings):
    """Checkpoints are written at the end and on Ctrl-C whatever these say."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="how many of the newest stay")


class ParallelSettings(Settings):
    """Layout of several processes, started by torchrun. One process ignores it."""

    mode: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="ddp: whole copies; fsdp2: parameters and optimizer sharded"
    )
    timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer ends the run")


class ModelSource(Settings):
    """Fields of both recipes: the model, precision, optimizer, checkpoints, processes."""

    FIXED: ClassVar[tuple[str, ...]] = ("model", "seed")  # what a resumed run cannot change: its checkpoint has them

    model: str | TinyModelSettings = Field(
        description="a folder or hub name; a run's folder, for its last checkpoint; 'latest:RECIPE', for the newest of "
        "that recipe; or a tiny model's sizes"
    )
    chat_template: str | None = Field(
        None, description="a registered template's name or jinja text; null: the tokenizer's own"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of weights and arithmetic; auto: bfloat16 where the GPU has it, else float32"
    )
    seed: int = Field(0, ge=0, description="everything random follows from it")
    tokens_per_microbatch: int = Field(
        16384, ge=1, description="padded tokens that go through the model at once; changes memory, never the result"
    )
    packing: Literal["auto", "on", "off"] = Field(
        "auto", description="sequences end to end instead of padded; auto: where that saves a fifth and the model can"
    )
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    parallel: ParallelSettings = ParallelSettings()
    log: list[Literal["wandb", "tensorboard"]] = Field(
        [], description="mirrors of metrics.jsonl, which is always written"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_the_word_tiny(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("model") == "tiny":
            return data | {"model": {}}
        return data
