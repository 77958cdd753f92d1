"""Groups ahead of the trainer, on a simulated clock with long-tailed answers: ages, what is dropped, steps per hour."""

import threading

import pytest

from llmrl.collectors.llm import LLMCollector
from llmrl.envs.llm import DatasetChatEnv
from llmrl.errors import RolloutError
from llmrl.modules.llm import LLMWrapperBase
from llmrl.testing import FakeEngine, tiny_tokenizer
from llmrl.train.planning.plan import _staleness
from llmrl.train.rollouts.queue import RolloutQueue
from llmrl.train.settings import GRPOConfig
from tests.support.simulated import simulate
from tests.support.vllm import BackgroundCall, wait_until


def is_accounted(totals):
    dropped = totals["dropped_old"] + totals["dropped_stragglers"]
    return totals["produced"] == totals["delivered"] + dropped + totals["queued"]


def test_four_versions_of_staleness_give_nearly_twice_the_steps_of_taking_turns():
    turns, ahead = simulate(max_staleness=0, steps=12), simulate(max_staleness=4, steps=12)
    assert turns.max_age == 0
    assert 1 <= ahead.max_age <= 4
    assert turns.time / ahead.time >= 1.8
    assert any(first < last for first, last in ahead.oldest_and_newest), "some answers are by several versions"
    assert is_accounted(ahead.totals)
    assert ahead.totals["delivered"] == 12 * 8
    assert ahead.totals["queued"] == 0, "no more is begun than the run takes"


@pytest.mark.parametrize(
    ("max_staleness", "oversample", "update"), [(0, 0.5, 50.0), (1, 0.25, 50.0), (2, 0.0, 20.0), (3, 0.5, 100.0)]
)
def test_no_row_is_older_than_allowed_and_every_group_is_delivered_dropped_or_waits(max_staleness, oversample, update):
    run = simulate(max_staleness=max_staleness, steps=8, oversample=oversample, update=update)
    assert run.max_age <= max_staleness
    assert is_accounted(run.totals)
    assert run.totals["delivered"] == 8 * 8
    dropped = run.totals["dropped_old"] + run.totals["dropped_stragglers"]
    assert (dropped > 0) == (oversample > 0), "without groups to spare a step waits for the slowest"


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("update", [10.0, 50.0])
def test_slow_groups_are_trained_as_often_as_fast_ones(k, update):
    run = simulate(max_staleness=k, steps=16, update=update)
    assert run.max_age <= k
    assert run.totals["produced"] == run.totals["delivered"] == 16 * 8, "what was begun is waited for"


def test_a_simulation_is_the_same_every_time():
    first, second = (simulate(max_staleness=2, steps=5, oversample=0.25, update=50.0) for _ in range(2))
    assert (first.time, first.ages) == (second.time, second.ages)
    # The other totals may differ: of groups that end in one moment the last step may stop some, or queue them.
    for name in ("produced", "delivered"):
        assert first.totals[name] == second.totals[name]


def test_a_step_waits_less_for_the_slowest_when_more_groups_are_begun():
    options = {"max_staleness": 0, "steps": 6, "update": 10.0, "half": 256.0}
    turns, more = (simulate(oversample=share, **options) for share in (0.0, 0.25))
    assert more.time < 0.85 * turns.time
    assert more.totals["dropped_stragglers"] >= 6, "two of ten in each step"


class Gate(FakeEngine):
    """Answers at once, but calls with seeds of ``held`` wait until `opened`; None: all calls."""

    def __init__(self, held=(), answers=("yes", "no")):
        super().__init__(list(answers), tokenizer=tiny_tokenizer())
        self.held, self.opened, self.asked = held, threading.Event(), []

    def generate(self, prompts, params, *, seeds=None):
        self.asked.append(seeds)
        if self.held is None or set(self.held) & set(seeds):
            assert self.opened.wait(120)
        return super().generate(prompts, params, seeds=seeds)


class Broken(Gate):
    def generate(self, prompts, params, *, seeds=None):
        raise RuntimeError("no engine")


def queue_of(engine, *, groups=2, session=None, **settings):
    options = {"num_envs": 2, "repeats": 2, "group_repeats": True, "shuffle": False, "seed": 0, "max_steps": 1}
    if session is not None:
        settings["session"] = session
        options |= {"rank": session.rank, "world_size": session.world_size}
    env = DatasetChatEnv(dataset=[{"query": f"{n}?"} for n in range(9)], **options)
    policy = LLMWrapperBase(engine, tokenizer=engine.tokenizer)
    collector = LLMCollector(env, policy=policy, yield_only_last_steps=True, track_policy_version=True)
    return RolloutQueue(collector, groups=groups, group_size=2, max_staleness=2, **settings)


def test_a_queue_that_is_closed_ends_every_wait():
    gate = Gate(held=None)
    queue = queue_of(gate)
    queue.begin_next(1)
    waiting = BackgroundCall(lambda: queue.take(0))
    closing = BackgroundCall(queue.close)
    with pytest.raises(RolloutError, match="close"):
        waiting.result()
    gate.opened.set()
    closing.result()
    queue.wait()
    for call in (lambda: queue.take(0), lambda: queue.begin_next(2)):
        with pytest.raises(RolloutError, match="close"):
            call()
    assert [part["rows"] for part in queue.state_dict()["parts"]] == [None] * 3, "a checkpoint has what was begun"


def test_a_checkpoint_holds_what_is_finished_and_begins_the_rest_anew():
    plain = queue_of(Gate(), groups=4)
    plain.begin_next(2)
    wait_until(lambda: plain.totals()["queued"] == 4)
    one = next(part.data for part in plain._finished if part.number == 2)
    gate = Gate(one["seed"].tolist())
    first = queue_of(gate, groups=4)
    first.begin_next(2)
    wait_until(lambda: first.totals()["queued"] == 3)
    state = first.state_dict()
    assert [part["rows"] is None for part in state["parts"]] == [False, True, False, False]
    state["collector"]["version"] = 1  # new weights came before the checkpoint

    engine = Gate()
    second = queue_of(engine, groups=4)
    second.load_state_dict(state, version=1)
    assert second.totals() == {**first.totals(), "restarted": 1}
    taken = second.take(1).select("group_id", "policy_version")
    order = taken["group_id"].argsort()
    assert taken["group_id"][order].tolist() == [0, 0, 1, 1, 2, 2, 3, 3], "no prompt is lost, none is drawn twice"
    assert taken["policy_version"][order].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert [sorted(seeds) for seeds in engine.asked] == [sorted(gate.held)], "what was finished is not sampled again"
    assert second.totals()["delivered"] == 4
    gate.opened.set()
    for queue in (plain, first, second):
        queue.close()


def test_rollouts_run_ahead_no_further_than_the_trainer_needs():
    slow_trainer, slow_engine = (simulate(max_staleness=4, steps=12, update=update) for update in (2000.0, 10.0))
    assert slow_trainer.max_age == 1, "the engine has a step ready in any case"
    assert slow_engine.max_age > 1, "the trainer would wait"


def test_a_resumed_run_with_more_than_it_needs_runs_ahead_again_when_that_is_taken():
    first, second = queue_of(Gate(), groups=4), queue_of(Gate(), groups=1)
    first.begin_next(2)
    wait_until(lambda: first.totals()["queued"] == 4)
    second.load_state_dict(first.state_dict(), version=1)
    for _ in range(4):
        second.take(1)
    assert second.totals()["queued"] == 0
    second.begin_next(2)
    wait_until(lambda: second.totals()["queued"] == 1)
    assert second.totals()["delivered"] == 4
    for queue in (first, second):
        queue.close()


def test_an_error_of_sampling_is_raised_where_its_rows_are_taken():
    queue = queue_of(Broken())
    queue.begin_next(1)
    with pytest.raises(RuntimeError, match="no engine"):
        queue.take(0)
    queue.close()


SHARED = """
import threading

from llmrl.errors import LLMRLError
from llmrl.train.distributed import Session
from tests.recipes.test_rollout_queue import Broken, Gate, config, queue_of, wait_until

def check(session, data, rank_of):
    # Each rank trains two whole groups; rank_of has the rank that sampled each.
    own = list(zip(data["group_id"].tolist(), data["seed"].tolist(), data["text"].response, strict=True))
    ranks = session.gather([(sorted(map(str, data.keys(True, True))), own)])
    assert ranks[0][0] == ranks[1][0], "rows of others have the same columns"
    assert [len({group for group, _, _ in rows}) for _, rows in ranks] == [2, 2]
    rows = [row for _, rows in ranks for row in rows]
    assert sorted(group for group, _, _ in rows) == sorted(2 * list(rank_of)), rows
    assert len({seed for _, seed, _ in rows}) == 8
    assert {group: said[:1] for group, _, said in rows} == {group: str(rank) for group, rank in rank_of.items()}, rows

def main():
    with Session(config()) as session:
        engine = Gate(held=None, answers=[f"{session.rank}"])
        queue = queue_of(engine, session=session)
        queue.begin_next(9)
        threading.Timer(0.5, engine.opened.set).start()
        check(session, queue.take(0), {0: 0, 1: 1, 2: 0, 3: 1})  # each rank's own
        engine.held = None if session.rank == 0 else ()
        engine.opened.clear()
        queue.begin_next(9)  # two steps, as the first was waited for
        wait_until(lambda: len(engine.asked) == 6)
        engine.version = 1
        check(session, queue.take(1), {5: 1, 7: 1, 9: 1, 11: 1})  # rank 0 does not stop the step
        engine.version = 2
        threading.Timer(0.5, engine.opened.set).start()
        data = queue.take(2)
        assert engine.opened.is_set(), "what was begun by version 0 is due, so the step waits for it"
        check(session, data, {4: 0, 6: 0, 8: 0, 10: 0})
        totals = session.gather([queue.totals()])
        assert [(each["delivered"], each["moved"]) for each in totals] == [(6, 2), (6, 2)], totals
        queue.begin_next(9)
        other = Gate(answers=[f"{session.rank}"])
        resumed = queue_of(other, session=session)
        resumed.load_state_dict(queue.state_dict(), version=3)
        check(session, resumed.take(3), {12: 0, 13: 1, 14: 0, 15: 1})  # no prompt is lost, none is drawn twice
        for each in (queue, resumed):
            each.close()

        queue = queue_of(Broken() if session.rank else Gate(), session=session)
        try:
            queue.take(0)
        except (LLMRLError, RuntimeError) as error:
            assert "no engine" in str(error) and isinstance(error, LLMRLError) == (session.rank == 0), error
        else:
            raise AssertionError("an error of one rank is raised on both")
        queue.close()

main()
"""


@pytest.mark.slow
def test_a_step_takes_what_is_finished_on_any_rank_and_waits_for_a_slow_one_when_its_groups_are_due(place):
    place.module("shared", SHARED)
    place.ranks(module="shared")


def config(grpo=None, updates_per_step=1, **rollout):
    settings = {"grpo": grpo or {}, "updates_per_step": updates_per_step, "rollout": {"engine": "vllm", **rollout}}
    return GRPOConfig(model={}, env={"name": "sums"}, **settings)


def test_the_plan_says_how_old_rollouts_may_be_and_where_nothing_corrects_for_it():
    assert _staleness(config()) == "weights sent after every step"
    assert "one version behind" in _staleness(config(max_staleness=1))
    assert "at most 4 versions behind; answers continue with new weights" in _staleness(config(max_staleness=4))
    servers = config(max_staleness=4, servers=["http://localhost:1"])
    assert "answers in flight are waited for" in _staleness(servers)
    assert "25% more groups" in _staleness(config(oversample=0.25))
    uncorrected = {"correction": "none", "proximal": "detach"}
    assert "NOTHING CORRECTS" in _staleness(config(uncorrected, max_staleness=4))
    assert "NOTHING CORRECTS" not in _staleness(config(uncorrected))


@pytest.mark.parametrize("updates", [1, 4])
def test_the_ratio_to_weights_that_are_several_versions_old_is_clipped(updates):
    """Else updates in a row on rollouts of the same old weights push on where the first of them has arrived."""
    for exact in (True, False):
        _, loss = config(updates_per_step=updates, max_staleness=4).grpo_settings(exact=exact)
        assert (loss.proximal, loss.engine_correction["kind"]) == ("behaviour", "none")
    _, loss = config({"proximal": "recomputed"}, max_staleness=4).grpo_settings(exact=False)
    assert (loss.proximal, loss.engine_correction["kind"]) == ("recomputed", "tis")
    _, loss = config(max_staleness=1).grpo_settings(exact=False)
    assert loss.proximal == "detach"
