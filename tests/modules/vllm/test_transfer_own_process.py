"""Weights into an engine in a process of its own, through memory that both share, and what is left when one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import connection

import pytest
import torch

from llmrl.errors import LLMRLError, RolloutError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.transfer import SharedMemory
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import SyncProbe, weight_groups

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]
PROBE = SyncProbe(PROMPTS, bound=1e-4)


def ours_in_memory():
    return [name for name in os.listdir("/dev/shm") if name.startswith("llmrl-")]


def test_updates_arrive_whole_and_a_peer_that_dies_in_one_is_named():
    model = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2).eval()  # tied
    trainer = TransformersEngine(model, eos_token_ids=(), pad_token_id=0)
    engine = VLLMEngine(model, own_process=True, eos_token_ids=(), max_model_len=128, seed=0)
    try:
        for version in range(1, 7):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            engine.weight_backend = SharedMemory(block_bytes=20_000) if version > 3 else None
            weights = weight_groups(model, max_bytes=30_000) if version % 2 else model.state_dict()
            engine.update_weights(weights, version=version)
            assert PROBE(engine.score, trainer.score, version=version) < 1e-5
            assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=3)).version == version
            assert ours_in_memory() == []  # the block has no name any more

        process = engine.core._processes[0]

        class Dying:
            """Groups in the middle of which the engine's process is killed."""

            metadata = weight_groups(model).metadata
            made = 0

            def __iter__(self):
                for group in weight_groups(model, max_bytes=1):
                    Dying.made += 1
                    if Dying.made == 5:
                        os.kill(process.pid, signal.SIGKILL)
                        connection.wait([process.sentinel], 10)
                    yield group

        began = time.monotonic()
        with pytest.raises(LLMRLError, match=r"process .* was killed by SIGKILL"):
            engine.update_weights(Dying(), version=version + 1)
        assert time.monotonic() - began < 10
        assert Dying.made == len(Dying.metadata)  # other ranks would have waited for the rest
        assert engine.version == version
        with pytest.raises(RolloutError):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=3))
        engine.restart(model.state_dict())
        assert PROBE(engine.score, trainer.score) < 1e-5
        assert engine.version == version
    finally:
        engine.close()
    assert ours_in_memory() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-weights")]
