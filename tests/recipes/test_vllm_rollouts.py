"""GRPO with vLLM sampling: in this process and overlapped, what is measured, what is proven, what ends a run."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmrl.errors import RolloutError
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.run.metrics import read_metrics
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_tokenizer
from llmrl.train.planning.engines import Gpus, make_engine_plan
from llmrl.train.rollouts.engine import RolloutEngine
from llmrl.train.rollouts.source import RolloutSource
from llmrl.train.settings import GRPOConfig
from tests.support.processes import wait_until
from tests.support.saved_models import save_tiny
from tests.support.vllm import stepped, trainer_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODEL = {"hidden_size": 64, "layers": 1, "heads": 2}  # heads of 32, the smallest that vLLM computes on a CPU
ROLLOUT = {"engine": "vllm", "options": {"kv_cache_memory_bytes": 1 << 27}}
LIMIT_S = 400


def recipe(place, name, **rollout):
    return place.recipe(name, "grpo", model=MODEL, rollout={**ROLLOUT, **rollout}, zero_variance="keep")


def finished(place, *arguments, **expected):
    return place.finish(place.process("grpo", *arguments), timeout_s=LIMIT_S, **expected)


def processes_in(folder):
    """Command lines of the other living processes that work in ``folder``, as those of a run's engine do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # it ended meanwhile
    return [line for line in found if line]


def test_an_engine_in_this_process_has_the_trainers_weights_at_every_step(place):
    words = ["engine     vLLM in this process · weights sent after every step"]
    changes = {"sleep": True, "options": ROLLOUT["options"] | {"num_gpu_blocks_override": 11}}  # for 16 rows
    finished(place, recipe(place, "here", **changes), "--name", "here", words=words)  # of the order alone, on a CPU
    steps = place.steps("here")
    assert len(steps) == 3
    speeds = [step["perf/sync_gb_s"] for step in read_metrics(place.path / "runs/here") if step["step"]]
    assert min(speeds) > 0
    for step in steps:
        assert 0 <= step["mismatch/probe"] < 1e-5
        assert step["mismatch/logp_abs_max"] < 1e-4, "the loss computes what the engine said, weights of this version"
        assert step["mismatch/is_mean"] == pytest.approx(1, abs=1e-4)
        assert step["async/staleness_max"] == 0
        assert "async/trainer_idle" not in step
        assert 0.5 < step["engine/cache_max_frac"] <= 1
        assert step["engine/waiting_max"] >= 1
        assert (step["engine/preempted"], step["engine/prefix_hit_frac"]) == (0, 0), "no row is longer than a block"


def test_overlapped_rollouts_are_one_version_behind_and_both_sides_say_how_long_they_waited(place):
    process = place.process("grpo", recipe(place, "ahead", max_staleness=1), "--name", "ahead", "steps=4")
    place.finish(process, timeout_s=LIMIT_S)
    steps = place.steps("ahead")
    assert [step["async/staleness_max"] for step in steps] == [0, 1, 1, 1]
    for step in steps:
        assert 0 <= step["async/trainer_idle"] <= 1
        assert 0 <= step["async/engine_idle"] <= 1
        assert 0 < step["engine/cache_max_frac"] < 1
        assert 0 < step["mismatch/is_mean"] <= 2, "cut at 2"
    assert all(step["mismatch/probe"] < 1e-5 for step in steps if "mismatch/probe" in step)
    assert sum("mismatch/probe" in step for step in steps) == 3
    wait_until(lambda: not processes_in(place.path))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"llmrl-weights-{process.pid}-")]


def test_answers_that_new_weights_interrupt_keep_the_log_probs_of_each_version_and_a_resumed_run_goes_on(
    place, monkeypatch
):
    weights, taken, take, push = {}, [], RolloutSource.take, RolloutEngine.push

    def remembering_take(self, version):
        weights.setdefault(version, copy.deepcopy(self._engine.model))
        taken.append(take(self, version))
        return taken[-1]

    def remembering_push(self, scorer):
        weights[self.policy.engine.version + 1] = copy.deepcopy(self.model)
        return push(self, scorer)

    monkeypatch.setattr(RolloutSource, "take", remembering_take)
    monkeypatch.setattr(RolloutEngine, "push", remembering_push)
    changes = {"model": MODEL, "rollout": {**ROLLOUT, "max_staleness": 2}, "zero_variance": "keep", "steps": 4}
    changes |= {"sampling": {"max_tokens": 250}, "checkpoint": {"every": 2, "keep": 5}}
    place.train("grpo", "queue", words=["at most 2 versions behind; answers continue with new weights"], **changes)
    mixed = 0
    for data in taken:
        masks = data.get(("masks", "all_assistant_mask"), as_list=True)
        versions = data.get(("log_probs", "versions"), as_list=True)
        ids, said = data.get(("tokens", "full"), as_list=True), data.get(("log_probs", "full"), as_list=True)
        scores = {
            version: TransformersEngine(model.eval(), eos_token_ids=(), pad_token_id=0).score(ids)
            for version, model in weights.items()
        }
        for row, mask in enumerate(masks):
            expected = torch.stack([scores[int(versions[row][place])][row][place] for place in mask.nonzero()[:, 0]])
            torch.testing.assert_close(said[row][mask], expected, atol=1e-4, rtol=0)
            mixed += versions[row][mask].unique().numel() > 1
    assert mixed, "no answer was interrupted"
    place.cut_back("queue", "cut", to=2)
    place.run("resume", "cut")
    restarted = [step["async/restarted"] for step in place.steps("cut")]
    assert restarted[:2] == [0, 0]
    assert restarted[-1] > 0
    for run in ("queue", "cut"):
        steps = place.steps(run)
        assert [step["async/delivered"] for step in steps] == [4, 8, 12, 16]
        for step in steps:
            assert step["async/staleness_max"] <= 2
            dropped = step["async/dropped_old"] + step["async/dropped_stragglers"]
            assert step["async/produced"] == step["async/delivered"] + dropped + step["async/queued"]
            assert step.get("mismatch/probe", 0) < 1e-5
        assert steps[-1]["async/queued"] == 0


def test_conversations_that_proceed_on_their_own_are_trained_like_others(place):
    name = recipe(place, "alone", concurrency=4, sleep=True)
    finished(place, name, "--name", "alone", "steps=2")
    assert [len(place.rollouts("alone", step)) for step in (1, 2)] == [16, 16]
    assert {step["async/staleness_max"] for step in place.steps("alone")} == {0}


DROPS = """
import sys
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.commands.cli import main

update, pushes = VLLMEngine.update_weights, []

def dropping(self, weights, *, version):
    pushes.append(version)
    if len(pushes) == 2 or len(pushes) > 4:
        self.version = version
    else:
        update(self, weights, version=version)

VLLMEngine.update_weights = dropping
sys.exit(main(["grpo", *sys.argv[1:]]))
"""


def test_pushes_that_are_lost_are_warned_of_sent_again_and_end_the_run_in_the_end(place):
    place.module("drops", DROPS)
    changes = ("steps=9", "dtype=bfloat16", "optim.lr=1e-6", "optim.warmup=0")
    process = place.process(recipe(place, "lost"), "--name", "lost", *changes, module="drops")
    words = ["for 3 versions in a row, each sent twice", "a second push helped"]
    place.finish(process, timeout_s=LIMIT_S, code=4, words=words)
    assert [step["mismatch/probe_warnings"] for step in place.steps("lost")] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("rollout", [{"max_staleness": 1}, {"max_staleness": 2, "oversample": 0.5}])
def test_two_processes_have_an_engine_each_and_the_same_weights(place, rollout):
    save_tiny("tied", hidden_size=64)
    overrides = ("model=tied", "parallel.mode=fsdp2", "steps=3", "optim={lr: 5.0e-3, schedule: constant, warmup: 0}")
    settings = recipe(place, "two", **rollout)
    place.finish(place.process("grpo", settings, "--name", "two", *overrides, ranks=2), timeout_s=LIMIT_S)
    assert all(step.get("mismatch/probe", 0) < 1e-5 for step in place.steps("two"))
    assert [step["async/staleness_max"] for step in place.steps("two")][:2] == [0, 1]
    assert all(step["engine/preempted"] == 0 < step["engine/cache_max_frac"] < 1 for step in place.steps("two"))
    if "oversample" in rollout:
        delivered = [step["async/delivered"] for step in place.steps("two")]
        assert delivered == [4, 8, 12], "two groups of each rank in a step"


def test_the_ranks_hold_one_engine_that_samples_for_all_of_them(place):
    save_tiny("tied", hidden_size=64)
    rollout = {"tensor_parallel": 2, "over_ranks": True, "sleep": True}
    overrides = ("model=tied", "parallel.mode=fsdp2", "steps=3", "optim={lr: 5.0e-3, schedule: constant, warmup: 0}")
    overrides += (
        "eval={dataset: prompts.jsonl, rows: 3, max_tokens: 4, batch_size: 1, every: 2}",
    )  # rank 0 calls twice
    process = place.process("grpo", recipe(place, "two", **rollout), "--name", "two", *overrides, ranks=2)
    place.finish(process, timeout_s=LIMIT_S, words=["vLLM over 2 ranks, in their processes", "asleep during updates"])
    steps = place.steps("two")
    assert len(steps) == 3
    for step in steps:
        assert len(place.rollouts("two", int(step["step"]))) == 16
        assert step["mismatch/logp_abs_max"] < 1e-4, "the weights of this version, each rank's part"
        assert step["mismatch/probe"] < 1e-5
        assert step["policy/grad_norm"] > 0, "the weights move"
        assert step["async/staleness_max"] == 0
        assert 0 < step["engine/cache_max_frac"] < 1
    assert [value for name, value in steps[1].items() if name.startswith("eval/") and name.endswith("/count")] == [3]


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("own_process", [False, pytest.param(True, marks=ON_GPU)], ids=["here", "apart"])
def test_an_engine_reads_the_files_of_the_model_and_sleeps_while_that_is_trained(tmp_path, own_process):
    """Beside the trainer, on its GPU where there is one: files in bfloat16, both compute in float32."""
    tiny_model(tiny_tokenizer(), heads=2).bfloat16().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    rollout = {"engine": "vllm", "sleep": True, "own_process": own_process, "options": ROLLOUT["options"]}
    env = {"name": "sums", "max_prompt_tokens": 64}
    config = GRPOConfig(model=str(tmp_path), env=env, dtype="float32", sampling={"max_tokens": 8}, rollout=rollout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([70, 8, 9, 10, 400, 12])]
    with Session(config) as session:
        model.to(session.device)
        plan = make_engine_plan(config, Gpus.of(session), model, dtype=torch.float32)
        rollouts = RolloutEngine(config, session, model, load_tokenizer(config, runs=tmp_path), plan)
        engine = rollouts.policy.engine
        try:
            assert engine.core.info.model == str(tmp_path), "no copy of the model was written for it"
            assert engine.max_length == 72, "64 of the prompt and 8 of the answer"
            for version in range(3):
                drawn = engine.generate(prompts, SamplingParams(max_new_tokens=6))
                for said, right in zip(drawn.log_probs, trainer_log_probs(model, prompts, drawn), strict=True):
                    torch.testing.assert_close(said, right.to(said.device), atol=1e-4, rtol=0)
                rollouts.sleep()
                with pytest.raises(RolloutError, match="must be awake"):
                    engine.generate(prompts, SamplingParams(max_new_tokens=6))
                stepped(model, version, size=0.05)
                rollouts.push(None)
        finally:
            rollouts.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_shares_its_gpu_with_an_engine_as_the_plan_says(place):
    name = place.recipe("shared", "grpo", model=MODEL, rollout={"engine": "vllm"}, zero_variance="keep")
    words = ["% of the GPU's memory", "asleep during updates"]
    finished(place, name, "--name", "shared", words=words)
    steps = [step for step in read_metrics(place.path / "runs/shared") if step["step"]]
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch/probe"] < 0.1, "in bfloat16"
        assert step["mismatch/probe_warnings"] == 0
        assert step["perf/sync_gb_s"] > 0
        assert step["perf/peak_gb"] > 0
