"""A server started by ``vllm serve``, in the form that users start it: its URL is all that is given. It is really
stopped, killed and started again: whoever waits gets an error within seconds, and weights that it lost are noticed.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.chat import History
from llmrl.errors import ConfigError, DeadlineError, RolloutError, UnsupportedError, WeightSyncError
from llmrl.modules.llm import ChatHistory, vLLMWrapper
from llmrl.modules.llm.engines import SamplingParams, StopReason, TransformersEngine, VLLMEngine
from llmrl.modules.llm.engines.vllm.worker import EXTENSION
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.weight_update import weight_groups

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]
LONG, SHORT = SamplingParams(max_new_tokens=1000), SamplingParams(max_new_tokens=5)
SOON_S = 10.0  # after which everything has to have ended


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
def server(folder, start_server):
    """One process for all of it: what that changes is how soon it is up."""
    arguments = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)
    arguments += ("--distributed-executor-backend", "uni")
    with start_server(folder, *arguments, VLLM_SERVER_DEV_MODE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0") as server:
        yield server


@pytest.fixture(scope="module")
def url(server):
    return server.url


@pytest.fixture
def engine(server):
    if server.process.poll() is not None:  # what the test before did
        server.kill()
        server.start()
    engine = VLLMEngine(server.url, eos_token_ids=(), seed=0)
    yield engine
    engine.close()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("llmrl-vllm-")]


def assert_close(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_ids_and_log_probs_are_those_of_the_sampling_distribution(engine, model, temperature, trainer_says):
    generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=7, temperature=temperature))
    assert [len(ids) for ids in generation.ids] == [7] * 3
    assert generation.stop_reasons == [StopReason.LENGTH] * 3
    assert_close(generation.log_probs, trainer_says(model, PROMPTS, generation, temperature))


def test_random_ids_go_in_and_come_out_as_they_are(engine, model, tokenizer, trainer_says):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(tokenizer), (9,), generator=generator) for _ in range(60)]
    assert sum("\ufffd" in text for text in tokenizer.batch_decode(rows)) > 30
    generation = engine.generate(rows, SamplingParams(max_new_tokens=3))
    assert_close(generation.log_probs, trainer_says(model, rows, generation))


def test_truncation_keeps_both_log_probs_at_temperature_one(engine, model, trainer_says):
    generation = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5, top_k=4))
    assert_close(generation.plain_log_probs, trainer_says(model, PROMPTS, generation))
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


def test_a_request_ends_at_its_deadline_and_the_server_drops_it(engine, server, system):
    engine.timeout_s = 0.5
    since = time.monotonic()
    with pytest.raises(DeadlineError, match=r"/v1/completions must answer within 0\.5 s: it did not"):
        engine.generate(PROMPTS, LONG)
    assert time.monotonic() - since < SOON_S
    engine.timeout_s = None
    system.wait_until(lambda: not server.is_drawing())
    assert len(engine.generate(PROMPTS, SHORT).ids) == 3


def test_whoever_waits_for_an_engine_that_is_closed_is_told(server, url, system, ask):
    engine = VLLMEngine(url, eos_token_ids=(), seed=0)
    calls = [ask(lambda: engine.generate(PROMPTS, LONG)) for _ in range(3)]
    system.wait_until(server.is_drawing)
    since = time.monotonic()
    engine.close()
    for error in ask.errors(calls, since):
        assert isinstance(error, RolloutError)
        assert "close() was called" in str(error)
    system.wait_until(lambda: not server.is_drawing() and not threads())


def test_weights_arrive_and_those_of_a_server_that_was_started_again_are_missed(
    engine, server, model, system, trainer_says
):
    """An update in the middle of which the server dies serves nothing; a new server has the weights of its folder, and
    serves those only until it is asked which it has.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    try:
        for version in (1, 2):
            engine.update_weights(model.state_dict(), version=version)
            generation = engine.generate(PROMPTS, SHORT)
            assert generation.version == version
            assert_close(generation.log_probs, trainer_says(model, PROMPTS, generation))
        server.kill()
        server.start()
        for call in (lambda: engine.generate(PROMPTS, SHORT), lambda: engine.score(PROMPTS)):
            with pytest.raises(RolloutError, match="it has 'default'; it was started again, or somebody else"):
                call()
        engine.update_weights(model.state_dict(), version=3)
        generation = engine.generate(PROMPTS, SHORT)
        assert_close(generation.log_probs, trainer_says(model, PROMPTS, generation))

        class Dying:
            """Groups in the middle of which the server is killed."""

            metadata = weight_groups(model).metadata
            made = 0

            def __iter__(self):
                for group in weight_groups(model, max_bytes=1):
                    Dying.made += 1
                    if Dying.made == 5:
                        server.process.kill()
                        server.process.wait(30)
                    yield group

        since = time.monotonic()
        with pytest.raises(WeightSyncError, match=rf"VLLMEngine: {server.url}/collective_rpc must be reachable"):
            engine.update_weights(Dying(), version=4)
        assert time.monotonic() - since < SOON_S
        assert engine.version == 3
        assert not system.left_in_memory(())
        since = time.monotonic()
        with pytest.raises(RolloutError):
            engine.generate(PROMPTS, SHORT)
        assert time.monotonic() - since < SOON_S
    finally:
        model.load_state_dict(before)


def test_a_server_started_without_anything_samples_plainly_and_nobody_waits_for_it_in_vain(
    folder, start_server, system, ask
):
    """Started by the command itself, with none of the arguments that more than plain sampling takes."""
    with start_server(folder, by_command=True) as server:
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
            since = time.monotonic()
            with pytest.raises(RolloutError, match=rf"{server.url} must answer /health within 7 s: it did not"):
                engine.generate(PROMPTS, SHORT)
            assert time.monotonic() - since < SOON_S
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert len(engine.generate(PROMPTS, SHORT).ids) == 3

        calls = [ask(lambda: engine.generate(PROMPTS * 10, LONG)) for _ in range(3)]
        system.wait_until(server.is_drawing)
        since = time.monotonic()
        server.process.kill()
        for error in ask.errors(calls, since):
            assert isinstance(error, RolloutError)
            assert server.url in str(error)
        engine.close()
    system.wait_until(lambda: not threads())
