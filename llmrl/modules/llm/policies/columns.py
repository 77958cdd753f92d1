"""The columns of a rollout's row that training uses: one table, from which selecting, queueing and placeholders follow.

Whatever passes rows on reads this table, so that a new column reaches the loss by one line here. A second table,
`RESERVED`, has the names that columns of the data cannot have, because a batch has an entry of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from llmrl.data.ragged.tensordicts import column, column_values
from llmrl.errors import DataError
from llmrl.modules.llm.policies.containers import CONTAINERS
from llmrl.modules.llm.vision import MEDIA, read_media, write_media

SEAT = "env_seat"  # text: the agent of a rollout of several, whose rewards are compared with those of the same one
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Column:
    """A field of a container, one value per row.

    dtype    of its tensors, which have the length of the tokens first; None: text
    use      "always": advantages and loss read it, and every rollout has it; "given": the same if a rollout has it;
             "record": only the records and metrics of a step
    """

    container: str
    field: str
    dtype: torch.dtype | None
    use: str

    @property
    def key(self) -> tuple[str, str]:
        return self.container, self.field


COLUMNS = (
    Column("tokens", "full", torch.int64, "always"),
    Column("tokens", "rewards", torch.float32, "given"),  # of each turn, at its last token
    Column("masks", "all_assistant_mask", torch.bool, "always"),
    Column("masks", "trained_from", torch.int64, "given"),  # one number per row: where its own part begins
    Column("log_probs", "full", torch.float32, "always"),
    Column("log_probs", "plain", torch.float32, "given"),  # before top-p, top-k, min-p
    Column("log_probs", "versions", torch.int64, "given"),  # of the weights that sampled each token
    Column("log_probs", "routes", torch.int16, "given"),  # the experts of each token
    Column("text", "prompt", None, "record"),
    Column("text", "response", None, "record"),
)


# What an environment, a policy, rewards and advantages write at the root of a batch of conversations, in any setup.
RESERVED: Mapping[str, str] = {
    **dict.fromkeys(CONTAINERS, "a view of the conversation"),
    MEDIA: "the tensors of its images",
    "group_id": "the number of the prompt's draw",
    SEAT: "the agent of a game that the row is of",
    "seed": "the seed of the row's sampling",
    "stop_reason": "the end of the model's turn",
    "policy_version": "the version of the weights",
    "new_record": "the start of a training record",
    "step_count": "the number of turns",
    **dict.fromkeys(("done", "terminated", "truncated"), "the end of the conversation"),
    **dict.fromkeys(("reward", "scored"), "the reward"),
    "advantage": "the advantage",
    "next": "the turn's result",
    "_reset": "the rows to start again",
}


def refuse_reserved(columns: Iterable[str], who: str, reserved: Mapping[str, str] = RESERVED) -> None:
    """Raises DataError naming the columns of the data that have the name of an entry in ``reserved``."""
    if taken := [name for name in columns if name in reserved]:
        meanings = ", ".join(f"{name!r} ({reserved[name]})" for name in taken)
        raise DataError(
            f"{who}: a column of the data must not have the name of another entry of the batch: got {meanings}; rename "
            f"it in the data and in the functions that read it, for example {taken[0]} to {taken[0].strip('_')}_of_row."
        )


def trained_keys(data: TensorDictBase) -> list[Any]:
    """The keys of the columns, and of images, that ``data`` has and that advantages and loss read."""
    columns = [column for column in COLUMNS if column.use != "record"]
    given = [c.key for c in columns if c.use == "always" or data.get(c.key, None, as_list=True) is not None]
    return [*given, *([MEDIA] if MEDIA in data.keys() else [])]


def placeholders(device: torch.device) -> dict[str, Any]:
    """Containers of one row of two tokens that are not trained, with the columns that every rollout has."""
    fields: dict[str, dict[str, Any]] = {}
    for c in COLUMNS:
        if c.use == "always":
            fields.setdefault(c.container, {})[c.field] = [torch.zeros(2, dtype=c.dtype, device=device)]
    return {container: CONTAINERS[container].from_rows(columns) for container, columns in fields.items()}


def to_plain(data: TensorDictBase) -> dict[str, Any]:
    """Rollouts [B] as tensors on the CPU, strings, numbers, lists and dicts, which a checkpoint can hold.

    Holds  `COLUMNS` of containers, also of those in "next" (log-probs of a reference); images; tensors; the user's
           columns of text, numbers, lists and dicts. Left out are the views that nothing reads later (histories, the
           prompt's ids) and Python objects of other types
    """
    plain: dict[str, Any] = {}
    for key in data.keys():
        value = data.get(key)
        if key == MEDIA:
            plain[key] = {"media": [{name: part.cpu() for name, part in row.items()} for row in read_media(data)]}
        elif kind := next((kind for kind in CONTAINERS.values() if isinstance(value, kind)), None):
            names = [c.field for c in COLUMNS if CONTAINERS[c.container] is kind]
            fields = {name: value.rows(name) for name in names if value.rows(name) is not None}
            if fields:
                rows = {name: [v.cpu() if isinstance(v, Tensor) else v for v in of] for name, of in fields.items()}
                plain[key] = {"container": kind.__name__, "rows": rows}
        elif isinstance(value, Tensor):
            plain[key] = {"tensor": value.cpu()}
        elif type(value) is TensorDict:
            plain[key] = {"nested": to_plain(value)}
        elif isinstance(value, LazyStackedTensorDict | NonTensorData):
            values = column_values(data, key)
            if values is not None and is_plain(values):
                plain[key] = {"values": values}
    return plain


def from_plain(plain: Mapping[str, Any], batch_size: Sequence[int] | None = None) -> TensorDict:
    """Rebuilds the rollouts from the result of `to_plain`."""
    size = [len(plain["tokens"]["rows"]["full"])] if batch_size is None else batch_size
    return TensorDict({key: _rebuilt(entry, size) for key, entry in plain.items()}, batch_size=size)


def _rebuilt(entry: Mapping[str, Any], size: Sequence[int]) -> Any:
    kinds = {kind.__name__: kind for kind in CONTAINERS.values()}
    (how, value), *rest = entry.items()
    if how == "container":
        return kinds[value].from_rows(rest[0][1], size)
    if how == "media":
        return write_media(value, size)
    if how == "nested":
        return from_plain(value, size)
    return column(value) if how == "values" else value


def is_plain(value: Any) -> bool:
    """True for text, numbers, None, and lists and dicts of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)
