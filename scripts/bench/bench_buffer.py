"""What a replay buffer costs over its floor: the same rows in plain lists and tensors, in the same process.

    python scripts/bench/bench_buffer.py

Rows of fixed shape (six keys, about 180 bytes) go into a LazyTensorStorage, against a dict of preallocated tensors that
is indexed directly. Conversations (64 rows, ragged) go into a LazyStackStorage, against lists of cloned tensors. Every
figure is the fastest of many rounds, floor and buffer in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from table import Row, add_json_option, print_table, write_rows
from tensordict import LazyStackedTensorDict, TensorDict
from timing import best

from llmrl.data.replay_buffers import LazyStackStorage, LazyTensorStorage, RandomSampler, ReplayBuffer
from llmrl.objectives.llm.advantage import MCAdvantage

CAPACITY = 100_000
BATCH = 256
ROUNDS = 40


def transitions(count: int) -> TensorDict:
    """Six keys: 16 + 16 floats of observation, 8 of action, an int64, a reward and a flag."""
    return TensorDict(
        {
            "observation": torch.rand(count, 16),
            "action": torch.rand(count, 8),
            "step": torch.arange(count),
            "next": TensorDict(
                observation=torch.rand(count, 16),
                reward=torch.rand(count, 1),
                done=torch.zeros(count, 1, dtype=torch.bool),
                batch_size=[count],
            ),
        },
        batch_size=[count],
    )


def conversations(count: int, group: int) -> TensorDict:
    """Ragged token ids, log-probs and masks, and the dense columns that a rollout writes."""
    prompts = torch.randint(20, 60, (count,)).tolist()
    totals = [
        prompt + answer for prompt, answer in zip(prompts, torch.randint(20, 200, (count,)).tolist(), strict=True)
    ]

    def ragged(**columns: list[torch.Tensor]) -> LazyStackedTensorDict:
        rows = zip(*columns.values(), strict=True)
        return LazyStackedTensorDict(*[TensorDict(dict(zip(columns, row, strict=True))) for row in rows])

    batch = TensorDict(
        {
            "tokens": ragged(
                prompt=[torch.arange(n) for n in prompts],
                response=[torch.arange(t - n) for n, t in zip(prompts, totals, strict=True)],
                full=[torch.arange(n) for n in totals],
            ),
            "log_probs": ragged(
                response=[torch.rand(t - n) for n, t in zip(prompts, totals, strict=True)],
                full=[torch.rand(n) for n in totals],
            ),
            "masks": ragged(
                all_attention_mask=[torch.ones(n, dtype=torch.bool) for n in totals],
                all_assistant_mask=[torch.ones(n, dtype=torch.bool) for n in totals],
            ),
            "group_id": torch.arange(count) // group,
            "policy_version": torch.zeros(count, dtype=torch.int64),
            "stop_reason": torch.zeros(count, dtype=torch.int64),
            "step_count": torch.ones(count, 1, dtype=torch.int64),
            "next": TensorDict(
                reward=torch.rand(count, 1, 1),
                done=torch.ones(count, 1, dtype=torch.bool),
                terminated=torch.ones(count, 1, dtype=torch.bool),
                truncated=torch.zeros(count, 1, dtype=torch.bool),
                batch_size=[count],
            ),
        },
        batch_size=[count],
    )
    batch["query"] = [f"question {i // group}" for i in range(count)]
    return batch


def leaves(td: TensorDict) -> dict[object, torch.Tensor]:
    return dict(td.items(include_nested=True, leaves_only=True))


def compare(name: str, floor: Callable[[], object], ours: Callable[[], object], repeats: int) -> Row:
    """Prints one line: microseconds of the floor and of the buffer."""

    def many(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeats):
                call()

        return run

    floor_us, ours_us = (ms * 1e3 / repeats for ms in best(many(floor), many(ours), repeats=ROUNDS))
    print(f"{name:38}{floor_us:10.1f}{ours_us:10.1f}")
    return Row(f"{name}: llmrl / by hand", ours_us / floor_us)


def fixed_rows() -> list[Row]:
    data, row = transitions(BATCH), transitions(1)[0]
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=RandomSampler(), batch_size=BATCH)
    while len(buffer) < CAPACITY // 2:
        buffer.extend(data)
    filled, cursor = len(buffer), 0
    store = {key: torch.zeros(CAPACITY, *value.shape[1:], dtype=value.dtype) for key, value in leaves(data).items()}
    plain_data, plain_row = leaves(data), leaves(row)

    def floor_sample() -> dict[object, torch.Tensor]:
        index = torch.randint(filled, (BATCH,))
        return {key: value.index_select(0, index) for key, value in store.items()}

    def floor_extend() -> None:
        nonlocal cursor
        cursor = 0 if cursor + BATCH > CAPACITY else cursor
        for key, value in store.items():
            value[cursor : cursor + BATCH] = plain_data[key]
        cursor += BATCH

    def floor_add() -> None:
        nonlocal cursor
        cursor = (cursor + 1) % CAPACITY
        for key, value in store.items():
            value[cursor] = plain_row[key]

    return [
        compare(f"buffer sample({BATCH}), fixed shapes", floor_sample, buffer.sample, 30),
        compare(f"buffer extend({BATCH}), fixed shapes", floor_extend, lambda: buffer.extend(data), 30),
        compare("buffer add, fixed shapes", floor_add, lambda: buffer.add(row), 100),
    ]


def ragged_rows() -> list[Row]:
    count, group = 64, 8
    data = conversations(count, group)
    columns = {
        key: list(value.unbind(0)) if isinstance(value, torch.Tensor) else value
        for key, value in ((key, data.get(key)) for key in ("group_id", "policy_version", "stop_reason", "step_count"))
    }
    for key in ("reward", "done", "terminated", "truncated"):
        columns[key] = list(data["next", key].unbind(0))
    for container in ("tokens", "log_probs", "masks"):
        for key in data[container].keys():
            columns[container, key] = data.get((container, key), as_list=True)
    store: list[dict[object, torch.Tensor]] = []
    buffer = ReplayBuffer(storage=LazyStackStorage(CAPACITY), sampler=RandomSampler(), batch_size=count)
    buffer.extend(data)

    def floor_extend() -> None:
        store.clear()
        for i in range(count):
            store.append({key: rows[i].clone() for key, rows in columns.items()})

    def floor_sample() -> list[dict[object, torch.Tensor]]:
        index = torch.randint(count, (count,)).tolist()
        return [{key: value.clone() for key, value in store[i].items()} for i in index]

    floor_extend()
    advantage = MCAdvantage(group)

    def floor_advantage() -> torch.Tensor:
        rewards = data["next", "reward"].double().view(-1, group)
        return (
            ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1, 1).float()
        )

    return [
        compare(
            f"buffer extend({count}), conversations", floor_extend, lambda: (buffer.empty(), buffer.extend(data)), 5
        ),
        compare(f"buffer sample({count}), conversations", floor_sample, buffer.sample, 5),
        compare(f"MCAdvantage, {count} rows in groups of {group}", floor_advantage, lambda: advantage.inv(data), 20),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':38}{'floor us':>10}{'llmrl us':>10}")
    rows = [*fixed_rows(), *ragged_rows()]
    print_table(rows)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
