"""Sleep and wake: what an engine refuses meanwhile, and that it computes with the weights that woke it."""

from contextlib import closing

import pytest
import torch

from llmrl.errors import RolloutError, WeightSyncError
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import publish
from tests.support.vllm import assert_rows_close, stepped, trainer_log_probs

pytestmark = pytest.mark.vllm
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12])]
SHORT = SamplingParams(max_new_tokens=6)


def check_sleep_and_wake(engine, model, memory=lambda: None):
    """Two sleeps that discard the weights and one that keeps them, and every call that is refused meanwhile.

    ``memory``  called where the engine is asleep, and where it is awake
    """
    before = engine.generate(PROMPTS, SHORT, seeds=[1, 2])
    with pytest.raises(WeightSyncError, match="it is awake"):
        engine.wake()
    for version in (1, 2):
        engine.sleep()
        memory()
        for refused in (lambda: engine.generate(PROMPTS, SHORT), lambda: engine.score(PROMPTS), engine.sleep):
            with pytest.raises(RolloutError, match=r"must be awake for \w+: it sleeps; update its weights"):
                refused()
        with pytest.raises(WeightSyncError, match="they were discarded"):
            engine.wake()
        with pytest.raises(WeightSyncError, match="missing"):
            engine.update_weights({"model.norm.weight": torch.ones(64)}, version=version)
        with pytest.raises(RolloutError, match="must be awake"):
            engine.generate(PROMPTS, SHORT)
        publish(stepped(model, version, size=0.05), engine)
        memory()
        drawn = engine.generate(PROMPTS, SHORT, seeds=[1, 2])
        assert drawn.version == version
        assert_rows_close(drawn.log_probs, trainer_log_probs(model, PROMPTS, drawn))
    assert not all(torch.equal(*pair) for pair in zip(before.log_probs, drawn.log_probs, strict=True))

    engine.sleep(keep_weights=True)
    with pytest.raises(RolloutError, match=r"wake\(\) it"):
        engine.generate(PROMPTS, SHORT)
    engine.wake()
    after = engine.generate(PROMPTS, SHORT, seeds=[1, 2])
    assert all(torch.equal(*pair) for pair in zip(after.ids, drawn.ids, strict=True))


@pytest.mark.parametrize("own_process", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "apart"])
def test_an_engine_sleeps_and_wakes_with_the_weights_that_it_is_given(own_process):
    model, tokenizer = tiny_model(tiny_tokenizer(), heads=2), tiny_tokenizer()
    options = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}
    options |= {"seed": 0, "max_model_len": 128, "own_process": own_process}
    calls = []
    with closing(VLLMEngine(model, tokenizer=tokenizer, **options)) as engine:
        for name in ("sleep", "wake_up", "reset_prefix_cache"):  # what vLLM is asked, in order
            setattr(engine.core.llm, name, recording(calls, name, getattr(engine.core.llm, name)))
        check_sleep_and_wake(engine, model)
    discarding = [("sleep", 2), ("wake_up", ["weights"]), ("reset_prefix_cache",), ("wake_up", ["kv_cache"])]
    assert calls == [*discarding, *discarding, ("sleep", 1), ("wake_up", None)]


def recording(calls, name, function):
    def recorded(*arguments, **options):
        calls.append((name, *arguments, *options.values()))
        return function(*arguments, **options)

    return recorded


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("own_process", [False, True], ids=["here", "apart"])
def test_beside_a_trainer_on_one_gpu_sleep_frees_the_memory_and_the_weights_come_back(own_process):
    model, tokenizer = tiny_model(tiny_tokenizer(), heads=1).cuda(), tiny_tokenizer()
    options = {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True, "max_model_len": 128}
    options |= {"devices": [torch.cuda.current_device()]} if own_process else {}
    free = []
    with closing(VLLMEngine(model, tokenizer=tokenizer, **options)) as engine:
        check_sleep_and_wake(engine, model, lambda: free.append(torch.cuda.mem_get_info()[0]))
    asleep, awake = min(free[::2]), max(free[1::2])
    total = torch.cuda.mem_get_info()[1]
    assert asleep - awake > 0.2 * total, "keys and values alone are more than that"
