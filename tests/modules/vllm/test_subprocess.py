"""An engine in a process of its own: many threads ask at a time, calls end when the process dies, stops or is closed,
and nothing is left however it ends. Processes are really killed.
"""

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from multiprocessing import connection

import pytest
import torch

from llmrl.collectors.llm import LLMCollector
from llmrl.envs import Transform
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import ConfigError, DeadlineError, LLMRLError, RolloutError, WeightSyncError
from llmrl.modules.llm import vLLMWrapper
from llmrl.modules.llm.engines import AsyncVLLMEngine, SamplingParams, StopReason
from llmrl.modules.llm.engines.vllm.transfer import SharedMemory
from llmrl.testing import tiny_model
from llmrl.train.rollouts.queue import RolloutQueue
from llmrl.weight_update import publish, weight_groups
from tests.support.conversations import prompt_after
from tests.support.processes import descendants, is_running
from tests.support.vllm import (
    PATIENCE_S,
    BackgroundCall,
    SameScores,
    WatchedGroups,
    assert_rows_close,
    command,
    footprint,
    left_in_memory,
    open_sockets,
    scorer,
    shared_files,
    stepped,
    trainer_log_probs,
    wait_until,
    wait_until_as_before,
    wait_until_empty,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [70, 8, 9, 10, 400, 12], [300, 301, 302])]
LONG, SHORT = SamplingParams(max_new_tokens=1900), SamplingParams(max_new_tokens=5)
PROBE = SameScores(PROMPTS, bound=1e-4)


def process(engine):
    return engine.core._processes[0]


def is_drawing(engine, count, ids=0):
    """Whether so many requests are under way in the engine's process, each with so many ids at least."""
    states = engine.core.llm.output_processor.request_states

    def check():
        drawn = [state.detokenizer.num_output_tokens() for state in list(states.values())]
        return len(drawn) == count and min(drawn) >= ids

    return check


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer, architecture="gemma", heads=2).eval()  # tied


@pytest.fixture(scope="module")
def shared_engine(model, tokenizer):
    """At its end nothing is left, whatever the tests did to it."""
    gc.collect()  # what tests of other files left in cycles is not the engine's, and would go at any moment
    before, sockets, files = footprint(), open_sockets(), shared_files()
    engine = AsyncVLLMEngine(model, tokenizer=tokenizer, eos_token_ids=(), seed=0, max_model_len=2048)
    assert len(footprint()[0] - before[0]) == 1  # one process, with the worker in it
    assert not torch.distributed.is_initialized()
    # On a CPU the limits of vllm.LLM; an engine of which vLLM does not know the use has 2048 and 128.
    limits = engine.core.llm.vllm_config.scheduler_config
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (4096, 256)
    used = shared_files() - files
    yield engine
    used |= shared_files() - files
    engine.close()
    wait_until_as_before(before)
    gc.collect()  # errors that tests caught hold frames, and these what they used
    wait_until_empty(lambda: left_in_memory(used))
    wait_until_empty(lambda: open_sockets() - sockets)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llmrl-weights")]


@pytest.fixture
def engine(shared_engine, model):
    """The engine with the model's weights, whatever became of it in the test before."""
    weights = model.state_dict()
    try:
        lives = process(shared_engine).is_alive()
    except RolloutError:
        lives = False  # it was closed
    if not lives:
        shared_engine.restart(weights)
    publish(weights, shared_engine)
    return shared_engine


# --- many threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9, "temperature": 0.7}, {"repetition_penalty": 1.5}],
    ids=str,
)
def test_rows_of_many_threads_are_what_they_are_alone(engine, model, options):
    """Eight calls of three rows at once: ids, log-probs, plain log-probs and stop reasons of each row by itself."""
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(0, 478, 19)), **options)
    alone = [engine.generate([PROMPTS[n % 3]], params, seeds=[n]) for n in range(24)]
    calls = [
        BackgroundCall(lambda first=first: engine.generate(PROMPTS, params, seeds=range(first, first + 3)))
        for first in range(0, 24, 3)
    ]
    answers = [call.result() for call in calls]
    assert len({len(ids) for answer in answers for ids in answer.ids}) > 2
    for number, one in enumerate(alone):
        answer, row = answers[number // 3], number % 3
        assert answer.ids[row].tolist() == one.ids[0].tolist()
        assert answer.stop_reasons[row] == one.stop_reasons[0]
        assert_rows_close([answer.log_probs[row]], one.log_probs)
        if params.truncates:
            assert_rows_close([answer.plain_log_probs[row]], one.plain_log_probs)
    plain = answers[5].plain_log_probs if params.truncates else answers[5].log_probs
    assert_rows_close(plain, trainer_log_probs(model, PROMPTS, answers[5], params.temperature))


def test_gauges_are_of_the_calls_of_all_threads_since_they_were_last_taken(engine):
    engine.take_gauges()
    prompt = torch.arange(1, 301)  # two whole blocks of 128, and a part
    engine.generate([prompt], SHORT)
    for call in [BackgroundCall(lambda: engine.generate([prompt], SHORT)) for _ in range(3)]:
        call.result()
    gauges = engine.take_gauges()
    assert (gauges["preempted"], gauges["prefix_queries"], gauges["prefix_hits"]) == (0, 4 * 300, 3 * 256)
    assert 0 < gauges["cache_max"] < 0.5
    assert engine.take_gauges() == {}


def test_calls_join_the_running_batch_and_aborted_rows_keep_what_they_have(engine, model):
    call = BackgroundCall(lambda: engine.generate(PROMPTS, LONG, seeds=[1, 2, 3]))
    wait_until(is_drawing(engine, 3))
    for _ in range(5):
        engine.generate(PROMPTS, SHORT)
    assert call.is_alive()
    assert engine.abort() == 3
    cut = call.result()
    assert cut.stop_reasons == [StopReason.ABORT] * 3
    assert all(5 < len(ids) < 1900 for ids in cut.ids)
    whole = engine.generate(PROMPTS, SHORT, seeds=[1, 2, 3])
    assert [ids[:5].tolist() for ids in cut.ids] == [ids.tolist() for ids in whole.ids]
    assert_rows_close(cut.log_probs, trainer_log_probs(model, PROMPTS, cut))
    assert engine.abort() == 0  # nothing is left


def test_an_aborted_conversation_is_truncated_by_the_wrapper(engine, tokenizer):
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 1900})
    env = DatasetChatEnv(dataset=[{"query": "Count."}], num_envs=1, max_steps=1)
    call = BackgroundCall(lambda: LLMCollector(env, policy=policy, yield_only_last_steps=True).next())
    wait_until(is_drawing(engine, 1))
    engine.abort()
    assert call.result()["stop_reason"].tolist() == [StopReason.ABORT]


def test_calls_of_many_threads_are_each_of_one_version_while_weights_change(engine, model):
    references = {engine.version: copy.deepcopy(model)}
    stop, drawn, changed = threading.Event(), [], copy.deepcopy(model)

    def draw():
        while not stop.is_set():
            drawn.append(engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.7, top_k=20)))

    calls = [BackgroundCall(draw) for _ in range(4)]
    for seed in range(3):
        count = len(drawn)
        wait_until(lambda count=count: len(drawn) > count + 4)
        version = publish(stepped(changed, seed), engine)
        references[version] = copy.deepcopy(changed)
    stop.set()
    for call in calls:
        call.result()
    drawn.append(engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.7, top_k=20)))
    assert {generation.version for generation in drawn} == set(references)
    for generation in drawn[:: max(len(drawn) // 20, 1)] + drawn[-1:]:
        expected = trainer_log_probs(references[generation.version], PROMPTS, generation, 0.7)
        assert_rows_close(generation.plain_log_probs, expected)


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_an_update_waits_for_what_is_being_drawn_or_aborts_it(engine, model, in_flight, monkeypatch):
    version = engine.version
    params = LONG if in_flight == "abort" else SamplingParams(max_new_tokens=300)
    call = BackgroundCall(lambda: engine.generate(PROMPTS, params))
    wait_until(is_drawing(engine, 3))
    monkeypatch.setattr(engine, "in_flight", in_flight)
    publish(model, engine)
    drawn = call.result()
    assert drawn.stop_reasons == [StopReason.ABORT if in_flight == "abort" else StopReason.LENGTH] * 3
    assert drawn.version == version
    assert engine.generate(PROMPTS, SHORT).version == version + 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20}])
def test_answers_go_on_with_new_weights_and_each_token_has_the_log_prob_of_the_version_that_drew_it(
    engine, model, options, monkeypatch
):
    params, first, changed = SamplingParams(max_new_tokens=700, **options), engine.version, copy.deepcopy(model)
    references = {first: copy.deepcopy(model)}
    publish(model, engine, first, again=True)
    monkeypatch.setattr(engine, "in_flight", "continue")
    call = BackgroundCall(lambda: engine.generate(PROMPTS, params, seeds=[1, 2, 3]))
    for seed in range(2):
        wait_until(is_drawing(engine, 3, ids=1))
        version = publish(stepped(changed, seed), engine)
        references[version] = copy.deepcopy(changed)
    drawn = call.result()
    with pytest.raises(ConfigError, match=r"in_flight='continue'.* stop_strings"):
        engine.generate(PROMPTS, SamplingParams(stop_strings=("x",)))
    assert drawn.stop_reasons == [StopReason.LENGTH] * 3
    assert drawn.version == first
    scores = {
        version: trainer_log_probs(weights, PROMPTS, drawn, options.get("temperature", 1.0))
        for version, weights in references.items()
    }
    for row, versions in enumerate(drawn.versions):
        assert len(versions) == 700
        assert versions.unique_consecutive().tolist() == [first, first + 1, first + 2]
        right = torch.stack([scores[version][row] for version in references])
        said = (drawn.plain_log_probs or drawn.log_probs)[row]
        assert_rows_close([said], [right[versions - first, torch.arange(700)]])
        assert (said - right[0]).abs().max() > 1e-2, "by the first version alone they would be others"


def test_rows_whose_first_token_becomes_too_old_end_instead_of_going_on(engine, model, monkeypatch):
    monkeypatch.setattr(engine, "in_flight", "continue")
    monkeypatch.setattr(engine, "max_age", 0)
    call = BackgroundCall(lambda: engine.generate(PROMPTS, LONG))
    wait_until(is_drawing(engine, 3, ids=1))
    publish(model, engine)
    assert call.result().stop_reasons == [StopReason.ABORT] * 3


def test_an_update_that_cannot_wait_longer_changes_nothing(engine, model, monkeypatch):
    call = BackgroundCall(lambda: engine.generate(PROMPTS, LONG))
    wait_until(is_drawing(engine, 3))
    version = engine.version
    monkeypatch.setattr(engine, "timeout_s", 0.2)
    with pytest.raises(DeadlineError, match=f"loading version {version + 1} must begin before .*: 1 other"):
        engine.update_weights(model.state_dict(), version=version + 1)
    assert engine.abort() == 3
    assert call.result().version == engine.version == version


class Meeting(Transform):
    """A tool that several conversations must be in at the same time."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def _step(self, td, next_td):
        if self.barrier is not None:
            self.barrier.wait(PATIENCE_S)
        more = [[{"role": "user", "content": "Go on."}]] * next_td.batch_size[0]
        next_td["history"] = prompt_after(next_td["history"].prompt, more)
        return next_td


def test_conversations_each_on_their_own_do_not_wait_for_a_tool_of_another(engine, tokenizer):
    rows = [{"query": f"Question {n}?"} for n in range(8)]

    def run(concurrency, barrier):
        env = DatasetChatEnv(dataset=rows, num_envs=8, shuffle=False, seed=0, max_steps=3)
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "seed": 3})
        env = env.append_transform(Meeting(barrier))
        batch = LLMCollector(env, policy=policy, yield_only_last_steps=True, concurrency=concurrency).next()
        masks = batch.get(("masks", "all_assistant_mask"), as_list=True)
        assert [mask.sum().item() >= 3 for mask in masks] == [True] * 8

    run(None, None)
    run(8, threading.Barrier(8))  # passes only if all eight are in their tool at once


def test_rollouts_ahead_end_when_the_engine_is_closed_under_them(engine, tokenizer):
    """What Ctrl-C does to a run that samples ahead: the engine is closed, then the thread is joined."""
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 1900})
    env = DatasetChatEnv(dataset=[{"query": f"{n}?"} for n in range(6)], num_envs=6, max_steps=4)
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, concurrency=6)
    ahead = RolloutQueue(collector, groups=6, group_size=1, max_staleness=1)
    ahead.begin_next(1)
    wait_until(is_drawing(engine, 6))
    collector.shutdown(close_env=False)
    engine.close()
    ahead.close()
    with pytest.raises(RolloutError, match=r"close"):
        ahead.take(0)
    env.close()


# --- a process that dies or stops -------------------------------------------------------------------------------------


def test_calls_end_when_the_process_dies_and_a_new_one_has_the_weights(engine, model):
    changed = stepped(copy.deepcopy(model), size=0.1)
    version = publish(changed, engine)
    calls = [BackgroundCall(lambda: engine.generate(PROMPTS, LONG)) for _ in range(8)]
    wait_until(is_drawing(engine, 24))
    pid = process(engine).pid
    os.kill(pid, signal.SIGABRT)
    killed = "killed by SIG(ABRT|SEGV)"  # Python prints the stacks of threads that still run, which can itself fault
    for call in calls:
        with pytest.raises(RolloutError, match=r"Its last lines:\n(?s:.*) File .*, line \d+,? in ") as caught:  # stack
            call.result()
        assert re.search(rf"while generating 3 rows: process {pid} \(EngineCore\) was {killed}\.", str(caught.value))
    with pytest.raises(RolloutError, match=f"was {killed}"):
        engine.generate(PROMPTS, SHORT)
    with pytest.raises(WeightSyncError, match=rf"was {killed}(?s:.*)Nothing was updated"):
        publish(model, engine)
    with pytest.raises(WeightSyncError, match=f"restart needs the weights of version {version}"):
        engine.restart()
    engine.restart(changed.state_dict())
    assert engine.generate(PROMPTS, SHORT).version == engine.version == version
    assert PROBE(engine.score, scorer(changed)) < 1e-5


def test_a_process_that_stops_answering_is_left_at_the_deadline_and_taken_up_again(engine, model):
    version, pid = engine.version, process(engine).pid
    engine.timeout_s = 1.0
    os.kill(pid, signal.SIGSTOP)
    try:
        for call in (
            lambda: engine.generate(PROMPTS, SHORT),
            lambda: engine.score(PROMPTS),
            lambda: engine.score(PROMPTS, temperature=0.5),
        ):
            with pytest.raises(DeadlineError, match=rf"before its deadline: process {pid} .*is stopped"):
                call()
        with pytest.raises(WeightSyncError, match="is stopped"):
            publish(model, engine)
    finally:
        os.kill(pid, signal.SIGCONT)
        engine.timeout_s = None
    assert engine.generate(PROMPTS, SHORT).version == version
    assert PROBE(engine.score, scorer(model)) < 1e-5  # at temperature 1: the one that was asked for meanwhile is gone


def test_updates_arrive_whole_and_a_process_that_dies_in_one_is_named(engine, model):
    changed = copy.deepcopy(model)
    for seed in range(4):
        engine.weight_backend = SharedMemory(buffer_bytes=20_000) if seed >= 2 else None
        stepped(changed, seed)
        weights = weight_groups(changed, max_bytes=30_000) if seed % 2 else changed.state_dict()
        version = publish(weights, engine)
        assert PROBE(engine.score, scorer(changed)) < 1e-5
        assert left_in_memory() == []  # the buffer has no name any more
    victim, made = process(engine), []

    def kill_in_the_middle(group):
        made.extend(group)
        if len(made) == 5:
            os.kill(victim.pid, signal.SIGKILL)
            connection.wait([victim.sentinel], 10)

    groups = WatchedGroups(changed, kill_in_the_middle)
    with pytest.raises(LLMRLError, match=r"process .* was killed by SIGKILL"):
        engine.update_weights(groups, version=version + 1)
    assert made == list(groups.metadata)  # other ranks would have waited for the rest
    assert engine.version == version
    with pytest.raises(RolloutError):
        engine.generate(PROMPTS, SHORT)
    engine.restart(changed.state_dict())
    assert PROBE(engine.score, scorer(changed)) < 1e-5
    assert (engine.version, left_in_memory()) == (version, [])


OWNER = """
if __name__ == "__main__":  # the engine's process imports this file, and as under the command no llmrl with it
    import threading
    from llmrl.modules.llm import VLLMEngine
    from llmrl.testing import tiny_model

    engine = VLLMEngine(tiny_model(heads=2), own_process=True, max_model_len=64, kv_cache_memory_bytes=10_000_000)
    print(engine.core._processes[0].pid, flush=True)
    threading.Event().wait(300)
"""


@pytest.mark.parametrize("after_s", [1.0, 3.0, None])
def test_every_process_ends_with_an_owner_that_was_killed(tmp_path, after_s):
    """Killed so long after the engine's process appeared, or once the engine is up."""
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen([sys.executable, str(tmp_path / "owner.py")], stdout=subprocess.PIPE, text=True)
    try:
        if after_s is None:
            assert "EngineCore" in command(int(owner.stdout.readline()))
        else:
            wait_until(lambda: any("multiprocessing-fork" in words for _, words in descendants(owner.pid)))
            threading.Event().wait(after_s)
        started = [pid for pid, _ in descendants(owner.pid)]
    finally:
        owner.kill()
        owner.communicate()
    assert len(started) >= 2  # the engine's, and multiprocessing's resource tracker
    wait_until(lambda: not any(map(is_running, started)), timeout_s=10)
