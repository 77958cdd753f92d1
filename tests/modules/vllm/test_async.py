"""AsyncVLLMEngine: many threads ask at a time, every row as if it were alone, every call of one version."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.data.llm.chat import History
from llmrl.envs import Transform
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import DeadlineError, RolloutError
from llmrl.modules.llm import ChatHistory, vLLMWrapper
from llmrl.modules.llm.engines import AsyncVLLMEngine, Engine, SamplingParams, StopReason
from llmrl.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]
LONG = SamplingParams(max_new_tokens=1900)  # seconds, even of a tiny model
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, heads=2)


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    engine = AsyncVLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=2048)
    yield engine
    engine.close()


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def drawing(engine):
    """How many requests the engine's process has been given and not answered."""
    return engine.core.llm.output_processor.get_num_unfinished_requests()


def assert_close(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, other, atol=1e-4, rtol=0)


def test_it_follows_the_protocol(engine):
    assert isinstance(engine, Engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9, "temperature": 0.7}, {"repetition_penalty": 1.5}],
    ids=str,
)
def test_rows_of_many_threads_are_what_they_are_alone(engine, model, options, ask, trainer_says):
    """Eight calls of three rows at once: ids, log-probs, plain log-probs and stop reasons of each row by itself."""
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(0, 478, 19)), **options)
    alone = [engine.generate([PROMPTS[n % 3]], params, seeds=[n]) for n in range(24)]
    calls = [
        ask(lambda first=first: engine.generate(PROMPTS, params, seeds=range(first, first + 3)))
        for first in range(0, 24, 3)
    ]
    answers = [call.answer() for call in calls]
    assert len({len(ids) for answer in answers for ids in answer.ids}) > 2
    for number, one in enumerate(alone):
        answer, row = answers[number // 3], number % 3
        assert answer.ids[row].tolist() == one.ids[0].tolist()
        assert answer.stop_reasons[row] == one.stop_reasons[0]
        assert_close([answer.log_probs[row]], one.log_probs)
        if params.truncates:
            assert_close([answer.plain_log_probs[row]], one.plain_log_probs)
    plain = answers[5].plain_log_probs if params.truncates else answers[5].log_probs
    assert_close(plain, trainer_says(model, PROMPTS, answers[5], params.temperature))


def test_calls_join_the_batch_that_is_running(engine, ask):
    """A short call that comes while a long one runs is answered long before it."""
    long = ask(lambda: engine.generate(PROMPTS, LONG))
    until(lambda: drawing(engine) == 3)
    for _ in range(5):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    assert long.is_alive()
    assert engine.abort() == 3
    long.answer()


def test_aborted_rows_keep_what_they_have_and_say_so(engine, model, ask, trainer_says):
    call = ask(lambda: engine.generate(PROMPTS, LONG, seeds=[1, 2, 3]))
    until(lambda: drawing(engine) == 3)
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=20))
    assert engine.abort() == 3
    cut = call.answer()
    assert cut.stop_reasons == [StopReason.ABORT] * 3
    assert all(5 < len(ids) < 1900 for ids in cut.ids)
    whole = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5), seeds=[1, 2, 3])
    assert [ids[:5].tolist() for ids in cut.ids] == [ids.tolist() for ids in whole.ids]
    assert_close(cut.log_probs, trainer_says(model, PROMPTS, cut))
    assert engine.abort() == 0  # nothing is left
    assert not drawing(engine)


def test_an_aborted_conversation_is_truncated_by_the_wrapper(engine, tokenizer, ask):
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 1900})
    env = DatasetChatEnv(dataset=[{"query": "Count."}], num_envs=1, max_steps=1)
    call = ask(lambda: LLMCollector(env, policy=policy, yield_only_last_steps=True).next())
    until(lambda: drawing(engine) == 1)
    engine.abort()
    assert call.answer()["stop_reason"].tolist() == [StopReason.ABORT]


def scaled(model, factor):
    """The weights, each times ``factor``; as tensors of their own."""
    return {name: value * factor for name, value in model.state_dict().items()}


def test_an_update_waits_for_what_is_being_drawn_and_nothing_is_of_two_versions(engine, model, ask, trainer_says):
    """Threads draw all the time while three versions come: every row is of the version that it says, to its end."""
    versions = {engine.version: 1.0} | {engine.version + n: 1.0 + 0.2 * n for n in (1, 2, 3)}
    stop, params = threading.Event(), SamplingParams(max_new_tokens=40, top_k=50)
    drawn = []

    def draw():
        while not stop.is_set():
            drawn.append(engine.generate(PROMPTS, params))

    threads = [ask(draw) for _ in range(4)]
    references = {}
    try:
        for version, factor in versions.items():
            copy = tiny_model(tiny_tokenizer(), heads=2)
            copy.load_state_dict(scaled(model, factor))
            references[version] = copy
            if version != min(versions):
                engine.update_weights(copy.state_dict(), version=version)
            seen = len(drawn)
            until(lambda seen=seen: len(drawn) > seen + 8)
    finally:
        stop.set()
        for one in threads:
            one.answer()
        engine.update_weights(model.state_dict(), version=max(versions) + 1)
    assert {generation.version for generation in drawn} == set(versions)
    for generation in drawn:
        assert_close(generation.plain_log_probs, trainer_says(references[generation.version], PROMPTS, generation))


def test_an_update_may_abort_what_is_being_drawn(engine, model, ask):
    call = ask(lambda: engine.generate(PROMPTS, LONG))
    until(lambda: drawing(engine) == 3)
    engine.in_flight, version = "abort", engine.version
    try:
        began = time.monotonic()
        engine.update_weights(model.state_dict(), version=version + 1)
        assert time.monotonic() - began < 10.0
    finally:
        engine.in_flight = "finish"
    cut = call.answer()
    assert cut.stop_reasons == [StopReason.ABORT] * 3
    assert cut.version == version
    assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).version == version + 1


def test_an_update_that_cannot_wait_longer_changes_nothing(engine, model, ask):
    call = ask(lambda: engine.generate(PROMPTS, LONG))
    until(lambda: drawing(engine) == 3)
    engine.timeout_s, version = 0.2, engine.version
    try:
        with pytest.raises(
            DeadlineError, match=f"loading version {version + 1} must begin before its deadline: 1 other"
        ):
            engine.update_weights(model.state_dict(), version=version + 1)
    finally:
        engine.timeout_s = None
    assert engine.version == version
    engine.abort()
    assert call.answer().version == version
    assert engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).version == version


def test_a_call_past_its_deadline_ends_and_leaves_nothing_in_the_engine(engine):
    engine.timeout_s = 0.5
    try:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"generating 3 rows must end before its deadline: process \d+ .* runs"):
            engine.generate(PROMPTS, LONG)
        assert time.monotonic() - began < 10.0
    finally:
        engine.timeout_s = None
    until(lambda: not drawing(engine))
    assert len(engine.generate(PROMPTS, SamplingParams(max_new_tokens=2)).ids) == 3


def test_an_error_of_one_call_is_its_own(engine, ask):
    calls = [ask(lambda: engine.generate(PROMPTS, SamplingParams(max_new_tokens=50))) for _ in range(4)]
    with pytest.raises(RolloutError, match="generating 1 rows failed"):  # an id beyond the vocabulary
        engine.generate([torch.tensor([10**6])], SamplingParams(max_new_tokens=2))
    assert [len(call.answer().ids) for call in calls] == [3] * 4


class Wait(Transform):
    """A tool that takes a while, one conversation at a time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def _step(self, td, next_td):
        prompt = next_td["history"].prompt
        count = next_td.batch_size[0]
        threading.Event().wait(self.seconds * count)
        more = History.from_chats([[{"role": "user", "content": "Go on."}]] * count)
        next_td["history"] = ChatHistory.from_rows({"prompt": prompt.extend(more, inplace=False, dim=-1)})
        return next_td


def test_conversations_each_on_their_own_give_what_lock_step_gives_and_wait_for_no_tool(engine, tokenizer):
    rows = [{"query": f"Question {n}?"} for n in range(8)]

    def run(concurrency):
        env = DatasetChatEnv(dataset=rows, num_envs=8, shuffle=False, seed=0, max_steps=3)
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "seed": 3})
        collector = LLMCollector(
            env.append_transform(Wait(0.2)), policy=policy, yield_only_last_steps=True, concurrency=concurrency
        )
        began = time.monotonic()
        batch = collector.next()
        return batch, time.monotonic() - began

    together, long = run(None)
    apart, short = run(8)
    assert len(apart) == len(together) == 8
    masks = [batch.get(("masks", "all_assistant_mask"), as_list=True) for batch in (together, apart)]
    assert [mask.sum().item() >= 3 for mask in masks[1]] == [True] * 8
    assert long > 4.8  # three turns of eight conversations of 0.2 s
    assert short < long / 3
