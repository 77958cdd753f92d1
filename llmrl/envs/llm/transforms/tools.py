"""`ToolTransform`: runs the tool calls of a turn and appends what they answered to the next prompt.

How models write calls is `llmrl.envs.llm.tool_calls`', what a tool is and how calls run at the same time is
`llmrl.tools`', and how messages become ids is `tool_messages`' and the wrapper's. This file decides which calls run,
when a conversation is over, and counts.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.llm.dataset_files import declared_tools
from llmrl.data.llm.templates import find_template
from llmrl.data.ragged.tensordicts import column, column_values
from llmrl.data.specs import Composite, NonTensor, Unbounded
from llmrl.envs.llm.completions import completion_texts, special_tokens, trim_markers
from llmrl.envs.llm.tool_calls import CallFormat, ParsedCall, call_format
from llmrl.envs.llm.tool_calls.base import call_from_object
from llmrl.envs.llm.transforms.tool_messages import append_messages, restate_answers
from llmrl.envs.llm.transforms.tool_use import COUNTS, added_tool_use, no_tool_use, tool_use_spec
from llmrl.envs.td_ops import present_keys, shallow_copy
from llmrl.envs.transforms.base import Transform, innermost
from llmrl.envs.transforms.step_counter import StepCounter
from llmrl.errors import ConfigError, MissingKeyError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.containers import decode_rows
from llmrl.modules.llm.rendering import Renderer
from llmrl.tools import Tool, ToolCall, ToolResult, load_tool
from llmrl.tools.runner import ToolRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmrl.envs.base import EnvBase

__all__ = ["ToolTransform"]

_VIEWS = ("history", "text", "tokens")
_TAIL_CHARS, _TAIL_IDS = 24, 8  # enough of a prompt to see whether it ends inside a thought
_SCOPES = itertools.count()  # a tool may serve several transforms: their conversations are told apart by these
_STAND_INS = re.compile("[\U000f0000-\U0010ffff]")  # what the renderer writes control tokens as


class ToolTransform(Transform):
    """Tools for the conversations of a `ChatEnv`.

    Reads   the policy's turn: ("history" | "text" | "tokens", "response"), or the last message of "full" where there
            is no response, and "stop_reason" int64[B] where it is there
    Calls   the tools, for all rows at the same time, each call with its deadline; a conversation's calls in their order
    Writes  at reset  "tools" NonTensor [B]: the schemas, which the chat template's own ``tools`` declares
                      "conversation_id" int64[B]: counts conversations; "tool_use": see `tool_metrics`
            at step   ("next", view, "prompt"): one message {"role", "content", "name", "tool_call_id"} per call more
                      ("next", "tool_use"): the counts so far
                      ("next", "terminated" | "truncated" | "done") bool[B, 1]: a turn without a call ends the
                      conversation; so does one that was cut off, and one more than ``max_tool_turns`` with calls: both
                      as truncated
    Raises  ConfigError for settings that cannot be used; MissingKeyError for a batch that no reset made. What a model
            writes never raises: a call that cannot be read, an unknown tool, wrong arguments, an exception and a
            timeout are answered with a message that says what is wrong

    tools               tools, typed functions, or names as `load_tool` takes them
    format              how the model writes calls: "auto" (what the chat template tells it, else what an answer looks
                        like), "hermes", "llama", "mistral", "deepseek", "harmony", "function", "tagged", "python", or
                        a `CallFormat`. Of formats whose templates keep calls apart from the content, the next prompt
                        has them as the "tool_calls" of the answer
    timeout_s           of one call, where the tool has none of its own
    max_calls_per_turn  calls beyond are not run, which the model is told
    max_result_chars    of one answer; the middle of a longer one is cut, with a notice
    max_tool_turns      turns whose calls are answered; None: no limit but the env's
    end_without_call    False leaves the end of a conversation to the env and its other transforms
    declare             whether the schemas go through the chat template; by default where ``format`` is one that
                        templates teach. Otherwise put :meth:`instructions` into the system prompt
    role                of the messages
    tokenizer           for "auto" and to read tokens; by default the env's

    A call in the last turn that `StepCounter` allows, or beside an end that the env sees, is not run: nobody would read
    the answer. Calls inside ``<think>`` blocks do not count. Two of these in one env share the counts and the end.

    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = ChatEnv(batch_size=[1]).append_transform(ToolTransform(["calculator"]))
    >>> call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    >>> td = env.step(ScriptedPolicy([call])(env.reset(TensorDict(query="6 * 7?", batch_size=[1]))))
    >>> td["next", "history"].prompt.to_chats()[0][-1]
    {'role': 'tool', 'content': '42', 'name': 'calculator', 'tool_call_id': 'call_0_0_0'}
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any] | str],
        *,
        format: str | CallFormat = "auto",
        timeout_s: float = 10.0,
        max_calls_per_turn: int = 8,
        max_result_chars: int = 4000,
        max_tool_turns: int | None = None,
        max_concurrency: int = 64,
        end_without_call: bool = True,
        declare: bool | None = None,
        role: str = "tool",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
            raise ConfigError(f"{type(self).__name__}: tools must be a list of at least one tool: got {tools!r:.80}.")
        for name, value in (("max_calls_per_turn", max_calls_per_turn), ("max_tool_turns", max_tool_turns)):
            if value is not None and value < 1:
                raise ConfigError(f"{type(self).__name__}: {name} must be at least 1: got {value}.")
        super().__init__()
        self.format = call_format(format, _template_of(tokenizer))
        self._asked_format = format
        self.max_calls_per_turn = max_calls_per_turn
        self.max_tool_turns = max_tool_turns
        self.end_without_call = end_without_call
        self.role = role
        self.tokenizer = tokenizer
        self.runner = ToolRunner(
            [load_tool(tool) if isinstance(tool, str) else tool for tool in tools],
            timeout_s=timeout_s,
            max_result_chars=max_result_chars,
            max_concurrency=max_concurrency,
        )
        self.declare = self.format.in_templates if declare is None else declare
        self.counters: dict[str, float] = {**dict.fromkeys(COUNTS, 0), "seconds": 0.0}
        self._schemas = self.runner.schemas()
        self._parameters = {name: tool.parameters for name, tool in self.runner.tools.items()}
        self._renderer: Renderer | None = None
        self._lock = threading.Lock()
        self._num_conversations = 0
        self._scope = next(_SCOPES)
        self._open: dict[int, None] = {}  # conversations for which a tool may keep something, oldest first

    # -- what subclasses and users may ask -----------------------------------------------------------------------------

    def instructions(self) -> str:
        """What the tools are and how to call them, for a system prompt where the chat template cannot say it."""
        return (
            "You can call these tools:\n"
            + "\n".join(_described(schema["function"]) for schema in self._schemas)
            + f"\n\nTo call one, write:\n{self.format.example}\nThe next message tells you what it answered."
        )

    def _content(self, result: ToolResult, number: int) -> str:
        """What the model is told about the call with this number, from 1, of a turn."""
        return result.content if result.status == "ok" else f"Error: {result.content}"

    # -- at reset ------------------------------------------------------------------------------------------------------

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        if self.tokenizer is None:
            self.tokenizer = getattr(container, "tokenizer", None)
        if self._asked_format == "auto":
            self.format = call_format("auto", _template_of(self.tokenizer))
        self._renderer = getattr(innermost(container), "_renderer", None)

    def _reset_env_preprocess(self, td: TensorDictBase | None) -> TensorDictBase | None:
        if not self.declare:
            return td
        if td is None:
            td = TensorDict({}, batch_size=() if self.container is None else self.container.batch_size)
        given = column_values(td, "tools") or [None] * td.batch_size.numel()
        td = shallow_copy(td)
        td.set("tools", column([self._declared(schemas, row) for row, schemas in enumerate(given, 1)]))
        return td

    def _declared(self, given: Any, row: int) -> Any:
        """Schemas of this transform's tools, with those of a row that has some."""
        given = declared_tools(given, f"row {row} of the batch")
        others = [schema for schema in given if schema.get("function", schema).get("name") not in self._parameters]
        return [*others, *self._schemas] if others else self._schemas

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        if self._peers()[0] is self:
            count = reset_td.batch_size.numel()
            with self._lock:
                first, self._num_conversations = self._num_conversations, self._num_conversations + count
            ids = torch.arange(first, first + count, device=reset_td.device).reshape(reset_td.batch_size)
            reset_td.set("conversation_id", ids)
            reset_td.set("tool_use", no_tool_use(reset_td.batch_size, reset_td.device))
        return reset_td

    # -- at step -------------------------------------------------------------------------------------------------------

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        peers = self._peers()
        before, conversations = td.get("tool_use", None), td.get("conversation_id", None)
        if before is None or conversations is None:
            raise MissingKeyError(
                f"{type(self).__name__}: reads 'tool_use' and 'conversation_id' of time t, which are not there; keys "
                f"present: {present_keys(td)}; step a tensordict that env.reset() returned."
            )
        over = self._over(td, next_td)
        cut = self._cut_off(td, len(over))
        ids, turns = conversations.flatten().tolist(), before.get("turns").flatten().tolist()
        answers, structured = self._answers(td), self._structured(td)
        parsed = self._parsed(td, answers, structured)
        mine = self._is_mine(peers)
        use = before if peers[0] is self else next_td.get("tool_use")
        counted = (use.get("tool_turns") > before.get("tool_turns")).flatten().tolist()
        spent = self._spent(before)
        calls: list[ToolCall] = []
        owners: list[int] = []
        counts: list[dict[str, float]] = []
        said: dict[int, dict[str, Any]] = {}
        for row, written in enumerate(parsed):
            every = [] if cut[row] else self._with_ids(written, ids[row], turns[row])
            found = [(call, call_id) for call, call_id in every if mine(call.name)]
            run = [] if over[row] or spent[row] else found[: self.max_calls_per_turn]
            for call, call_id in run:
                calls.append(ToolCall(call.name, call.arguments, call_id, (self._scope, ids[row]), call.error))
                owners.append(row)
            if run and not structured[row] and (fields := self.format.message(answers[row], every)):
                said[row] = fields
            turn = {"turns": int(peers[0] is self), "tool_turns": int(bool(run) and not counted[row])}
            counts.append({**turn, "calls": len(found), "not_run": len(found) - len(run)})
        messages = self._run(calls, owners, counts)
        for new, row_counts in zip(messages, counts, strict=True):
            if new and (left := row_counts["not_run"]):
                text = f"Error: {left} more calls of this turn were not run: at most {self.max_calls_per_turn} are."
                new.append({"role": self.role, "content": text})
        self._count(counts)
        use = added_tool_use(use, counts)
        next_td.set("tool_use", use)
        if any(messages):
            if said:
                restate_answers(next_td, said)
            append_messages(next_td, _view(next_td), messages, self._renderer, said)
        if peers[-1] is self:
            called = (use.get("calls") > before.get("calls")).flatten().tolist()
            self._end_conversations(next_td, called, cut, spent)
        ended = [a or b for a, b in zip(over, next_td.get("done").flatten().tolist(), strict=True)]
        self._free(ids, ended, {ids[row] for row in owners})
        return next_td

    def _run(
        self, calls: list[ToolCall], owners: list[int], counts: list[dict[str, float]]
    ) -> list[list[dict[str, Any]]]:
        """Runs the calls of all rows; the messages of each row, and its counts, in place."""
        messages: list[list[dict[str, Any]]] = [[] for _ in counts]
        for row, result in zip(owners, self.runner.run(calls) if calls else (), strict=True):
            content = _STAND_INS.sub("\ufffd", self._content(result, len(messages[row]) + 1))
            name = {"name": result.call.name} if result.call.name else {}
            messages[row].append({"role": self.role, "content": content, **name, "tool_call_id": result.call.id})
            row_counts = counts[row]
            row_counts[result.status] = row_counts.get(result.status, 0) + 1
            row_counts["cut"] = row_counts.get("cut", 0) + (result.cut > 0)
            row_counts["seconds"] = row_counts.get("seconds", 0.0) + result.duration_s
        return messages

    def _parsed(
        self, td: TensorDictBase, answers: list[str], structured: list[list[ParsedCall] | None]
    ) -> list[list[ParsedCall]]:
        """The calls of each row's turn; nothing but this turn is read."""
        return [
            self.format.parse(text, self._parameters, thinking=thought) if calls is None else calls
            for text, calls, thought in zip(answers, structured, self._opened_thoughts(td), strict=True)
        ]

    def _structured(self, td: TensorDictBase) -> list[list[ParsedCall] | None]:
        """The calls of turns that have them apart from their text."""
        history = td.get("history", None)
        chats = None if history is None else history.chats("response") or history.chats("full")
        if chats is None:
            return [None] * td.batch_size.numel()
        return [_structured_calls(chat[-1]) if chat else None for chat in chats]

    def _with_ids(self, calls: list[ParsedCall], conversation: int, turn: int) -> list[tuple[ParsedCall, str]]:
        return [(call, call.id or self.format.call_id(conversation, turn, number)) for number, call in enumerate(calls)]

    def _answers(self, td: TensorDictBase) -> list[str]:
        tokens = td.get("tokens", None)
        responses = None if tokens is None else tokens.rows("response")
        if td.get("text", None) is None and td.get("history", None) is None and responses and self.tokenizer:
            # not skipping special tokens: in some families they are part of a call
            rows = [row.tolist() for row in responses]
            ends = special_tokens(self.tokenizer)
            return [trim_markers(text, ends) for text in decode_rows(self.tokenizer, rows)]
        return completion_texts(td, self.tokenizer, who=type(self).__name__)

    def _opened_thoughts(self, td: TensorDictBase) -> list[bool]:
        """Whether the template's generation prompt opened a thought, which the answer then began in."""
        text, tokens = td.get("text", None), td.get("tokens", None)
        tails: list[str] | None = None
        if text is not None and (prompts := text.rows("prompt")) is not None:
            tails = [prompt[-_TAIL_CHARS:] for prompt in prompts]
        elif tokens is not None and self.tokenizer and (rows := tokens.rows("prompt")) is not None:
            tails = decode_rows(self.tokenizer, [row[-_TAIL_IDS:].tolist() for row in rows])
        if tails is None:
            return [False] * td.batch_size.numel()
        return [tail.rstrip().endswith("<think>") for tail in tails]

    # -- who goes on ---------------------------------------------------------------------------------------------------

    def _peers(self) -> list[ToolTransform]:
        """The tool transforms of the env in running order: the first counts turns, the last ends conversations."""
        if self.container is None:
            return [self]
        return [leaf for leaf in self.container.transform.leaves() if isinstance(leaf, ToolTransform)]

    def _is_mine(self, peers: list[ToolTransform]) -> Callable[[str], bool]:
        """Whether a call is for this transform: for one of its tools, or for nobody's and no peer before says so."""
        others = {name for peer in peers if peer is not self for name in peer.runner.tools}
        first = next(peer for peer in peers if peer.format.name == self.format.name) is self
        return lambda name: name in self.runner.tools or (first and name not in others)

    def _over(self, td: TensorDictBase, next_td: TensorDictBase) -> list[bool]:
        """Rows that end with this turn, whatever is in it, or had ended before."""
        over = next_td.get("done").flatten()
        if (done := td.get("done", None)) is not None:
            over = over | done.flatten()
        leaves = () if self.container is None else self.container.transform.leaves()
        for counter in leaves:
            if isinstance(counter, StepCounter) and counter.max_steps is not None:
                over = over | (td.get(counter.step_count_key).flatten() + 1 >= counter.max_steps)
        return over.tolist()

    def _cut_off(self, td: TensorDictBase, count: int) -> list[bool]:
        reasons = td.get("stop_reason", None)
        if reasons is None:
            return [False] * count
        return [not StopReason(reason).natural for reason in reasons.flatten().tolist()]

    def _spent(self, before: TensorDictBase) -> list[bool]:
        """Rows that have had as many turns with calls as they may."""
        if self.max_tool_turns is None:
            return [False] * before.batch_size.numel()
        return (before.get("tool_turns") >= self.max_tool_turns).flatten().tolist()

    def _end_conversations(
        self, next_td: TensorDictBase, called: list[bool], cut: list[bool], spent: list[bool]
    ) -> None:
        going_on = ~next_td.get("done").flatten()
        device = going_on.device
        called_B, cut_B, spent_B = (torch.tensor(flags, device=device) for flags in (called, cut, spent))
        truncated = called_B & spent_B
        terminated = torch.zeros_like(truncated)
        if self.end_without_call:
            truncated |= cut_B
            terminated = ~called_B & ~cut_B
        for name, ends in (("truncated", truncated), ("terminated", terminated), ("done", truncated | terminated)):
            flag = next_td.get(name)
            next_td.set(name, flag | (ends & going_on).reshape(flag.shape))

    def _free(self, ids: list[int], done: list[bool], ran: set[int]) -> None:
        """Ends what tools keep for conversations that are over; beyond a bound, for the oldest that nobody ended."""
        with self._lock:
            self._open.update(dict.fromkeys(ran))
            over = [number for number, is_done in zip(ids, done, strict=True) if is_done and number in self._open]
            for number in over:
                del self._open[number]
            limit = 4 * max(64, len(ids))
            while len(self._open) > limit:
                over.append(next(iter(self._open)))
                del self._open[over[-1]]
        if over:
            self.runner.end([(self._scope, number) for number in over])

    def _count(self, counts: list[dict[str, float]]) -> None:
        with self._lock:
            for row in counts:
                for name, value in row.items():
                    self.counters[name] += value

    # -- specs and state -----------------------------------------------------------------------------------------------

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["tool_use"] = tool_use_spec(observation_spec.shape, observation_spec.device)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        shape, device = state_spec.shape, state_spec.device
        state_spec["conversation_id"] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        if self.declare:
            state_spec["tools"] = NonTensor(shape=shape, device=device)
        return state_spec

    def state_dict(self) -> dict[str, Any]:
        """How many conversations there were, so that ids go on counting."""
        return {"conversations": self._num_conversations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_conversations = state["conversations"]

    def clone(self) -> Self:
        """A copy that belongs to no env and shares the tools; its conversations and its counters are its own."""
        other = super().clone()
        other._scope, other._lock, other._open = next(_SCOPES), threading.Lock(), {}
        other.counters = dict.fromkeys(self.counters, 0)
        return other

    def close(self) -> None:
        """Closes the tools."""
        self.runner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tools=[{', '.join(self.runner.tools)}], format={self.format.name!r})"


def _view(next_td: TensorDictBase) -> str:
    return next(view for view in _VIEWS if next_td.get(view, None) is not None)


def _template_of(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    return None if tokenizer is None else find_template(tokenizer).jinja


def _structured_calls(message: Mapping[str, Any]) -> list[ParsedCall] | None:
    """The calls of a message that has them apart from its text, as those of an API do."""
    if not message.get("tool_calls"):
        return None
    calls = []
    for call in message["tool_calls"]:
        name, arguments, reason = call_from_object(call.get("function", call) if isinstance(call, Mapping) else call)
        given = call.get("id") if isinstance(call, Mapping) else None
        calls.append(ParsedCall(name, arguments, reason or None, given if isinstance(given, str) and given else None))
    return calls


def _described(function: Mapping[str, Any]) -> str:
    return json.dumps(dict(function), ensure_ascii=False)
