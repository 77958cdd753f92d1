"""Every column of a rollout's row passes through whatever passes rows on."""

import io

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from llmrl.collectors.llm.batches import cat_rows
from llmrl.data import LazyStackStorage, ReplayBuffer
from llmrl.modules.llm.policies.columns import COLUMNS, from_plain, placeholders, to_plain
from llmrl.modules.llm.policies.containers import CONTAINERS, LogProbs
from llmrl.modules.llm.vision import read_media, write_media
from llmrl.train.rollouts.step import select_training_columns

LENGTHS = [3, 5]
ROOT = {"group_id": torch.int64, "policy_version": torch.int64, "seed": torch.int64}


def value(column, length, row):
    if column.dtype is None:
        return f"{column.field} {row}"
    if column.field == "trained_from":
        return torch.tensor(row)
    shape = (length, 2, 1) if column.field == "routes" else (length,)
    return torch.arange(torch.Size(shape).numel()).reshape(shape).add(row).to(column.dtype)


def rollouts():
    """Two conversations with every column, images, a reference's log-probs, a user's column and tool calls."""
    fields = {}
    for column in COLUMNS:
        rows = [value(column, length, row) for row, length in enumerate(LENGTHS)]
        fields.setdefault(column.container, {})[column.field] = rows
    containers = {name: CONTAINERS[name].from_rows(columns) for name, columns in fields.items()}
    media = write_media([{"pixel_values": torch.ones(n, 4), "positions": torch.arange(n)} for n in (1, 2)], [2])
    reference = LogProbs.from_rows({"full": [torch.full((length,), -2.0) for length in LENGTHS]})
    after = {"reward": torch.tensor([[[1.0]], [[0.0]]]), "done": torch.ones(2, 1, dtype=torch.bool)}
    after |= {"ref_log_probs": reference, "tool_calls": NonTensorStack('[{"name": "add"}]', "[]")}
    root = {name: torch.arange(2, dtype=dtype) for name, dtype in ROOT.items()}
    user = {"answer": NonTensorStack("4", "6"), "numbers": NonTensorStack([1, 2], [3])}
    return TensorDict({**containers, **root, **user, "media": media, "next": TensorDict(after, [2])}, [2])


def saved(batch):
    """As a checkpoint writes the queue and a resumed run reads it."""
    file = io.BytesIO()
    torch.save(to_plain(batch), file)
    return from_plain(torch.load(io.BytesIO(file.getvalue()), weights_only=True))


def stored(batch):
    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    buffer.extend(batch)
    return buffer[:]


def listed(rows):
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]


PASSAGES = {
    "queue": lambda batch: from_plain(to_plain(batch)),
    "checkpoint": saved,
    "several parts": lambda batch: cat_rows([from_plain(to_plain(batch[row : row + 1])) for row in range(2)]),
    "selection": select_training_columns,
    "selection in a buffer": lambda batch: stored(select_training_columns(batch)),
    "the queue's rows in a buffer": lambda batch: stored(select_training_columns(from_plain(to_plain(batch)))),
}


@pytest.mark.parametrize("passage", PASSAGES)
def test_every_column_that_is_trained_passes(passage):
    before, after = rollouts(), PASSAGES[passage](rollouts())
    for column in COLUMNS:
        if ("selection" not in passage and "buffer" not in passage) or column.use != "record":
            old, new = (list(batch.get(column.key, as_list=True)) for batch in (before, after))
            assert all(
                torch.equal(*pair) if column.dtype else pair[0] == pair[1] for pair in zip(old, new, strict=True)
            )
    for old, new in zip(read_media(before), read_media(after), strict=True):
        assert {name: part.tolist() for name, part in old.items()} == {
            name: part.tolist() for name, part in new.items()
        }
    for key in (*ROOT, ("next", "reward"), ("next", "done")):
        assert torch.equal(before[key], after[key])


@pytest.mark.parametrize("passage", ["queue", "checkpoint", "several parts"])
def test_what_only_records_read_passes_the_queue_too(passage):
    after = PASSAGES[passage](rollouts())
    assert (after.get("answer").tolist(), after.get("numbers").tolist()) == (["4", "6"], [[1, 2], [3]])
    assert after.get("next").get("tool_calls").tolist() == ['[{"name": "add"}]', "[]"]
    assert after.get(("next", "ref_log_probs", "full"), as_list=True)[1].tolist() == [-2.0] * 5


def test_a_placeholder_has_the_columns_of_every_rollout_and_trains_nothing():
    rows = placeholders(torch.device("cpu"))
    assert {(name, field) for name, rows in rows.items() for field in rows._tensordict.keys() if rows.rows(field)} >= {
        column.key for column in COLUMNS if column.use == "always"
    }
    assert not torch.stack(rows["masks"].rows("all_assistant_mask")).any()
