"""The calls of one rollout as a graph, and its rows: each path from a first call to a last one.

A call continues the earlier one whose prompt and answer its messages repeat; its ids then begin with the ids of that
one. A call that repeats none begins a new path: of a sub-agent, of an edited history, or of the same conversation if
the template writes earlier turns differently.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from llmrl.data.ragged.tensordicts import column
from llmrl.endpoint.agents import Seat
from llmrl.envs.llm.transforms.dataloading import row_seeds
from llmrl.errors import RewriteError
from llmrl.modules.llm.conversation import Message, SampledTurn, TurnSampler
from llmrl.modules.llm.policies.columns import SEAT
from llmrl.modules.llm.policies.containers import LogProbs, Masks, Text, Tokens, decode_rows

Train = Literal["main", "all", "longest"]
Key = tuple[Any, ...]
_RECENT = 8  # calls that a request is compared with as a whole
_SHOWN = 1000  # characters of a message in the record of a call: the whole text is in the row


def identity(message: Message) -> Key:
    """What a client must repeat of a message: its role, its text, and its calls by name and arguments.

    Left out are reasoning, which clients drop or send back as they like, and ids of calls; null equals the empty text.
    """
    role, content = message["role"], message.get("content") or ""
    if len(message) == 2 and "content" in message:  # as nearly all: a long conversation has many
        return role, content
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return role, content, *((call.get("name"), _arguments(call.get("arguments"))) for call in calls)


def _arguments(value: Any) -> str:
    """JSON with sorted keys, from text or an object; text that is not JSON as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except ValueError:
            return value
    return json.dumps(value, sort_keys=True)


@dataclass
class Question:
    """A request.

    place      of its tools and messages; ``first``: of its tools alone
    messages   none if it is of ids
    parent     the call that it continues
    number     among all requests
    continues  if the template keeps it from continuing a call, the number of that one's path
    """

    session: str
    first: int
    place: int
    messages: Sequence[Message]
    parent: Call | None
    number: int = -1
    continues: int | None = None


@dataclass(eq=False)
class Call:
    """A recorded answer. ``root``: the number of the request that began its path."""

    turn: SampledTurn
    asked: Question
    parent: Call | None
    root: int
    children: list[Call] = field(default_factory=list)


def _length(call: Call) -> int:
    return len(call.turn.stream)


def _known(messages: Sequence[Message], parent: Call) -> list[Message]:
    """The messages, those up to the answer of ``parent`` as the template knows them: a client may drop reasoning."""
    known = [*parent.turn.messages, parent.turn.message]
    return [*known, *messages[len(known) :]]


class CallGraph:
    """The calls of a rollout. Its methods may be called by several threads.

    seed      with it, an answer depends only on it, the number of the request and the prompt; unless a request has one
    counters  "calls"; "roots", paths that were begun; "rewritten" of them because of the template; "retries", answers
              beside another one to the same prompt that nothing continues
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.calls: list[Call] = []
        self.counters: Counter[str] = Counter()
        # A conversation has a number, its place: that of the conversation without the last message leads to it. So a
        # request is compared once with what was asked before, however many calls that were.
        self._places: dict[tuple[int, Any], int] = {}
        self._answered: dict[int, Call] = {}  # the newest call at the place of its prompt and answer
        self._streams: list[Call] = []  # sorted by the number of ids
        self._num_asked = 0
        self._lock = threading.Lock()

    def sample(
        self,
        sampler: TurnSampler,
        messages: Sequence[Message] | Tensor,
        *,
        tools: Any = None,
        session: str = "",
        **options: Any,
    ) -> tuple[Question, list[SampledTurn]]:
        """Answers of ``sampler`` to a client's messages, or to the ids that it made of them; they continue an earlier
        call if there is one of the same ``session`` to continue.
        """
        with self._lock:
            number = self._num_asked
            self._num_asked += 1
        asked = self._find(messages, tools, session)
        asked.number, parent = number, asked.parent
        if self.seed is not None and options.get("seeds") is None:
            count = options.get("count", 1)
            options["seeds"] = row_seeds(self.seed, [asked.number] * count, range(count)).tolist()
        if isinstance(messages, Tensor):
            return asked, sampler.sample(messages, after=None if parent is None else parent.turn, **options)
        if parent is not None:
            try:
                return asked, sampler.sample(_known(messages, parent), tools=tools, after=parent.turn, **options)
            except RewriteError:
                asked.continues, asked.parent = parent.root, None
        return asked, sampler.sample(messages, tools=tools, **options)

    def prompt(self, sampler: TurnSampler, messages: Sequence[Message], *, tools: Any = None) -> Tensor:
        """int64[P]: the ids that `sample` would be asked with; nothing is recorded."""
        if (parent := self._find(messages, tools).parent) is not None:
            try:
                return sampler.prompt(_known(messages, parent), tools=tools, after=parent.turn)
            except RewriteError:
                pass  # rendered as a whole then, as in `sample`
        return sampler.prompt(messages, tools=tools)

    def _find(self, messages: Sequence[Message] | Tensor, tools: Any, session: str = "") -> Question:
        """A request, which continues the call with the longest conversation that it repeats."""
        if isinstance(messages, Tensor):
            with self._lock:
                shorter = bisect_left(self._streams, len(messages), key=_length)
                earlier = (call for call in reversed(self._streams[:shorter]) if call.asked.session == session)
                parent = next((c for c in earlier if messages[: _length(c)].equal(c.turn.stream)), None)
                place = self._next(0, ("ids", session, messages.numpy().tobytes()))
                return Question(session, 0, place, (), parent)
        with self._lock:
            first = self._next(0, ("tools", session, repr(tools)))
            # All messages but the last ones are those of a recent call, as a rule: lists are compared without a step of
            # Python per message, and the request then has that call's, so that no copies are kept.
            for call in self.calls[: -_RECENT - 1 : -1]:
                told = call.asked.messages
                if call.asked.first == first and messages[: len(told)] == told:
                    place, parent = self._walk(call.asked.place, new := messages[len(told) :])
                    if parent is not None:  # else an earlier part of the path may have been answered since
                        return Question(session, first, place, [*told, *new], parent)
            place, parent = self._walk(first, messages)
            return Question(session, first, place, messages, parent)

    def _walk(self, place: int, messages: Sequence[Message]) -> tuple[int, Call | None]:
        """The place behind the messages, and the last call whose answer is one of them."""
        parent = None
        for message in messages:
            parent = self._answered.get(place, parent)
            place = self._next(place, identity(message))
        return place, parent

    def _next(self, place: int, key: Any) -> int:
        return self._places.setdefault((place, key), len(self._places) + 1)

    def add(self, asked: Question, turn: SampledTurn, said: Message) -> Call:
        """Records an answer, which the client got as the message ``said``."""
        with self._lock:
            parent = asked.parent
            call = Call(turn, asked, parent, asked.number if parent is None else parent.root)
            self.counters["calls"] += 1
            self.counters["roots"] += parent is None
            self.counters["rewritten"] += asked.continues is not None
            if parent is not None:
                parent.children.append(call)
            self.calls.append(call)
            insort(self._streams, call, key=_length)
            self._answered[self._next(asked.place, identity(said))] = call
            return call

    def leaves(self, train: Train = "main") -> list[Call]:
        """The last calls of the paths to train, in the order of their first calls.

        train  "main": the path of the first call, and those that the template made it leave; "all": also sub-agents and
               edited histories; "longest": the path with the most sampled tokens; each of one session
        """
        kept, repeated = self._ends()
        self.counters["retries"] = len(repeated)
        first: dict[str, Call] = {}
        if train == "longest":
            for call in sorted(kept, key=lambda call: -sum(len(turn.ids) for turn in call.turn.path())):
                first.setdefault(call.asked.session, call)
            return list(first.values())
        if train == "main":
            calls = sorted(self.calls, key=lambda call: call.asked.number)
            for call in calls:
                first.setdefault(call.asked.session, call)
            main = {call.root for call in first.values()}
            for call in calls:  # a path is left by its later calls, so in order
                if call.asked.continues in main:
                    main.add(call.root)
            kept = [call for call in kept if call.root in main]
        return sorted(kept, key=lambda call: call.root)

    def _ends(self) -> tuple[list[Call], list[Call]]:
        """The last calls of all paths, and those beside them that the client did not go on with."""
        with self._lock:
            ends = [call for call in self.calls if not call.children]
            # Of several answers to one prompt the client went on with one, or, if it ended there, took the last.
            continued = {call.asked.place for call in self.calls if call.children}
            newest = {call.asked.place: call for call in ends if call.asked.place not in continued}
        kept = list(newest.values())
        return kept, [call for call in ends if call not in kept]

    def describe(self, leaves: Sequence[Call], train: Train = "main") -> list[dict[str, Any]]:
        """The calls in the order of their requests, each a `ModelCallRecord`, if those of ``leaves`` became rows."""
        repeated, calls = self._ends()[1], sorted(self.calls, key=lambda call: call.asked.number)
        places, rows = {call: place for place, call in enumerate(calls)}, {}
        for row, leaf in enumerate(leaves):
            for turn in leaf.turn.path():
                rows.setdefault(id(turn), row)  # which trains it
        other = {"main": "of another conversation, which train main leaves out", "all": "it came after the rollout"}
        other["longest"] = "not of the longest conversation, which alone is trained"
        found = []
        for call in calls:
            turn, row = call.turn, rows.get(id(call.turn), -1)
            why = "the client went on with another answer" if call in repeated else other[train]
            asked = str(turn.messages[-1].get("content") or "") if turn.messages else ""
            if row >= 0 and turn.is_chosen:
                why, row = "tool_choice demanded its calls", -1
            facts = {"parent": places.get(call.parent, -1), "row": row, "why": why if row < 0 else ""}
            facts |= {"question": _cut(asked), "answer": _cut(str(turn.message.get("content") or ""))}
            facts |= {"prompt_tokens": len(turn.prompt_ids), "tokens": len(turn.ids)}
            found.append(facts | {"stop_reason": turn.stop_reason.name.lower()})
        return found


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def make_rows(
    leaves: Sequence[SampledTurn],
    tokenizer: Any,
    *,
    seats: Sequence[Seat],
    named: bool = False,
    group: int = 0,
    row: Mapping[str, Any] | None = None,
    plain: bool = False,
) -> TensorDict:
    """The rows [N] of a rollout, as `LLMCollector` makes them: the last one of each seat is done and has its reward.

    A sampled id is trained in the first row that holds it, and in no other; one of a forced call in none.

    ``leaves``: the last turn of each path; ``seats``: whose it is, those of one seat side by side;
    ``named``: their names are written; ``plain``: the log-probs before top-p, top-k and min-p are written too.

    Writes  ("tokens" | "masks" | "log_probs", "full" ...), ("text", "prompt" | "response"), "group_id", "stop_reason",
            "policy_version", ("next", "reward") float32[N, 1, 1], ("next", "done") bool[N, 1]; the columns of ``row``;
            with ``named`` "env_seat", text
    """
    owned: set[int] = set()
    columns = [_row_columns(leaf, owned) for leaf in leaves]
    count = len(columns)
    texts = decode_rows(tokenizer, [part.tolist() for c in columns for part in (c["prompt"], c["response"])])
    is_last = [seat.name != after.name for seat, after in pairwise(seats)] + [True]
    done = torch.tensor(is_last).view(count, 1)
    rewards = torch.tensor([seat.reward if last else 0.0 for seat, last in zip(seats, is_last, strict=True)])
    # Rows of different rollouts are joined, so all have the same columns.
    log_probs = {"full": [c["log_probs"] for c in columns], "versions": [c["versions"] for c in columns]}
    if plain:
        log_probs["plain"] = [c["plain"] for c in columns]
    masks = [c["mask"] for c in columns]
    ends = {
        "reward": rewards.view(count, 1, 1),
        "done": done,
        "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }
    return TensorDict(
        {
            "tokens": Tokens.from_rows({"full": [c["ids"] for c in columns]}),
            "masks": Masks.from_rows(
                {"all_assistant_mask": masks, "all_attention_mask": [torch.ones_like(mask) for mask in masks]}
            ),
            "log_probs": LogProbs.from_rows(log_probs),
            "text": Text.from_rows({"prompt": texts[::2], "response": texts[1::2]}),
            "group_id": torch.full((count,), group),
            "policy_version": torch.tensor([min(turn.version for turn in leaf.path()) for leaf in leaves]),
            "stop_reason": torch.tensor([int(leaf.stop_reason) for leaf in leaves]),
            "next": TensorDict(ends, batch_size=[count]),
            **{name: column([value] * count) for name, value in (row or {}).items()},
            **({SEAT: column(seat.name for seat in seats)} if named else {}),
        },
        batch_size=[count],
    )


def _row_columns(leaf: SampledTurn, owned: set[int]) -> dict[str, Tensor]:
    """The ids of a path, and per id the mask, log-prob, plain log-prob and version; adds its turns to ``owned``."""
    path, ids = leaf.path(), leaf.stream
    mask = torch.zeros(len(ids), dtype=torch.bool)
    log_probs, plain = torch.zeros(len(ids)), torch.zeros(len(ids))
    versions = torch.zeros(len(ids), dtype=torch.int64)
    for turn in path:
        place = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.ids))
        mask[place] = id(turn) not in owned and not turn.is_chosen
        log_probs[place] = turn.log_probs.float()
        plain[place] = (turn.log_probs if turn.plain_log_probs is None else turn.plain_log_probs).float()
        versions[place] = turn.version if turn.versions is None else turn.versions
        owned.add(id(turn))
    first = len(path[0].prompt_ids)
    named = {"ids": ids, "mask": mask, "log_probs": log_probs, "plain": plain, "versions": versions}
    return {**named, "prompt": ids[:first], "response": ids[first:]}
