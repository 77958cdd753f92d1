"""GRPO whose rollouts come from vLLM servers in Ray actors, and what is said where no cluster is."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from llmrl.errors import ConfigError, RolloutError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.planning.engines import EnginePlan
from llmrl.train.ray_servers import RayPlan, check_room, connect
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.settings import GRPOConfig
from tests.support.processes import descendants, is_running, wait_until

MODEL = {"hidden_size": 64, "layers": 1, "heads": 2}  # heads of 32, the smallest that vLLM computes on a CPU


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
def test_rollouts_of_a_cluster_are_fresh_and_exact_and_a_dead_actor_ends_the_run(place):
    pytest.importorskip("ray")
    rollout = {"engine": "vllm", "ray": "local", "max_staleness": 2, "options": {"kv_cache_memory_bytes": 1 << 27}}
    name = place.recipe("mine", "grpo", model=MODEL, rollout=rollout, zero_variance="keep")
    run = place.process("grpo", name, "--name", "run", "steps=100000", start_new_session=True)
    try:
        place.wait_for_lines(run, "run", 3)
        started = descendants(run.pid)
        (actor,) = [pid for pid, command in started if command.startswith("ray::_Server")]
        os.kill(actor, signal.SIGKILL)
        place.finish(run, timeout_s=180, code=4, words=["llmrl resume"])
    finally:
        run.kill()
    for step in place.steps("run")[:3]:
        assert step["async/staleness_max"] <= 2
        assert step["mismatch/probe"] < 1e-5
        assert step["rollout/failed"] == 0
        assert step["engine/preempted"] == 0
        assert "engine/cache_max_frac" not in step, "servers keep no peak"
    wait_until(lambda: not any(is_running(pid) for pid, _ in started), 60)


def test_servers_that_were_placed_are_closed_if_no_engine_can_be_made_of_them():
    closed = []

    class Placed(RolloutEngine):
        def _place_servers(self, config, plan, tokenizer):
            self._parts.callback(closed.append, plan.ray)
            return ["http://127.0.0.1:9"]  # nothing listens there

    tokenizer = tiny_tokenizer()
    config, plan = (
        GRPOConfig(model=MODEL, env={"name": "sums"}, rollout={"engine": "vllm"}),
        EnginePlan(ray=RayPlan("local", 1)),
    )
    with Session(config) as session, pytest.raises(RolloutError, match=r"127\.0\.0\.1:9"):
        Placed(config, session, tiny_model(tokenizer), tokenizer, plan)
    assert closed == [plan.ray]


def test_a_cluster_that_is_not_there_is_an_error(place, monkeypatch):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # held, and nothing listens: nothing else can take it
        with pytest.raises(ConfigError, match=rf"a Ray cluster must be at '{address}': ConnectionRefused.*ray start"):
            connect(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=address.rpartition(":")[2]):
            connect("auto")
        for wrong in ("nowhere", "nowhere:port"):
            with pytest.raises(ConfigError, match=r"host:port of its head node"):
                connect(wrong)
        words = [f"a Ray cluster must be at '{address}'"]
        place.plan("grpo", code=2, words=words, model=MODEL, rollout={"engine": "vllm", "ray": address})


NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 4.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}},
]


def test_the_room_of_a_cluster_is_counted_node_by_node():
    check_room(NODES, RayPlan("auto", 4, {"GPU": 2.0, "CPU": 1.0}))
    check_room(NODES, RayPlan("auto", 64, {"CPU": 0}))
    with pytest.raises(ConfigError, match=r"room for 5 engines .*: it has for 4"):
        check_room(NODES, RayPlan("auto", 5, {"GPU": 2.0, "CPU": 1.0}))
    with pytest.raises(ConfigError, match=r"it has for 0, its nodes \[{'big_disk': 0}, {'big_disk': 0}\]"):
        check_room(NODES, RayPlan("auto", 1, {"big_disk": 1.0}))
