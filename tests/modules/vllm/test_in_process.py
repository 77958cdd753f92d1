"""VLLMEngine in this process, beside what every engine promises: what it does to the process, how calls end."""

import os
from pathlib import Path

import pytest
import torch

from llmrl.errors import ConfigError, DeadlineError, RolloutError
from llmrl.modules.llm.engines import SamplingParams, StopReason, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from tests.support.vllm import BackgroundCall, footprint, wait_until, wait_until_as_before

pytestmark = pytest.mark.vllm
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]
LONG, SHORT = SamplingParams(max_new_tokens=1900), SamplingParams(max_new_tokens=6)


def process_settings():
    """What vLLM changes in the process that builds it; of its memory, the node that the heap is taken from."""
    maps = Path("/proc/self/numa_maps")
    heap = [line.split()[1] for line in maps.read_text().splitlines() if " heap " in line] if maps.exists() else []
    threads = torch.set_num_threads
    return dict(os.environ), threads, torch.get_rng_state().tolist(), os.sched_getaffinity(0), heap


@pytest.fixture(scope="module")
def engine():
    """Built after others that could not be; with a cache of 19 blocks. At its end the process is as it was.

    Regression: the process groups of the first that failed stayed open.
    """
    model, tokenizer = tiny_model(tiny_tokenizer(), heads=2), tiny_tokenizer()
    for options, error in (({"kv_cache_memory_bytes": 1}, ValueError), ({"logprobs_mode": "raw_logits"}, ConfigError)):
        with pytest.raises(error, match=r"memory|logprobs_mode"):
            VLLMEngine(model, tokenizer=tokenizer, max_model_len=128, **options)
    before, settings = footprint(), process_settings()
    engine = VLLMEngine(model, tokenizer=tokenizer, seed=0, max_model_len=2048, num_gpu_blocks_override=20)
    assert engine.eos_token_ids == (model.config.eos_token_id,)
    engine.generate(PROMPTS, SHORT)
    assert process_settings() == settings
    yield engine
    engine.close()
    assert not torch.distributed.is_initialized()
    wait_until_as_before(before)


def test_only_one_engine_fits_into_a_process(engine):
    with pytest.raises(ConfigError, match="opens the default process group"):
        VLLMEngine(tiny_model(tiny_tokenizer(), heads=2))


def test_a_cache_that_is_too_small_shows_in_the_gauges(engine):
    """A block is of 128 tokens: eight rows that grow into their fourth want 32."""
    engine.take_gauges()
    params = SamplingParams(max_new_tokens=380, ignore_eos=True)
    assert [len(ids) for ids in engine.generate([torch.arange(1, 41)] * 8, params).ids] == [380] * 8
    gauges = engine.take_gauges()
    assert gauges["preempted"] >= 1
    assert gauges["waiting_max"] >= 1
    assert 0.9 < gauges["cache_max"] <= 1
    assert gauges["prefix_queries"] == 8 * 40
    assert gauges["prefix_hits"] == 0, "shorter than a block"
    assert engine.take_gauges() == {}, "nothing was asked since"
    for _ in range(2):
        engine.generate([torch.arange(1, 301)], SHORT)
    gauges = engine.take_gauges()
    assert (gauges["preempted"], gauges["prefix_queries"], gauges["prefix_hits"]) == (0, 600, 256)
    assert gauges["cache_max"] == pytest.approx(3 / 19)


def test_an_aborted_row_is_never_a_natural_stop(engine, monkeypatch):
    inner = engine.core.llm.llm_engine
    step, steps = inner.step, iter(range(100))

    def step_and_abort():
        if next(steps) == 3:
            inner.abort_request([list(inner.output_processor.request_states)[1]], internal=True)
        return step()

    params = SamplingParams(max_new_tokens=9, top_k=20, ignore_eos=True)
    whole = engine.generate(PROMPTS, params, seeds=range(3))
    monkeypatch.setattr(inner, "step", step_and_abort)
    generation = engine.generate(PROMPTS, params, seeds=range(3))
    assert generation.stop_reasons == [StopReason.LENGTH, StopReason.ABORT, StopReason.LENGTH]
    assert not StopReason.ABORT.natural
    assert [len(row) for row in generation.plain_log_probs] == [9, 0, 9]
    for row in (0, 2):
        assert torch.equal(generation.ids[row], whole.ids[row])


def test_a_failed_call_leaves_nothing_for_the_next_one(engine, monkeypatch):
    inner = engine.core.llm.llm_engine
    before = engine.generate(PROMPTS, SHORT, seeds=range(3))

    def fail():
        raise RuntimeError("out of blocks")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "step", fail)
        with pytest.raises(RolloutError, match="generating failed: RuntimeError: out of blocks"):
            engine.generate([torch.arange(1, 9)] * 6, SHORT)
    after = engine.generate(PROMPTS, SHORT, seeds=range(3))
    assert [ids.tolist() for ids in after.ids] == [ids.tolist() for ids in before.ids]


def test_calls_end_at_their_deadline_and_when_the_engine_is_closed(engine):
    """The last test: it closes the engine."""
    engine.timeout_s = 0.1
    with pytest.raises(DeadlineError, match="generating must end before its deadline: the engine in this process"):
        engine.generate(PROMPTS, LONG)
    engine.timeout_s = None
    assert len(engine.generate(PROMPTS, SHORT).ids) == 3  # the call that was given up is not in the way
    call = BackgroundCall(lambda: engine.generate(PROMPTS, SamplingParams(max_new_tokens=1900, ignore_eos=True)))
    wait_until(engine.core.llm.llm_engine.has_unfinished_requests)
    engine.close()
    with pytest.raises(RolloutError, match="engine was closed while generating"):
        call.result()
