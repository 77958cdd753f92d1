"""Time of samplers over their floors: the same draws written by hand with arrays, in the same process.

    python scripts/bench/bench_samplers.py [--rows 10000 1000000]

Rows of six keys (about 180 bytes), batches of 256. Priorities: a binary tree in two numpy arrays, sums and minima,
drawn from and updated level by level. Slices: starts drawn from known boundaries, rows gathered from plain tensors.
Passes: a permutation, cut into batches, rows gathered. Every figure is the fastest of many rounds, floor and sampler in
turn. The cost of slices must not depend on the number of rows: the largest of their ratios is compared with the least.
"""

from __future__ import annotations

import numpy as np
import torch
from inputs import TRAJECTORY, gather, leaves, transitions
from table import Row, benchmark
from timing import compare

from llmrl.data.replay_buffers import (
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)

BATCH = 256
SLICES = 8
ROUNDS = 500


class BinaryTrees:
    """Binary trees of sums and of minima: the children of node i are 2 i and 2 i + 1, leaves start at ``size``."""

    def __init__(self, masses: np.ndarray) -> None:
        self.depth = (masses.size - 1).bit_length()
        self.size = 1 << self.depth
        self.sums, self.minima = np.zeros(2 * self.size), np.full(2 * self.size, np.inf)
        self.update(np.arange(masses.size), masses)

    def update(self, index: np.ndarray, masses: np.ndarray) -> None:
        node = index + self.size
        self.sums[node] = self.minima[node] = masses
        for _ in range(self.depth):
            node = node >> 1
            left = 2 * node
            self.sums[node] = self.sums[left] + self.sums[left + 1]
            self.minima[node] = np.minimum(self.minima[left], self.minima[left + 1])

    def sample(self, count: int, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        points = np.random.rand(count) * self.sums[1]
        node = np.ones(count, dtype=np.int64)
        for _ in range(self.depth):  # to the child whose cumulative sum covers the point
            node = 2 * node
            left = self.sums[node]
            right = points >= left
            points = points - left * right
            node = node + right
        weights = (self.sums[node] / self.minima[1]) ** -beta
        return torch.from_numpy(node - self.size), torch.from_numpy(weights).float()


def priorities(capacity: int) -> Row:
    storage = ListStorage(capacity)
    storage.set(slice(0, capacity), [None] * capacity)
    sampler, values = PrioritizedSampler(capacity, alpha=0.6, beta=0.4), torch.rand(capacity, dtype=torch.float64)
    sampler.extend(torch.arange(capacity))
    sampler.update_priority(torch.arange(capacity), values)
    trees, fresh = BinaryTrees((values.numpy() + 1e-8) ** 0.6), torch.rand(BATCH)

    def floor() -> None:
        index, _ = trees.sample(BATCH, 0.4)
        trees.update(index.numpy(), (fresh.numpy().astype(np.float64) + 1e-8) ** 0.6)

    def ours() -> None:
        index, _ = sampler.sample(storage, BATCH)
        sampler.update_priority(index, fresh)

    return compare(f"priorities of {capacity:.0e} rows: sample + update", floor, ours, 2, 2.0, rounds=ROUNDS)


def updates(capacity: int) -> list[Row]:
    """Times updates alone, against a binary tree compiled by numba; no rows without numba."""
    try:
        from numba import njit
    except ImportError:
        print("numba is not installed: no rows for updates against a compiled tree")
        return []

    @njit
    def write(sums, minima, index, masses):
        size = sums.size // 2
        for place in range(index.size):
            node = index[place] + size
            sums[node] = minima[node] = masses[place]
            while node > 1:
                node >>= 1
                sums[node] = sums[2 * node] + sums[2 * node + 1]
                minima[node] = min(minima[2 * node], minima[2 * node + 1])

    trees, sampler = BinaryTrees(np.random.rand(capacity)), PrioritizedSampler(capacity, alpha=0.6, beta=0.4)
    sampler.extend(torch.arange(capacity))
    sampler.update_priority(torch.arange(capacity), torch.rand(capacity))
    fresh, rows = torch.rand(BATCH), []
    for what, index in (("update", torch.randint(capacity, (BATCH,))), ("extend", torch.arange(BATCH))):

        def floor(index=index) -> None:
            write(trees.sums, trees.minima, index.numpy(), (fresh.numpy().astype(np.float64) + 1e-8) ** 0.6)

        def ours(index=index, what=what) -> None:
            if what == "extend":
                sampler.extend(index)
            sampler.update_priority(index, fresh)

        rows.append(compare(f"priorities of {capacity:.0e} rows, compiled: {what}", floor, ours, 2, 3.0, rounds=ROUNDS))
    return rows


def slices(counts: list[int]) -> list[Row]:
    rows, ratios = [], []
    for count in counts:
        data = transitions(count)
        sampler = SliceSampler(num_slices=SLICES, traj_key="episode")
        buffer = ReplayBuffer(storage=TensorStorage(data), sampler=sampler, batch_size=BATCH)
        buffer.sample()
        store, length = leaves(data), BATCH // SLICES
        starts, within = torch.arange(0, count, TRAJECTORY), torch.arange(length)

        def floor(store=store, starts=starts, within=within, length=length) -> dict[object, torch.Tensor]:
            begin = starts[torch.randint(len(starts), (SLICES,))]
            begin = begin + torch.randint(TRAJECTORY - length + 1, (SLICES,))
            return gather(store, (begin[:, None] + within).reshape(-1))

        rows.append(compare(f"slices of {count:.0e} rows: sample", floor, buffer.sample, 2, 2.0, rounds=ROUNDS))
        ratios.append(rows[-1].measured)

        fresh = transitions(BATCH)
        fresh_leaves, cursor = leaves(fresh), 0

        def floor_write(store=store, fresh=fresh_leaves, floor=floor, count=count) -> None:
            nonlocal cursor
            cursor = 0 if cursor + BATCH > count else cursor
            for key, value in store.items():
                value[cursor : cursor + BATCH] = fresh[key]
            cursor += BATCH
            floor()

        def ours_write(buffer=buffer, fresh=fresh) -> None:
            buffer.extend(fresh)
            buffer.sample()

        rows.append(compare(f"slices of {count:.0e} rows: extend + sample", floor_write, ours_write, 2, rounds=ROUNDS))
        del data, store, buffer
    if len(ratios) > 1:
        what = f"slices of {counts[0]:.0e} to {counts[-1]:.0e} rows: the largest ratio / the smallest"
        rows.append(Row(what, max(ratios) / min(ratios), 1.5))
    return rows


def passes(count: int) -> Row:
    data = transitions(count)
    buffer = ReplayBuffer(storage=TensorStorage(data), sampler=SamplerWithoutReplacement(), batch_size=BATCH)
    store, order, place = leaves(data), torch.empty(0, dtype=torch.int64), 0

    def floor() -> dict[object, torch.Tensor]:
        nonlocal order, place
        if place >= len(order):
            order, place = torch.randperm(count), 0
        index = order[place : place + BATCH]
        place += BATCH
        return gather(store, index)

    batches = -(-count // BATCH)  # one pass, so that the figure includes its permutation
    return compare(f"passes over {count:.0e} rows: sample", floor, buffer.sample, batches, 2.0, rounds=20)


def main(rows: list[int]) -> list[Row]:
    torch.set_num_threads(1)
    print(f"{'':58}{'floor us':>10}{'llmrl us':>10}")
    return [priorities(1_000_000), *updates(1_000_000), *slices(rows), passes(100_000)]


if __name__ == "__main__":
    benchmark(main, __doc__, rows=([10_000, 100_000, 1_000_000, 10_000_000], "sizes for the slices; 10^7 takes 4 GB"))
