"""`ToolTransform`: runs the tool calls of a turn and appends their results to the next prompt.

`llmrl.envs.llm.tool_calls` parses calls, `llmrl.tools` runs them, `tool_messages` turns messages into ids. This file
decides which calls run and when a conversation is over, and keeps the counts.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from llmrl.data.llm.row_messages import declared_tools
from llmrl.data.llm.templates import find_template
from llmrl.data.ragged.tensordicts import column, column_values, required
from llmrl.data.specs import Composite, NonTensor, Unbounded
from llmrl.envs.base import EnvBase
from llmrl.envs.llm.completions import completion_texts, renderer_of, view_of
from llmrl.envs.llm.options import ToolOptions, split_keywords
from llmrl.envs.llm.tool_calls import ParsedCall, call_format
from llmrl.envs.llm.tool_calls.base import call_from_object
from llmrl.envs.llm.transforms.dataloading import primers_of
from llmrl.envs.llm.transforms.tool_messages import append_messages, restate_answers, without_stand_ins
from llmrl.envs.llm.transforms.tool_use import COUNTS, added_tool_use, tool_use_spec
from llmrl.envs.td_ops import shallow_copy
from llmrl.envs.transforms.base import Transform
from llmrl.envs.transforms.trajectory import at_last_step
from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import StopReason
from llmrl.modules.llm.policies.columns import refuse_reserved
from llmrl.modules.llm.policies.containers import decode_rows
from llmrl.modules.llm.rendering import Renderer
from llmrl.tools import Tool, ToolCall, ToolResult, load_tool
from llmrl.tools.runner import ToolRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_CHARS, _TAIL_IDS = 24, 8  # enough of a prompt to see that it ends inside a thought
_SCOPES = itertools.count()  # a tool may serve several transforms: these distinguish their conversations
_RESERVED = {
    "conversation_id": "the number of the conversation",
    "tool_use": "the counts of its calls",
    "tool_calls": "its calls so far",
}


@dataclass
class _Turn:
    """One conversation's turn: all calls with their ids, those of this transform's tools, and those that run."""

    calls: list[tuple[ParsedCall, str]]
    found: list[tuple[ParsedCall, str]]
    run: list[tuple[ParsedCall, str]]
    structured: bool  # True if the message held the calls in a field, separate from its text
    counts: dict[str, float]
    messages: list[dict[str, Any]] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)  # of ``run``


class ToolTransform(Transform):
    """Tools for the conversations of a `ChatEnv`.

    Reads   the policy's turn: (view, "response"), else the last message of (view, "full"); "stop_reason" if any
    Calls   the tools: rows in parallel, a conversation's calls in order, each call with its deadline
    Writes  at reset  "tools" NonTensor [B]: the schemas, for the chat template; "conversation_id" int64[B]
            at step   ("next", view, "prompt"): adds a message {"role", "content", "name", "tool_call_id"} per call
                      ("next", "tool_use"): the counts so far, see `tool_metrics`
                      ("next", "tool_calls") str [B]: the calls so far, see `read_calls`
                      ("next", "terminated" | "truncated" | "done") bool[B, 1]: a turn without a call terminates the
                      conversation; one cut off, or with calls beyond ``max_tool_turns``, truncates it
    Raises  ConfigError for unusable settings; MissingKeyError for a batch that does not come from a reset. Text of the
            model never raises: malformed calls, unknown tools, exceptions and timeouts are answered with a message

    ``tools`` are tools, typed functions, or names for `load_tool`; ``options`` are those of `ToolOptions`. If schemas
    are not declared, put :meth:`instructions` into the system prompt. Calls in a thinking block, or in the last turn
    that `StepCounter` allows, are not run. Several ToolTransforms in one env share their counts and end conditions.

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
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ):
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
            raise ConfigError(f"{type(self).__name__}: tools must be a list of at least one tool: got {tools!r:.80}.")
        split_keywords(options, type(self).__name__, ToolOptions)
        super().__init__()
        self.options = ToolOptions(**options)
        self.format = call_format(self.options.format, _template_of(tokenizer))
        self.tokenizer = tokenizer
        self.runner = ToolRunner(
            [load_tool(tool) if isinstance(tool, str) else tool for tool in tools],
            timeout_s=self.options.timeout_s,
            max_result_chars=self.options.max_result_chars,
            max_concurrency=self.options.max_concurrency,
        )
        declare = self.options.declare
        self.declare = self.format.in_templates if declare is None else declare
        self.counters: dict[str, float] = {**dict.fromkeys(COUNTS, 0), "seconds": 0.0}
        self._schemas = self.runner.schemas()
        self._parameters = {name: tool.parameters for name, tool in self.runner.tools.items()}
        self._renderer: Renderer | None = None
        self._lock = threading.Lock()
        self._num_conversations = 0
        self._scope = next(_SCOPES)
        self._open: dict[int, None] = {}  # conversations for which a tool may hold state, oldest first

    def instructions(self) -> str:
        """The tools and the call format, for a system prompt if the chat template cannot declare them."""
        functions = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in self._schemas)
        call = f"To call one, write:\n{self.format.example}\nThe next message tells you what it answered."
        return f"You can call these tools:\n{functions}\n\n{call}"

    def _content(self, result: ToolResult, number: int) -> str:
        """The message to the model about the call with this number, from 1, of a turn."""
        return result.content if result.status == "ok" else f"Error: {result.content}"

    # -- at reset ------------------------------------------------------------------------------------------------------

    def set_container(self, container: EnvBase) -> None:
        super().set_container(container)
        if self.tokenizer is None:
            self.tokenizer = getattr(container, "tokenizer", None)
        if self.options.format == "auto":
            self.format = call_format("auto", _template_of(self.tokenizer))
        self._renderer = renderer_of(container)
        for primer in primers_of(container):
            refuse_reserved(primer.columns, "dataset", _RESERVED)

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
        """The row's schemas of other tools, followed by the schemas of this transform's tools."""
        given = declared_tools(given, f"row {row} of the batch")
        others = [schema for schema in given if schema.get("function", schema).get("name") not in self._parameters]
        return [*others, *self._schemas] if others else self._schemas

    def _reset(self, td: TensorDictBase, reset_td: TensorDictBase) -> TensorDictBase:
        if self._peers()[0] is self:
            # Of the turns before a reset are the three together, the counts as a nested tensordict.
            given = [name for name in _RESERVED if name in reset_td.keys()]
            if len(given) < len(_RESERVED) or is_non_tensor(reset_td.get("tool_use")):
                refuse_reserved(given, type(self).__name__, _RESERVED)
            count = reset_td.batch_size.numel()
            with self._lock:
                first, self._num_conversations = self._num_conversations, self._num_conversations + count
            ids = torch.arange(first, first + count, device=reset_td.device).reshape(reset_td.batch_size)
            reset_td.set("conversation_id", ids)
            reset_td.set("tool_use", tool_use_spec(reset_td.batch_size, reset_td.device).zero())
            reset_td.set("tool_calls", column([""] * count))
        return reset_td

    # -- at step -------------------------------------------------------------------------------------------------------

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        before, conversations = (
            required(td, key, type(self).__name__, "step a tensordict that env.reset() returned")
            for key in ("tool_use", "conversation_id")
        )
        peers, ids = self._peers(), conversations.flatten().tolist()
        # Calls of a conversation's last turn are not run: no later turn would read their results.
        over_B = self._over(td, next_td)
        cut_B = _cut_off(td).to(over_B.device)
        spent_B = torch.zeros_like(over_B)  # rows that have used up max_tool_turns
        if self.options.max_tool_turns is not None:
            spent_B = (before.get("tool_turns") >= self.options.max_tool_turns).flatten()
        # With several tool transforms, the first counts turns, and each adds to the counts of the previous ones.
        use = before if peers[0] is self else next_td.get("tool_use")
        answers = completion_texts(td, self.tokenizer, who=type(self).__name__, as_drawn=True)
        turns = self._turns(td, answers, ids, cut_B.tolist(), (over_B | spent_B).tolist())
        counted = (use.get("tool_turns") > before.get("tool_turns")).flatten().tolist()
        for turn, had_calls in zip(turns, counted, strict=True):
            turn.counts |= {"turns": int(peers[0] is self), "tool_turns": int(bool(turn.run) and not had_calls)}
        self._run(turns, ids)
        with self._lock:
            for name in self.counters:
                self.counters[name] += sum(turn.counts.get(name, 0) for turn in turns)
        use = added_tool_use(use, [turn.counts for turn in turns])
        next_td.set("tool_use", use)
        calls = column_values(td if peers[0] is self else next_td, "tool_calls")
        numbers = td.get(("tool_use", "turns")).flatten().tolist()
        rows = zip(calls, turns, answers, numbers, strict=True)
        next_td.set("tool_calls", column([before + _lines(turn, text, number) for before, turn, text, number in rows]))
        self._append(next_td, turns, answers)
        if peers[-1] is self:
            called_B = (use.get("calls") > before.get("calls")).flatten()
            self._end_conversations(next_td, called_B, cut_B, spent_B)
        ended = (over_B | next_td.get("done").flatten()).tolist()
        self._free(ids, ended, {number for number, turn in zip(ids, turns, strict=True) if turn.run})
        return next_td

    def _turns(
        self, td: TensorDictBase, answers: list[str], ids: list[int], cut: list[bool], skipped: list[bool]
    ) -> list[_Turn]:
        """The calls of each row's turn; a cut-off turn has none, and a skipped row runs none."""
        numbers = td.get(("tool_use", "turns")).flatten().tolist()
        peers, turns = self._peers(), []
        others = {name for peer in peers if peer is not self for name in peer.runner.tools}
        # An unknown tool name is answered once: by the first transform that reads calls of this format.
        answers_unknown = next(peer for peer in peers if peer.format.name == self.format.name) is self
        rows = zip(answers, self._structured(td), self._opened_thoughts(td), ids, numbers, cut, skipped, strict=True)
        for text, structured, thinking, conversation, number, is_cut, is_skipped in rows:
            written = structured is None
            parsed = self.format.parse(text, self._parameters, thinking=thinking) if written else structured
            calls = [
                (call, call.id or self.format.call_id(conversation, number, place))
                for place, call in enumerate([] if is_cut else parsed)
            ]
            found = [
                (call, call_id)
                for call, call_id in calls
                if call.name in self.runner.tools or (answers_unknown and call.name not in others)
            ]
            run = [] if is_skipped else found[: self.options.max_calls_per_turn]
            counts = {"calls": len(found), "not_run": len(found) - len(run)}
            turns.append(_Turn(calls, found, run, not written, counts))
        return turns

    def _run(self, turns: list[_Turn], ids: list[int]) -> None:
        """Runs the calls of all rows; writes the messages and the counts of each turn."""
        role, limit = self.options.role, self.options.max_calls_per_turn
        owned = [
            (turn, ToolCall(call.name, call.arguments, call_id, (self._scope, number), call.error))
            for turn, number in zip(turns, ids, strict=True)
            for call, call_id in turn.run
        ]
        results = self.runner.run([call for _, call in owned]) if owned else []
        for (turn, _), result in zip(owned, results, strict=True):
            content = without_stand_ins(self._content(result, len(turn.messages) + 1))
            name = {"name": result.call.name} if result.call.name else {}
            turn.messages.append({"role": role, "content": content, **name, "tool_call_id": result.call.id})
            turn.results.append(result)
            for count, value in ((result.status, 1), ("cut", result.cut > 0), ("seconds", result.duration_s)):
                turn.counts[count] = turn.counts.get(count, 0) + value
        for turn in turns:
            if turn.messages and (left := turn.counts["not_run"]):
                text = f"Error: {left} more calls of this turn were not run: at most {limit} are."
                turn.messages.append({"role": role, "content": text})

    def _append(self, next_td: TensorDictBase, turns: list[_Turn], answers: list[str]) -> None:
        """Appends the messages to the prompts, and restructures answers whose template expects separate calls."""
        if not any(turn.messages for turn in turns):
            return
        said = {}
        for row, turn in enumerate(turns):
            if turn.run and not turn.structured and (fields := self.format.message(answers[row], turn.calls)):
                said[row] = fields
        if said:
            restate_answers(next_td, said)
        append_messages(next_td, view_of(next_td), [turn.messages for turn in turns], self._renderer, said)

    def _structured(self, td: TensorDictBase) -> list[list[ParsedCall] | None]:
        """The calls of turns whose message has a "tool_calls" field, as API responses do; None for other turns."""
        history = td.get("history", None)
        chats = None if history is None else history.chats("response") or history.chats("full")
        if chats is None:
            return [None] * td.batch_size.numel()
        return [_structured_calls(chat[-1]) if chat else None for chat in chats]

    def _opened_thoughts(self, td: TensorDictBase) -> list[bool]:
        """True for each row whose generation prompt opened a thought, so that the answer starts inside it."""
        text, tokens = td.get("text", None), td.get("tokens", None)
        tails = [""] * td.batch_size.numel()
        if text is not None and (prompts := text.rows("prompt")) is not None:
            tails = [prompt[-_TAIL_CHARS:] for prompt in prompts]
        elif tokens is not None and self.tokenizer and (rows := tokens.rows("prompt")) is not None:
            tails = decode_rows(self.tokenizer, [row[-_TAIL_IDS:].tolist() for row in rows])
        return [tail.rstrip().endswith("<think>") for tail in tails]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _peers(self) -> list[ToolTransform]:
        """The tool transforms of the env in running order: the first counts turns, the last ends conversations."""
        if self.container is None:
            return [self]
        return [leaf for leaf in self.container.transform.leaves() if isinstance(leaf, ToolTransform)]

    def _over(self, td: TensorDictBase, next_td: TensorDictBase) -> Tensor:
        """Rows that end with this turn regardless of its content, or ended before: bool[B]."""
        over_B = next_td.get("done").flatten()
        if (done := td.get("done", None)) is not None:
            over_B = over_B | done.flatten()
        return over_B | at_last_step(self.container, td).to(over_B.device)

    def _end_conversations(self, next_td: TensorDictBase, called_B: Tensor, cut_B: Tensor, spent_B: Tensor) -> None:
        # Conversations that another limit already ended keep their flags.
        going_on_B = ~next_td.get("done").flatten()
        truncated_B, terminated_B = called_B & spent_B, torch.zeros_like(called_B)
        if self.options.end_without_call:
            truncated_B = truncated_B | cut_B
            terminated_B = ~called_B & ~cut_B
        ends = {"truncated": truncated_B, "terminated": terminated_B, "done": truncated_B | terminated_B}
        for name, ends_B in ends.items():
            flag = next_td.get(name)
            next_td.set(name, flag | (ends_B & going_on_B).reshape(flag.shape))

    def _free(self, ids: list[int], done: list[bool], ran: set[int]) -> None:
        """Frees the tool state of ended conversations and, beyond a limit, of the oldest unfinished ones."""
        with self._lock:
            self._open.update(dict.fromkeys(ran))
            over = [number for number, is_done in zip(ids, done, strict=True) if is_done and number in self._open]
            for number in over:
                del self._open[number]
            # A conversation that a reset abandoned never reports its end, so the number of open ones is limited.
            limit = 4 * max(64, len(ids))
            while len(self._open) > limit:
                over.append(next(iter(self._open)))
                del self._open[over[-1]]
        if over:
            self.runner.end([(self._scope, number) for number in over])

    # -- specs and state -----------------------------------------------------------------------------------------------

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["tool_use"] = tool_use_spec(observation_spec.shape, observation_spec.device)
        observation_spec["tool_calls"] = NonTensor(shape=observation_spec.shape, device=observation_spec.device)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        shape, device = state_spec.shape, state_spec.device
        state_spec["conversation_id"] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        if self.declare:
            state_spec["tools"] = NonTensor(shape=shape, device=device)
        return state_spec

    def state_dict(self) -> dict[str, Any]:
        """The number of conversations so far, so that ids continue after a resume."""
        return {"conversations": self._num_conversations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_conversations = state["conversations"]

    def clone(self) -> Self:
        """A copy without an env that shares the tools, with its own conversations and counters."""
        other = super().clone()
        other._scope, other._lock, other._open = next(_SCOPES), threading.Lock(), {}
        other.counters = dict.fromkeys(self.counters, 0)
        return other

    def close(self) -> None:
        self.runner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tools=[{', '.join(self.runner.tools)}], format={self.format.name!r})"


def _lines(turn: _Turn, answer: str, number: int) -> str:
    """The calls of turn ``number`` as JSON lines for `read_calls`; calls beyond the limit have no result."""
    lines = []
    for place, (call, _) in enumerate(turn.found):
        result = turn.results[place] if place < len(turn.results) else None
        said = answer[slice(*call.span)] if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
        entry = {"turn": number, "name": call.name, "arguments": said}
        entry |= {"result": turn.messages[place]["content"] if result else ""}
        entry |= {"outcome": result.status if result else "not_run", "seconds": result.duration_s if result else None}
        lines.append(json.dumps(entry) + "\n")
    return "".join(lines)


def _cut_off(td: TensorDictBase) -> Tensor:
    """Rows whose turn did not end by itself, bool[B]."""
    if (reasons := td.get("stop_reason", None)) is None:
        return torch.zeros(td.batch_size.numel(), dtype=torch.bool)
    return torch.tensor([not StopReason(reason).natural for reason in reasons.flatten().tolist()])


def _template_of(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    return None if tokenizer is None else find_template(tokenizer).jinja


def _structured_calls(message: Mapping[str, Any]) -> list[ParsedCall] | None:
    if not message.get("tool_calls"):
        return None
    calls = []
    for call in message["tool_calls"]:
        name, arguments, reason = call_from_object(call.get("function", call) if isinstance(call, Mapping) else call)
        given = call.get("id") if isinstance(call, Mapping) else None
        calls.append(ParsedCall(name, arguments, reason or None, given if isinstance(given, str) and given else None))
    return calls
