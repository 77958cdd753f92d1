"""A map from rows to rows against a Python dict of the same tensors, at 10^4, 10^5 and 10^6 keys.

python scripts/bench/bench_maps.py [--sizes 10000 100000]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from table import Row, benchmark
from tensordict import TensorDict
from timing import best

from llmrl.data import LazyTensorStorage, QueryModule, TensorDictMap

BATCH = 1000  # keys per write or read


def cost(work: Callable[[slice], object], size: int, repeats: int) -> float:
    """Microseconds per key, of the fastest of several passes in batches."""

    def run() -> None:
        for first in range(0, size, BATCH):
            work(slice(first, first + BATCH))

    return 1e3 * best(run, repeats=repeats)[0] / size


def measure(size: int, repeats: int) -> tuple[float, float, float, float]:
    """Microseconds per key: insert and query of the map, then of the dict."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 1 << 40, (size, 4), generator=draw)
    values = torch.randn(size, 8, generator=draw)
    key = TensorDict(x=rows, batch_size=[size])
    value = TensorDict(y=values, batch_size=[size])
    plain: dict[bytes, torch.Tensor] = {}

    def insert(part: slice) -> None:
        for row, one in zip(rows[part].numpy(), values[part], strict=True):
            plain[row.tobytes()] = one

    def query(part: slice) -> torch.Tensor:
        return torch.stack([plain[row.tobytes()] for row in rows[part].numpy()])

    inserts = []
    for _ in range(repeats):
        map_ = TensorDictMap(query_module=QueryModule(["x"]), storage=LazyTensorStorage(size))
        inserts.append(cost(lambda part: map_.__setitem__(key[part], value[part]), size, 1))  # noqa: B023
    queries = cost(lambda part: map_[key[part]], size, repeats)
    return min(inserts), queries, cost(insert, size, repeats), cost(query, size, repeats)


def main(sizes: list[int], repeats: int) -> list[Row]:
    rows, costs = [], []
    for size in sizes:
        insert, query, plain_insert, plain_query = measure(size, repeats)
        rows += [
            Row(f"{size:,} keys: insert", insert / plain_insert, 3.0),
            Row(f"{size:,} keys: query", query / plain_query, 3.0),
        ]
        costs.append(insert + query)
    if len(costs) > 1:
        rows.append(Row("a key of the largest map against one of the smallest", costs[-1] / costs[0], 2.0))
    return rows


if __name__ == "__main__":
    benchmark(main, __doc__, sizes=[10_000, 100_000, 1_000_000], repeats=3)
