"""The engine protocol, token ids in, sampled ids with their log-probs out; and its parameters and results.

An engine handles only ids: messages, templates, tensordicts and masks belong to the wrapper (``policies``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from llmrl.errors import ConfigError, ShapeError


class StopReason(IntEnum):
    """The reason that a generation ended. ``EOS`` and ``STOP_STRING`` are natural ends, ``LENGTH`` is a truncation.

    ``TOOL`` marks a turn that ends in a tool call, also natural; ``ABORT`` one that was interrupted from outside.

    >>> StopReason.LENGTH.natural, StopReason.EOS.natural
    (False, True)
    """

    EOS = 0
    STOP_STRING = 1
    LENGTH = 2
    TOOL = 3
    ABORT = 4

    @property
    def natural(self) -> bool:
        """True if the model itself ended the turn."""
        return self in (StopReason.EOS, StopReason.STOP_STRING, StopReason.TOOL)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one call. The defaults sample the model's own distribution: no truncation, temperature 1.

    ``temperature == 0`` and ``do_sample=False`` both mean greedy. Order: repetition penalty, temperature, top-k, top-p,
    min-p.

    Raises  ConfigError  if a value has the wrong type or is out of range

    >>> SamplingParams(temperature=0.0).greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    llmrl.errors.ConfigError: SamplingParams: top_p must be within [0, 1]: got 1.5.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the engine's own end-of-sequence ids
    stop_strings: tuple[str, ...] = ()
    do_sample: bool = True
    ignore_eos: bool = False  # the engine's own end-of-sequence ids do not end a response
    extra: tuple[tuple[str, Any], ...] = ()  # engine-specific options, as (name, value)

    def __post_init__(self) -> None:
        for names, kind, rule in (
            (("max_new_tokens", "top_k"), Integral, "an integer"),
            (("temperature", "top_p", "min_p", "repetition_penalty"), Real, "a number"),
        ):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, kind):
                    raise ConfigError(f"SamplingParams: {name} must be {rule}: got {value!r}.")
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "positive"),
            ("temperature", self.temperature >= 0, "non-negative"),
            ("top_p", 0 <= self.top_p <= 1, "within [0, 1]"),
            ("top_k", self.top_k >= 0, "positive, or 0 to turn it off"),
            ("min_p", 0 <= self.min_p <= 1, "within [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive"),
        ):
            if not holds:
                raise ConfigError(f"SamplingParams: {name} must be {rule}: got {getattr(self, name)!r}.")
        if not all(isinstance(token, Integral) for token in self.stop_token_ids):
            raise ConfigError(f"SamplingParams: stop_token_ids must be integers: got {self.stop_token_ids!r}.")
        if isinstance(self.stop_strings, str) or not all(isinstance(stop, str) and stop for stop in self.stop_strings):
            raise ConfigError(
                f"SamplingParams: stop_strings must be a sequence of non-empty strings: got {self.stop_strings!r}."
            )

    @property
    def greedy(self) -> bool:
        """True if every step takes the most likely token."""
        return self.temperature == 0 or not self.do_sample

    @property
    def scoring_temperature(self) -> float:
        """The temperature for reported and re-scored log-probs: 1 for greedy decoding, which has no distribution."""
        return 1.0 if self.greedy else self.temperature

    @property
    def truncates(self) -> bool:
        """True if the sampling distribution is not ``softmax(logits / temperature)``."""
        if self.repetition_penalty != 1.0 or self.extra:
            return True
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass
class Generation:
    """An engine's answers, in the order of the prompts.

    ids             list of int64[R_i]    sampled ids, including the stop token; without the prompt
    log_probs       list of float32[R_i]  under the sampling distribution, including the first token
    plain_log_probs the same tokens under ``softmax(logits / temperature)``; None if nothing was truncated
    stop_reasons    list of StopReason
    version         version of the weights that sampled the ids; the oldest, if there are several
    versions        list of int64[R_i], the version of each id; None if one version sampled all
    routes          list of int16[P_i + R_i, layers, K]: the experts of each id of prompt and answer; -1 in layers
                    without experts, and for the last id, which was sampled but not read. None if the engine does not
                    report them
    """

    ids: list[Tensor]
    log_probs: list[Tensor]
    plain_log_probs: list[Tensor] | None
    stop_reasons: list[StopReason]
    version: int
    versions: list[Tensor] | None = None
    routes: list[Tensor] | None = None


Rows = Sequence[Tensor]  # ids int64[T], or masks bool[T]
MediaRows = Sequence[Mapping[str, Tensor]] | None
Hear = Callable[[int, list[int], list[float]], bool]


@runtime_checkable
class Engine(Protocol):
    """Runs a model for the wrapper. A subclass sets the attributes below where it differs.

    ``generate``       prompts: int64[P_i] each; ``seeds``: one int per row, or None for fresh ones. A row's sample
                       depends only on its prompt, its seed and the weights, never on other rows.
                       ``media``: one entry per row, if rows have images (``llmrl.modules.llm.vision``)
    ``score``          float32[T_i] per sequence: [t] = log p(token t | tokens before t), [0] = 0; 0 where ``masks[i]``
                       is False
    ``update_weights`` all or nothing; None if the engine shares the trainer's module, so that only the version changes

    ``eos_token_ids``    end an answer, besides those of `SamplingParams`
    ``context_length``   the most tokens that a prompt and its answer may have together; None: unknown
    ``concurrent``       True: calls of several threads are computed at the same time; False: one after the other
    ``streams``          True: `generate` takes ``hear``, which any thread may call as hear(row, ids, log_probs) with
                         what was sampled of a row since the last time; False ends the row, as ABORT
    ``takes_groups``     True: `update_weights` accepts `WeightGroups`; otherwise it gets a mapping
    ``unsaved_buffers``  names that a set of weights may leave out
    ``in_flight``        what an update does to answers in progress: it waits for them, or ends or continues them
    ``address``          of a server that other ranks may share, one of them then sends weights; None: this rank's own
    ``load_speed``       of the last update, bytes per second; 0 if unknown
    """

    version: int = 0
    eos_token_ids: Collection[int] = ()
    context_length: int | None = None
    concurrent: bool = False
    streams: bool = False
    takes_groups: bool = False
    unsaved_buffers: frozenset[str] = frozenset()
    in_flight: Literal["finish", "abort", "continue"] = "finish"
    address: str | None = None
    load_speed: float = 0.0

    @abstractmethod
    def generate(
        self, prompts: Rows, params: SamplingParams, *, seeds: Sequence[int] | None = None, media: MediaRows = None
    ) -> Generation: ...

    @abstractmethod
    def score(
        self, sequences: Rows, *, temperature: float = 1.0, masks: Rows | None = None, media: MediaRows = None
    ) -> list[Tensor]: ...

    @abstractmethod
    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None: ...

    def weight_precision(self) -> tuple[torch.dtype | None, tuple[str, ...]]:
        """The dtype in which new weights are sent (None: their own), and parts of the names of those that are not cast:
        a sharded trainer casts weights before it gathers them.
        """
        return None, ()

    def joined(self) -> AbstractContextManager[None]:
        """Context in which each of the ranks that hold the engine together may call it as often as it needs to."""
        return nullcontext()

    def take_gauges(self) -> dict[str, float]:
        """Numbers of the engine since the last call, named as in `llmrl.modules.llm.engines.vllm.gauges`."""
        return {}

    def close(self) -> None:
        """Releases what the engine holds."""
        return None  # an empty body would be an abstract method to type checkers


class SeededEngine(Engine):
    """Base class of engines that draws the seeds of rows."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def _seeds(self, given: Sequence[int] | None, num_rows: int) -> Sequence[int]:
        """The given seeds, or fresh ones if None. Raises ShapeError unless there is one per prompt."""
        if given is None:
            return torch.randint(1 << 62, (num_rows,), generator=self._generator).tolist()
        if len(given) != num_rows:
            raise ShapeError(f"{type(self).__name__}: one seed per prompt: got {len(given)} for {num_rows} prompts.")
        return given

    def state_dict(self) -> dict[str, Any]:
        """The generator and the version, so that a resumed run draws the same seeds."""
        return {"generator": self._generator.get_state(), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self.version = state["version"]


def generate_within(
    engine: Engine,
    prompts: Rows,
    params: SamplingParams,
    limit: int | None,
    *,
    full: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    media: MediaRows = None,
    hear: Hear | None = None,
) -> Generation:
    """``engine.generate`` of the prompts, none of which with its answer is longer than ``limit``.

    full  rows that get an empty answer, which ends as LENGTH, like each answer that reaches the limit
    hear  of an engine that ``streams``, without ``full``; it hears of no id beyond the limit
    """
    rows = sorted(set(range(len(prompts))) - set(full))

    def asked(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [values[row] for row in rows]

    generation = None
    if rows:
        options: dict[str, Any] = {} if media is None else {"media": asked(media)}
        if hear is not None:
            options["hear"] = hear if limit is None else _hear_within(hear, [limit - len(prompt) for prompt in prompts])
        generation = engine.generate(asked(prompts), params, seeds=asked(seeds), **options)
        generation = generation if limit is None else _cut(generation, asked(prompts), limit)
    return _with_unanswered(generation, rows, prompts, engine.version) if full else generation


def _with_unanswered(generation: Generation | None, answered: Sequence[int], prompts: Rows, version: int) -> Generation:
    """``generation`` of the prompts at ``answered``, with empty answers that end as LENGTH for the others.

    generation  None if no prompt was answered; ``version`` is then the result's
    """
    places = {row: place for place, row in enumerate(answered)}
    nothing = prompts[0].new_zeros(0, dtype=torch.int64)

    def rows(values: Sequence[Any] | None, empty: Callable[[int], Any]) -> list[Any] | None:
        if values is None:
            return None
        return [values[places[row]] if row in places else empty(row) for row in range(len(prompts))]

    if generation is None:
        generation, places = Generation([], [], None, [], version), {}
    routes = generation.routes or None
    return Generation(
        rows(generation.ids, lambda row: nothing),
        rows(generation.log_probs, lambda row: nothing.float()),
        rows(generation.plain_log_probs, lambda row: nothing.float()),
        rows(generation.stop_reasons, lambda row: StopReason.LENGTH),
        generation.version,
        versions=rows(generation.versions, lambda row: nothing),
        routes=rows(routes, lambda row: routes[0].new_full((len(prompts[row]), *routes[0].shape[1:]), -1)),
    )


def _hear_within(hear: Hear, rooms: list[int]) -> Hear:
    """``hear`` of the first ids of each row, as many as it has room for."""

    def heard(row: int, ids: list[int], log_probs: list[float]) -> bool:
        room = rooms[row]
        rooms[row] = max(0, room - len(ids))
        return not room or hear(row, ids[:room], log_probs[:room])

    return heard


def _cut(generation: Generation, prompts: Rows, limit: int) -> Generation:
    """``generation`` with answers cut where prompt and answer together reach ``limit`` tokens; those end as LENGTH."""
    rooms = [limit - len(prompt) for prompt in prompts]
    if all(len(ids) <= room for ids, room in zip(generation.ids, rooms, strict=True)):
        return generation

    def shortened(values: Sequence[Tensor] | None, lengths: Sequence[int]) -> list[Tensor] | None:
        return None if values is None else [row[:length] for row, length in zip(values, lengths, strict=True)]

    ends = zip(generation.stop_reasons, generation.ids, rooms, strict=True)
    return Generation(
        shortened(generation.ids, rooms),
        shortened(generation.log_probs, rooms),
        shortened(generation.plain_log_probs, rooms),
        [StopReason.LENGTH if len(ids) > room else reason for reason, ids, room in ends],
        generation.version,
        versions=shortened(generation.versions, rooms),
        routes=shortened(generation.routes, [limit] * len(rooms)),
    )


def check_ids(rows: Sequence[Tensor], vocabulary_size: int | None, *, who: str, what: str) -> None:
    """Raises ShapeError for rows that are not ids, and for ids outside the vocabulary: those crash a process on a GPU.

    Reads  vocabulary_size  None: only shapes and dtypes are checked

    >>> check_ids([torch.tensor([0, 7])], 8, who="engine", what="prompt")
    """
    for row, ids in enumerate(rows):
        if ids.ndim != 1 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"{who}: a {what} must be a non-empty int64[T]: got {ids.dtype} {tuple(ids.shape)} in row {row}."
            )
    if not rows or vocabulary_size is None:
        return
    low, high = (int(value) for value in torch.cat(list(rows)).aminmax())
    if low < 0 or high >= vocabulary_size:
        raise ShapeError(
            f"{who}: the ids of a {what} must be within the model's vocabulary of {vocabulary_size}: got {low} to "
            f"{high}; usually the tokenizer belongs to another model."
        )
