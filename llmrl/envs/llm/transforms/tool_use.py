"""Counts of tool calls in each conversation so far, as entries of the batch, and the metrics that recipes log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.data.ragged.tensordicts import required
from llmrl.data.specs import Composite, Unbounded

ENDS = ("ok", "error", "timeout", "malformed", "unknown", "not_run")  # a call ends in exactly one of these ways
COUNTS = ("turns", "tool_turns", "calls", *ENDS, "cut")


def added_tool_use(before: TensorDictBase, rows: Sequence[Mapping[str, float]]) -> TensorDict:
    """``before`` plus the counts of each row, in a new tensordict."""
    entries = {}
    for name, value in before.items():
        extra = torch.tensor([row.get(name, 0) for row in rows], dtype=value.dtype, device=value.device)
        entries[name] = value + extra
    return TensorDict(entries, batch_size=before.batch_size, device=before.device)


def tool_use_spec(batch_size: Sequence[int], device: torch.device | None) -> Composite:
    """The counts of each conversation, all zero at its start: int64[B], and "seconds" float32[B]."""
    leaves = {name: Unbounded(shape=batch_size, dtype=torch.int64, device=device) for name in COUNTS}
    leaves["seconds"] = Unbounded(shape=batch_size, dtype=torch.float32, device=device)
    return Composite(leaves, shape=batch_size, device=device)


def read_calls(lines: str) -> list[dict[str, Any]]:
    """The calls of a conversation, parsed from its ("next", "tool_calls"): one JSON object per line.

    Returns  "turn" of the policy, from 0; "name"; "arguments", JSON, or the text of a malformed call; "result", the
             message to the model; "outcome", one of ``ENDS``; "seconds" float, None if it was not run

    >>> read_calls('{"turn": 0, "name": "calculator", "outcome": "ok"}\\n')
    [{'turn': 0, 'name': 'calculator', 'outcome': 'ok'}]
    """
    return [json.loads(line) for line in lines.splitlines()]


def tool_metrics(data: TensorDictBase) -> dict[str, float]:
    """Tool-call metrics of the conversations that ended in a collector's batch.

    Reads    ("next", "tool_use", ...) int64[B], float32[B] and ("next", "done") bool[B, 1]; skips unfinished rows
    Returns  "tools/conversations", the number that ended; "tools/call_rate", the share of these with any call;
             "tools/calls_mean" per conversation; the shares of calls "tools/ok_frac", "tools/error_frac",
             "tools/timeout_frac", "tools/malformed_frac", "tools/unknown_frac" and "tools/not_run_frac", which add up
             to 1, and "tools/cut_frac" with shortened results; "tools/seconds_mean" of the calls that ran. All are 0
             for a batch in which no conversation ended or called a tool
    Raises   MissingKeyError if the batch has no entries of a ToolTransform

    >>> from llmrl.envs.llm import ChatEnv
    >>> from llmrl.envs.llm.transforms import ToolTransform
    >>> from llmrl.testing import ScriptedPolicy
    >>> env = ChatEnv(batch_size=[1]).append_transform(ToolTransform(["calculator"]))
    >>> call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>'
    >>> batch = env.rollout(5, ScriptedPolicy([call, "4"]), tensordict=TensorDict(query="2+2?", batch_size=[1]))
    >>> metrics = tool_metrics(batch[:, -1])
    >>> batch.shape[1], metrics["tools/calls_mean"], metrics["tools/ok_frac"]
    (2, 1.0, 1.0)
    """
    use = required(data, ("next", "tool_use"), "tool_metrics", "put a ToolTransform into the env")
    done = data.get(("next", "done"))
    ended = done.reshape(-1)
    totals = {name: use.get(name).reshape(-1)[ended].sum().item() for name in (*COUNTS, "seconds")}
    conversations = int(ended.sum())
    # Calls that ended otherwise never ran, and took no time.
    calls, ran = totals["calls"], totals["ok"] + totals["error"] + totals["timeout"]
    called = (use.get("calls").reshape(-1)[ended] > 0).sum().item()
    return {
        "tools/conversations": float(conversations),
        "tools/call_rate": called / max(1, conversations),
        "tools/calls_mean": calls / max(1, conversations),
        **{f"tools/{name}_frac": totals[name] / max(1, calls) for name in (*ENDS, "cut")},
        "tools/seconds_mean": totals["seconds"] / max(1, ran),
    }
