"""The bytes that the plan names are those that autograd keeps, and saving them changes no result."""

import copy
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from llmrl.errors import ConfigError, MissingDependencyError
from llmrl.modules.llm.log_probs import TokenScorer
from llmrl.objectives.llm import SFTLoss
from llmrl.recipes.grpo import plan as plan_grpo
from llmrl.run.metrics import read_metrics
from llmrl.testing import tiny_model
from llmrl.train import optimizers
from llmrl.train.data.lengths import RowLengths
from llmrl.train.distributed import Session
from llmrl.train.gpus import GPU, find_gpu, parse_gpu
from llmrl.train.models.shape import block_matrices, model_shape
from llmrl.train.optimizers import HostAdamW, OffloadedAdamW, make_optimizer, set_learning_rate
from llmrl.train.planning import memory
from llmrl.train.planning.fitting import engine_share, memory_rows, remedies, with_changes
from llmrl.train.planning.memory import cached_tokens, can_spread, engine_memory, plan_memory, trainer_gpus
from llmrl.train.settings import GRPOConfig, OptimSettings, SFTConfig
from llmrl.train.settings.algorithms import PPOConfig
from llmrl.train.settings.preferences import RewardConfig
from llmrl.train.updater import Updater, recompute_blocks
from scripts.memory_table import MODELS, shape_of, table
from tests.support.saved_models import save_tiny
from tests.support.training_rows import random_rows

FAMILIES = ["qwen2", "qwen3", "llama", "gemma2", "qwen3_moe", "gpt2"]
GIB = 2**30


def sft(**settings):
    return SFTConfig(model="m", data={"path": "sums"}, **settings)


def grpo(**settings):
    return GRPOConfig(model="m", env={"name": "gsm8k"}, **settings)


def scores(scorer, rows):
    """Of rows of 64 tokens, the last of which is padding."""
    ids = torch.arange(rows * 64).view(rows, 64) % 300
    mask = torch.ones(rows, 64, dtype=torch.bool)
    mask[:, -1] = False
    return scorer(ids, mask, mask).log_probs


def kept_bytes(scorer, rows, autocast):
    """Of all storages that autograd saves, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*scorer.parameters(), *scorer.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = scores(scorer, rows)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_knows_the_bytes_kept_for_the_backward_pass_to_a_tenth(family, arithmetic):
    model = tiny_model(architecture=family, hidden_size=128, layers=3, heads=8)
    model = model.to(torch.bfloat16 if arithmetic == "bfloat16" else torch.float32)
    scorer, shape = TokenScorer(model, packing="off"), model_shape(model)
    for checkpointing in (False, True):
        if checkpointing:
            recompute_blocks(model)
        # two more rows: what does not grow with them, as autocast's copies of weights, is another line of the plan
        kept = kept_bytes(scorer, 4, arithmetic == "autocast") - kept_bytes(scorer, 2, arithmetic == "autocast")
        assert shape.activations(128, arithmetic, length=64, checkpointing=checkpointing) == pytest.approx(
            kept, rel=0.1
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_once_and_arithmetic_as_torch_counts_it(family):
    model = tiny_model(architecture=family, hidden_size=128, layers=2, heads=8)
    shape = model_shape(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    if family == "qwen3_moe":
        return  # torch's counter does not know grouped products
    model.set_attn_implementation("eager")
    ids = torch.ones(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # torch counts all of the attention's square, the plan what lies below the diagonal
    square = shape.num_blocks * 3 * 2 * shape.query_width * 2 * 64**2
    assert shape.training_flops([64, 64], 128) + square == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_with_adapters_the_arithmetic_is_that_of_frozen_products():
    peft = pytest.importorskip("peft")
    model = tiny_model(hidden_size=128, layers=2, heads=8, vocab_size=2000)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).eval()
    model.enable_input_require_grads()  # so that torch's counter sees the gradient of the first layer's input, too
    model.set_attn_implementation("eager")
    ids = torch.ones(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    shape = model_shape(model)
    square = shape.num_blocks * 3 * 2 * shape.query_width * 2 * 64**2
    assert shape.training_flops([64, 64], 128) + square == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert shape.frozen_products > 0.8 * shape.multiplied


@pytest.mark.slow
def test_public_models_have_their_parameters():
    billions = {name: shape_of(name).parameters / 1e9 for name in MODELS}
    expected = {"0.5B": 0.494, "3B": 3.086, "7B": 7.616, "14B": 14.770, "32B": 32.764, "70B": 70.554, "30B-A3B": 30.532}
    assert billions == pytest.approx(expected, abs=1e-3)
    mixture = shape_of("30B-A3B")
    assert (mixture.multiplied + mixture.vocabulary * mixture.hidden) / 1e9 == pytest.approx(3.04, abs=0.01)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe", "gpt2"])
def test_gradients_are_the_same_with_checkpointing_in_evaluation_mode(tmp_path, family, offload):
    save_tiny(tmp_path, tied=family in ("gemma2", "gpt2"), architecture=family, layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    saving = copy.deepcopy(model)
    recompute_blocks(saving, offload=offload)
    copied = copy.deepcopy(saving)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(1.5)  # a copy computes with its own weights
    for _ in range(3):
        for each in (model, saving):
            assert not each.training
            each.zero_grad()
            scores(TokenScorer(each, packing="off"), 2).mean().neg().backward()
        for mine, theirs in zip(model.parameters(), saving.parameters(), strict=True):
            assert (mine.grad - theirs.grad).abs().max() <= 1e-6 * max(1.0, mine.grad.abs().max())
            with torch.no_grad():
                mine -= mine.grad
                theirs -= theirs.grad
    with torch.no_grad():
        assert (scores(TokenScorer(copied), 2) - scores(TokenScorer(model), 2)).abs().max() > 1e-3


def test_the_parts_of_the_plan_are_those_of_mixed_precision_training():
    shape = shape_of("7B")
    one = plan_memory(sft(), shape, num_gpus=1, low_precision=True, capacity=80e9).training
    assert one["weights"] == one["gradients"] == 4 * shape.parameters
    assert one["optimizer"] == 8 * shape.parameters
    assert one["weights in use"] == 2 * shape.parameters, "autocast's copies"
    sharded = sft(parallel={"mode": "fsdp2"})
    eight = plan_memory(sharded, shape, num_gpus=8, low_precision=True, capacity=80e9).training
    assert eight["weights"] == 4 * shape.parameters / 8
    assert eight["optimizer"] == 8 * shape.parameters / 8
    light = with_changes(sharded, {"optim.name": "adamw_8bit"})
    assert plan_memory(light, shape, num_gpus=8, low_precision=True).training["optimizer"] == shape.parameters / 4
    reference = plan_memory(grpo(grpo={"kl": 0.1}), shape, num_gpus=1, low_precision=True).training
    assert reference["reference"] == 4 * shape.parameters
    ppo = PPOConfig(model="m", env={"name": "gsm8k"}, ppo={"critic_optim": {"name": "adamw_8bit"}})
    assert plan_memory(ppo, shape, num_gpus=1, low_precision=True).training["critic"] == (4 + 2) * shape.parameters


def test_the_plan_counts_the_tokens_of_the_data_and_not_those_that_the_settings_allow():
    """Regression: 16 rows of 60 tokens were planned as the 16,384 tokens that are allowed at once."""
    shape, options = shape_of("0.5B"), {"num_gpus": 1, "low_precision": False, "capacity": 80e9}

    def activations(config, lengths=None):
        return plan_memory(config, shape, **options, lengths=lengths).training["activations"]

    short, bound = RowLengths((60,)), activations(sft())
    assert activations(sft(batch_size=16), short) == pytest.approx(bound * 16 * 60 / 16384, rel=0.2), "less is masked"
    several = grpo(prompts_per_step=8, group_size=8, updates_per_step=4)
    assert activations(several, short) == activations(sft(batch_size=16), short), "the rows of one update"
    mixed = RowLengths((60, 60, 60, 600))
    padded = activations(sft(batch_size=16, packing="off"), mixed)
    assert activations(sft(batch_size=16), mixed) < padded < bound, "packs have no padding"


def test_a_run_that_a_cpu_cannot_hold_says_so_and_what_to_set(monkeypatch):
    monkeypatch.setattr("llmrl.train.planning.memory._held", lambda: 0.5 * GIB)

    def rows(pages, **changes):
        monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.get)
        with Session(config := sft(dtype="float32", **changes)) as session:
            return [text for _, text in memory_rows(config, shape_of("0.5B"), session)]

    assert len(rows(2**26)) == 2
    assert len(rows(2**23)) == 2, "a pass on a CPU has few tokens"
    assert rows(3 * 2**20)[2] == "DOES NOT FIT in 12.0 GiB; set memory.checkpointing=on"
    assert "a smaller model" in rows(2**17)[2]


def test_checkpointing_is_taken_where_a_run_does_not_fit_without_it():
    shape, options = shape_of("0.5B"), {"num_gpus": 1, "low_precision": True}
    assert not plan_memory(sft(), shape, **options, capacity=80 * GIB).checkpointing
    assert plan_memory(sft(), shape, **options, capacity=24 * GIB).checkpointing
    off = sft(memory={"checkpointing": "off"})
    assert not plan_memory(off, shape, **options, capacity=24 * GIB).checkpointing
    assert not plan_memory(sft(), shape, **options, capacity=None).checkpointing, "on a CPU"


def test_the_settings_that_are_named_make_it_fit_and_none_of_them_is_superfluous():
    shape, gpu = shape_of("7B"), parse_gpu("80:8")
    config = grpo(rollout={"engine": "vllm"}, memory={"checkpointing": "off"})
    changes = remedies(config, shape, gpu)
    assert changes

    def peak(changes):
        changed = with_changes(config, changes)
        return plan_memory(changed, shape, num_gpus=8, low_precision=True, capacity=gpu.bytes).peak

    assert peak(changes) <= gpu.bytes
    for name in changes:
        assert peak({other: value for other, value in changes.items() if other != name}) > gpu.bytes
    assert remedies(config, shape_of("70B"), parse_gpu("24")) is None
    assert remedies(config, shape_of("0.5B"), gpu) == {}


def test_a_sequence_that_is_too_long_for_a_gpu_is_shared_by_as_many_ranks_as_are_named():
    shape, gpu = shape_of("7B"), parse_gpu("H100:8")
    config = sft(max_length=1 << 17, parallel={"mode": "fsdp2"}, memory={"checkpointing": "on"})
    with Session(config) as session, pytest.raises(ConfigError) as refused:
        memory_rows(config, shape, session, gpu)
    assert "parallel.context=2, where 2 ranks share each sequence" in str(refused.value)
    for changes, fits in (({}, False), ({"parallel.context": 2}, True)):
        changed = with_changes(config, changes)
        plan = plan_memory(changed, shape, num_gpus=8, low_precision=True, capacity=gpu.bytes)
        assert (plan.peak <= gpu.bytes) is fits
    longer = with_changes(config, {"max_length": 1 << 18})
    assert remedies(longer, shape, gpu) == {"parallel.context": 4}
    with Session(longer) as session, pytest.raises(ConfigError, match=r"fits on 2 with .*parallel\.context=2"):
        memory_rows(longer, shape, session, parse_gpu("H100:1"))
    # rows that a smaller micro-batch helps are not split, nor what cannot be
    assert "parallel.context" not in remedies(sft(), shape, parse_gpu("40:8"))
    pairs = {"data": {"path": "sums"}, "max_length": 1 << 16, "memory": {"checkpointing": "on"}}
    judge = RewardConfig(model="m", parallel={"mode": "fsdp2"}, **pairs)
    assert "parallel.context" not in (remedies(judge, shape, gpu) or {})


def test_an_engine_gets_what_the_trainer_leaves_of_a_gpu():
    config, gpu = grpo(rollout={"engine": "vllm"}), parse_gpu("H100:8")
    share = engine_share(config, shape_of("0.5B"), gpu)
    plan = plan_memory(config, shape_of("0.5B"), num_gpus=8, low_precision=True, capacity=gpu.bytes)
    beside = plan.resident if plan.sleeps else sum(plan.training.values())
    assert 0 <= (gpu.bytes - plan.reserve - beside) - share * gpu.bytes < 0.01 * gpu.bytes
    needs = r"1 x H100 of 79.2 GiB: needs \d+ GiB on each if every answer has 1024 tokens \(.*it fits on 2 with "
    with pytest.raises(ConfigError, match=needs):
        engine_share(config, shape_of("70B"), parse_gpu("H100"))


def test_transformers_samples_as_many_rows_at_once_as_a_gpu_has_memory_for(monkeypatch):
    """Qwen2.5 7B: 28 layers of 2 x 512 values in float32, 114,688 bytes per token; rows of 4096 tokens, .44 GiB."""
    config = grpo(
        dtype="bfloat16", prompts_per_step=64, group_size=16, parallel={"mode": "fsdp2"}, sampling={"max_tokens": 3072}
    )
    lengths, shape = RowLengths((4096,)), shape_of("7B")
    row = 4096 * 28 * 1024 * 4
    found = {}
    for gpu in ("80:8", "192:8", "24:8"):
        plan = plan_memory(
            config, shape, num_gpus=8, low_precision=True, capacity=parse_gpu(gpu).bytes, lengths=lengths
        )
        found[gpu] = plan.sampling["KV cache"] / row
        free = parse_gpu(gpu).bytes - plan.reserve - plan.resident - plan.training["weights in use"]
        assert found[gpu] == max(1, min(128, int(0.8 * free / row)))
    assert found["24:8"] < found["80:8"] < found["192:8"]
    cpu = plan_memory(config, shape, num_gpus=8, low_precision=False, lengths=lengths)
    assert cpu.sampling["KV cache"] == 128 * row, "all rows at once"
    session = SimpleNamespace(device=torch.device("cuda"), world_size=8)
    monkeypatch.setattr(memory, "find_gpu", lambda *place: parse_gpu("80:8"))
    monkeypatch.setattr(memory, "model_shape", lambda model: shape)
    assert cached_tokens(config, None, session, lengths) == 4096 * found["80:8"]
    assert cached_tokens(grpo(rollout={"engine": "vllm"}), None, session, lengths) is None


def test_gpus_of_the_engines_are_the_trainers_no_more_and_are_checked():
    shape, gpu = shape_of("32B"), parse_gpu("40:8")
    config = grpo(rollout={"engine": "vllm", "own_process": True})
    changes = remedies(config, shape, gpu)
    assert changes["rollout.gpus"] in (1, 2, 4)
    apart = with_changes(config, changes)
    trainers = trainer_gpus(apart, gpu)
    assert trainers.count == 8 - changes["rollout.gpus"]
    assert apart.prompts_per_step % trainers.count == 0
    plan = plan_memory(apart, shape, num_gpus=trainers.count, low_precision=True, capacity=gpu.bytes)
    assert plan.peak <= gpu.bytes
    assert not plan.sampling, "no engine on the trainer's GPUs"
    on_one, on_two = (
        engine_memory(with_changes(apart, {"rollout.tensor_parallel": n}), shape, low_precision=True) for n in (1, 2)
    )
    assert on_one["engine weights"] == 2 * shape.parameters == 2 * on_two["engine weights"]
    with pytest.raises(ConfigError, match="a GPU to the trainer: got 8 of 8"):
        trainer_gpus(with_changes(config, {"rollout.gpus": 8}), gpu)


@pytest.mark.parametrize(("gpus", "nodes"), [("80:8", 1), ("80:8x2", 2), ("80:16", 2), ("80:4x2", 2)])
def test_engines_are_set_aside_where_llmrl_launch_can_start_them(gpus, nodes):
    """That is one machine; more than eight GPUs are on machines of eight."""
    gpu, config = parse_gpu(gpus), grpo(rollout={"engine": "vllm", "own_process": True})
    assert (gpu.nodes, gpu.of(8).nodes) == (nodes, 1)
    changes = remedies(config, shape_of("70B"), gpu) or {}
    assert ("rollout.gpus" in changes) == (nodes == 1)
    assert parse_gpu("80:4").of(16).place == "16 (2 nodes of 8)"


@pytest.mark.parametrize(("size", "gpus"), [("32B", "H100:4"), ("70B", "H100:8"), ("70B", "H100:8x2")])
def test_adapters_of_a_large_model_are_trained_with_one_engine_over_the_trainers_gpus(size, gpus):
    """Two of verl's published minima: LoRA of 32B on four H100, and of 72B on eight."""
    shape, gpu = shape_of(size), parse_gpu(gpus)
    lora = {"lora": {"r": 32}, "parallel": {"mode": "fsdp2"}}
    changes = remedies(grpo(rollout={"engine": "vllm"}, **lora), shape, gpu)
    found = with_changes(grpo(rollout={"engine": "vllm"}, **lora), changes)
    assert found.rollout.over_ranks
    assert trainer_gpus(found, gpu).count == gpu.count, "all of them train"
    plan = plan_memory(found, shape, num_gpus=gpu.count, low_precision=True, capacity=gpu.bytes)
    assert plan.fits(gpu)
    assert plan.sampling["engine weights"] == 2 * shape.parameters / found.rollout.tensor_parallel
    assert "engine's process" not in plan.training, "it is in the ranks' own"
    assert remedies(grpo(rollout={"engine": "vllm", "own_process": True}, **lora), shape, gpu) != {}, "one for each"
    with pytest.raises(ConfigError, match="must divide a machine's 6 GPUs: got 4"):
        trainer_gpus(with_changes(found, {"rollout.tensor_parallel": 4}), parse_gpu("80:6"))


@pytest.mark.parametrize(("parts", "fits"), [(2, True), (8, True), (16, True), (3, False), (6, False)])
def test_an_engine_is_spread_over_more_gpus_than_key_value_heads_if_they_divide(parts, fits):
    assert can_spread((64, 4), parts) is fits


def test_an_engine_that_its_gpus_cannot_hold_is_refused():
    config = grpo(rollout={"engine": "vllm", "gpus": 4}, parallel={"mode": "fsdp2"}, optim={"name": "adamw_offload"})
    with Session(config) as session:
        with pytest.raises(ConfigError, match=r"1 x 60 GB of 59.1 GiB.*its weights.*rollout.tensor_para"):
            memory_rows(config, shape_of("32B"), session, parse_gpu("60:64"))
        config = with_changes(config, {"rollout.tensor_parallel": 4})
        rows = memory_rows(config, shape_of("32B"), session, parse_gpu("60:64"))
    assert "60 x 60 GB" in rows[0][1]
    assert "4 GPUs for engines alone" in rows[2][1]


def test_bfloat16_is_refused_by_the_plan_of_a_gpu_without_it():
    with Session(sft()) as session:
        assert memory_rows(sft(dtype="auto"), shape_of("0.5B"), session, parse_gpu("V100"))
        with pytest.raises(ConfigError, match=r"dtype: bfloat16 needs a GPU .* use dtype=float32"):
            memory_rows(sft(dtype="bfloat16"), shape_of("0.5B"), session, parse_gpu("V100"))
    assert sft(dtype="bfloat16").in_bfloat16(None), "a CPU computes in it"


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2", "gpt2"])
def test_with_adapters_the_plan_is_near_and_not_far_below_what_is_kept(family, low):
    peft = pytest.importorskip("peft")
    model = tiny_model(architecture=family, hidden_size=128, layers=3, heads=8).to([torch.float32, torch.bfloat16][low])
    shape = model_shape(model)
    settings = peft.LoraConfig(r=16, target_modules=list(shape.linears), fan_in_fan_out=family == "gpt2")
    model = peft.get_peft_model(model, settings)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    config = sft(lora={"r": 16}, dtype="bfloat16" if low else "float32")
    one = plan_memory(config, shape, num_gpus=1, low_precision=low, checkpointing=False).training
    assert one["gradients"] == one["optimizer"] / 2 == 4 * trained
    assert one["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    scorer = TokenScorer(model, packing="off")
    for checkpointing, arithmetic in [(False, "autocast"), (True, "bfloat16")]:
        if checkpointing:
            recompute_blocks(model)
        kept = kept_bytes(scorer, 4, low) - kept_bytes(scorer, 2, low)
        arithmetic = arithmetic if low else "float32"
        assert 0.9 < shape.activations(128, arithmetic, length=64, checkpointing=checkpointing) / kept < 1.35


def test_adapters_are_a_remedy_where_nothing_else_helps():
    config, shape = grpo(rollout={"engine": "vllm"}, grpo={"kl": 0.1}), shape_of("7B")
    options = {"num_gpus": 1, "low_precision": True, "capacity": 80e9}
    plan = plan_memory(with_changes(config, {"lora.r": 16}), shape, **options).training
    assert "reference" not in plan, "the model without its adapters"
    assert plan["weights in use"] == 0
    assert plan["weights"] == pytest.approx(2 * shape.parameters + 4 * 40.4e6, rel=1e-3), "r 16 on 7B: 40.4 million"
    packed = plan_memory(with_changes(config, {"lora.quantize": "nf4"}), shape, **options).training
    assert packed["weights"] == pytest.approx(6.01e9, rel=1e-3), "linear layers at 0.56 bytes, all else at 2"
    assert remedies(config, shape, parse_gpu("40")) == {"lora.r": 16}
    assert "lora.r" not in remedies(config, shape_of("0.5B"), parse_gpu("24"))
    quantized = with_changes(config, {"lora.quantize": "nf4"})
    changes = remedies(quantized, shape, parse_gpu("24:8"))
    assert changes is None or "parallel.mode" not in changes
    with pytest.raises(ConfigError, match=r"it fits with lora\.r=16"):
        engine_share(config, shape, parse_gpu("40"))


def test_the_page_has_the_table_of_the_plan():
    page = Path(__file__).parents[2] / "docs/scaling.md"
    assert table() in page.read_text(), "python scripts/memory_table.py prints the table of the page"


@pytest.mark.parametrize(
    ("found", "gib", "label"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100"),
        ("NVIDIA A100-PCIE-40GB", 39.5, "A100-40"),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA A10G", 22.0, "A10G"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIe"),
        ("NVIDIA H100 NVL", 93.0, "H100-NVL"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "RTX-PRO-6000"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("GeForce GTX 1080", 7.9, "GeForce GTX 1080"),
    ],
)
def test_a_gpu_is_recognised_by_its_name_and_its_size(monkeypatch, found, gib, label):
    """Regression: an A100 of 80 GB was called one of 40 GB."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib * GIB))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    gpu = find_gpu(torch.device("cuda"))
    assert (gpu.name, gpu.bytes) == (label, gib * GIB)


@pytest.mark.parametrize("text", ["H100:0", "H10", "80:x", "", ":8", "-3", "80:8x", "80:x2", "80:8x0"])
def test_gpus_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="must be a name or gigabytes"):
        parse_gpu(text)


# --- optimizers


@pytest.mark.parametrize("name", ["adamw_offload", "offload=parameters"])
def test_an_adamw_that_is_not_on_the_gpu_gives_its_steps_also_after_a_resume(monkeypatch, name):
    """The second begins again in the middle, from a checkpoint: with the state, and the options, of the first."""
    monkeypatch.setattr(optimizers, "_CHUNK", 4)  # several chunks, the last one smaller
    host = name == "adamw_offload"
    optim = OptimSettings(name=name if host else "adamw", lr=0.1, weight_decay=0.1)
    models = [torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)]
    models[0].unused = torch.nn.Parameter(torch.ones(2))  # it gets no gradient
    models[1] = copy.deepcopy(models[0])
    if host:  # sharded parameters are always contiguous
        models[1].weight = torch.nn.Parameter(models[0].weight.detach().t().contiguous().t())
    make = partial(make_optimizer, device=torch.device("cpu"))
    makes = [make(models[0].parameters(), OptimSettings(lr=0.1, weight_decay=0.1))]
    makes.append(make(models[1].parameters(), optim, offloads=not host))
    assert type(makes[1]) is (OffloadedAdamW if host else HostAdamW)
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(makes[0].state_dict())
            makes[1] = make(models[1].parameters(), optim, offloads=not host)
            makes[1].load_state_dict(state)
        for model, optimizer in zip(models, makes, strict=True):
            model(torch.full((2, 5), step + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        moments = [optimizer.state[key].get("exp_avg_sq") for optimizer, key in zip(makes, (one, other), strict=True)]
        assert moments[0] is None or torch.allclose(*moments)


def test_moments_in_host_memory_are_there_after_a_resume_and_no_gpu_memory_is_taken():
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.ones(3, 2, device="cuda"))
        optimizer = OffloadedAdamW([parameter])
        moments = {"exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2), "step": torch.ones(())}
        optimizer.load_state_dict({"state": {0: moments}, "param_groups": optimizer.state_dict()["param_groups"]})
        assert {value.device.type for value in optimizer.state[parameter].values()} == {"cpu"}


def test_parameters_in_host_memory_are_updated_on_all_cores(monkeypatch):
    """torchrun gives each of several ranks one thread."""
    used, before = [], torch.get_num_threads()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: used.append(torch.get_num_threads()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(12))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            HostAdamW([torch.nn.Parameter(torch.ones(1))]).step()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert used == [3, 2]


def test_muon_trains_the_matrices_of_decoder_layers_and_adamw_all_else():
    optim = OptimSettings(name="muon", lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, muon={"lr": 0.02, "momentum": 0.9})
    ours, theirs = tiny_model(layers=2, hidden_size=32, heads=2), tiny_model(layers=2, hidden_size=32, heads=2)
    matrices = block_matrices(ours)
    assert sum(weight.numel() for weight in matrices) == model_shape(ours).matrices
    named = {name for name, weight in ours.named_parameters() if any(weight is each for each in matrices)}
    parts = {name.split(".")[-2] for name in named}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(named) == 2 * 7
    optimizer = make_optimizer(ours.parameters(), optim, torch.device("cpu"), matrices=matrices)
    by_muon = [weight for name, weight in theirs.named_parameters() if name in named]
    others = [weight for name, weight in theirs.named_parameters() if name not in named]
    muon = torch.optim.Muon(by_muon, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    set_learning_rate(optimizer, 0.01)
    for step in range(3):
        for model, steppers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            model(torch.arange(6)[None] + step).logits.square().sum().backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        if step == 1:  # as a checkpoint does
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_a_large_model_on_a_cpu_is_updated_in_one_pass_with_the_same_result():
    options = OptimSettings(lr=1e-2, weight_decay=0.1)
    small, large = (torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (10**7 - 1, 10**7))
    optimizers = [make_optimizer([weight], options, torch.device("cpu")) for weight in (small, large)]
    assert [bool(each.param_groups[0]["fused"]) for each in optimizers] == [False, True]
    expected = torch.nn.Parameter(large.detach().clone())
    alone = torch.optim.AdamW([expected], lr=1e-2, weight_decay=0.1, betas=options.betas)
    for _ in range(3):
        for weight, optimizer in ((large, optimizers[1]), (expected, alone)):
            weight.grad = weight.detach() + 0.5
            optimizer.step()
    torch.testing.assert_close(large, expected, atol=1e-5, rtol=0)


def test_an_optimizer_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingDependencyError, match=r"optim.name=adamw_8bit: .*llmrl\[optim\]"):
        make_optimizer(torch.nn.Linear(2, 2).parameters(), OptimSettings(name="adamw_8bit"), torch.device("cpu"))


# --- speed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speed_is_of_all_updates_since_it_was_asked(dtype, monkeypatch):
    monkeypatch.setattr("llmrl.train.updater.find_gpu", lambda device, count: GPU("a GPU", 1e9, count, flops=1e9))
    config = sft(dtype=dtype, tokens_per_microbatch=100)
    with Session(config) as session:
        scorer = TokenScorer(tiny_model(hidden_size=32, heads=2), packing="off")
        updater = Updater(session, scorer, config, steps=9)
        for step in (1, 2):
            updater.step(SFTLoss(updater.scorer), random_rows([9, 6]), step)
        flops = 2 * model_shape(scorer.model).training_flops([9, 6], 10)
        metrics = updater.speed(2.0)
        assert metrics["perf/train_tok_s_device"] == 10, "6 and 4 trained tokens, twice, in 2 s"
        assert metrics["perf/padding_frac"] == pytest.approx(3 / 18)
        assert metrics.get("perf/mfu") == (None if dtype == "float32" else pytest.approx(flops / (2.0 * 1e9)))
        assert metrics["perf/peak_gb"] > 0.1
        assert updater.speed(2.0)["perf/train_tok_s_device"] == 0


def test_a_run_writes_its_speed_and_a_trace_of_the_steps_asked_for(place):
    overrides = ("profile.steps=[2,2]", "memory.checkpointing=on")
    place.train("grpo", "run", *overrides, grpo={"kl": 0.1}, packing="off", zero_variance="keep")
    last = read_metrics(place.path / "runs/run")[-1]
    assert {"perf/train_tok_s_device", "perf/peak_gb", "time/logp", "rollout/turns_mean"} <= last.keys()
    assert 0 <= last["perf/padding_frac"] < 1
    assert last["rollout/turns_mean"] == 1
    trace = json.loads((place.path / "runs/run/profile-rank0.json").read_text())
    assert any("AdamW" in event["name"] for event in trace["traceEvents"])


def test_a_dry_run_plans_for_gpus_that_are_not_here(place):
    place.plan("sft", "--gpu", "H100:8", words=["8 x H100, 79.2 GiB each"])
    place.run("sft", "plan.yaml", "--gpu", "H100:8", code=2, words=["needs --dry-run"])


@pytest.mark.slow
def test_the_engine_is_planned_for_those_gpus_too(tmp_path):
    def rows(rollout, gpu="H100:8", **changes):
        model = {"hidden_size": 32, "heads": 4}
        config = GRPOConfig(model=model, env={"name": "sums"}, rollout={"engine": "vllm"} | rollout, **changes)
        return dict(reversed(plan_grpo(config, runs=tmp_path, gpu=parse_gpu(gpu))))

    engine = rows({})["engine"]
    assert "vLLM in a process of its own" in engine
    assert re.search(r"GPU 0 · 9\d% of the GPU's memory · .* · asleep during updates", engine)
    assert "asleep" not in rows({"max_staleness": 4})["engine"], "it samples during updates"
    spread = rows({"tensor_parallel": 2})
    assert "GPU 0 and 1" in spread["engine"]
    assert "4 x H100" in spread["memory"], "as many ranks as engines"
    for rollout, changes, words in (
        ({"tensor_parallel": 2}, {"gpu": "H100:7"}, "tensor_parallel: must divide the 7 GPUs: got 2"),
        ({"gpu_memory": 0.01}, {}, "share must hold its weights .* raise rollout.gpu_memory"),
        ({"gpu_memory": 0.99}, {}, r"the trainer leaves 9\d% of a GPU's memory to the engine: got 99%"),
        ({}, {"prompts_per_step": 30}, "prompts_per_step 30 must be a multiple of the 8 processes"),
        ({"gpus": 5}, {}, "prompts_per_step 32 must be a multiple of the 3 processes"),
        ({}, {"parallel": {"mode": "fsdp2", "replicas": 16}}, "parallel.replicas must divide the 8 processes: got 16"),
    ):
        with pytest.raises(ConfigError, match=words):
            rows(rollout, **changes)
    with pytest.raises(ValueError, match="replicas needs mode fsdp2"):
        grpo(parallel={"replicas": 2})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_needs_what_the_plan_says(checkpointing):
    model = tiny_model(hidden_size=1024, layers=12, heads=16, vocab_size=32000).cuda()
    config = sft(max_length=1024, batch_size=16, memory={"checkpointing": "on" if checkpointing else "off"})
    plan = plan_memory(config, model_shape(model), num_gpus=1, low_precision=True, capacity=80e9)
    if checkpointing:
        recompute_blocks(model)
    optimizer = make_optimizer(model.parameters(), config.optim, torch.device("cuda"))
    scorer = TokenScorer(model, packing="off")
    ids, mask = torch.ones(16, 1024, dtype=torch.int64).cuda(), torch.ones(16, 1024, dtype=torch.bool).cuda()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = scorer(ids, mask, mask).log_probs.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() == pytest.approx(sum(plan.training.values()), rel=0.25)
