"""The containers of a conversation in a batch: ``Text``, ``ChatHistory``, ``Tokens``, ``LogProbs``, ``Masks``.

Each is a TensorClass with the fields prompt, response and full, and batch size [B] (or any other, including () for a
single row). Two layouts: ragged (a list of rows, the default) and padded (dense tensors, ``padded`` True). Tokens are
the source of truth of a conversation; text and history are views of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import NestedKey, NonTensorStack, TensorClass, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.llm.history import History
from llmrl.data.llm.spans import rows_to_tensors
from llmrl.data.ragged.stack import stack_columns
from llmrl.data.ragged.tensordicts import fill, inner, rewrap, wrap
from llmrl.data.specs import Categorical, Composite, NonTensor, TensorSpec, Unbounded
from llmrl.errors import ConfigError, ShapeError, TemplateError, did_you_mean
from llmrl.modules.llm.policies.rows import Padding, field_rows, is_ragged
from llmrl.modules.llm.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Rows:
    """Base class that builds a container from rows, and returns its rows.

    The plain constructor also accepts a whole batch. If no batch size is given, it is the fields' shape without their
    last dimension (tokens or messages; strings have none).
    """

    def __post_init__(self) -> None:
        td = inner(self)
        if td.batch_size:
            return
        fields = {name: td.get(name) for name in td.keys() if name != "padded"}
        shapes = {name: _batch_of(value, _DIMENSIONS.get(name, 1)) for name, value in fields.items()}
        batch_size = max(shapes.values(), key=len, default=())
        if not batch_size:
            return
        if wrong := [name for name, shape in shapes.items() if shape[: len(batch_size)] != batch_size]:
            raise ShapeError(
                f"{type(self).__name__}: fields must hold the same rows: got {wrong[0]} of {list(shapes[wrong[0]])}, "
                f"expected {list(batch_size)}."
            )
        if any(isinstance(value, list) for value in fields.values()):  # rows of any length
            columns = {name: _flat_rows(value, len(batch_size)) for name, value in fields.items()}
            fill(self, stack_columns(columns, batch_size))
        else:
            td.batch_size = batch_size

    @classmethod
    def from_rows(cls, columns: Mapping[str, Any], batch_size: Sequence[int] | None = None) -> Self:
        """A ragged container with one value per row, without copies.

        columns     field -> list of tensors or strings, Tensor[B, ...] or History[B, M]; all of one length
        batch_size  default [number of rows]; any other shape with as many rows, () for a single row
        Raises      ShapeError if the lengths disagree
        """
        if batch_size is None:
            batch_size = (len(next(iter(columns.values()))) if columns else 0,)
        num_rows = torch.Size(batch_size).numel()
        for name, values in columns.items():
            if len(values) != num_rows:
                raise ShapeError(
                    f"{cls.__name__}: {name} must hold one value per row: got {len(values)} for {num_rows} rows."
                )
        flags = {"padded": False} if "padded" in cls.__expected_keys__ else None
        return wrap(cls, stack_columns(columns, batch_size), flags)

    @classmethod
    def from_padded(cls, columns: Mapping[str, Tensor], batch_size: Sequence[int] | None = None) -> Self:
        """A padded container of dense tensors [*batch_size, T]."""
        if batch_size is None:
            batch_size = next(iter(columns.values())).shape[:-1]
        return wrap(cls, TensorDict(dict(columns), batch_size=batch_size), {"padded": True})

    def rows(self, field: str) -> list[Any] | None:
        """The field as a flat list with one value per row of the batch; None if it is not set.

        >>> Text.from_rows({"prompt": ["a", "b"]}).rows("prompt")
        ['a', 'b']
        """
        return field_rows(inner(self), field)

    def _parts(self) -> dict[str, list[Any]]:
        """The rows of prompt and response if all fields are set (they make up ``full``), else of the set fields."""
        columns = {name: self.rows(name) for name in ("prompt", "response", "full")}
        present = {name: rows for name, rows in columns.items() if rows is not None}
        return {name: present[name] for name in ("prompt", "response")} if len(present) == 3 else present

    @classmethod
    def default_spec(cls, shape: Sequence[int], keys: Sequence[str] | None = None) -> Composite:
        """The spec of a container of batch size ``shape`` with these fields (default: the conversation's).

        >>> tokens = Tokens.from_rows({"full": [torch.arange(2), torch.arange(3)]})
        >>> Tokens.default_spec((2,), ["full"]).is_in(tokens), Tokens.default_spec((2,)).is_in(tokens)
        (True, False)
        """
        shape = tuple(shape)
        every = cls.__annotations__
        names = [name for name in every if name in _DEFAULT_FIELDS] if keys is None else keys
        unknown = [name for name in names if name not in every]
        if unknown:
            raise ConfigError(
                f"{cls.__name__}.default_spec: unknown field {unknown[0]!r}.{did_you_mean(unknown[0], every)}"
            )
        return Composite({name: cls._field_spec(name, shape) for name in names}, shape=shape)

    @classmethod
    def _field_spec(cls, name: str, shape: tuple[int, ...]) -> TensorSpec:
        if cls is Text or name == "padded":
            return NonTensor(shape=shape)
        if cls is ChatHistory:
            return History.default_spec((*shape, -1))
        if name in ("covered", "trained_from"):
            return Unbounded(shape=shape, dtype=torch.int64)
        dtype = {Tokens: torch.int64, LogProbs: torch.float32, Masks: torch.bool}[cls]
        dtype = {"versions": torch.int64, "routes": torch.int16, "rewards": torch.float32}.get(name, dtype)
        if name == "routes":
            return Unbounded(shape=(*shape, -1, -1, -1), dtype=dtype)
        length = (*shape, -1)
        return Categorical(2, shape=length, dtype=dtype) if cls is Masks else Unbounded(shape=length, dtype=dtype)


_DEFAULT_FIELDS = ("prompt", "response", "full", "all_attention_mask", "all_assistant_mask")


_DIMENSIONS = {"covered": 0, "routes": 3}  # dimensions of a row's value; 1 for all other fields


def _batch_of(value: Any, num_dims: int) -> tuple[int, ...]:
    """The batch size of a field's value: its shape without the ``num_dims`` dimensions of a row."""
    if isinstance(value, list):
        return (len(value), *_batch_of(value[0], num_dims)) if value else (0,)
    if isinstance(value, Tensor | History):
        return tuple(value.shape[: value.ndim - num_dims])
    return tuple(value.batch_size) if isinstance(value, NonTensorStack) else ()


def _flat_rows(value: Any, num_dims: int) -> list[Any]:
    parts = list(value) if isinstance(value, list) else list(value.unbind(0))
    return parts if num_dims == 1 else [row for part in parts for row in _flat_rows(part, num_dims - 1)]


class Text(_Rows, TensorClass["nocast"]):
    """Strings with ``full == prompt + response``, including control tokens.

    >>> text = Text.from_rows({"prompt": ["1+1="], "response": ["2"], "full": ["1+1=2"]})
    >>> text.full, text[0].response, text.batch_size
    (['1+1=2'], '2', torch.Size([1]))
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    def to_tokens(self, tokenizer: PreTrainedTokenizerBase, *, padding: bool = False) -> Tokens:
        """Tokenises prompt and response, whose ids together are ``full``; or the only field that is set.

        Raises  ValueError for ``padding=True``
        """
        if padding:
            raise ShapeError(
                "Text.to_tokens: Padding is not yet supported: rows stay ragged; pad the values that you read."
            )
        encoded = _converted(
            self._parts(), lambda texts: rows_to_tensors(tokenizer(texts, add_special_tokens=False)["input_ids"])
        )
        if encoded.keys() == {"prompt", "response"}:
            encoded["full"] = [torch.cat(pair) for pair in zip(*encoded.values(), strict=True)]
        return Tokens.from_rows(encoded, self.batch_size)

    def to_history(self, tokenizer: PreTrainedTokenizerBase, *, chat_template_name: str | None = None) -> ChatHistory:
        """Parses each field back into messages (``History.from_text``)."""

        def parse(texts: list[str]) -> list[Any]:
            return History.from_text(texts, chat_template_name=chat_template_name, tokenizer=tokenizer).to_chats()

        columns = {name: self.rows(name) for name in ("prompt", "full")}
        chats = _converted({name: texts for name, texts in columns.items() if texts}, parse)
        if len(chats) == 2:
            chats["prompt"] = [_without_opening(*pair) for pair in zip(chats["prompt"], chats["full"], strict=True)]
            pairs = zip(chats["prompt"], chats["full"], strict=True)
            chats["response"] = [full[len(prompt) :] for prompt, full in pairs]
        return ChatHistory.from_rows({n: History.from_chats(c) for n, c in chats.items()}, self.batch_size)


class ChatHistory(_Rows, TensorClass["nocast"]):
    """Messages: ``History`` objects of batch [*B, M]; ``full`` has the prompt's messages, then the response's.

    >>> ask = [{"role": "user", "content": "Hi"}]
    >>> history = ChatHistory.from_rows({"prompt": History.from_chats([ask, ask])})
    >>> history.prompt.to_chats()[1]
    [{'role': 'user', 'content': 'Hi'}]
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt", "response", "full"):
            history = self.get(name, None)
            if isinstance(history, History) and history.ndim == self.ndim:
                warnings.warn(
                    f"ChatHistory: {name} must have a dimension of messages after those of the batch: got "
                    f"{list(history.shape)}; each row is treated as a conversation of one message.",
                    stacklevel=3,
                )
                self.set(name, history.unsqueeze(-1))

    def chats(self, field: str) -> list[list[dict[str, Any]]] | None:
        """The conversations of a field as lists of messages, one per row of the batch."""
        history = self.get(field, None)
        return None if history is None else history_chats(history, self.ndim)

    def to_tokens(self, tokenizer: PreTrainedTokenizerBase | Renderer) -> Tokens:
        """Renders with the chat template: ``prompt`` ends with a generation prompt, ``full`` begins with ``prompt``,
        ``response`` is the rest.

        Raises  TemplateError if the template writes the prompt differently once the answer follows
        """
        renderer = _renderer(tokenizer)
        prompt = self.get("prompt", None)
        prompts = None if prompt is None else history_chats(prompt, self.ndim, asks=True)
        fulls = self.chats("full")
        columns: dict[str, list[Tensor]] = {}
        if prompts is not None:
            columns["prompt"] = renderer.prompt_ids(prompts)
        if fulls is not None:
            columns["full"] = rows_to_tensors(renderer.codec.encode(renderer.codec.render(fulls)))
        if len(columns) == 2:
            columns["response"] = [_beyond(*pair, row) for row, pair in enumerate(zip(*columns.values(), strict=True))]
        return Tokens.from_rows(columns, self.batch_size)

    def to_text(self, tokenizer: PreTrainedTokenizerBase | Renderer) -> Text:
        """The text of :meth:`to_tokens`: ``full == prompt + response``."""
        renderer = _renderer(tokenizer)
        return self.to_tokens(renderer).to_text(renderer.tokenizer)


class Tokens(_Rows, TensorClass["nocast"]):
    """Token ids as sampled by the engine: ``full == cat(prompt, response)``.

    prompt    int64[P]  left-padded if ``padded``
    response  int64[R]  right-padded if ``padded``
    full      int64[T]
    covered   int64[]   number of messages (history mode) or characters (text mode) that ``full`` covers; the next turn
                        adds to the stream what the environment appends after them
    rewards   float32[T]  aligned with ``full``: what a turn earned, at its last token; set by the collector in rows of
                          whole conversations
    padded    bool      layout of prompt, response and full
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    covered: Tensor | None = None
    rewards: Tensor | None = None
    padded: bool | None = None

    def to_text(self, tokenizer: PreTrainedTokenizerBase) -> Text:
        """Decodes each field, including control tokens.

        Raises  ValueError for padded tokens
        """
        if self.padded:
            raise ShapeError("Tokens.to_text: padded tokens cannot be decoded without their masks: use ragged ones.")
        decoded = _converted(self._parts(), lambda ids: decode_rows(tokenizer, [row.tolist() for row in ids]))
        if decoded.keys() == {"prompt", "response"}:
            decoded["full"] = [prompt + response for prompt, response in zip(*decoded.values(), strict=True)]
        return Text.from_rows(decoded, self.batch_size)

    def to_history(self, tokenizer: PreTrainedTokenizerBase, *, chat_template_name: str | None = None) -> ChatHistory:
        """Decodes and parses back into messages. Raises ValueError for padded tokens."""
        return self.to_text(tokenizer).to_history(tokenizer, chat_template_name=chat_template_name)


class LogProbs(_Rows, TensorClass["nocast"]):
    """Log-probs of tokens, float32, aligned with the same field of ``Tokens``; 0 for tokens that were not sampled.

    prompt, response, full  under the sampling distribution (or, in a scoring call, under the model)
    plain                   aligned with ``full``: the same tokens under ``softmax(logits / temperature)``; set only
                            if top-k, top-p, min-p or a repetition penalty makes the two differ
    versions                int64, aligned with ``full``: weight version that sampled each token; set only if weights
                            may change within an answer
    routes                  int16[T, layers, K], aligned with ``full``: the experts of each token, -1 if unknown; set
                            only if the engine reports them
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    plain: Tensor | None = None
    versions: Tensor | None = None
    routes: Tensor | None = None
    padded: bool | None = None


class Masks(_Rows, TensorClass["nocast"]):
    """Masks of tokens, aligned with ``tokens.full`` (the ``prompt_`` masks with ``tokens.prompt``).

    all_attention_mask     bool[T]  True on real tokens
    all_assistant_mask     bool[T]  True on tokens that the policy sampled in any turn so far; recorded at sampling, not
                           derived from token values
    prompt_assistant_mask  bool[P]  the last turn's ``all_assistant_mask``, which the environment carries over to this
                           turn's prompt
    prompt_attention_mask  bool[P]  the same for ``all_attention_mask``; only padded prompts need it
    trained_from           int64[]  start of the part that this row itself trains

    ``attention_mask_all`` and ``assistant_mask_all``, the older names of the first two, are attributes only.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None
    prompt_assistant_mask: Tensor | None = None
    prompt_attention_mask: Tensor | None = None
    trained_from: Tensor | None = None
    padded: bool | None = None

    @property
    def attention_mask_all(self) -> Tensor | None:
        return self.all_attention_mask

    @property
    def assistant_mask_all(self) -> Tensor | None:
        return self.all_assistant_mask


CONTAINERS: dict[str, Any] = {
    "text": Text,
    "masks": Masks,
    "tokens": Tokens,
    "log_probs": LogProbs,
    "history": ChatHistory,
}  # in the order in which wrappers write them


def make_containers(
    columns: Mapping[str, Mapping[str, Any]], batch_size: Sequence[int], padding: Padding | None = None
) -> dict[str, Any]:
    """Makes a container of each group of ragged columns; with ``padding`` all but text and history are padded."""
    made = {}
    for name, fields in columns.items():
        if padding is None or name in ("text", "history"):
            made[name] = CONTAINERS[name].from_rows(fields, batch_size)
        else:
            made[name] = CONTAINERS[name].from_padded(padding.padded(name, fields, batch_size), batch_size)
    return made


def history_chats(history: History, batch_ndim: int, *, asks: bool = False) -> list[list[dict[str, Any]]]:
    """The conversations of a History of batch [*batch, M] as lists of messages, one per row of the batch.

    With ``asks`` an unfinished last message keeps its ``"is_complete": False``: the model is to continue it.
    """
    if batch_ndim > 1:
        return [chat for part in history.unbind(0) for chat in history_chats(part, batch_ndim - 1, asks=asks)]
    if not batch_ndim:
        history = History.stack([history])
    chats = history.to_chats()
    # ``to_chats`` leaves out ``is_complete``, because templates do not read it.
    if asks and all(chats):
        for chat, complete in zip(chats, history[..., -1].is_complete, strict=True):
            if not complete:
                chat[-1]["is_complete"] = False
    return chats


def _renderer(tokenizer: PreTrainedTokenizerBase | Renderer) -> Renderer:
    return tokenizer if isinstance(tokenizer, Renderer) else Renderer(tokenizer)


def decode_rows(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """The text of each row of ids, including control tokens."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        decode = tokenizer.backend_tokenizer.decode  # as batch_decode, but without its check of every id
        return [decode(row, skip_special_tokens=False) for row in rows]
    return tokenizer.batch_decode(rows, skip_special_tokens=False)


def _converted(columns: Mapping[str, list[Any]], convert: Callable[[list[Any]], list[Any]]) -> dict[str, list[Any]]:
    """Converts the values of all columns in one call."""
    values = [value for rows in columns.values() for value in rows]
    results = iter(convert(values) if values else ())
    return {name: list(islice(results, len(rows))) for name, rows in columns.items()}


def _beyond(prompt: Tensor, full: Tensor, row: int) -> Tensor:
    if not torch.equal(full[: len(prompt)], prompt):
        raise TemplateError(
            f"ChatHistory.to_tokens: the rendered conversation must begin with its rendered prompt: row {row} does not;"
            " this template rewrites the past, so there is no boundary between prompt and response."
        )
    return full[len(prompt) :]


def _without_opening(prompt: list[dict[str, Any]], full: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt without the opening of an answer, which parses as an empty assistant message."""
    opened = len(prompt) > 0 and prompt[-1]["role"] == "assistant" and not prompt[-1]["content"]
    return prompt[:-1] if opened and prompt[-1] != full[len(prompt) - 1] else prompt


# --- the part of a row that is trained --------------------------------------------------------------------------------

# In a batch of turns each sampled token is also in the rows of all later turns. To train it only once, each row stores
# in ("masks", "trained_from") where its own part begins.
TRAINED_FROM = ("masks", "trained_from")


def mark_turn(td: TensorDictBase) -> None:
    """Writes ("masks", "trained_from") int64[B]: the index in ("tokens", "full") where the turn's response begins.

    A batch [B] without the masks or the prompt of a turn is left unchanged.
    """
    prompt = td.get(("tokens", "prompt"), None, as_list=True)
    if prompt is not None and td.get(("masks", "all_assistant_mask"), None, as_list=True) is not None:
        _mark(td, torch.tensor([row.shape[-1] for row in prompt]))


def mark_whole_record(td: TensorDictBase) -> None:
    """Sets ("masks", "trained_from") to 0 if present: the row trains every turn that it holds."""
    if td.get(TRAINED_FROM, None, as_list=True) is not None:
        _mark(td, torch.zeros(td.batch_size[0], dtype=torch.int64))


def own_part(td: TensorDictBase, like_BT: Tensor) -> Tensor:
    """bool[B, T]: True from the start of the part that each row itself trains.

    Reads   ("masks", "trained_from") int64[B]; if absent, a row trains every turn that it holds
    """
    starts = td.get(TRAINED_FROM, None, as_list=True)
    if starts is None:
        return torch.ones_like(like_BT, dtype=torch.bool)
    return _from(starts if isinstance(starts, Tensor) else torch.stack(list(starts)), like_BT)


def response_part(
    td: TensorDictBase, like_BT: Tensor, lengths: Sequence[int] | None, response_key: NestedKey = ("tokens", "response")
) -> Tensor | None:
    """bool[B, T]: True from the first token of each row's response on; None if the batch has no responses.

    Reads   lengths  row lengths of a ragged batch, padded on the right in ``like_BT``; None for a dense batch
    """
    response = td.get(response_key, None, as_list=True)
    if response is None:
        return None
    if lengths is None:
        starts = [like_BT.shape[1] - response.shape[1]] * len(like_BT)
    else:
        starts = [length - len(row) for length, row in zip(lengths, response, strict=True)]
    return _from(torch.tensor(starts), like_BT)


def _from(start_B: Tensor, like_BT: Tensor) -> Tensor:
    places_T = torch.arange(like_BT.shape[1], device=like_BT.device)
    return places_T >= start_B.reshape(-1, 1).to(like_BT.device)


def _mark(td: TensorDictBase, start_B: Tensor) -> None:
    set_field(td, TRAINED_FROM, start_B)


def set_field(td: TensorDictBase, key: tuple[str, str], rows: Tensor | list[Tensor]) -> None:
    """Sets a field of a container of ``td``, which is replaced by a new one; a list of rows for a ragged container."""
    container, field = key
    before = td.get(container)
    held = inner(before)
    if is_ragged(held):
        columns = {name: held.get(name, as_list=True) for name in held.keys()}
        held = stack_columns({**columns, field: rows}, td.batch_size)
    else:
        held = held.copy().set(field, rows)
    td.set(container, rewrap(before, held))
