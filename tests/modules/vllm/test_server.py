"""A server started by ``vllm serve``, in the form that users start it: its URL is all that is given."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, UnsupportedError
from llmrl.modules.llm import ChatHistory, vLLMWrapper
from llmrl.modules.llm.engines import SamplingParams, StopReason, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.worker import EXTENSION
from llmrl.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, architecture="gemma", heads=2)  # tied


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder, start_server):
    arguments = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)
    with start_server(folder, *arguments, VLLM_SERVER_DEV_MODE="1") as (url, _):
        yield url


@pytest.fixture
def engine(url):
    engine = VLLMEngine(url, eos_token_ids=(), seed=0)
    yield engine
    engine.close()


def scored_by(model, prompts, generation, temperature=1.0):
    full = [torch.cat(row) for row in zip(prompts, generation.ids, strict=True)]
    scores = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score(full, temperature=temperature)
    return [score[len(prompt) :] for score, prompt in zip(scores, prompts, strict=True)]


def assert_close(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_ids_and_log_probs_are_those_of_the_sampling_distribution(engine, model, temperature):
    generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=7, temperature=temperature))
    assert [len(ids) for ids in generation.ids] == [7] * 3
    assert generation.stop_reasons == [StopReason.LENGTH] * 3
    assert_close(generation.log_probs, scored_by(model, PROMPTS, generation, temperature))


def test_random_ids_go_in_and_come_out_as_they_are(engine, model, tokenizer):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(tokenizer), (9,), generator=generator) for _ in range(60)]
    assert sum("\ufffd" in text for text in tokenizer.batch_decode(rows)) > 30
    generation = engine.generate(rows, SamplingParams(max_new_tokens=3))
    assert_close(generation.log_probs, scored_by(model, rows, generation))


def test_truncation_keeps_both_log_probs_at_temperature_one(engine, model):
    generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5, top_k=4))
    assert_close(generation.plain_log_probs, scored_by(model, PROMPTS, generation))
    assert all((a > b).all() for a, b in zip(generation.log_probs, generation.plain_log_probs, strict=True))


def test_what_http_cannot_say_is_refused(engine, url, tokenizer):
    with pytest.raises(ConfigError, match=r"scores at temperature 1 only: got 0\.5"):
        engine.score(PROMPTS, temperature=0.5)
    with pytest.raises(ConfigError, match="plain log-probs of a truncated distribution at temperature"):
        vLLMWrapper(url, tokenizer=tokenizer, generate_kwargs={"top_k": 3, "temperature": 0.5})


def test_scores_and_masks(engine, model):
    masks = [torch.arange(len(row)) % 2 == 0 for row in PROMPTS]
    reference = TransformersEngine(model, eos_token_ids=(), pad_token_id=0)
    assert_close(engine.score(PROMPTS, masks=masks), reference.score(PROMPTS, masks=masks))


def test_rows_are_functions_of_their_seeds_and_stops(engine, tokenizer):
    stops = tuple(range(0, 478, 5))
    params = SamplingParams(max_new_tokens=12, stop_token_ids=stops)
    together = engine.generate(PROMPTS * 3, params, seeds=range(9))
    assert StopReason.EOS in together.stop_reasons
    alone = engine.generate([PROMPTS[1]], params, seeds=[4])
    assert alone.ids[0].tolist() == together.ids[4].tolist()
    text = tokenizer.decode(together.ids[0][:2])
    again = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12, stop_strings=(text,)), seeds=[0])
    assert again.stop_reasons == [StopReason.STOP_STRING]


def test_the_url_is_all_that_a_wrapper_needs(url):
    policy = vLLMWrapper(url, generate_kwargs={"max_new_tokens": 6, "seed": 0})
    history = History.from_chats([[{"role": "user", "content": text}] for text in ("Hi", "What is 2+2?")])
    td = policy(TensorDict(history=ChatHistory.from_rows({"prompt": history}), batch_size=[2]))
    assert policy.tokenizer.eos_token == "<|im_end|>"
    scored = policy.get_new_version(generate=False)(td.copy())
    for row in range(2):
        mask = td["masks"].rows("all_assistant_mask")[row]
        assert_close([td["log_probs"].rows("full")[row][mask]], [scored["log_probs"].rows("full")[row][mask]])
    policy.engine.close()


def test_weights_arrive_through_a_file(engine, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        engine.update_weights(model.state_dict(), version=1)
        generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
        assert generation.version == 1
        assert_close(generation.log_probs, scored_by(model, PROMPTS, generation))
    finally:
        model.load_state_dict(before)
        engine.update_weights(before, version=2)


def test_a_server_started_without_anything_samples_plainly_and_refuses_the_rest(folder, start_server):
    with start_server(folder) as (plain_url, _):
        engine = VLLMEngine(plain_url, eos_token_ids=(), seed=0)
        generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
        assert [len(row) for row in generation.log_probs] == [4, 4, 4]
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            engine.generate(PROMPTS, SamplingParams(temperature=0.7))
        weights = tiny_model(tiny_tokenizer(), architecture="gemma", heads=2).state_dict()
        with pytest.raises(UnsupportedError, match="VLLM_SERVER_DEV_MODE=1 vllm serve"):
            engine.update_weights(weights, version=1)
        assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).version == 0
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-vllm-server")]
