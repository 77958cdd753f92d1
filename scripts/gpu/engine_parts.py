"""The parts with another process: weights on their way, an engine beside the trainer, and a whole run."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_weight_sync import Receiver, layers
from runs import run_steps

from llmrl.data.llm.templates import find_template
from llmrl.modules.llm.engines import SamplingParams
from llmrl.modules.llm.engines.vllm.transfer import CudaIPC, SharedMemory
from llmrl.objectives.llm import GRPOLoss, SFTLoss
from llmrl.testing import tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.updater import make_updater
from scripts.gpu.context import GIB, Context
from scripts.gpu.figures import Figure
from tests.support.training_rows import policy_of, random_rows

NO_VLLM = "vllm is not installed"


# --- 8 transfer -------------------------------------------------------------------------------------------------------


def transfer(context: Context) -> Iterator[Figure]:
    """Weights to another process through each kind of memory; AdamW's moments in host memory, saved and loaded."""
    parameters = context.pick(2**29, 2**20)  # 2 GiB
    weights = {name: each.to(context.device) for name, each in layers(parameters, context.pick(4096, 256)).items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    kinds = {"shared memory": (SharedMemory(), 20.0)}
    kinds |= {"CUDA IPC": (CudaIPC(), 200.0)} if context.on_gpu else {}
    for name, (settings, least) in kinds.items():
        with closing(Receiver(weights)) as receiver:
            [seconds] = context.seconds(lambda: receiver.send(settings))  # noqa: B023
        yield Figure(f"transfer/{name}", size / seconds / 1e9, "GB/s", least=context.judged(least))
    if not context.on_gpu:
        yield Figure.skipped("transfer/CUDA IPC", "no GPU")
    del weights
    context.free()

    config = context.sft(optim={"lr": 1e-3, "name": "adamw_offload"}, memory={"checkpointing": "on"})
    rows = random_rows().to(context.device)
    with Session(config) as session:
        actor = policy_of(context.model("0.5B"))
        updater, loss = make_updater(config, session, actor, steps=9), SFTLoss(actor)
        updater.step(loss, rows, 1)
        saved, state = copy.deepcopy(actor.model.state_dict()), copy.deepcopy(updater.state_dict())
        expected = updater.step(loss, rows, 2), updater.step(loss, rows, 3)

        again = policy_of(context.model("0.5B"))
        again.model.load_state_dict(saved)
        resumed, loss = make_updater(config, session, again, steps=9), SFTLoss(again)
        before = context.held()
        with context.peak() as peak:
            resumed.load_state_dict(state)
        moments = [value for values in resumed.optimizer.state.values() for value in values.values()]
        on_gpu = sum(value.nbytes for value in moments if value.is_cuda)
        yield Figure("transfer/moments on the GPU after loading", on_gpu / GIB, "GiB", most=0.0)
        if context.on_gpu:
            yield Figure("transfer/rise while loading", (peak() - before) / GIB, "GiB", most=0.1)
        found = resumed.step(loss, rows, 2), resumed.step(loss, rows, 3)
        apart = max(abs(one["loss"] / other["loss"] - 1) for one, other in zip(found, expected, strict=True))
        yield Figure("transfer/loss after loading", apart, "relative", most=1e-3 if context.on_gpu else 1e-6)


PARTS = {"transfer": transfer}
