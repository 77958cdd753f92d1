"""``LLMWrapperBase``: a language model as a policy on TensorDicts. It reads a prompt or a conversation, calls an
engine, and writes all views.

All backends share one code path: a backend is an ``Engine``, made in ``_build``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from llmrl.data.ragged.padding import lengths_mask, pad_rows
from llmrl.errors import ConfigError, RewriteError, ShapeError, UnsupportedError, did_you_mean
from llmrl.modules.llm.engines.base import (
    Engine,
    Generation,
    MediaRows,
    Rows,
    SamplingParams,
    check_ids,
    generate_within,
)
from llmrl.modules.llm.engines.transformers import model_device, vocabulary_size
from llmrl.modules.llm.log_probs import TokenScores
from llmrl.modules.llm.model_files import loaded
from llmrl.modules.llm.policies.batching import BATCHING_SETTINGS, BatchingEngine, join_requests, own_engine
from llmrl.modules.llm.policies.containers import CONTAINERS, make_containers
from llmrl.modules.llm.policies.modes import Prompts, Turn, make_mode
from llmrl.modules.llm.policies.options import (
    GenerationOptions,
    check_settings,
    container_keys,
    generation_options,
    options_of_call,
    standard_names,
    with_stop_ids,
)
from llmrl.modules.llm.policies.rows import Key, Padding, row_seeds
from llmrl.modules.llm.rendering import Renderer, text_tokenizer
from llmrl.modules.llm.token_stream import turn_columns
from llmrl.modules.llm.vision import MEDIA, load_processor, present, read_media, write_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from llmrl.modules.llm.policies.scoring import Conversations, TokenCategorical

_log = logging.getLogger(__name__)
_PER_TURN = ["stop_reason", "policy_version", "new_record"]
_SEED_STRIDE = 0x2545F4914F6CDD1D  # distance between the seeds of the samples of one prompt


@dataclass
class Backend:
    """The engine, the module that scores with gradients (None if there is none), and the padding id."""

    engine: Engine
    scorer: nn.Module | None
    pad_token_id: int


class LLMWrapperBase(nn.Module):
    """A policy over an engine. ``model`` is an ``Engine`` here; subclasses accept the model type of their backend.

    Generating (``generate=True``):
      Reads   (mode, "prompt"), and the `TokenStream` of earlier turns if an environment carried it over: its ids are
              used unchanged, and only messages appended since are rendered
              "seed" int64[B], if present: one seed per row
              "media", if present in tokens mode: the images of each row (``llmrl.modules.llm.vision``)
      Writes  text, masks, tokens, log_probs and history containers (those of the mode), "stop_reason" int64[B]
              (``StopReason``), "policy_version" int64[B], "new_record" bool[B]: True if a training record begins with
              this turn, because it is the conversation's first or does not continue the stream of the previous turn;
              with a processor also "media", of all images of the conversation
    Scoring (``generate=False``):
      Reads   ("tokens", "full") if present, else (mode, "full")
      Writes  ("log_probs", "full") float32[T], [t] = log p(token t | tokens before t), with gradients if they are
              enabled; also the mode's other containers, from the batch or with only "full"
    Raises  MissingKeyError, TypeError, ConfigError, ShapeError, TemplateError

    The signature describes the arguments; `generation_options` describes ``generate_kwargs``. If a template rewrites
    earlier turns (for example drops their thinking), ``prefer_tokens=True`` renders the row again and starts a new
    record: its masks and log-probs begin with this turn. Counted in ``counters["rewritten"]``, logged once.
    """

    takes_vllm_options = False

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | None = None,  # or its name; None: the model's
        input_mode: Literal["history", "text", "tokens"] = "history",
        input_key: Key | None = None,  # read instead of (mode, "prompt") or (mode, "full")
        attention_mask_key: Key = "attention_mask",  # mask of a dense ("tokens", "prompt"); if absent, all ids count
        generate: bool = True,  # False: score whole conversations
        generate_kwargs: Mapping[str, Any] | None = None,  # see generation_options
        tokenizer_kwargs: Mapping[str, Any] | None = None,  # in history mode: template variables
        pad_output: bool = False,  # True: dense, padded containers instead of ragged rows
        pad_model_input: bool | None = None,  # False: rows run in groups of equal length, without padding
        inplace: bool | Literal["empty"] | None = None,  # False: a new TensorDict; "empty": td.empty()
        device: torch.device | str | None = None,  # the model is moved there
        layout: torch.layout | None = None,  # torch.strided only
        num_samples: int | None = None,  # responses per prompt, batch [*B, n]; never in place
        chat_template_name: str | None = None,  # a registered template, instead of the tokenizer's own
        chat_template: str | None = None,  # the text of a template
        return_log_probs: bool | None = None,  # True by default; scoring needs it
        history_key: str = "history",
        text_key: str = "text",
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        batching: bool | None = None,  # join calls of several threads (BatchingEngine); None: only if a size is given
        min_batch_size: int | None = None,  # rows to wait for; None: 1
        max_batch_size: int | None = None,  # maximum rows in one joined call
        batching_timeout: float = 10.0,  # seconds after which a call is made with fewer rows
        prefer_tokens: bool | Literal["always"] = True,  # False: render every turn; "always": no new records
        max_conversation_tokens: int | None = None,  # prompt and answer together; None: what the engine can hold
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "model", "__class__")}
        super().__init__()
        self.settings = SimpleNamespace(**given)
        self._given = (model,)  # in a tuple, so that a module is not registered as a submodule
        self.generate_kwargs = standard_names(generate_kwargs)
        self.options = generation_options(generate_kwargs, vllm=self.takes_vllm_options)
        check_settings(type(self).__name__, self.settings, self.options)
        self.settings.tokenizer = self._load_tokenizer(model, tokenizer)
        self.tokenizer = text_tokenizer(self.settings.tokenizer)
        self.renderer = self._make_renderer()
        self.mode = make_mode(self.settings, self.tokenizer, self.renderer)
        self.generate = generate
        self.input_mode, self.keys = input_mode, container_keys(self.settings)
        for name, key in self.keys.items():
            setattr(self, f"{name}_key", key)
        self.input_key: Key = input_key or (self.keys[input_mode], "prompt" if generate else "full")
        self.attention_mask_key = attention_mask_key
        self._set_outputs()
        self.prefer_tokens = prefer_tokens
        self.max_conversation_tokens = max_conversation_tokens
        self.temperature = self.options.params.scoring_temperature
        self.counters = {"rewritten": 0}  # turns that started a new record because of the template
        backend = self._build(model)
        self.engine: Any = join_requests(backend.engine, self.settings)
        self.scorer, self.pad_token_id = backend.scorer, backend.pad_token_id
        self.stop_token_ids = self._stop_token_ids()
        self.seed = self.options.seed
        self._collector: weakref.ref[Any] | None = None

    def _set_outputs(self) -> None:
        """Sets the output arguments; ``generate_kwargs`` may contain two of them."""
        given, options = self.settings, self.options
        self.num_samples = options.num_return_sequences if given.num_samples is None else given.num_samples
        wanted = options.logprobs if given.return_log_probs is None else given.return_log_probs
        self.return_log_probs = True if wanted is None else wanted
        self.inplace = (self.num_samples is None) if given.inplace is None else given.inplace
        self.pad_output = given.pad_output

    def _stop_token_ids(self) -> tuple[int, ...]:
        """The template's stop ids, or without a template the tokenizer's."""
        if self.renderer is not None:
            return self.renderer.stop_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos is None else (eos,)

    # --- overridden by backends ---------------------------------------------------------------------------------------

    def _build(self, model: Any) -> Backend:
        """Makes the engine and the scorer of ``model``."""
        if not isinstance(model, Engine):
            raise ConfigError(
                f"{type(self).__name__}: model must be a subclass of llmrl.modules.llm.engines.Engine: got "
                f"{type(model).__name__}; pass a Hugging Face model to TransformersWrapper."
            )
        self._leave_to_engine("the engine that it was given")
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return Backend(model, None, 0 if pad is None else pad)

    def _leave_to_engine(self, decider: str) -> None:
        for name in ("device", "pad_model_input"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(f"{type(self).__name__}: {name} is decided by {decider}: leave it out.")

    def _load_tokenizer(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | None
    ) -> PreTrainedTokenizerBase | ProcessorMixin | None:
        if not isinstance(tokenizer, str):
            return tokenizer
        return loaded(load_processor, tokenizer, setting=f"{type(self).__name__}: tokenizer of")

    # --- public attributes --------------------------------------------------------------------------------------------

    @property
    def in_keys(self) -> list[Key]:
        """The key that every call reads."""
        return [self.input_key]

    @property
    def out_keys(self) -> list[Key]:
        """The entries that are written, in this order."""
        wanted = {"masks", "tokens", *self.mode.written} | ({"log_probs"} if self.return_log_probs else set())
        return [self.keys[name] for name in CONTAINERS if name in wanted] + _PER_TURN * self.generate

    @property
    def seed(self) -> int | None:
        """The seed of the row seeds' generator; None leaves them to the engine. Setting it restarts the sequence."""
        return self._seed

    @seed.setter
    def seed(self, value: int | None) -> None:
        self._seed = value
        self._generator = None if value is None else torch.Generator().manual_seed(value)

    def get_new_version(self, **changes: Any) -> Self:
        """Returns this wrapper with some constructor arguments changed; engine and weights are shared.

        Raises  ConfigError for a name that is not an argument of the constructor

        >>> from llmrl.testing import FakeEngine, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> policy = LLMWrapperBase(FakeEngine(["hello"], tokenizer=tokenizer), tokenizer=tokenizer, text_key="words")
        >>> scorer = policy.get_new_version(generate=False)
        >>> scorer.generate, scorer.keys["text"], scorer.engine is policy.engine
        (False, 'words', True)
        """
        settings = vars(self.settings)
        known = (*settings, "model")
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"get_new_version: {name!r} is not an argument of {type(self).__name__}.{did_you_mean(name, known)}"
                )
        model = changes.pop("model", None)
        new = type(self)(self._source() if model is None else model, **{**settings, **changes})
        if model is None:
            if not changes.keys() & {"device", "pad_model_input"}:
                new.engine = self.engine
                if changes.keys() & BATCHING_SETTINGS:
                    new.engine = join_requests(own_engine(self.engine), new.settings)
            new.engine.version = self.engine.version  # a new engine has the same weights
            new.scorer = self.scorer
            if "generate_kwargs" not in changes:
                new._seed, new._generator = self._seed, self._generator
        return new

    def token_scores(self, input_ids: Tensor, attention_mask: Tensor, select: Tensor, **options: Any) -> TokenScores:
        """Log-probs of the selected tokens at the policy's temperature, with gradients; called by losses.

        input_ids int64[B, T], attention_mask bool[B, T], select bool[B, T]; ``options`` are those of `token_logprobs`:
        entropy, media, routes
        Raises  ConfigError if the backend has no model in this process
        """
        if self.scorer is None:
            raise ConfigError(
                f"{type(self).__name__}: gradients need a model in this process: this wrapper has only an engine; score"
                " with a TransformersWrapper of the trainer's model."
            )
        return self.scorer(input_ids, attention_mask, select, **{"temperature": self.temperature, **options})

    def forward(self, td: TensorDictBase, *, generate_kwargs: Mapping[str, Any] | None = None) -> TensorDictBase:
        """Generates or scores. ``generate_kwargs`` override individual options for this call."""
        self._check_batch(td)
        if not self.generate:
            if generate_kwargs is not None:
                raise ConfigError(f"{type(self).__name__}: generate_kwargs are for generating: this wrapper scores.")
            return self._score(td)
        options = self.options
        if generate_kwargs is not None:
            options = options_of_call(self.generate_kwargs, generate_kwargs, vllm=self.takes_vllm_options)
        return self._generate(td, options)

    def get_dist(
        self,
        td: TensorDictBase,
        *,
        masking_strategy: Literal["generic", "sft", "rlhf"] = "generic",
        mask: Tensor | Sequence[Tensor] | None = None,
    ) -> TokenCategorical:
        """The categorical distributions of the tokens of whole conversations, at the policy's temperature.

        Reads    ("tokens", "full") with its masks if present, else (mode, "full"), encoded
        Returns  a categorical over the vocabulary, float32, for [*B, T] tokens (rows padded on the right), with
                 gradients if they are enabled; it takes 4 bytes times the vocabulary size for every chosen token
        Raises   UnsupportedError if the backend has no logits; ConfigError, MissingKeyError, ShapeError

        masking_strategy  "generic": every token except a conversation's first; "rlhf" and "sft": the tokens in the
                          assistant mask, or the response if there is no such mask
        mask              bool, shaped like ("tokens", "full"): an explicit mask, instead of a strategy
        """
        model = self._scored_model()
        if model is None:
            engine = type(own_engine(self.engine)).__name__
            raise UnsupportedError(
                f"{type(self).__name__}.get_dist: the backend must give logits: {engine} gives only log-probs; use "
                "get_new_version(generate=False) for those of a conversation, or a TransformersWrapper."
            )
        self._check_batch(td)
        from llmrl.modules.llm.policies.scoring import token_categorical

        given = {"pad_token_id": self.pad_token_id, "temperature": self.temperature, "batch_size": td.batch_size}
        return token_categorical(model, self._conversations(td), masking_strategy, mask, **given)

    # --- collectors and requests of several threads -------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Stores a weak reference to the collector that uses this policy."""
        self._collector = None if collector is None else weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector that registered itself; None if there is none, or if it was deleted."""
        return None if self._collector is None else self._collector()

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: everything except the collector."""
        return {**self.__dict__, "_collector": None}

    def get_batching_state(self) -> dict[str, Any]:
        """The state of request joining; see ``BatchingEngine.state``."""
        if isinstance(self.engine, BatchingEngine):
            return self.engine.state()
        none = {"batching_enabled": False, "queue_size": 0, "pending_futures": 0, "lock_state": "unlocked"}
        return {**none, "min_batch_size": None, "max_batch_size": None}

    def cleanup_batching(self, timeout: float = 600.0) -> None:
        """Stops joining requests: waiting ones are sent at once, later ones individually.

        Returns when all are answered. Raises DeadlineError if that takes longer than ``timeout`` seconds.
        """
        if isinstance(self.engine, BatchingEngine):
            self.engine.drain(timeout)

    # --- generating ---------------------------------------------------------------------------------------------------

    def _generate(self, td: TensorDictBase, options: GenerationOptions) -> TensorDictBase:
        # 1. The prompt ids: the sampled stream of earlier turns, then the messages appended since.
        prompt_mask_key = (self.keys["masks"], "prompt_attention_mask")
        prompts = self.mode.read(td, self.input_key, prompt_mask_key, self.attention_mask_key)
        stream = self.mode.read_stream(td, self.keys, prompts) if self.prefer_tokens else None
        if rewritten := self.mode.encode_prompts(prompts, stream):
            self._count_rewritten(rewritten)
        prompts.media = self.mode.media(prompts.rows, prompts.ids, prompts.stream) or read_media(td)
        if prompts.stream is not None:
            prompts.texts = self.mode.carried_texts(td, self.keys, prompts.stream)
        seeds = self._seeds(td, len(prompts.ids))
        batch_size = td.batch_size
        if self.num_samples is not None:  # repeated here, so that each prompt is read and encoded only once
            prompts = prompts.select([row for row in range(len(prompts.ids)) for _ in range(self.num_samples)])
            batch_size = torch.Size([*batch_size, self.num_samples])
        # 2. The engine samples an answer to each that leaves room for one.
        params, stop_ids = with_stop_ids(options.params, self.stop_token_ids, self.engine.eos_token_ids)
        generation = self._sample(prompts, params, seeds)
        # 3. The views of the finished turns, ragged or padded.
        turn = Turn(prompts, generation.ids, generation.stop_reasons, stop_ids, options.skip_special_tokens)
        views, covered = self.mode.views(turn)
        columns = turn_columns(prompts.ids, generation, prompts.stream, covered, log_probs=self.return_log_probs)
        padding = Padding.around_turns(prompts.ids, generation.ids, self.pad_token_id) if self.pad_output else None
        if padding is not None and "prompt_assistant_mask" in columns["masks"]:
            columns["masks"]["prompt_attention_mask"] = [torch.ones(len(row), dtype=torch.bool) for row in prompts.ids]
        out = self._write(self._output(td, batch_size), make_containers(columns | views, batch_size, padding))
        if prompts.media is not None:
            out.set(MEDIA, write_media(prompts.media, batch_size))
        # 4. One value per turn.
        begins = [True] * len(prompts.ids) if prompts.stream is None else prompts.stream.begins_record()
        out.set("stop_reason", torch.tensor(generation.stop_reasons).reshape(batch_size))
        versions = [()] * len(generation.ids) if generation.versions is None else generation.versions
        oldest = [int(row[0]) if len(row) else generation.version for row in versions]  # versions increase within a row
        out.set("policy_version", torch.tensor(oldest).reshape(batch_size))
        out.set("new_record", torch.tensor(begins).reshape(batch_size))
        return out

    @property
    def context_length(self) -> int | None:
        """The most tokens of a conversation: ``max_conversation_tokens``, and what the engine can hold."""
        limits = self.max_conversation_tokens, self.engine.context_length
        return min((limit for limit in limits if limit is not None), default=None)

    def _sample(self, prompts: Prompts, params: SamplingParams, seeds: list[int] | None) -> Generation:
        """An answer to each prompt. A conversation without room for one is not an error of its batch: it ends here.

        Changes  the prompts of those conversations: what did not fit is not part of the row that is trained
        """
        limit = self.context_length
        full = [] if limit is None else [row for row, ids in enumerate(prompts.ids) if len(ids) >= limit]
        prompts.cut(full, limit)
        options = {"full": full, "seeds": seeds, "media": prompts.media}
        return generate_within(self.engine, prompts.ids, params, limit, **options)

    def _count_rewritten(self, rewritten: Mapping[int, RewriteError]) -> None:
        """Counts the rows that start a new record because of the template; logs a warning the first time.

        Raises  RewriteError if that is not allowed
        """
        who = type(self).__name__
        row, reason = next(iter(rewritten.items()))
        if self.prefer_tokens == "always":
            raise RewriteError(
                f"{who}: with prefer_tokens='always' a prompt must begin with the turns before it: row {row} does not "
                f"({reason}) With prefer_tokens=True (in a recipe env.on_rewrite=new_record) such a turn starts a new "
                "training record."
            ) from reason
        if not self.counters["rewritten"]:
            _log.warning(
                f"{who}: the template writes earlier turns differently once a conversation continues, so the "
                "conversation cannot be one training record: a turn whose prompt does not begin with the earlier turns "
                "is rendered again and starts a new record. counters['rewritten'] counts these turns; this is logged "
                f"once. ({reason})"
            )
        self.counters["rewritten"] += len(rewritten)

    def _seeds(self, td: TensorDictBase, num_rows: int) -> list[int] | None:
        """One seed per row and sample: from the batch, else from the wrapper's generator; None: from the engine's."""
        num_samples = self.num_samples or 1
        # The samples of one row must differ, but be reproducible.
        if (given := row_seeds(td, num_rows, who=type(self).__name__)) is not None:
            return [seed + sample * _SEED_STRIDE for seed in given for sample in range(num_samples)]
        if self._generator is None:
            return None
        return torch.randint(1 << 62, (num_rows * num_samples,), generator=self._generator).tolist()

    # --- scoring ------------------------------------------------------------------------------------------------------

    def _conversations(self, td: TensorDictBase) -> Conversations:
        """The conversations to score: ("tokens", "full") if present, else (mode, "full")."""
        from llmrl.modules.llm.policies.scoring import Conversations

        key = (self.keys[self.mode.name], "full") if self.generate else self.input_key
        conversations = Conversations.read(td, self.mode, self.keys, key, self.attention_mask_key)
        size, who = vocabulary_size(self._scored_model()), type(self).__name__
        check_ids(conversations.rows, size, who=who, what="conversation")
        return conversations

    def _scored_model(self) -> nn.Module | None:
        """The language model in this process, without the scorer's wrappers; None if it is not in this process."""
        return getattr(getattr(self.scorer, "module", self.scorer), "model", None)

    def _score(self, td: TensorDictBase) -> TensorDictBase:
        conversations = self._conversations(td)
        scores = self.score_rows(conversations.rows, media=conversations.media)
        written = conversations.containers(scores, td.batch_size, self.output_pad_id)
        written |= conversations.views(td, self.mode, self.keys, self.input_key)
        return self._write(self._output(td, td.batch_size), written)

    @property
    def output_pad_id(self) -> int | None:
        """The padding id of the output; None if the output is ragged."""
        return self.pad_token_id if self.pad_output else None

    def score_rows(
        self, ids: Rows, *, masks: Rows | None = None, temperature: float | None = None, media: MediaRows = None
    ) -> list[Tensor]:
        """Log-probs float32[T] of the ids int64[T], 0 where bool[T] masks are False; from the scorer if gradients are
        enabled, else from the engine.
        """
        temperature = self.temperature if temperature is None else temperature
        if self.scorer is None or not torch.is_grad_enabled():
            return self.engine.score(ids, temperature=temperature, masks=masks, **present(media=media))
        lengths = [len(row) for row in ids]
        device = model_device(self.scorer)
        ids_BT = pad_rows(ids, value=self.pad_token_id).to(device)
        attention_BT = lengths_mask(lengths, ids_BT.shape[1]).to(device)
        select_BT = attention_BT if masks is None else pad_rows(masks).to(device)
        scores = self.scorer(ids_BT, attention_BT, select_BT, temperature=temperature, **present(media=media))
        return [row[:length] for row, length in zip(scores.log_probs, lengths, strict=True)]

    # --- construction helpers -----------------------------------------------------------------------------------------

    def _make_renderer(self) -> Renderer | None:
        settings, history = self.settings, self.settings.input_mode == "history"
        given = {name: getattr(settings, name) for name in ("chat_template", "chat_template_name")}
        if self.tokenizer is None or not (history or any(given.values()) or self.tokenizer.chat_template):
            return None
        return Renderer(settings.tokenizer, **given, template_kwargs=settings.tokenizer_kwargs if history else None)

    def _source(self) -> Any:
        """The model for building another wrapper over the same weights."""
        return self._given[0]

    def _check_batch(self, td: Any) -> None:
        who = type(self).__name__
        if not isinstance(td, TensorDictBase):
            raise TypeError(f"{who}: the input must be a TensorDict: got {type(td).__name__}.")
        if not td.batch_size.numel():
            raise ShapeError(f"{who}: a batch must have at least one row: got {list(td.batch_size)}.")

    def _output(self, td: TensorDictBase, batch_size: Sequence[int]) -> TensorDictBase:
        if (self.generate and self.num_samples is not None) or not self.inplace:
            return TensorDict({}, batch_size=batch_size)
        return td.empty() if self.inplace == "empty" else td

    def _write(self, out: TensorDictBase, containers: Mapping[str, Any]) -> TensorDictBase:
        for name in CONTAINERS:
            if name in containers:
                out.set(self.keys[name], containers[name])
        return out
