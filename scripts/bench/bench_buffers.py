"""Time of a replay buffer over its floor: the same rows in plain tensors and lists, in the same process.

    python scripts/bench/bench_buffers.py

Transitions (six keys, about 180 bytes a row, batches of 256) go into tensor storages, against a dict of preallocated
tensors that is indexed directly, and into a list. Conversations (ids, masks and log-probs of 50 to 1000 tokens, a
history, text) go into a LazyStackStorage, against lists of cloned tensors; memory is the growth of a separate process.
Slices, priorities and passes are in ``bench_samplers.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import resource
from pathlib import Path
from typing import Any

import torch
from inputs import gather, leaves, transitions
from table import Row, benchmark
from tensordict import LazyStackedTensorDict, TensorDict
from timing import compare
from torch.nn.utils.rnn import pad_sequence

from llmrl.data.llm.chat import History
from llmrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from llmrl.modules.llm.policies import containers
from llmrl.objectives.llm.advantage import MCAdvantage

BATCH = 256


# --- transitions ---


def sampled(make: type, size: int, kind: type = ReplayBuffer) -> Row:
    """Times sampling batches from a full buffer of ``size`` rows."""
    buffer = kind(storage=make(size), batch_size=BATCH)
    data = transitions(min(size, 10_000))
    while len(buffer) < size:
        buffer.extend(data)
    store = {key: value.contiguous() for key, value in leaves(buffer[:]).items()}

    def floor() -> dict[object, torch.Tensor]:
        return gather(store, torch.randint(size, (BATCH,)))

    return compare(f"{name(make, kind)}, {size:,} rows: sample({BATCH})", floor, buffer.sample, 4, 1.6)


def written(make: type, kind: type = ReplayBuffer) -> list[Row]:
    capacity = 100_000
    data, row = transitions(BATCH), transitions(1)[0]
    buffer = kind(storage=make(capacity))
    buffer.extend(data)
    plain_data, plain_row = leaves(buffer[:]), leaves(buffer[0])  # includes the "index" that some buffers add
    plain_data = {key: value.contiguous() for key, value in plain_data.items()}
    store = {key: torch.zeros(capacity, *value.shape[1:], dtype=value.dtype) for key, value in plain_data.items()}
    cursor = 0

    def floor_extend() -> None:
        nonlocal cursor
        cursor = 0 if cursor + BATCH > capacity else cursor
        for key, value in store.items():
            value[cursor : cursor + BATCH] = plain_data[key]
        cursor += BATCH

    def floor_add() -> None:
        nonlocal cursor
        cursor = (cursor + 1) % capacity
        for key, value in store.items():
            value[cursor] = plain_row[key]

    return [
        compare(f"{name(make, kind)}: extend({BATCH})", floor_extend, lambda: buffer.extend(data), 4, 2.0),
        compare(f"{name(make, kind)}: add", floor_add, lambda: buffer.add(row), 4, 2.0),
    ]


def name(make: type, kind: type) -> str:
    return make.__name__ if kind is ReplayBuffer else f"{kind.__name__}, {make.__name__}"


def listed() -> list[Row]:
    """Tensordicts in a ListStorage, against a list of clones that torch.stack joins."""
    data = transitions(BATCH)
    buffer = ReplayBuffer(storage=ListStorage(BATCH), batch_size=BATCH)
    buffer.extend(data)
    rows: list[TensorDict] = list(data.clone().unbind(0))

    def floor_extend() -> None:
        rows[:] = data.clone().unbind(0)

    def floor_sample() -> TensorDict:
        return torch.stack([rows[i] for i in torch.randint(BATCH, (BATCH,)).tolist()])

    tensors = torch.rand(BATCH, 45)
    other = ReplayBuffer(storage=ListStorage(BATCH), batch_size=BATCH)
    other.extend(tensors)
    plain = list(tensors.clone().unbind(0))

    def floor_extend_tensors() -> None:
        plain[:] = tensors.clone().unbind(0)

    def floor_sample_tensors() -> torch.Tensor:
        return torch.stack([plain[i] for i in torch.randint(BATCH, (BATCH,)).tolist()])

    return [
        compare(
            f"ListStorage: extend({BATCH}), tensordicts", floor_extend, lambda: buffer.extend(data), 1, 1.5, rounds=40
        ),
        compare(f"ListStorage: sample({BATCH}) + stack, tensordicts", floor_sample, buffer.sample, 1, 1.5, rounds=40),
        compare(f"ListStorage: extend({BATCH}), tensors", floor_extend_tensors, lambda: other.extend(tensors), 2, 1.5),
        compare(f"ListStorage: sample({BATCH}) + stack, tensors", floor_sample_tensors, other.sample, 2, 1.5),
    ]


# --- conversations ---


def raw_records(count: int) -> dict[str, list[Any]]:
    """Ids, masks, log-probs, messages and text of ``count`` conversations of 50 to 1000 tokens."""
    draw = random.Random(0)
    lengths = [draw.randint(50, 1000) for _ in range(count)]
    letters = "abcdefghijklmnopqrstuvwxyz      "
    texts = ["".join(draw.choices(letters, k=4 * length)) for length in lengths]
    return {
        "full": [torch.randint(50_000, (n,)) for n in lengths],
        "all_assistant_mask": [torch.rand(n) < 0.5 for n in lengths],
        "log_probs": [torch.rand(n) for n in lengths],
        "chats": [
            [{"role": "user", "content": text[:100]}, {"role": "assistant", "content": text[100:]}] for text in texts
        ],
        "text": texts,
    }


def as_batch(raw: dict[str, list[Any]], rows: slice) -> TensorDict:
    """A batch as a wrapper returns it: ragged containers, dense columns."""
    count = len(raw["full"][rows])
    return TensorDict(
        {
            "tokens": containers.Tokens.from_rows({"full": raw["full"][rows]}),
            "masks": containers.Masks.from_rows({"all_assistant_mask": raw["all_assistant_mask"][rows]}),
            "log_probs": containers.LogProbs.from_rows({"full": raw["log_probs"][rows]}),
            "text": containers.Text.from_rows({"full": raw["text"][rows]}),
            "history": History.from_chats(raw["chats"][rows]),
            "policy_version": torch.zeros(count, dtype=torch.int64),
            "next": TensorDict(
                reward=torch.rand(count, 1, 1), done=torch.ones(count, 1, dtype=torch.bool), batch_size=[count]
            ),
        },
        batch_size=[count],
    )


def records() -> list[Row]:
    count, batch = 512, 16
    raw = raw_records(count)
    data = as_batch(raw, slice(0, count))
    buffer = ReplayBuffer(storage=LazyStackStorage(count), batch_size=batch)
    buffer.extend(data)

    def pad(full: list[torch.Tensor], mask: list[torch.Tensor], log_probs: list[torch.Tensor]) -> tuple[Any, ...]:
        return tuple(pad_sequence(rows, batch_first=True) for rows in (full, mask, log_probs))

    def floor() -> tuple[Any, ...]:
        index = torch.randint(count, (batch,)).tolist()
        picked = [[raw[key][i] for i in index] for key in ("full", "all_assistant_mask", "log_probs")]
        return pad(*picked), [raw["chats"][i] for i in index], [raw["text"][i] for i in index]

    keys = (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"))

    def ours() -> tuple[Any, ...]:
        sample = buffer.sample()
        padded = tuple([sample.get(key, as_padded_tensor=True) for key in keys])
        return padded, sample["history"], sample["text"].rows("full")

    return [compare(f"records of 50 to 1000 tokens: sample({batch}) and pad", floor, ours, 1, 1.5)]


def ragged_stack() -> list[Row]:
    """Writes 512 rows of one ragged key and samples 64, against a list of clones."""
    count, batch = 512, 64
    lengths = torch.randint(10, 200, (count,)).tolist()
    rows = [TensorDict(ids=torch.arange(n), score=torch.rand(())) for n in lengths]
    data = LazyStackedTensorDict(*rows)
    buffer = ReplayBuffer(storage=LazyStackStorage(count), batch_size=batch)
    buffer.extend(data)
    store: list[tuple[torch.Tensor, torch.Tensor]] = []

    def floor_in() -> None:
        store[:] = [(row["ids"].clone(), row["score"].clone()) for row in rows]

    def floor_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
        index = torch.randint(count, (batch,)).tolist()
        return [(store[i][0].clone(), store[i][1].clone()) for i in index]

    floor_in()
    return [
        compare(f"LazyStackStorage: {count} ragged rows in", floor_in, lambda: buffer.extend(data), 1, 1.5, rounds=60),
        compare(f"LazyStackStorage: {batch} ragged rows out", floor_out, buffer.sample, 1, 1.5),
    ]


def single_records() -> list[Row]:
    """Conversations as single rows, as a rollout returns them, against copies of their tensors in a list."""
    count, batch = 512, 16
    rows = list(as_batch(raw_records(count), slice(0, count)).unbind(0))
    buffer = ReplayBuffer(storage=LazyStackStorage(count), batch_size=batch)
    buffer.extend(rows)
    keys = (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full"))
    plain = [[row.get(key) for key in keys] for row in rows]
    store = [[tensor.clone() for tensor in row] for row in plain]

    def floor_in(number: int) -> None:
        store[:number] = [[tensor.clone() for tensor in row] for row in plain[:number]]

    def floor_out() -> list[torch.Tensor]:
        picked = [store[i] for i in torch.randint(count, (batch,)).tolist()]
        return [pad_sequence(column, batch_first=True) for column in zip(*picked, strict=True)]

    def ours_out() -> list[torch.Tensor]:
        sample = buffer.sample()
        return [sample.get(key, as_padded_tensor=True) for key in keys]

    many = LazyStackedTensorDict(*rows[:batch])
    return [
        compare("records as single rows: add", lambda: floor_in(1), lambda: buffer.add(rows[0]), 8),
        compare(f"records as single rows: extend({batch})", lambda: floor_in(batch), lambda: buffer.extend(many), 1),
        compare(f"records as single rows: sample({batch}) and pad", floor_out, ours_out, 1, 1.5),
    ]


def memory() -> Row:
    """Resident memory per record that a buffer adds, in a fresh process, over the bytes of its tensors and text."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_memory, args=(send,))
    process.start()
    send.close()
    grown, raw = receive.recv()
    process.join()
    print(f"{'resident bytes per record, raw and in the buffer':58}{raw:10.0f}{grown:10.0f}")
    return Row("records of 50 to 1000 tokens: resident memory / raw bytes", grown / raw, 2.0)


def _measure_memory(connection: Any) -> None:
    count, batch = 4096, 256
    buffer = ReplayBuffer(storage=LazyStackStorage(count))
    buffer.extend(as_batch(raw_records(batch), slice(0, batch)))  # one-time allocations
    buffer.empty()
    gc.collect()
    before, raw_bytes = _resident(), 0
    for _ in range(count // batch):
        raw = raw_records(batch)
        raw_bytes += sum(row.nbytes for key in ("full", "all_assistant_mask", "log_probs") for row in raw[key]) + sum(
            2 * len(text) for text in raw["text"]
        )  # text is stored twice: as messages and as text
        buffer.extend(as_batch(raw, slice(0, batch)))
        del raw
    gc.collect()
    connection.send(((_resident() - before) / count, raw_bytes / count))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def advantages() -> Row:
    count, group = 64, 8
    data = as_batch(raw_records(count), slice(0, count))
    data["group_id"] = torch.arange(count) // group
    advantage = MCAdvantage(group)

    def floor() -> torch.Tensor:
        rewards = data["next", "reward"].double().view(-1, group)
        centred = rewards - rewards.mean(1, keepdim=True)
        return (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1, 1).float()

    return compare(f"MCAdvantage, {count} rows in groups of {group}", floor, lambda: advantage.inv(data), 20)


def main() -> list[Row]:
    torch.set_num_threads(1)
    print(f"{'':58}{'floor us':>10}{'llmrl us':>10}")
    rows = [sampled(make, 10**power) for make in (LazyTensorStorage, LazyMemmapStorage) for power in (3, 4, 5, 6)]
    rows += [row for make in (LazyTensorStorage, LazyMemmapStorage) for row in written(make)]
    rows += [sampled(LazyTensorStorage, 1000, TensorDictReplayBuffer)]
    rows += written(LazyTensorStorage, TensorDictReplayBuffer)
    return [*rows, *listed(), *records(), *single_records(), *ragged_stack(), memory(), advantages()]


if __name__ == "__main__":
    benchmark(main, __doc__)
