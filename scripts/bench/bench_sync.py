"""Times weight synchronisation schemes until the worker has answered, against a minimal implementation.

    python scripts/bench/bench_sync.py [--parameters 100_000_000] [--tensors 300] [--repeats 8]

Shared memory is compared with one copy of the same tensors inside this process. With a hundredth of the parameters,
where the number of tensors counts, shared memory and pipe are compared with the same written by hand: one buffer, in
shared memory or sent as bytes, that the worker copies into its tensors before it answers.
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


def by_hand_worker(theirs: Connection, block: Tensor, parameters: int, tensors: int) -> None:
    """``block`` float32[N] is the shared memory; of no elements if the weights arrive through the pipe."""
    torch.set_num_threads(1)
    own = [tensor.data for tensor in model_of(parameters, tensors).values()]
    memory = block if len(block) else torch.empty(sum(tensor.numel() for tensor in own))
    places, data = memory.split([tensor.numel() for tensor in own]), memoryview(memory.numpy()).cast("B")
    while True:
        if len(block):
            theirs.recv_bytes()
        else:
            theirs.recv_bytes_into(data)
        torch._foreach_copy_(own, places)
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


def by_hand_update(shared: bool, weights: dict[str, Tensor], size: tuple[int, int]) -> Callable[[], None]:
    flat = [tensor.data for tensor in weights.values()]
    sizes = [len(tensor) for tensor in flat]
    memory = torch.empty(sum(sizes)).share_memory_()
    pipe = start(by_hand_worker, Connection, memory if shared else memory[:0], *size)
    places, message = memory.split(sizes), b"new" if shared else memoryview(memory.numpy()).cast("B")

    def update() -> None:
        torch._foreach_copy_(places, flat)
        pipe.send_bytes(message)
        pipe.recv_bytes()

    return update


def measure(
    name: str, scheme: WeightSyncScheme, parameters: int, tensors: int, repeats: int, floor_name: str, target: float
) -> Row:
    weights = {name: torch.randn_like(own) for name, own in model_of(parameters, tensors).items()}
    update = scheme_update(scheme, weights, (parameters, tensors))
    if floor_name == "one copy":
        floor = copying(weights)
    else:
        floor = by_hand_update(isinstance(scheme, SharedMemWeightSyncScheme), weights, (parameters, tensors))
    for warm in (floor, update, update):
        warm()
    lowest, measured = best(floor, update, repeats=repeats)
    print(f"{name}: {tensors} tensors, floor {lowest:.2f} ms, until answered {measured:.2f}")
    return Row(f"{name}: until the worker has answered / {floor_name}", measured / lowest, target)


def main(parameters: int, tensors: int, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    shared, pipe = SharedMemWeightSyncScheme(timeout=60), MultiProcessWeightSyncScheme(timeout=60)
    few = parameters // 100
    return [
        measure("shared memory", shared, parameters, tensors, repeats, "one copy", 1.2),
        measure(f"shared memory, {few:.0e} parameters", shared, few, tensors, 5 * repeats, "the same by hand", 3.0),
        measure(f"pipe, {few:.0e} parameters", pipe, few, tensors, 5 * repeats, "the same by hand", 3.0),
    ]


if __name__ == "__main__":
    benchmark(main, __doc__, parameters=100_000_000, tensors=300, repeats=8)
