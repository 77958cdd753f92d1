"""Times sending weights to another process of this machine, against copying them inside one.

    python scripts/bench/bench_weight_sync.py [--parameters 100_000_000] [--repeats 8] [--hidden 512]

The transport is that of a vLLM engine in its own process: a shared buffer, checksums on both sides, calls between the
processes. Here a process that copies each tensor into its own parameters replaces vLLM. If vLLM is installed a real
engine is measured too, with a model of width ``--hidden``: the time then includes its loading, which fuses and packs
weights. Also reported: the peak private memory that an update adds to each process.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from inputs import copying
from table import Row, benchmark
from timing import best, memory_mb
from torch import Tensor

from llmrl.modules.llm.engines.vllm.transfer import SharedMemory, TransferSettings, WeightTransfer
from llmrl.modules.llm.engines.vllm.worker import WorkerExtension
from llmrl.modules.llm.engines.weights import WeightSet
from llmrl.weight_update.buffers import StoredTensor


@contextmanager
def highest(process: int | str) -> Iterator[list[float]]:
    """The peak private memory of a process inside the block, above its level at the start, in bytes."""
    start, found, ended = memory_mb("RssAnon", process), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], 2**20 * (memory_mb("RssAnon", process) - start))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def layers(parameters: int, width: int = 1024) -> dict[str, Tensor]:
    """Weights like a language model's: a large embedding, then layers of matrices and vectors."""
    weights = {"embedding": torch.randn(max(parameters // 5 // width, 1), width)}
    count, layer = weights["embedding"].numel(), 0
    while count < parameters:
        rows = min(3 * width, -(-(parameters - count) // width))
        weights |= {f"{layer}.matrix": torch.randn(rows, width), f"{layer}.norm": torch.randn(width)}
        count, layer = count + (rows + 1) * width, layer + 1
    return weights


def worker(pipe: Connection, shapes: dict[str, torch.Size], device: str) -> None:
    """Plays the part of a vLLM worker, with plain parameters instead of a model."""
    if device == "cpu":
        torch.set_num_threads(1)
    own = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    ours = SimpleNamespace()
    while True:
        method, arguments = pipe.recv()
        answer: Any = None
        if method == "llmrl_open_buffer":
            WorkerExtension.llmrl_open_buffer(ours, **arguments)
        elif method == "llmrl_receive":
            buffer, entries = ours._llmrl_buffer, [StoredTensor(*entry) for entry in arguments["stored"]]
            answer = buffer.damaged(entries)
            for entry in entries:
                own[entry.name].copy_(buffer.read(entry))
            if device != "cpu":
                torch.cuda.synchronize()  # the buffer is written again after this answer
        elif method == "llmrl_finish":
            answer = {}
        elif method == "sum":
            answer = sum(float(tensor.double().sum()) for tensor in own.values())
        elif method == "end":
            return
        pipe.send([answer])


class Receiver:
    """A `worker` in a process of its own, with as many zeros as there are ``weights``."""

    def __init__(self, weights: dict[str, Tensor]):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._weights = weights
        self._metadata = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        device = str(next(iter(weights.values())).device)
        self._process = context.Process(target=worker, args=(theirs, shapes, device), daemon=True)
        self._process.start()
        theirs.close()  # so that a failing worker raises EOFError here
        self.pid, self._transfer = self._process.pid, WeightTransfer(self._call)

    def _call(self, method: str, end: float = 0.0, **arguments: Any) -> list[Any]:
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def send(self, settings: TransferSettings) -> None:
        """Sends the weights; checksums on both sides."""
        self._transfer.send(WeightSet(self._metadata, [self._weights]), time.monotonic() + 600, settings)

    def close(self) -> None:
        """Ends the process. Raises AssertionError if it does not have the weights."""
        expected = sum(float(tensor.double().sum()) for tensor in self._weights.values())
        assert self._call("sum") == [expected]
        self._pipe.send(("end", {}))
        self._process.join(30)


def measure_transport(weights: dict[str, Tensor], repeats: int) -> list[Row]:
    receiver, settings = Receiver(weights), SharedMemory()
    receiver.send(settings)
    copied, sending = best(copying(weights), lambda: receiver.send(settings), repeats=repeats)
    with highest(receiver.pid) as theirs, highest("self") as ours:
        receiver.send(settings)
        receiver.send(settings)
    receiver.close()
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{size / 1e6:.0f} MB in {len(weights)} tensors: copying {copied:.0f} ms, sending {sending:.0f} ms")
    return [
        Row("weights to another process: time / that of one copy", sending / copied, 1 / 0.4),
        Row("  private memory at the peak / the weights, trainer", ours[0] / size, 0.1),
        Row("  private memory at the peak / the weights, worker", theirs[0] / size, 0.1),
    ]


def measure_engine(hidden: int, repeats: int) -> list[Row]:
    from llmrl.modules.llm import VLLMEngine
    from llmrl.testing import tiny_model, tiny_tokenizer
    from llmrl.weight_update import weight_groups

    model = tiny_model(tiny_tokenizer(), hidden_size=hidden, layers=8, heads=hidden // 64)
    weights = dict(model.state_dict())
    engine = VLLMEngine(model, own_process=True, eos_token_ids=(), max_model_len=128)

    def update() -> None:
        engine.update_weights(weight_groups(model), version=engine.version + 1)

    try:
        update()
        copied, updating = best(copying(weights), update, repeats=repeats)
        with highest(engine.core._processes[0].pid) as theirs, highest("self") as ours:
            update()
            update()
    finally:
        engine.close()
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"vLLM, {size / 1e6:.0f} MB in {len(weights)} tensors: copying {copied:.0f} ms, update {updating:.0f} ms")
    return [
        Row("weights into vLLM, loaded: time / that of one copy", updating / copied),
        Row("  private memory at the peak / the weights, trainer", ours[0] / size, 0.1),
        Row("  private memory at the peak / the weights, engine", theirs[0] / size),
    ]


def main(parameters: int, repeats: int, hidden: int) -> list[Row]:
    rows = measure_transport(layers(parameters), repeats)
    if importlib.util.find_spec("vllm") is not None:
        rows += measure_engine(hidden, repeats)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    benchmark(
        main,
        __doc__,
        parameters=(100_000_000, "float32"),
        repeats=8,
        hidden=(512, "width of vLLM's model, a multiple of 64; 8 layers"),
    )
