"""The engine of each rank, planned: GPUs, memory, length, sleep. vLLM's own checks say whether it would start."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from llmrl.errors import ConfigError
from llmrl.modules.llm.engines import VLLMEngine
from llmrl.modules.llm.engines.vllm import compat
from llmrl.testing import tiny_model
from llmrl.train.distributed import check_gpus
from llmrl.train.models.shape import model_shape
from llmrl.train.planning.engines import GIB, Gpus, make_engine_plan, replays_routes
from llmrl.train.settings import GRPOConfig
from llmrl.train.settings.rollout import RolloutSettings

CARD = 80 * GIB
# Qwen2.5: hidden size, inner width, layers, heads, key/value heads, tied embeddings
QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}


def config(rollout=None, env=None, **changes):
    return GRPOConfig(
        model="unread",
        env={"name": "gsm8k", "max_prompt_tokens": 500, **(env or {})},
        sampling={"max_tokens": 1000},
        rollout={"engine": "vllm", **(rollout or {})},
        **changes,
    )


def qwen(size):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*names, "tie_word_embeddings"), QWEN[size], strict=True))
    sizes |= {"max_position_embeddings": 32768, "vocab_size": 151936, "architectures": ["Qwen2ForCausalLM"]}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes))


def planned(settings=None, gpus=None, model=None, dtype=torch.bfloat16, **options):
    model = tiny_model(heads=4) if model is None else model
    return make_engine_plan(settings or config(), gpus or Gpus(), model, dtype=dtype, **options)


# --- where an engine is


def test_each_rank_has_its_engine_on_its_own_gpu_and_on_several_side_by_side():
    places = [planned(gpus=Gpus(4, CARD, 4, rank), world_size=4) for rank in range(4)]
    assert [place.devices for place in places] == [(0,), (1,), (2,), (3,)]
    assert all(place.own_process and place.sleeps for place in places)
    spread = config({"tensor_parallel": 2})
    places = [planned(spread, Gpus(8, CARD, 4, rank), world_size=4) for rank in range(4)]
    assert [place.devices for place in places] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert planned(spread, Gpus(2, CARD)).devices == (0, 1)
    assert planned(gpus=Gpus(1, CARD)).devices is None, "in this process, on the GPU that it has"


def test_drafts_are_refused_where_their_log_probs_are_not_those_of_the_model():
    drafting = config({"options": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}})
    with pytest.raises(ConfigError, match="speculative_config cannot be used on a CPU"):
        planned(drafting)
    assert "speculative_config" in planned(drafting, Gpus(1, CARD)).options


def test_ranks_that_hold_one_engine_have_a_part_of_it_on_their_own_gpus():
    shared = config({"tensor_parallel": 2, "over_ranks": True})
    plan, alone = planned(shared, Gpus(4, CARD, 4, 1), world_size=4), planned(gpus=Gpus(4, CARD, 4, 1), world_size=4)
    assert (plan.parts, plan.devices, plan.own_process, plan.sleeps) == (2, None, False, True)
    assert plan.options["gpu_memory_utilization"] >= alone.options["gpu_memory_utilization"]
    assert "vLLM over 2 ranks" in plan.place
    with pytest.raises(ConfigError, match="must divide the 3 processes"):
        planned(shared, Gpus(3, CARD, 3), world_size=3)
    mixture = tiny_model(architecture="qwen3_moe")
    assert "enable_return_routed_experts" not in planned(shared, Gpus(2, CARD, 2), mixture, world_size=2).options


def test_processes_that_would_share_a_gpu_are_refused_before_they_meet():
    with pytest.raises(ConfigError, match=r"got 8 processes on a machine of 4 GPUs; .* --nproc-per-node"):
        check_gpus(8, 4)
    check_gpus(4, 4)
    check_gpus(2, 0)  # on a CPU


def test_on_a_cpu_nothing_is_placed_and_nothing_sleeps_unless_it_is_asked():
    plan = planned(dtype=torch.float32)
    assert (plan.devices, plan.sleeps, plan.own_process) == (None, False, False)
    assert plan.options == {"dtype": "float32", "max_model_len": 1501}
    assert planned(config({"sleep": True})).sleeps
    assert not planned(config({"max_staleness": 1}), Gpus(1, CARD)).sleeps, "it samples during updates"


@pytest.mark.parametrize(
    ("rollout", "gpus", "message"),
    [
        ({}, Gpus(2, CARD, 4), "4 processes.*4 GPUs.*got 2"),
        ({"tensor_parallel": 2}, Gpus(8, CARD, 8), "8 processes.*16 GPUs"),
        ({"tensor_parallel": 2}, Gpus(3, CARD), "a multiple of 2: got 3"),
        ({"tensor_parallel": 2}, Gpus(), "2 GPUs.*got 0"),
        ({"tensor_parallel": 3}, Gpus(3, CARD), "4 attention heads and 2 key/value heads"),
        ({"gpu_memory": 0.01}, Gpus(1, CARD), r"got 0\.8 GiB; raise rollout\.gpu_memory"),
        ({"max_model_len": 1500}, Gpus(), r"rollout\.max_model_len.* 1501 tokens .*: got 1500"),
    ],
    ids=["engines", "spread", "uneven", "cpu", "heads", "share", "length"],
)
def test_what_a_machine_cannot_do_is_refused_before_weights_are_loaded(rollout, gpus, message):
    with pytest.raises(ConfigError, match=message):
        planned(config(rollout), gpus, world_size=gpus.ranks)


def test_four_key_value_heads_are_repeated_over_eight_gpus():
    model = tiny_model(hidden_size=128, heads=8)
    assert len(planned(config({"tensor_parallel": 8}), Gpus(8, CARD), model).devices) == 8


def test_the_engine_of_a_mixture_is_asked_for_its_routes_where_it_can_report_them():
    mixture = tiny_model(architecture="qwen3_moe")
    plan = planned(model=mixture)
    assert plan.options["enable_return_routed_experts"]
    assert "its choice of experts is replayed" in plan.describe()
    for rollout in ({"routing_replay": "off"}, {"options": {"enable_prefix_caching": False}}, {"gpus": 1}):
        assert "enable_return_routed_experts" not in planned(config(rollout), model=mixture).options
    assert "enable_return_routed_experts" not in planned().options, "not a mixture"
    with pytest.raises(ConfigError, match=r"rollout\.routing_replay=on: .* engines that are servers"):
        replays_routes(config({"routing_replay": "on", "gpus": 1}), mixture)


@pytest.mark.parametrize(
    ("rollout", "ranks", "rows", "tokens"),
    [
        ({}, 1, 384, 8192),  # 48 prompts x 8
        ({}, 4, 256, 8192),
        ({"max_staleness": 3}, 1, 1024, 8192),  # up to three steps are in flight
        ({"concurrency": 300}, 1, 300, 8192),
        ({"gpus": 2}, 1, 256, 8192),
        ({"gpus": 2, "tensor_parallel": 2}, 1, 384, 8192),
        ({"options": {"max_num_seqs": 9000}}, 1, 9000, 9000),
        ({"options": {"max_num_batched_tokens": 100}}, 1, 100, 100),
        ({"options": {"enable_chunked_prefill": False}}, 1, 384, None),  # vLLM raises its own to the longest prompt
    ],
)
def test_an_engine_on_gpus_computes_the_rows_of_its_steps_at_once_however_it_is_started(rollout, ranks, rows, tokens):
    settings = config(rollout, prompts_per_step=48, group_size=8)
    options = planned(settings, Gpus(8, CARD, ranks), world_size=ranks).options
    assert (options["max_num_seqs"], options.get("max_num_batched_tokens")) == (rows, tokens)


# --- how long a conversation may be


def test_the_length_is_the_longest_prompt_with_its_longest_answer():
    assert planned().length == 500 + 1000 + 1
    assert planned(longest_evaluated=1400).length == 1400 + 512 + 1, "problems that are measured may be longer"
    assert planned(config({"max_model_len": 4000})).length == 4000
    turns = {"max_turns": 3, "tools": ["calculator"]}
    assert planned(config(env=turns)).length is None, "what tools say has no bound that is known"
    with pytest.raises(ConfigError, match=r"3 x sampling\.max_tokens 1000"):
        planned(config({"max_model_len": 3500}, env=turns))


def test_old_files_with_kv_cache_gb_are_read():
    assert config({"kv_cache_gb": 0.5}).rollout.options == {"kv_cache_memory_bytes": 2**29}
    assert config({"kv_cache_gb": None}).rollout.options == {}


# --- memory: a ledger of bytes, and vLLM's own functions


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode", "largest"), [(1, "ddp", "3B"), (8, "ddp", "3B"), (8, "fsdp2", "7B")])
def test_vllm_starts_beside_the_trainer_and_holds_a_conversation(tmp_path, ranks, mode, largest):
    """For Qwen2.5 on cards of 80 GB: the trainer's bytes are on the card when vLLM asks for its share of it, and when
    AdamW's moments have come, everything still fits.
    """
    compat.load_vllm()
    from vllm import EngineArgs
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import request_memory

    context = GIB // 2  # of the trainer's process
    for size, (hidden, _, layers, heads, kv_heads, _) in QWEN.items():
        model = qwen(size)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        settings = config({"max_model_len": 16384}, parallel={"mode": mode})
        if size == "7B" and largest == "3B":
            with pytest.raises(ConfigError, match="must fit" if ranks == 1 else r"must fit.*parallel\.mode=fsdp2"):
                planned(settings, Gpus(8, CARD, ranks), model, world_size=ranks)
            continue
        plan = planned(settings, Gpus(8, CARD, ranks), model, world_size=ranks)
        share = plan.options["gpu_memory_utilization"]

        # While the engine is built the card has the trainer's float32 weights, or its part of them.
        parts = ranks if mode == "fsdp2" else 1
        free = CARD - context - 4 * parameters / parts
        snapshot = MemorySnapshot(free_memory=free, total_memory=CARD, device="cpu", auto_measure=False)
        requested = request_memory(snapshot, CacheConfig(gpu_memory_utilization=share))
        assert 0.1 * CARD < requested <= free
        if free < 0.92 * CARD:  # what vLLM asks by default
            with pytest.raises(ValueError, match="Free memory on device"):
                request_memory(snapshot, CacheConfig(gpu_memory_utilization=0.92))

        # Once awake again: weights, gradients' buckets, two moments, sharded or not.
        held = (12 if mode == "fsdp2" or ranks == 1 else 16) * parameters / parts
        assert held + context + requested <= CARD

        # What the weights leave of it holds one conversation, by vLLM's count of keys and values, which is ours.
        folder = tmp_path / size
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
        arguments = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384)
        with compat.environment():
            vllm_config = arguments.create_engine_config()
        vllm_config.cache_config.kv_cache_layout = "LBNHC"  # which a running engine finds out
        spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=hidden // heads, dtype=torch.bfloat16)
        specs = {f"layer{number}": spec for number in range(layers)}
        check_enough_kv_cache_memory(vllm_config, specs, requested - 2 * parameters - GIB)
        counted = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs.values())
        assert 2 * model_shape(model).cache_numbers(16384) == counted


@pytest.mark.vllm
@pytest.mark.slow
def test_with_several_turns_vllm_takes_as_many_tokens_as_the_memory_holds():
    """A MiB of 4,096 tokens (keys and values of one head of 32 floats), less vLLM's empty block of 128."""
    plan = planned(config(env={"max_turns": 2, "tools": ["calculator"]}), dtype=torch.float32)
    model = tiny_model(hidden_size=64, layers=1, heads=2)
    engine = VLLMEngine(model, eos_token_ids=(), **plan.options | {"kv_cache_memory_bytes": 2**20})
    engine.close()
    assert engine.max_length == 4096 - 128 - 1


def test_the_cache_of_windows_and_of_latent_attention_is_smaller():
    window = tiny_model(architecture="gemma3_text", heads=2, layers=2)
    full = [kind == "full_attention" for kind in window.config.layer_types]
    per_token = 2 * window.config.num_key_value_heads * window.config.head_dim
    assert model_shape(window).cache_numbers(100) == sum(100 if is_full else 8 for is_full in full) * per_token
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, "n_routed_experts": 8}
    with torch.device("meta"):
        latent = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **sizes))
    assert model_shape(latent).cache_numbers(100) == 2 * 100 * 576


def test_engines_on_gpus_of_their_own_are_planned_as_servers():
    plan = planned(config({"gpus": 4, "tensor_parallel": 2, "options": {"enforce_eager": True}}), Gpus(8, CARD))
    assert plan.apart == 2
    built = {"tensor_parallel_size": 2, "enforce_eager": True, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    assert plan.options == {"dtype": "bfloat16", "max_model_len": 1501, **built}
    with pytest.raises(ConfigError, match="4 attention heads"):
        planned(config({"gpus": 6, "tensor_parallel": 3}), Gpus(8, CARD))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"gpus": 3, "tensor_parallel": 2}, "gpus 3 must be a multiple of tensor_parallel 2"),
        ({"gpus": 1, "sleep": True}, "gpus needs sleep"),
        ({"gpus": 1, "engine": "transformers"}, "gpus needs engine vllm"),
        ({"gpus": 2, "options": {"enable_lora": True}}, "gpus sends whole weights"),
        ({"servers": ["http://a:1"], "engine": "transformers"}, "servers needs engine vllm"),
        ({"tensor_parallel": 2, "own_process": False}, "needs"),
        ({"max_staleness": 4, "engine": "transformers"}, "max_staleness needs engine vllm"),
        ({"max_staleness": 4, "own_process": False}, "max_staleness needs own_process"),
        ({"max_staleness": 2, "sleep": True}, "max_staleness needs sleep off"),
        ({"max_staleness": -1}, "greater than or equal to 0"),
        ({"oversample": 0.5, "engine": "transformers"}, "oversample needs engine vllm"),
        ({"ray": "auto", "engine": "transformers"}, "ray needs engine vllm"),
        ({"sleep": False, "engine": "transformers"}, "sleep needs engine vllm"),
        ({"options": {"seed": 1}, "engine": "transformers"}, "options needs engine vllm"),
        ({"ray": "auto", "servers": ["http://a:1"]}, "leave out servers"),
        ({"ray": "auto", "gpus": 1}, "leave out gpus"),
        ({"ray": "auto", "sleep": True}, "ray needs sleep and own_process left out"),
        ({"ray": "auto", "options": {"enable_lora": True}}, "ray sends whole weights"),
        ({"ray_engines": 2}, "need ray"),
        ({"over_ranks": True}, "over_ranks needs tensor_parallel"),
        ({"over_ranks": True, "tensor_parallel": 2, "max_staleness": 1}, "over_ranks needs max_staleness left out"),
        ({"over_ranks": True, "tensor_parallel": 2, "gpus": 2}, "over_ranks needs gpus left out"),
        ({"over_ranks": True, "tensor_parallel": 2, "engine": "transformers"}, "needs engine vllm"),
    ],
)
def test_settings_of_engines_that_exclude_each_other(rollout, message):
    with pytest.raises(ValidationError, match=message):
        RolloutSettings(**{"engine": "vllm", **rollout})


@pytest.mark.vllm
def test_an_argument_that_vllm_does_not_have_is_named_in_the_plan(place):
    rollout = {"engine": "vllm", "options": {"enforce_eagr": True}}
    place.plan("grpo", code=2, words=["'enforce_eagr'. Did you mean 'enforce_eager'?"], rollout=rollout)


def test_the_plan_says_what_the_engine_is_built_with(place):
    words = ["vLLM in this process · weights sent after every step · at most 1033 tokens · asleep during updates"]
    place.plan("grpo", words=words, rollout={"engine": "vllm", "sleep": True})
