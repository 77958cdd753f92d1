"""A server started by ``vllm serve``, beside what every engine promises: its URL is all that is given. It is really
killed and started again: calls end in an error, and weights that it lost are noticed.
"""

import contextlib
import os
import signal
import threading

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from transformers import AutoModelForCausalLM

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm import ChatHistory, vLLMWrapper
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.llm import DistillLoss, DistillSettings
from llmrl.objectives.llm.teacher import SAMPLED, TOP_IDS, TOP_LOG_PROBS
from llmrl.objectives.llm.teacher_models import ServedTeacher, write_columns
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import publish
from tests.support.losses import conversation
from tests.support.vllm import (
    BackgroundCall,
    WatchedGroups,
    assert_rows_close,
    left_in_memory,
    serving,
    stepped,
    trainer_log_probs,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]
LONG, SHORT = SamplingParams(max_new_tokens=1000), SamplingParams(max_new_tokens=5)


@pytest.fixture
def engine(vllm_server):
    engine = VLLMEngine(vllm_server.url, eos_token_ids=(), seed=0)
    yield engine
    engine.close()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("llmrl-vllm-")]


def test_the_url_is_all_that_a_wrapper_needs(vllm_server):
    policy = vLLMWrapper(vllm_server.url, generate_kwargs={"max_new_tokens": 6, "seed": 0})
    history = History.from_chats([[{"role": "user", "content": text}] for text in ("Hi", "What is 2+2?")])
    td = policy(TensorDict(history=ChatHistory.from_rows({"prompt": history}), batch_size=[2]))
    assert policy.tokenizer.eos_token == "<|im_end|>"
    scored = policy.get_new_version(generate=False)(td.copy())
    for row in range(2):
        mask = td["masks"].rows("all_assistant_mask")[row]
        assert_rows_close([td["log_probs"].rows("full")[row][mask]], [scored["log_probs"].rows("full")[row][mask]])
    policy.engine.close()
    with pytest.raises(ConfigError, match="plain log-probs of a truncated distribution at temperature"):
        vLLMWrapper(vllm_server.url, generate_kwargs={"top_k": 3, "temperature": 0.5})


def test_a_server_is_asked_for_what_it_counted_and_has_no_peaks(engine):
    assert engine.take_gauges() == {}, "what it counted before is not of this engine"
    for _ in range(2):
        engine.generate([torch.arange(1, 301)], SHORT)
    assert engine.take_gauges() == {"preempted": 0, "prefix_queries": 600, "prefix_hits": 256}


def test_a_teacher_by_its_url_says_what_the_same_teacher_says_here(vllm_server, served_folder):
    """The likeliest tokens and the sampled one; more of them than the server gives are refused."""
    model = AutoModelForCausalLM.from_pretrained(served_folder).eval()
    for estimator, keys in (("sample", [SAMPLED[1:]]), ("topk", [TOP_IDS, TOP_LOG_PROBS])):
        options = DistillSettings(
            teacher=vllm_server.url, estimator=estimator, **{"k": 4} if estimator == "topk" else {}
        )
        loss = DistillLoss(TokenScorer(model), options=options, teacher=TokenScorer(model))
        rows = [conversation(seed, 3, 2 + seed, dtype=torch.float32).select("tokens", "masks") for seed in range(3)]
        here, there = lazy_stack(rows), lazy_stack(rows).clone()
        lengths = [len(row["tokens", "full"]) for row in rows]
        write_columns(here, [row[:length] for row, length in zip(loss.ask_teacher(here), lengths, strict=True)])
        with contextlib.closing(ServedTeacher(options)) as teacher:
            teacher.write(loss, there, None)
        for key in keys:
            found, expected = (batch.get(key, as_list=True) for batch in (there, here))
            masks = here.get(("masks", "all_assistant_mask"), as_list=True)
            got = [row[mask].float() for row, mask in zip(found, masks, strict=True)]
            assert_rows_close(got, [row[mask].float() for row, mask in zip(expected, masks, strict=True)])
    with pytest.raises(ConfigError, match="--max-logprobs 50"):
        ServedTeacher(DistillSettings(teacher=vllm_server.url, estimator="topk", k=50))


def test_a_server_cannot_sleep_and_goes_on_serving(engine):
    with pytest.raises(UnsupportedError, match="a server has its own GPU"):
        engine.sleep()
    assert engine.score(PROMPTS)


def test_calls_of_an_engine_that_is_closed_end_and_the_server_drops_them(vllm_server):
    engine = VLLMEngine(vllm_server.url, eos_token_ids=(), seed=0)
    calls = [BackgroundCall(lambda: engine.generate(PROMPTS, LONG)) for _ in range(3)]
    wait_until(lambda: vllm_server.is_drawing(3 * len(PROMPTS)))
    engine.close()
    for call in calls:
        with pytest.raises(RolloutError, match="engine was closed"):
            call.result()
    wait_until(lambda: not vllm_server.is_drawing() and not threads())


def test_weights_arrive_and_those_of_a_server_that_was_started_again_are_missed(engine, vllm_server):
    """An update in the middle of which the server dies serves nothing; a new server has the weights of its folder, and
    its label tells.
    """
    model = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2)
    for seed in range(2):
        version = publish(stepped(model, seed, size=0.1), engine)
        generation = engine.generate(PROMPTS, SHORT)
        assert generation.version == version
        assert_rows_close(generation.log_probs, trainer_log_probs(model, PROMPTS, generation))
    engine.take_gauges()
    vllm_server.kill()
    vllm_server.start()
    assert engine.take_gauges() == {}, "its counters began anew"
    for call in (lambda: engine.generate(PROMPTS, SHORT), lambda: engine.score(PROMPTS)):
        with pytest.raises(RolloutError, match="it has 'default'; it was restarted, or another client"):
            call()
    version = publish(model, engine)
    generation = engine.generate(PROMPTS, SHORT)
    assert_rows_close(generation.log_probs, trainer_log_probs(model, PROMPTS, generation))

    made = []

    def kill_in_the_middle(group):
        made.extend(group)
        if len(made) == 5:
            vllm_server.process.kill()
            vllm_server.process.wait(30)

    with pytest.raises(WeightSyncError, match=rf"VLLMEngine: {vllm_server.url}/collective_rpc must be reachable"):
        engine.update_weights(WatchedGroups(model, kill_in_the_middle), version=version + 1)
    assert (engine.version, left_in_memory()) == (version, [])
    with pytest.raises(RolloutError):
        engine.generate(PROMPTS, SHORT)


def test_a_server_started_without_anything_samples_plainly_and_its_silence_and_death_are_noticed(served_folder):
    """Started by the command itself, with none of the arguments that more than plain sampling takes."""
    with serving(served_folder, by_command=True) as server:
        engine = VLLMEngine(server.url, eos_token_ids=(), seed=0)
        generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
        assert [len(row) for row in generation.log_probs] == [4, 4, 4]
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            engine.generate(PROMPTS, SamplingParams(temperature=0.7))
        weights = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2).state_dict()
        with pytest.raises(UnsupportedError, match="VLLM_SERVER_DEV_MODE=1 vllm serve"):
            engine.update_weights(weights, version=1)
        assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).version == 0

        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RolloutError, match=rf"{server.url}.* must answer /health within 7 s: it did not"):
                engine.generate(PROMPTS, SHORT)  # its own deadline is in ten minutes
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert len(engine.generate(PROMPTS, SHORT).ids) == 3

        calls = [BackgroundCall(lambda: engine.generate(PROMPTS * 10, LONG)) for _ in range(3)]
        wait_until(server.is_drawing)
        server.process.kill()
        for call in calls:
            with pytest.raises(RolloutError, match=server.url):
                call.result()
        engine.close()
    wait_until(lambda: not threads())
