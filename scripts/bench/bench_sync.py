"""Times weight synchronisation schemes until the worker has answered, against a minimal implementation.

    python scripts/bench/bench_sync.py [--parameters 100_000_000] [--tensors 300] [--repeats 8]

Shared memory is compared with one copy of the same tensors inside this process; a pipe, with 10^6 parameters, with a
hand-written pipe: one buffer of bytes that the worker copies into its tensors before it answers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from inputs import copying
from table import Row, benchmark
from timing import best
from torch import Tensor, nn

from llmrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

CONTEXT = multiprocessing.get_context("fork")


def model_of(parameters: int, tensors: int) -> nn.ParameterDict:
    shape = (parameters // tensors,)
    return nn.ParameterDict({f"weight_{n}": nn.Parameter(torch.zeros(shape)) for n in range(tensors)})


def scheme_worker(scheme: WeightSyncScheme, theirs: Connection, parameters: int, tensors: int) -> None:
    torch.set_num_threads(1)
    receiver = scheme.create_receiver()
    receiver.register_model(model_of(parameters, tensors))
    receiver.register_worker_transport(theirs)
    while True:
        receiver.receive(timeout=60)


def by_hand_worker(theirs: Connection, parameters: int, tensors: int) -> None:
    torch.set_num_threads(1)
    model = model_of(parameters, tensors)
    while True:
        memory, start = torch.frombuffer(bytearray(theirs.recv_bytes()), dtype=torch.float32), 0
        for tensor in model.values():
            tensor.data.copy_(memory[start : start + tensor.numel()])
            start += tensor.numel()
        theirs.send_bytes(b"done")


def start(target: Callable[..., None], *arguments: Any) -> Connection:
    ours, theirs = CONTEXT.Pipe()
    CONTEXT.Process(target=target, args=[theirs if a is Connection else a for a in arguments], daemon=True).start()
    theirs.close()
    return ours


def scheme_update(scheme: WeightSyncScheme, weights: dict[str, Tensor], size: tuple[int, int]) -> Callable[[], None]:
    sender = scheme.create_sender()
    sender.register_worker(0, start(scheme_worker, scheme, Connection, *size))

    def update() -> None:
        sender.update_weights(weights)
        sender.wait()

    return update


def measure(name: str, scheme: WeightSyncScheme, parameters: int, tensors: int, repeats: int, target: float) -> Row:
    weights = {name: torch.randn_like(own) for name, own in model_of(parameters, tensors).items()}
    update = scheme_update(scheme, weights, (parameters, tensors))
    if isinstance(scheme, SharedMemWeightSyncScheme):
        floor = copying(weights)
    else:
        pipe = start(by_hand_worker, Connection, parameters, tensors)

        def floor() -> None:
            pipe.send_bytes(torch.cat([tensor.reshape(-1) for tensor in weights.values()]).numpy())
            pipe.recv_bytes()

    for warm in (floor, update, update):
        warm()
    lowest, measured = best(floor, update, repeats=repeats)
    print(f"{name}, {parameters} parameters in {tensors} tensors: floor {lowest:.2f} ms, until answered {measured:.2f}")
    return Row(
        f"{name}: until the worker has answered / {'one copy' if target < 2 else 'a pipe by hand'}",
        measured / lowest,
        target,
    )


def main(parameters: int, tensors: int, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    shared, pipe = SharedMemWeightSyncScheme(timeout=60), MultiProcessWeightSyncScheme(timeout=60)
    return [
        measure("shared memory", shared, parameters, tensors, repeats, 1.2),
        measure("pipe", pipe, parameters // 100, tensors, 5 * repeats, 3.0),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, parameters=100_000_000, tensors=300, repeats=8)
