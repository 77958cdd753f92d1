"""`ChatEnv`: a conversation as an environment. `DatasetChatEnv`: the same, started from the rows of a dataset.

The state is the conversation so far; the action is the policy's turn. Rewards, tools, turn limits and prompts from data
are transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from llmrl.data.llm.history import History
from llmrl.data.llm.row_messages import declared_tools
from llmrl.data.llm.rows import to_prompt
from llmrl.data.ragged.tensordicts import column_values, new_tensordict
from llmrl.data.specs import Composite, NonTensor
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.completions import required_column
from llmrl.envs.llm.options import MODES, keywords_of, split_keywords
from llmrl.envs.llm.transforms.dataloading import DataLoadingPrimer
from llmrl.envs.transforms.trajectory import StepCounter
from llmrl.envs.transforms.transformed_env import TransformedEnv
from llmrl.errors import ConfigError, DataError, MissingKeyError, check_at_least, check_choice
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.columns import RESERVED, refuse_reserved
from llmrl.modules.llm.policies.containers import CONTAINERS, ChatHistory, Text, Tokens
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.token_stream import TokenStream
from llmrl.modules.llm.vision import MEDIA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


class ChatEnv(EnvBase):
    """A batch of conversations. Transforms add the rewards and end conversations; the env itself does neither.

    Reset  reads   ``data_key``  NonTensor [B]: the user's message, a string or a list of messages; a single string is
                   used for every row
                   "tools"  NonTensor [B], optional: schemas that the first message declares through the template
           writes  (mode, "prompt"): the system prompt, if any, and the user's message, as a History in history mode, as
                   rendered text or ids with the generation prompt in the other two; the other input columns are passed
                   through
    Step   reads   (mode, "full"): the conversation with the policy's turn
           writes  ("next", view, "prompt") = (view, "full") for every view that the policy wrote, with the masks and
                   log-probs of the turns so far: the next turn continues the sampled token stream
    Raises MissingKeyError without ``data_key`` at reset or (mode, "full") at step; ConfigError for an unknown mode, an
           empty batch size, or text and tokens mode without a tokenizer

    The env keeps no state between calls, so any subset of rows can be stepped or reset separately.

    >>> from tensordict import TensorDict
    >>> env = ChatEnv(batch_size=[2], system_prompt="Be brief.")
    >>> td = env.reset(TensorDict(query="2 + 2?", batch_size=[2]))
    >>> td["history"].prompt.to_chats()[1]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """

    def __init__(
        self,
        *,
        input_mode: str = "history",
        batch_size: int | Sequence[int] | None = None,
        system_prompt: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        policy_role: str = "assistant",
        data_key: str | None = None,
        device: torch.device | str | None = None,
    ):
        check_choice("ChatEnv", "input_mode", input_mode, MODES)
        if input_mode != "history" and tokenizer is None:
            raise ConfigError(f"ChatEnv: input_mode={input_mode!r} renders the prompt at reset and needs a tokenizer.")
        batch_size = one_batch_size(batch_size, "ChatEnv", "conversations")
        super().__init__(device=device, batch_size=batch_size, batch_locked=False)
        self.input_mode, self.data_key, self.tokenizer = input_mode, data_key or "query", tokenizer
        self.system_prompt, self.system_role = system_prompt, system_role
        self.user_role, self.policy_role = user_role, policy_role
        # In history mode the policy renders the prompt.
        self.renderer = None if input_mode == "history" else Renderer(tokenizer, template_kwargs=template_kwargs)
        self.observation_spec = self._view_spec("prompt")
        self.action_spec = self._view_spec("full")
        # The initial query, and the entries of earlier turns that a policy may carry into the next prompt.
        views = {"text": "prompt", "tokens": "prompt", "log_probs": "prompt", "masks": "prompt_assistant_mask"}
        carried = {
            name: CONTAINERS[name].default_spec(batch_size, [field])
            for name, field in views.items()
            if name != input_mode
        }
        self.state_spec = Composite({**carried, self.data_key: NonTensor(shape=batch_size)}, shape=batch_size)
        # The prompt may be in a column named like a view, which then replaces it.
        is_view = self.data_key in CONTAINERS
        self.reserved_columns = {name: RESERVED[name] for name in RESERVED if name != self.data_key or not is_view}

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[Any], **options: Any) -> TransformedEnv:
        """A `ChatEnv` whose prompts come from ``dataloader``; ``options`` go to `ChatEnv` and `DataLoadingPrimer`.

        >>> env = ChatEnv.from_dataloader([{"query": "2 + 2?"}], repeats=2, group_repeats=True)
        >>> env.reset()["group_id"].tolist()
        [0, 0]
        """
        loading, asking = split_keywords(options, f"{cls.__name__}.from_dataloader", DataLoadingPrimer, cls)
        primer = DataLoadingPrimer(dataloader, **loading)
        return TransformedEnv(cls(**asking | {"batch_size": primer.batch_size}), primer)

    def _view_spec(self, field: str) -> Composite:
        shape = self.batch_size
        if self.input_mode == "tokens":
            view = Tokens.default_spec(shape, [field])
        else:
            view = Composite({field: NonTensor(shape=shape)}, shape=shape)
        return Composite({self.input_mode: view}, shape=shape)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        remedy = f"pass TensorDict({self.data_key}=..., batch_size={list(self.batch_size)}), or add a DataLoadingPrimer"
        queries = required_column(td, self.data_key, "ChatEnv.reset", "the user's message", remedy)
        refuse_reserved(_columns_of(td), "ChatEnv.reset", self.reserved_columns)
        out = new_tensordict(
            {key: value for key, value in td.items() if key not in ("_reset", "next", *CONTAINERS)},
            batch_size=td.batch_size,
            device=self.device,
        )
        chats = [self._chat(query) for query in queries]
        # The renderer reads tool declarations from the first message of each row.
        for row, (chat, schemas) in enumerate(zip(chats, column_values(td, "tools") or (), strict=False), 1):
            if schemas:
                chat[0]["tools"] = declared_tools(schemas, f"row {row} of the batch")
        out.set(self.input_mode, self._prompt(chats))
        return out

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        view = td.get(self.input_mode)
        if view.rows("full") is None:
            fields = [field for field in ("prompt", "response") if view.rows(field) is not None]
            raise MissingKeyError(
                f"ChatEnv.step: the policy must write {(self.input_mode, 'full')!r}, the conversation with its turn: "
                f"{self.input_mode!r} has {' and '.join(fields) or 'nothing'}."
            )
        # The next prompt reuses the sampled ids unchanged: rendering them again could give other ids.
        out = new_tensordict(next_prompt(td), td.batch_size, self.device)
        if (ends_B := _without_room(td)) is not None:
            for flag in ("truncated", "done"):
                out.set(flag, ends_B.view(*td.batch_size, 1).to(self.device or ends_B.device))
        return out

    def _blank(self, old: TensorDictBase, new: TensorDictBase) -> None:
        key = self.data_key
        if key in CONTAINERS and key not in new.keys() and is_non_tensor(old.get(key, None)) and len(new) == len(old):
            new.set(key, CONTAINERS[key].from_rows({}, new.batch_size))  # the prompt now holds the user's message
        missing = CONTAINERS.keys() - new.keys()
        text = old.get("text", None)
        if "text" in missing and not (text is None or is_non_tensor(text)) and text.rows("prompt") is not None:
            new.set("text", Text.from_rows({"prompt": [""] * len(new)}, new.batch_size))
        # Empty streams: a new conversation must not continue the tokens of the row's previous one.
        if (stream := TokenStream.read(old)) is not None:
            empty = stream.cut(range(len(old))).select([0] * len(new))
            empty.write(new, only=missing)

    def _continue_randomly(self, td: TensorDictBase, generator: torch.Generator | None) -> bool:
        view = td.get(self.input_mode, None)
        if view is None or view.rows("prompt") is None:
            who, key = f"{type(self).__name__}.rand_action", (self.input_mode, "prompt")
            raise MissingKeyError(f"{who}: reads {key!r}, which is missing; reset the env first.")
        letters = torch.randint(ord("a"), ord("z") + 1, (td.batch_size.numel(), 8), generator=generator).tolist()
        answers = ["".join(map(chr, row)) for row in letters]
        td.set(self.input_mode, answered(view, answers, self.tokenizer, self.policy_role))
        return True

    def _chat(self, query: Any) -> list[Message]:
        if isinstance(query, str):
            chat = [{"role": self.user_role, "content": query}]
        elif isinstance(query, (list, tuple)) and query and all(isinstance(m, Mapping) for m in query):
            chat = [dict(message) for message in query]
        elif isinstance(query, History):
            chat = query.to_chats()
        else:
            raise DataError(
                f"ChatEnv.reset: {self.data_key!r} must be text, a list of messages or a History: got {query!r:.80}."
            )
        if self.system_prompt is not None and chat[0]["role"] != self.system_role:
            chat.insert(0, {"role": self.system_role, "content": self.system_prompt})
        return chat

    def _prompt(self, chats: list[list[Message]]) -> ChatHistory | Text | Tokens:
        if self.input_mode == "history":
            return ChatHistory.from_rows({"prompt": History.from_chats(chats)})
        if self.input_mode == "text":
            return Text.from_rows({"prompt": self.renderer.codec.render(chats, add_generation_prompt=True)})
        return Tokens.from_rows({"prompt": [ids.to(self.device) for ids in self.renderer.prompt_ids(chats)]})


def _columns_of(td: TensorDictBase) -> list[str]:
    """The entries that are columns of the data by their type; the others may come from the turns before a reset."""
    nested = (*CONTAINERS, MEDIA, "next")
    return [
        name
        for name, value in td.items()
        if (is_non_tensor(value) and name != "policy_version") or (name in nested and isinstance(value, Tensor))
    ]


def _without_room(td: TensorDictBase) -> Tensor | None:
    """bool[B]: True for conversations that left no room for an answer; None if there are none."""
    reasons, tokens = td.get("stop_reason", None), td.get("tokens", None)
    responses = None if tokens is None or is_non_tensor(tokens) else tokens.rows("response")
    if reasons is None or responses is None:
        return None
    empty = torch.tensor([not len(row) for row in responses], device=reasons.device)
    if getattr(tokens, "padded", False) and not empty.any():  # answers of the batch's width, which the mask tells apart
        attention = td.get(("masks", "all_attention_mask")).flatten(0, -2)
        empty = ~attention[:, -len(responses[0]) :].bool().any(1)
    ends_B = empty & (reasons.flatten() == StopReason.LENGTH)
    return ends_B if bool(ends_B.any()) else None


class DatasetChatEnv(TransformedEnv):
    """A `ChatEnv` that starts every conversation from a row of a dataset and ends it after ``max_steps`` turns.

    Reads   ``dataset``: a local file, a hub name (with ``name`` and ``split``), or rows; columns as `to_prompt` reads
            them, unless ``prompt_column`` and ``answer_column`` name them, or ``collate_fn(list of rows)`` returns
            other rows
    Writes  what `DataLoadingPrimer` and `ChatEnv` write; "answer" NonTensor [B] if the data have a reference
    Raises  DataError for data that cannot be read or have no prompt; EndOfData at a reset after ``epochs``

    ``num_envs`` is the number of parallel conversations; with ``group_repeats=True`` it counts prompts, each of which
    starts ``repeats`` conversations. ``shuffle``, ``seed``, ``epochs``, ``rank`` and ``world_size`` are the primer's.
    ``batch_size_dl`` and ``apply_template`` have no effect: rows are in memory, and ``input_mode`` sets the form of a
    prompt. ``ray_backend`` and ``dataloader_actor_name`` must stay False and None.

    >>> env = DatasetChatEnv(dataset=[{"question": "2 + 2?", "answer": "4"}], shuffle=False)
    >>> env.reset().get("answer").tolist()
    ['4']
    """

    SYSTEM_PROMPT: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        dataset: str | Path | Sequence[Mapping[str, Any]],
        shuffle: bool = True,
        name: str | None = None,
        split: str | None = None,
        num_envs: int = 1,
        repeats: int | None = None,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Sequence[Mapping[str, Any]]] | None = None,
        input_mode: str = "history",
        data_key: str | None = None,
        primers: Any | None = None,
        system_prompt: str | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        max_steps: int | None = 1,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        batch_size_dl: int = 1,
        apply_template: bool = False,
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
    ):
        given, who = dict(locals()), type(self).__name__
        if system_prompt is None:
            given["system_prompt"] = self.SYSTEM_PROMPT
        if ray_backend or dataloader_actor_name is not None:
            raise ConfigError(
                f"{who}: ray_backend must be False and dataloader_actor_name None: got {ray_backend} and "
                f"{dataloader_actor_name!r}; share rows between processes with rank and world_size."
            )
        check_at_least(who, 1, batch_size_dl=batch_size_dl)
        is_source = isinstance(dataset, (str, Path)) or hasattr(dataset, "column_names")  # a datasets.Dataset
        rows = dataset
        if is_source:
            from llmrl.data.llm.dataset_files import load_rows

            rows = load_rows(dataset, split=split or "train", name=name)
        if collate_fn is None:
            columns = {"prompt_column": prompt_column, "answer_column": answer_column}
            rows = [to_prompt(row, number=number, **columns) for number, row in enumerate(checked_rows(rows, who), 1)]
        else:
            # Collates all rows at once, not per batch: epoch order and resumption count the collated rows.
            rows = list(collate_fn(list(rows)))
        if data_key not in (None, "query"):
            rows = [_under(data_key, row, number) for number, row in enumerate(rows, 1)]
        names = dict.fromkeys(name for row in rows for name in row)
        if any(len(row) < len(names) for row in rows):  # rows of JSON may leave out what has no value
            rows = [{**dict.fromkeys(names), **row} for row in rows]
        self.primer = DataLoadingPrimer(rows, batch_size=num_envs, **keywords_of(DataLoadingPrimer, given))
        super().__init__(ChatEnv(batch_size=self.primer.batch_size, **keywords_of(ChatEnv, given)), self.primer)
        if max_steps is not None:
            self.append_transform(StepCounter(max_steps=max_steps))

    def reset_dataloader(self) -> None:
        """Starts again at the first row of the first epoch."""
        self.primer.reset_dataloader()


def one_batch_size(batch_size: int | Sequence[int] | None, who: str, noun: str) -> torch.Size:
    """A batch size of one dim, by default [1]. Raises ConfigError for another number of dims."""
    size = torch.Size((1,) if batch_size is None else (batch_size,) if isinstance(batch_size, int) else batch_size)
    if len(size) != 1:
        raise ConfigError(f"{who}: batch_size must be the number of {noun}, as in [8]: got {list(size)}.")
    return size


def checked_rows(rows: Sequence[Any], who: str) -> Sequence[Mapping[str, Any]]:
    """The rows, unchanged. Raises DataError naming the first row that is not a mapping."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            form, got = {"question": "2 + 2?", "answer": "4"}, type(row).__name__
            raise DataError(f"{who}: a row must be a mapping of its columns, as {form}: row {number} is a {got}.")
    return rows


def _under(data_key: str, row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The row with its prompt under ``data_key``. Raises DataError for another column of that name."""
    if data_key in row and row[data_key] != row.get("query"):
        raise DataError(
            f"dataset: data_key={data_key!r} must not name a column besides the prompt: row {number} has both; choose "
            "another data_key."
        )
    return {data_key if key == "query" else key: value for key, value in row.items()}


def answered(
    view: ChatHistory | Text | Tokens,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    role: str = "assistant",
) -> ChatHistory | Text | Tokens:
    """The view with one answer per row added as "response" and "full"; token views need the ``tokenizer``.

    >>> answered(Text.from_rows({"prompt": ["2+2=", "2+3="]}), ["4", "5"]).rows("full")
    ['2+2=4', '2+3=5']
    """
    if isinstance(view, ChatHistory):
        prompt = History.from_chats(view.chats("prompt"))
        response = History.from_chats([[{"role": role, "content": answer}] for answer in answers])
        columns = {"prompt": prompt, "response": response, "full": prompt.extend(response, inplace=False, dim=-1)}
        return ChatHistory.from_rows(columns, view.batch_size)
    prompts, responses = view.rows("prompt"), list(answers)
    if isinstance(view, Text):
        fulls = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    else:
        ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
        responses = [torch.tensor(row, dtype=torch.int64, device=prompts[0].device) for row in ids]
        fulls = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    return type(view).from_rows({"prompt": prompts, "response": responses, "full": fulls}, view.batch_size)


def next_prompt(td: TensorDictBase) -> dict[str, Any]:
    """The views of the next turn's prompt: the current ``full``, without padding.

    Writes  (view, "prompt") for history and text, and the token stream
    """
    out = new_tensordict({}, td.batch_size)
    if (history := td.get("history", None)) is not None and (full := history.get("full", None)) is not None:
        out.set("history", ChatHistory.from_rows({"prompt": full}, td.batch_size))
    if (text := td.get("text", None)) is not None and (texts := text.rows("full")) is not None:
        out.set("text", Text.from_rows({"prompt": texts}, td.batch_size))
    if (stream := TokenStream.read(td, finished=True)) is not None:
        stream.write(out)
    return dict(out.items())
