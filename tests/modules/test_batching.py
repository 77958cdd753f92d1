"""Requests of several threads batched into one call: grouping, timeouts, errors and interrupts.

Every wait has a deadline, and every thread is joined.
"""

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from llmrl.errors import DeadlineError
from llmrl.modules.llm import LLMWrapperBase, SamplingParams, Tokens, TransformersWrapper
from llmrl.modules.llm.engines import Engine, Generation, StopReason
from llmrl.modules.llm.policies import batching
from llmrl.modules.llm.policies.batching import BatchingEngine
from llmrl.testing import FakeEngine, tiny_model
from tests.support.conversations import chats, fake_policy, history_td
from tests.support.processes import wait_until
from tests.support.vllm import BackgroundCall

POISON = 666
DEADLINE_S = 120.0  # of every wait in this file: reached only when something hangs


class EchoEngine(Engine):
    """Answers a prompt with itself and remembers its calls; a prompt that holds ``POISON`` fails the call it is in."""

    def __init__(self, hold: threading.Event | None = None):
        self.version = 0
        self.calls = []
        self.hold = hold
        self.busy = threading.Lock()

    def generate(self, prompts, params, *, seeds=None):
        assert self.busy.acquire(blocking=False), "two calls at a time"
        try:
            self.calls.append([prompt.tolist() for prompt in prompts])
            if self.hold is not None:
                assert self.hold.wait(DEADLINE_S)
            if any(POISON in prompt.tolist() for prompt in prompts):
                raise RuntimeError(f"poison among {len(prompts)}")
            log_probs = [prompt.float() for prompt in prompts]
            return Generation(list(prompts), log_probs, None, [StopReason.EOS] * len(prompts), self.version)
        finally:
            self.busy.release()

    def score(self, sequences, *, temperature=1.0, masks=None):
        self.calls.append([row.tolist() for row in sequences])
        scores = [row.float() * temperature for row in sequences]
        return scores if masks is None else [row * mask for row, mask in zip(scores, masks, strict=True)]

    def update_weights(self, weights, *, version):
        assert self.busy.acquire(blocking=False), "an update during a call"
        self.version = version
        self.busy.release()

    def close(self):
        self.calls.append("closed")


def request(*values):
    return [torch.tensor([value, value + 1]) for value in values]


def together(call, *columns):
    """``call`` of each row of the columns, in a thread of its own; the results in order."""
    with ThreadPoolExecutor(len(columns[0])) as pool:
        futures = [pool.submit(call, *row) for row in zip(*columns, strict=True)]
        return [future.result(timeout=DEADLINE_S) for future in futures]


def ask_together(engine, requests, params=None):
    """Every request from a thread of its own; their answers in order."""
    return together(engine.generate, requests, params or [SamplingParams()] * len(requests))


# --- grouping ---------------------------------------------------------------------------------------------------------


def test_it_is_an_engine_and_shows_what_its_engine_has():
    engine = BatchingEngine(EchoEngine())
    assert isinstance(engine, Engine)
    assert engine.calls == []
    engine.version = 3
    assert engine.engine.version == 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


def test_one_row_is_enough_by_default_and_what_came_meanwhile_goes_together():
    hold = threading.Event()
    engine = BatchingEngine(EchoEngine(hold), timeout=DEADLINE_S)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(engine.generate, request(1), SamplingParams())
        wait_until(lambda: engine.state()["lock_state"] == "locked")
        later = [pool.submit(engine.generate, request(value), SamplingParams()) for value in (2, 3, 4)]
        wait_until(lambda: engine.state()["queue_size"] == 3)
        assert engine.state()["pending_futures"] == 4
        hold.set()
        for future in (first, *later):
            future.result(timeout=DEADLINE_S)
    assert [len(call) for call in engine.calls] == [1, 3]
    assert engine.state()["pending_futures"] == engine.state()["queue_size"] == 0


def test_the_first_of_the_requests_that_are_expected_waits_for_the_others_as_long_as_they_keep_coming(monkeypatch):
    monkeypatch.setattr(batching, "_PAUSE_S", DEADLINE_S)
    monkeypatch.setattr(batching, "_GATHER_S", DEADLINE_S)
    engine = BatchingEngine(EchoEngine(), expected=lambda: 3)
    ask_together(engine, [request(value) for value in (1, 2, 3)])
    assert [len(call) for call in engine.calls] == [3], "all are there: it does not wait longer"
    monkeypatch.setattr(batching, "_PAUSE_S", 0.01)
    engine.generate(request(4), SamplingParams())
    assert [len(call) for call in engine.calls] == [3, 1], "no other came within a pause"


def test_the_first_call_of_all_waits_for_clients_that_are_slow_to_start(monkeypatch):
    monkeypatch.setattr(batching, "_FIRST_S", 20 * DEADLINE_S)  # of which pauses may take a twentieth
    engine = BatchingEngine(EchoEngine(), expected=lambda: 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(engine.generate, request(1), SamplingParams())
        wait_until(lambda: engine.state()["queue_size"] == 1)
        time.sleep(2 * batching._GATHER_S)
        engine.generate(request(2), SamplingParams())
        first.result(timeout=DEADLINE_S)
    assert [len(call) for call in engine.calls] == [2]


def test_a_call_has_at_most_max_rows_and_a_request_is_never_cut():
    hold = threading.Event()
    engine = BatchingEngine(EchoEngine(hold), max_batch_size=3, timeout=DEADLINE_S)
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(engine.generate, request(0), SamplingParams())]
        wait_until(lambda: engine.state()["lock_state"] == "locked")
        for number, size in enumerate((2, 2, 4, 1), start=1):
            futures.append(pool.submit(engine.generate, request(*range(size)), SamplingParams()))
            wait_until(lambda number=number: engine.state()["queue_size"] == number)
        hold.set()
        sizes = [len(future.result(timeout=DEADLINE_S).ids) for future in futures]
    assert sizes == [1, 2, 2, 4, 1]
    assert [len(call) for call in engine.calls] == [1, 2, 2, 4, 1]


def test_requests_with_other_parameters_are_another_call():
    engine = BatchingEngine(EchoEngine(), min_batch_size=2, timeout=DEADLINE_S)
    cold, hot = SamplingParams(temperature=0.5), SamplingParams(temperature=1.5)
    ask_together(engine, [request(1), request(2), request(3), request(4)], [cold, hot, cold, hot])
    assert sorted(sorted(row[0] for row in call) for call in engine.calls) == [[1, 3], [2, 4]]


def test_scores_are_joined_too_with_their_masks():
    engine = BatchingEngine(EchoEngine(), min_batch_size=2, timeout=DEADLINE_S)

    def score(value):
        return engine.score(request(value), temperature=0.5, masks=[torch.tensor([True, False])])

    one, two = together(score, [4, 8])
    assert (one[0].tolist(), two[0].tolist()) == ([2.0, 0.0], [4.0, 0.0])
    assert len(engine.calls) == 1


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_lone_request_returns_after_its_timeout():
    engine = BatchingEngine(EchoEngine(), min_batch_size=8, timeout=0.2)
    [answer] = ask_together(engine, [request(1)])
    assert len(answer.ids) == 1
    assert engine.calls == [[[1, 2]]]


def test_closing_sends_what_waits_and_then_closes():
    engine = BatchingEngine(EchoEngine(), min_batch_size=8, timeout=10 * DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(engine.generate, request(value), SamplingParams()) for value in (1, 2)]
        wait_until(lambda: engine.state()["queue_size"] == 2)
        engine.close()
        assert all(future.result(timeout=DEADLINE_S) for future in futures)
    assert (engine.calls[-1], engine.state()["pending_futures"]) == ("closed", 0)
    assert len(engine.generate(request(3), SamplingParams()).ids) == 1  # at once, though 8 were asked for


def test_draining_has_a_deadline():
    hold = threading.Event()
    engine = BatchingEngine(EchoEngine(hold))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.generate, request(1), SamplingParams())
        wait_until(lambda: engine.state()["lock_state"] == "locked")
        with pytest.raises(DeadlineError, match=r"within 0.05 s of closing: 1 are not"):
            engine.drain(0.05)
        hold.set()
        future.result(timeout=DEADLINE_S)
    engine.drain(1.0)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_thousand_rounds_with_injected_failures():
    """Random sizes, parameters, bounds and failures: each caller gets its own rows or its own error."""
    rng = random.Random(0)
    params = [SamplingParams(temperature=temperature) for temperature in (0.5, 1.0)]
    num_threads, failed = 4, 0
    engine = BatchingEngine(EchoEngine(), min_batch_size=3, max_batch_size=6, timeout=0.002)
    barrier = threading.Barrier(num_threads)
    problems = []

    def work(plan):
        for rows, sampling, poisoned in plan:
            barrier.wait(DEADLINE_S)
            try:
                answer = engine.generate(rows, sampling)
            except RuntimeError as error:
                if not poisoned or str(error) != f"poison among {len(rows)}":
                    problems.append(error)
            else:
                columns = ([row.tolist() for row in column] for column in (rows, answer.ids, answer.log_probs))
                ids, answered, log_probs = columns
                if poisoned or not ids == answered == log_probs or answer.stop_reasons != [StopReason.EOS] * len(rows):
                    problems.append((rows, answer))

    plans = []
    for _ in range(num_threads):
        plan = []
        for _ in range(1000):
            values = [rng.randrange(600) for _ in range(rng.randint(1, 4))]
            poisoned = rng.random() < 0.1
            if poisoned:
                values[rng.randrange(len(values))] = POISON
                failed += 1
            plan.append((request(*values), rng.choice(params), poisoned))
        plans.append(plan)
    for call in [BackgroundCall(lambda plan=plan: work(plan)) for plan in plans]:
        call.result()
    assert problems == []
    assert engine.state()["pending_futures"] == 0
    assert sum(len(call) > 4 for call in engine.calls) > 100, "no request has more than 4 rows: nothing was joined"
    assert failed > 300


class Interrupted(BaseException):
    """Stands in for Ctrl-C in a thread."""


def test_an_interrupted_thread_leaves_the_others_served():
    """The thread that makes the call is interrupted inside of it: another one makes it."""
    interrupts = iter([True])

    class InterruptedOnce(EchoEngine):
        def generate(self, prompts, params, *, seeds=None):
            if next(interrupts, False):
                raise Interrupted
            return super().generate(prompts, params, seeds=seeds)

    engine = BatchingEngine(InterruptedOnce(), min_batch_size=3, timeout=DEADLINE_S)
    calls = [BackgroundCall(lambda n=n: engine.generate(request(n), SamplingParams())) for n in (1, 2, 3)]
    wait_until(lambda: any(call.error for call in calls) and engine.state()["queue_size"] == 2)
    engine.drain(DEADLINE_S)
    for call in calls:
        call.join(DEADLINE_S)
    assert [type(call.error) for call in calls if call.value is None] == [Interrupted]
    assert all(call.value.ids[0][0] == n for n, call in enumerate(calls, start=1) if call.error is None)


def test_weights_are_updated_between_calls():
    class Slow(EchoEngine):
        def generate(self, prompts, params, *, seeds=None):
            version = self.version
            generation = super().generate(prompts, params, seeds=seeds)
            time.sleep(0.002)
            assert self.version == version, "an update during a call"
            return generation

    engine = BatchingEngine(Slow(), timeout=DEADLINE_S)
    stop, versions = threading.Event(), []

    def ask():
        while not stop.is_set():
            versions.append(engine.generate(request(1), SamplingParams()).version)

    calls = [BackgroundCall(ask) for _ in range(3)]
    for version in range(1, 51):
        engine.update_weights(None, version=version)
        time.sleep(0.001)
    stop.set()
    for call in calls:
        call.result()
    assert engine.version == 50
    assert set(versions) <= set(range(51))


# --- the wrapper ------------------------------------------------------------------------------------------------------


def test_policies_in_threads_share_calls_and_keep_their_shapes(tokenizer):
    inner = FakeEngine(lambda prompt: tokenizer.decode(prompt[3:-5]), tokenizer=tokenizer)  # says what was asked
    policy = LLMWrapperBase(inner, tokenizer=tokenizer, min_batch_size=4, batching_timeout=DEADLINE_S)
    inputs = [history_td(chats(["Hi"]))[0], history_td(chats(["One", "Two"])), history_td(chats(["And you?"]))]
    single, double, other = together(policy, inputs)
    assert single.batch_size == ()
    assert isinstance(single["text"].response, str)
    assert "Hi" in single["text"].response
    assert double.batch_size == (2,)
    assert ["One" in double["text"].rows("response")[0], "Two" in double["text"].rows("response")[1]] == [True, True]
    assert "And you?" in other["text"].rows("response")[0]
    state = policy.get_batching_state()
    assert (state["batching_enabled"], state["min_batch_size"], state["queue_size"]) == (True, 4, 0)
    assert {"pending_futures", "lock_state", "max_batch_size"} <= state.keys()
    policy.cleanup_batching()
    assert policy.get_batching_state()["batching_enabled"] is False
    assert policy(history_td(chats(["Hi"]))).batch_size == (1,)


def test_batching_is_asked_for_by_name_or_by_a_size(tokenizer):
    cases = ({}, {"batching": False}, {"batching": True}, {"min_batch_size": 2}, {"max_batch_size": 2})
    states = [fake_policy(tokenizer, ["a"], **options).get_batching_state() for options in cases]
    assert [state["batching_enabled"] for state in states] == [False, False, True, True, True]


def test_a_new_version_shares_the_queue_unless_it_is_told_another(tokenizer):
    engine = FakeEngine(["a"], tokenizer=tokenizer)
    policy = LLMWrapperBase(engine, tokenizer=tokenizer, min_batch_size=2, batching_timeout=0.01)
    assert policy.get_new_version(generate=False).engine is policy.engine
    other = policy.get_new_version(max_batch_size=7)
    assert other.engine is not policy.engine
    assert other.engine.engine is engine
    assert (other.engine.min_batch_size, other.engine.max_batch_size) == (2, 7)
    plain = policy.get_new_version(batching=False, min_batch_size=None)
    assert plain.engine is engine
    assert plain.get_new_version(batching=True).engine.engine is engine


def test_another_process_gets_the_settings_and_an_empty_queue():
    engine = pickle.loads(pickle.dumps(BatchingEngine(FakeEngine([torch.tensor([5])]), max_batch_size=3, timeout=0.5)))
    assert (engine.max_batch_size, engine.timeout) == (3, 0.5)
    assert engine.generate(request(1), SamplingParams()).ids[0].tolist() == [5]


def test_threads_sample_and_score_a_real_model_as_one_would_alone(tokenizer):
    model = tiny_model(tokenizer, hidden_size=16, heads=2, layers=1)
    options = {"tokenizer": tokenizer, "input_mode": "tokens", "generate_kwargs": {"max_new_tokens": 4}}
    joined = TransformersWrapper(model, min_batch_size=3, batching_timeout=DEADLINE_S, **options)
    alone = TransformersWrapper(model, **options)

    def td(number):
        prompt = torch.arange(number + 3) + 10
        return TensorDict({"tokens": Tokens.from_rows({"prompt": [prompt]}), "seed": torch.tensor([number])}, [1])

    for number, out in enumerate(together(joined, [td(number) for number in range(3)])):
        expected = alone(td(number))
        assert torch.equal(out["tokens"].rows("full")[0], expected["tokens"].rows("full")[0])
        torch.testing.assert_close(out["log_probs"].rows("full")[0], expected["log_probs"].rows("full")[0])
