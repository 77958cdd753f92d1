"""Adapters in SFT and GRPO: they alone are trained, pushed and saved, with the numbers of peft and of one process."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.errors import ConfigError, MissingDependencyError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.distributed import Session
from llmrl.train.lora import add_adapters, lora_rows
from llmrl.train.model_shape import model_shape
from llmrl.train.models import load_model
from llmrl.train.settings import GRPOConfig, SFTConfig
from llmrl.train.sft_data import tokenize_chats
from llmrl.weight_update import merged_weights
from tests.support.training_rows import worst as difference

peft = pytest.importorskip("peft")
OPTIM = {"lr": 1e-2, "warmup": 1}
LORA = {"r": 4, "alpha": 8}
IDS = torch.arange(3, 33).view(2, 15)


def sft_config(**settings):
    return SFTConfig(**{"model": "m", "data": {"path": "sums"}, "lora": LORA} | settings)


def adapter(place, run, step):
    return load_file(place.checkpoint(run, step) / "adapter/adapter_model.safetensors")


def read_by_peft(place, run, step):
    """The base of a run with the adapters of a checkpoint merged into it."""
    path = json.loads((place.checkpoint(run, step) / "adapter/adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(path["base_model_name_or_path"])
    return peft.PeftModel.from_pretrained(base, place.checkpoint(run, step) / "adapter").merge_and_unload()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def test_supervised_training_is_that_of_a_loop_with_peft_alone(place):
    optim, words = OPTIM | {"clip_norm": 1e9}, ["2 048 of 39 968 parameters trained"]
    place.train("sft", "run", lora=LORA, batch_size=40, optim=optim, words=words)
    base = place.path / "runs/run/base"
    before = load_file(base / "model.safetensors")
    chats = tokenize_chats(sft_config(data={"path": "sums", "rows": 40}), AutoTokenizer.from_pretrained(base))

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    metrics = place.steps("run")
    for row in metrics:
        loss = num_tokens = 0
        for ids, mask in zip(chats.ids, chats.masks, strict=True):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            loss, num_tokens = loss - log_probs[mask[1:].bool()].sum(), num_tokens + mask[1:].sum()
        (loss / num_tokens).backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in trained]).norm()
        assert row["policy/loss"] == pytest.approx(float(loss.detach() / num_tokens), abs=1e-5)
        assert row["policy/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert metrics[-1]["policy/loss"] < metrics[0]["policy/loss"]
    own = adapter(place, "run", 3)
    assert difference(own, peft.get_peft_model_state_dict(model)) < 1e-5
    assert min(value.abs().max() for value in own.values()) > 1e-3
    assert difference(before, load_file(base / "model.safetensors")) == 0

    # the last checkpoint is a whole model too, and the adapters are peft's own format
    expected = logits(model.eval())
    saved = place.checkpoint("run", 3)
    assert (logits(AutoModelForCausalLM.from_pretrained(saved)) - expected).abs().max() < 1e-4
    assert (logits(peft.AutoPeftModelForCausalLM.from_pretrained(saved / "adapter")) - expected).abs().max() < 1e-4


def test_a_run_of_grpo_begins_at_its_reference_and_goes_on_from_its_adapters(place):
    changes = {"lora": LORA, "grpo": {"kl": 0.1}, "checkpoint": {"every": 2}, "eval": {"rows": 4}}
    place.train("grpo", "one", steps=4, **changes)
    kl = [row["policy/kl_ref"] for row in place.steps("one")]
    assert kl[0] == 0
    assert min(kl[1:]) > 1e-6
    files = {path.name for path in place.checkpoint("one", 2).iterdir()}
    assert "model.safetensors" not in files
    assert {"adapter", "config.json", "trainer.pt"} <= files
    place.cut_back("one", "two", to=2)

    # adapters alone are enough to begin another run from, of all of the model or of adapters on it
    for name, lora in (("whole", "lora=null"), ("again", "lora={r: 2}")):
        place.run("grpo", "one.yaml", lora, "model=runs/two", "steps=1", "optim.lr=1e-9", "--name", name)
    whole, again = (load_file(place.checkpoint(name, 1) / "model.safetensors") for name in ("whole", "again"))
    assert difference(whole, again) < 1e-6
    begun = AutoModelForCausalLM.from_pretrained(place.checkpoint("whole", 1))
    assert (logits(begun) - logits(read_by_peft(place, "two", 2))).abs().max() < 1e-4

    place.run("resume", "two")
    place.same("one", "two")
    assert difference(adapter(place, "one", 4), adapter(place, "two", 4)) == 0
    place.run("resume", "two", "lora.r=8", code=2, words=["cannot change in a resumed run"])


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_moe"])
def test_layers_of_other_kinds_have_adapters_and_merge(architecture):
    sizes = {"architecture": architecture, "hidden_size": 32, "heads": 2, "layers": 1}
    plain, adapted = tiny_model(tiny_tokenizer(), **sizes), tiny_model(tiny_tokenizer(), **sizes)
    adapted = add_adapters(sft_config(), adapted)
    assert torch.equal(logits(adapted), logits(plain)), "new adapters change nothing"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter += 0.1 * (".lora_B." in name)
    assert (logits(adapted) - logits(plain)).abs().max() > 1e-2
    merged = {name: value for group in merged_weights(adapted) for name, value in group.items()}
    plain.load_state_dict(merged, strict=False)
    plain.tie_weights()
    assert (logits(adapted) - logits(plain)).abs().max() < 1e-4


def test_dropout_is_of_adapters_alone_and_of_training_alone():
    config = sft_config(lora={"r": 2, "dropout": 0.5})
    adapted = add_adapters(config, tiny_model(tiny_tokenizer(), hidden_size=32, heads=2))
    random = [name for name, module in adapted.named_modules() if module.training]
    assert random
    assert all(".lora_dropout." in name for name in random)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"target_modules": ["q_prj"]}}, "q_prj must be a linear layer .*Did you mean 'q_proj'"),
        ({"lora": {"target_modules": ["lm_head"]}}, "lm_head must be a linear layer"),
        ({"lora": {"target_modules": []}}, "needs linear layers"),
        ({"lora": {"quantize": "nf4"}, "model": "tiny"}, "needs a model that is read from files"),
        ({"lora": {"quantize": "nf4"}, "parallel": {"mode": "fsdp2"}}, "cannot be used with parallel.mode fsdp2"),
    ],
)
def test_settings_that_a_model_cannot_keep_are_errors_of_the_plan(settings, message):
    with pytest.raises(ConfigError, match=message):
        lora_rows(sft_config(**settings), model_shape(tiny_model()))


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    config = GRPOConfig(model="m", env={"name": "gsm8k"}, lora={})
    with pytest.raises(MissingDependencyError, match=r"lora: .*llmrl\[lora\]"):
        lora_rows(config, model_shape(tiny_model()))


def test_a_model_in_4_bits_is_trained_and_leaves_a_whole_one(place):
    functional = pytest.importorskip("bitsandbytes.functional")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden_size=64, heads=2, layers=1).save_pretrained(place.path / "base")
    tokenizer.save_pretrained(place.path / "base")
    config = sft_config(model="base", lora=LORA | {"quantize": "nf4"})
    with Session(config) as session:
        packed = load_model(config, tokenizer, session, runs=place.path)
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            parameter += 0.1 if ".lora_B." in name else 0
    plain = tiny_model(tokenizer, hidden_size=64, heads=2, layers=1)
    plain.load_state_dict({name: value for group in merged_weights(packed) for name, value in group.items()})
    assert (logits(plain) - packed(IDS).logits.detach()).abs().max() < 1e-4, "with gradients"
    assert (logits(plain) - logits(packed)).abs().max() < 1e-4, "and without"

    settings = {"model": "base", "lora": LORA | {"quantize": "nf4"}, "checkpoint": {"every": 2}}
    place.train("sft", "run", words=["linear layers in nf4"], **settings)
    losses = [row["policy/loss"] for row in place.steps("run")]
    assert losses[-1] < losses[0]
    saved = place.checkpoint("run", 3)
    merged, base = (load_file(folder / "model.safetensors") for folder in (saved, place.path / "base"))
    trained, prefix = adapter(place, "run", 3), "base_model.model."
    assert merged.keys() == base.keys()
    for name, value in merged.items():
        expected = base[name]
        if name.endswith("proj.weight"):
            expected = functional.dequantize_4bit(*functional.quantize_4bit(expected, quant_type="nf4"))
            stem = prefix + name.removesuffix(".weight")
            expected = expected.float() + 2 * trained[f"{stem}.lora_B.weight"] @ trained[f"{stem}.lora_A.weight"]
        assert (value.float() - expected).abs().max() <= 1e-2 * expected.abs().max(), name
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    place.cut_back("run", "two", to=2)
    place.run("resume", "two")
    assert difference(adapter(place, "two", 3), trained) == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_processes_have_the_adapters_of_one(place, layout):
    changes = {"grpo": {"kl": 0.1}, "lora": LORA, "tokens_per_microbatch": 150, "checkpoint": {"every": 2}}
    savings = (f"parallel.mode={layout}", "memory.checkpointing=on", "packing=on")
    place.train_as_one_and_as_ranks(
        "grpo", *savings, step=3, optim=OPTIM, memory={"checkpointing": "off"}, packing="off", **changes
    )
    assert place.steps("two")[0]["policy/kl_ref"] == 0
    for step in (2, 3):
        assert difference(adapter(place, "one", step), adapter(place, "two", step)) < 1e-6
    assert difference(place.weights("one", 3), place.weights("two", 3)) < 1e-6
    if layout == "ddp":
        return
    shutil.rmtree(place.checkpoint("two", 3))
    place.ranks("resume", "two")
    assert difference(adapter(place, "one", 3), adapter(place, "two", 3)) < 1e-6
    # adapters alone are merged into a sharded model, below new ones, in bfloat16 arithmetic
    shutil.rmtree(place.checkpoint("two", 3))
    savings = ("parallel.mode=fsdp2", "memory.checkpointing=on", "packing=on", "dtype=bfloat16")
    place.ranks("grpo", "mine.yaml", "model=runs/two", "optim.lr=1e-9", "steps=1", *savings, "--name", "three")
    merged = load_file(place.checkpoint("three", 1) / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    read = read_by_peft(place, "two", 2).state_dict()
    expected = {name: value for name, value in read.items() if name in merged}
    assert difference(expected, {name: value.float() for name, value in merged.items()}) < 2e-3


def test_grpo_with_adapters_learns(place):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden_size=32, heads=2, layers=1)
    with torch.no_grad():
        model.lm_head.weight *= 10  # a random head makes all tokens equally likely, whatever comes before it
    model.save_pretrained(place.path / "base")
    tokenizer.save_pretrained(place.path / "base")
    changes = {"prompts_per_step": 8, "group_size": 8, "lora": {"r": 8}, "optim": {"lr": 3e-2}}
    place.train("grpo", "run", model="base", steps=12, **changes)
    rewards = [row["reward/mean"] for row in place.steps("run")]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "adapters"])
def test_vllm_gets_adapters_merged_or_alone_and_a_resumed_run_goes_on_with_them(place, way):
    options = {"enforce_eager": True} | ({"enable_lora": True} if way == "adapters" else {})
    rollout = {"engine": "vllm", "sleep": True, "options": options}
    model = {"hidden_size": 64, "heads": 2, "layers": 1}
    settings = place.recipe("mine", "grpo", model=model, lora=LORA, rollout=rollout, checkpoint={"every": 2})
    result = place.run("grpo", settings, "steps=2", "--name", "run")
    assert ("gets adapters only" in result.out) == (way == "adapters")
    place.run("resume", "run", "steps=4")
    for row in place.steps("run"):
        assert row["mismatch/probe"] < 1e-5
        assert row["mismatch/probe_warnings"] == 0
        assert row["mismatch/logp_abs_mean"] < 1e-5
