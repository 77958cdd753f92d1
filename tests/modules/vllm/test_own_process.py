"""vLLM's core in a process of its own: the same answers, weights through memory that both share, and nothing is left
behind, however it ends. Processes are really killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RolloutError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.transfer import SharedMemory
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import SyncProbe, weight_groups

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]
PROBE = SyncProbe(PROMPTS, bound=1e-4)
SOON_S = 10.0  # after which everything has to have ended


def parity(engine, model, temperature):
    params = SamplingParams(max_new_tokens=6, temperature=temperature, top_k=20)
    drawn = engine.generate(PROMPTS, params, seeds=[1, 2])
    full = [torch.cat(row) for row in zip(PROMPTS, drawn.ids, strict=True)]
    expected = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full, temperature=temperature)
    rows = zip(PROMPTS, drawn.plain_log_probs, engine.score(full, temperature=temperature), expected, strict=True)
    for prompt, plain, score, right in rows:
        torch.testing.assert_close(plain, right[len(prompt) :], atol=1e-4, rtol=0)
        torch.testing.assert_close(score, right, atol=1e-4, rtol=0)
    return drawn


def stepped(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    return model


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_tokenizer(), architecture="gemma", heads=2).eval()  # tied


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory, system):
    """At its end nothing is left, whatever the tests did to it."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    before = system.footprint()
    options = {"max_model_len": 1024, "skip_tokenizer_init": True}
    engine = VLLMEngine(str(folder), own_process=True, eos_token_ids=(), seed=0, **options)
    assert len(system.footprint()[0]) == len(before[0]) + 1  # one process, with the worker in it
    assert not torch.distributed.is_initialized()
    used = system.shared_files()
    yield engine
    used |= system.shared_files()
    engine.close()
    engine.close()  # nothing more happens
    with pytest.raises(RolloutError, match=r"close\(\) was called"):
        engine.generate(PROMPTS, SamplingParams())
    system.wait_until(lambda: system.footprint() == before and not system.left_in_memory(used))


@pytest.fixture
def alive(engine, model):
    """The engine, with the trainer's weights, whatever became of it in the test before."""
    if not engine.core._processes[0].is_alive():
        engine.restart(model.state_dict())
    return engine


def test_it_answers_like_an_engine_in_this_process(alive, model):
    old = parity(alive, model, 0.7)
    for version in (alive.version + 1, alive.version + 2):
        alive.update_weights(stepped(model).state_dict(), version=version)
        assert parity(alive, model, 1.0).version == version
    assert old.version < version
    parity(alive, model, 0.7)
    with pytest.raises(WeightSyncError, match="missing"):
        alive.update_weights({"model.norm.weight": model.model.norm.weight}, version=version + 1)
    parity(alive, model, 1.3)
    assert alive.version == version
    with pytest.raises(ConfigError, match="stop_strings need tokenizer="):
        alive.generate(PROMPTS, SamplingParams(stop_strings=("x",)))


def test_updates_arrive_whole_and_a_peer_that_dies_in_one_is_named(alive, model, system):
    trainer = TransformersEngine(model, eos_token_ids=(), pad_token_id=0)
    first = alive.version + 1
    for version in range(first, first + 4):
        alive.weight_backend = SharedMemory(block_bytes=20_000) if version >= first + 2 else None
        weights = weight_groups(stepped(model), max_bytes=30_000) if version % 2 else stepped(model).state_dict()
        alive.update_weights(weights, version=version)
        assert PROBE(alive.score, trainer.score, version=version) < 1e-5
        assert system.left_in_memory(()) == []  # the block has no name any more

    process = alive.core._processes[0]

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

    since = time.monotonic()
    with pytest.raises(LLMRLError, match=r"process .* was killed by SIGKILL"):
        alive.update_weights(Dying(), version=version + 1)
    assert Dying.made == len(Dying.metadata)  # other ranks would have waited for the rest
    assert alive.version == version
    with pytest.raises(RolloutError):
        alive.generate(PROMPTS, SamplingParams(max_new_tokens=3))
    assert time.monotonic() - since < SOON_S
    alive.restart(model.state_dict())
    assert PROBE(alive.score, trainer.score) < 1e-5
    assert alive.version == version
    assert system.left_in_memory(()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-weights")]


def test_a_call_ends_at_its_deadline_or_with_the_process(alive, system):
    long = SamplingParams(max_new_tokens=1000)
    alive.timeout_s = 0.3
    try:
        with pytest.raises(DeadlineError, match=r"generating 2 rows must end before its deadline: process \d+ .* runs"):
            alive.generate(PROMPTS, long)
    finally:
        alive.timeout_s = None
    process, found = alive.core._processes[0], []

    def draw():
        try:
            alive.generate(PROMPTS, long)
        except RolloutError as error:
            found.append(str(error))

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    system.wait_until(lambda: alive.core.llm.output_processor.get_num_unfinished_requests() == 2)
    process.kill()
    thread.join(SOON_S)
    assert f"while it is generating 2 rows: process {process.pid} (EngineCore) was killed by SIGKILL." in found[0]


def test_an_engine_in_this_process_leaves_it_as_it_was(system):
    environment, threads, generator = dict(os.environ), torch.set_num_threads, torch.get_rng_state()
    affinity, before, bind = os.sched_getaffinity(0), system.footprint(), memory_policy()
    model = tiny_model(tiny_tokenizer(), heads=2)
    engine = VLLMEngine(model, max_model_len=128)
    assert engine.eos_token_ids == (model.config.eos_token_id,)
    with pytest.raises(ConfigError, match="opens the default process group"):
        VLLMEngine(model)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert dict(os.environ) == environment
    assert torch.set_num_threads is threads
    assert torch.equal(torch.get_rng_state(), generator)
    assert os.sched_getaffinity(0) == affinity
    assert memory_policy() == bind
    engine.close()
    assert not torch.distributed.is_initialized()
    system.wait_until(lambda: system.footprint() == before)


def memory_policy():
    """From which node this process takes its memory: of its heap."""
    maps = Path("/proc/self/numa_maps")
    return [line.split()[1] for line in maps.read_text().splitlines() if " heap " in line] if maps.exists() else []


OWNER = """
import sys, threading
from llmrl.modules.llm import VLLMEngine
from llmrl.testing import tiny_model

if __name__ == "__main__":
    engine = VLLMEngine(tiny_model(heads=2), own_process=True, max_model_len=64, kv_cache_memory_bytes=10_000_000)
    print(engine.core._processes[0].pid, flush=True)
    threading.Event().wait(300)
"""


def test_the_process_ends_with_an_owner_that_was_killed(tmp_path, system):
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen([sys.executable, str(tmp_path / "owner.py")], stdout=subprocess.PIPE, text=True)
    try:
        process = int(owner.stdout.readline())
        assert "EngineCore" in system.command(process)
    finally:
        owner.kill()
        owner.communicate()
    system.wait_until(lambda: not system.command(process))
