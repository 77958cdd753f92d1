"""What the environment wrote beside the reward, over all ranks: each reward function's values, and what tools did."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl.envs.llm.transforms.tool_use import tool_metrics

if TYPE_CHECKING:
    from llmrl.train.distributed import Session

__all__ = ["env_metrics"]

_REWARD = "reward_"


def env_metrics(session: Session, data: TensorDictBase) -> dict[str, float]:
    """Metrics of the conversations of a collector's batch, one part of which each rank has.

    Reads    ("next", "reward_<name>") float32[B, 1, 1] and ("next", "tool_use"), where they are, of rows that are done
    Returns  "reward/<name>/mean": of a conversation's last turn, without those that failed; what `tool_metrics` returns
    """
    after = data.get("next")
    done = after.get("done").flatten()
    metrics = {}
    for key in sorted(key for key in after.keys() if key.startswith(_REWARD)):
        values = session.gather(after.get(key)[done].double().flatten(1).sum(1).tolist())
        valid = [value for value in values if math.isfinite(value)]
        metrics[f"reward/{key.removeprefix(_REWARD)}/mean"] = sum(valid) / len(valid) if valid else math.nan
    if (use := after.get("tool_use", None)) is not None:
        columns = {name: torch.tensor(session.gather(value[done].tolist())) for name, value in use.items()}
        count = len(columns["calls"])
        ended = torch.ones(count, 1, dtype=torch.bool)
        metrics |= tool_metrics(TensorDict({"next": {"tool_use": columns, "done": ended}}, batch_size=[count]))
    return metrics
