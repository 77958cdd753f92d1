"""Adapters in SFT and GRPO: they alone are trained, pushed and saved, with the numbers of peft and of one process."""

import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.errors import ConfigError, MissingDependencyError
from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.data.sft import tokenize_chats
from llmrl.train.distributed import Session
from llmrl.train.models.loading import load_model
from llmrl.train.models.lora import ReferenceAtStart, add_adapters, lora_rows
from llmrl.train.models.shape import model_shape
from llmrl.train.settings import GRPOConfig, SFTConfig
from llmrl.weight_update import merged_weights
from tests.support.saved_models import save_tiny
from tests.support.training_rows import worst as difference
from tests.support.vllm import stepped

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


def by_peft(base, *, tied, saves=None, moved=False):
    """A model of peft's own with new adapters, as of seed 0; ``moved``: with others, and saved in the folder start."""
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
    settings |= {
        "modules_to_save": saves and [*saves],
        "ensure_weight_tying": bool(saves) and tied,
        "task_type": "CAUSAL_LM",
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings)).eval()
    if moved:
        stepped(model, size=0.05).save_pretrained("start")
    return model


ENDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("saves", "start", "tied"),
    [
        *((None, False, True), (ENDS[:1], False, False), (ENDS, False, True), (ENDS, False, False)),
        *((None, True, False), (ENDS, True, True)),
    ],
)
def test_supervised_training_is_that_of_a_loop_with_peft_alone(place, tied, saves, start):
    base = place.path / "base"
    save_tiny(base, tied=tied)
    before = load_file(base / "model.safetensors")
    model = by_peft(base, tied=tied, saves=saves, moved=start)
    settings = {"model": "start"} if start else {"model": "base", "lora": LORA | {"modules_to_save": saves or []}}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    words = [f"{trained:,} of".replace(",", " "), *(["goes on from the adapter"] if start else [])]
    place.train("sft", "run", batch_size=40, optim=OPTIM | {"clip_norm": 1e9}, words=words, **settings)
    chats = tokenize_chats(sft_config(data={"path": "sums", "rows": 40}), AutoTokenizer.from_pretrained(base))
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

    # The last checkpoint is a whole model too, the adapters are peft's own format, and what is exported is the same.
    saved = place.checkpoint("run", 3)
    for folder, *options in (("alone",), ("merged", "--merge")):
        place.run("export", "run", folder, "--dtype", "float32", *options)
    whole = logits(AutoModelForCausalLM.from_pretrained(saved))
    assert (whole - logits(model)).abs().max() < 1e-4
    for folder in (saved / "adapter", "alone"):
        plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert (logits(plain) - whole).abs().max() < 1e-6
    assert (logits(AutoModelForCausalLM.from_pretrained("merged")) - whole).abs().max() < 1e-6
    (saved / "model.safetensors").unlink()  # as in earlier checkpoints: the adapters are merged as they are read
    config = sft_config(model="alone").model_copy(update={"lora": None})
    with Session(config) as session:
        for source in ("alone", str(saved)):
            config = config.model_copy(update={"model": source})
            read = load_model(config, AutoTokenizer.from_pretrained(base), session, runs=place.path, checked=True)
            assert (logits(read) - whole).abs().max() < 1e-6


def test_a_run_of_grpo_begins_at_its_reference_and_goes_on_from_its_adapters(place):
    changes = {"lora": LORA, "grpo": {"kl": 0.1}, "checkpoint": {"every": 2}}
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


@pytest.mark.parametrize("saves", [None, ENDS], ids=["adapters", "ends"])
@pytest.mark.parametrize("command", ["grpo", "dpo"])
def test_the_reference_of_a_run_that_goes_on_from_an_adapter_is_that_adapter(place, command, saves):
    save_tiny("base")
    start = by_peft("base", tied=True, saves=saves, moved=True)
    kl = {"grpo": {"kl": 0.1}, "zero_variance": "keep", "checkpoint": {"every": 2}}
    place.train(command, "run", model="start", **({} if command == "dpo" else kl))
    steps = place.steps("run")
    if command == "dpo":  # no margin before the first update, and as of the start in each later one
        assert steps[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert abs(steps[0]["preference/margin"]) < 1e-6 < abs(steps[2]["preference/margin"])
        return
    assert abs(steps[0]["policy/kl_ref"]) < 1e-9
    assert min(row["policy/kl_ref"] for row in steps[1:]) > 1e-6
    place.cut_back("run", "two", to=2)
    place.run("resume", "two")
    place.same("run", "two", step=3)
    # The reference does not move with the adapters, and leaves them as they were.
    expected = logits(start)
    moved = stepped(by_peft("base", tied=True, saves=saves), seed=1, size=0.1)
    before = logits(moved)
    with ReferenceAtStart(moved, Path("start")).active():
        assert torch.equal(logits(moved), expected)
    assert torch.equal(logits(moved), before)
    assert (before - expected).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft, for ends trained apart
def test_a_folder_of_peft_is_read_with_its_base_wherever_that_is(place, monkeypatch):
    for tied, together in ((False, False), (True, True), (True, False)):  # the last: ends trained apart are untied
        save_tiny("base", tied=tied)
        by_peft("base", tied=tied and together, saves=[*ENDS], moved=True)
        plain = peft.AutoPeftModelForCausalLM.from_pretrained("start").eval()
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/tokens\n"))
        chats = [place.run("chat", "start", "--max-tokens", "2", "--temperature", "0").out]
        place.run("template", "start")
        shutil.move("base", "moved")
        words = ["base model base: must be the folder of a model", "model_options.base_model="]
        place.run("chat", "start", code=3, words=words)
        place.train("sft", "lost", model="start", code=3, words=words)
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/tokens\n"))
        chats.append(
            place.run("chat", "start", "model_options.base_model=moved", "--max-tokens", "2", "--temperature", "0").out
        )
        assert chats[0] == chats[1]
        config = sft_config(model="start", model_options={"base_model": "moved"}).model_copy(update={"lora": None})
        with Session(config) as session:
            read = load_model(config, tiny_tokenizer(), session, runs=place.path)
        assert (logits(read) - logits(plain)).abs().max() < 1e-6
        assert not hasattr(read, "peft_config")
        read.save_pretrained("whole")
        assert (logits(AutoModelForCausalLM.from_pretrained("whole")) - logits(plain)).abs().max() < 1e-6
        if tied and not together:
            place.train(
                "sft", "x", "model_options.base_model=moved", model="start", code=2, words=["ensure_weight_tying=False"]
            )
        shutil.rmtree("moved")


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"lora": {"r": 8}}, "lora.r  must be 4, as in the adapter: got 8"),
        ({}, {"lora": {"alpha": 8, "target_modules": ["q_proj"]}}, "lora.target_modules  must be ['down_proj', 'gate"),
        (
            {"modules_to_save": ["lm_head"]},
            {"lora": {"modules_to_save": ENDS}},
            "must be ['lm_head'], as in the adapter",
        ),
        ({"use_dora": True}, {}, "has use_dora=True"),
        ({"bias": "all"}, {}, "has bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern={'q_proj': 2}"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights='olora'"),
        ({"layers_to_transform": [0]}, {"lora": {"target_modules": "all-linear"}}, "layers_to_transform=[0]"),
        (
            {"target_modules": ["q_proj"]},
            {"lora": {"target_modules": "all-linear"}},
            "must be ['q_proj'], as in the adapter",
        ),
        ({"lora_dropout": 0.1}, {"zero_variance": "keep"}, "set lora.dropout=0"),
    ],
)
def test_an_adapter_is_the_start_as_it_is_or_not_at_all(place, settings, changes, message):
    save_tiny("base", tied=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    made = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | settings)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained("base"), made).save_pretrained("start")
    command = "grpo" if "lora_dropout" in settings else "sft"
    place.train(command, "run", model="start", code=2, words=[message], **changes)
    if command == "grpo":
        place.train(command, "run", "lora.dropout=0", model="start", **changes)
        assert json.loads((place.checkpoint("run", 3) / "adapter/adapter_config.json").read_text())["lora_dropout"] == 0


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


def test_tied_embeddings_of_other_names_stay_tied(place):
    save_tiny("base", architecture="gpt2")
    place.train("sft", "run", model="base", lora=LORA | {"modules_to_save": ["wte"]})
    whole = AutoModelForCausalLM.from_pretrained(place.checkpoint("run", 3))
    assert whole.lm_head.weight is whole.transformer.wte.weight
    base = AutoModelForCausalLM.from_pretrained("base")
    assert (whole.lm_head.weight - base.lm_head.weight).abs().max() > 1e-3
    plain = peft.PeftModel.from_pretrained(base, place.checkpoint("run", 3) / "adapter")
    assert (logits(plain) - logits(whole)).abs().max() < 1e-6


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
        ({"lora": {"modules_to_save": ["lm_heat"]}}, "embed_tokens, lm_head.*Did you mean 'lm_head'"),
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


@pytest.mark.slow
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
    lora = LORA | {"modules_to_save": ENDS}
    rounding = 1e-4  # AdamW enlarges that of rows of the ends whose gradients are nearly 0
    changes = {"grpo": {"kl": 0.1}, "lora": lora, "tokens_per_microbatch": 150, "checkpoint": {"every": 2}}
    savings = (f"parallel.mode={layout}", "memory.checkpointing=on", "packing=on")
    place.train_as_one_and_as_ranks(
        "grpo", *savings, step=3, optim=OPTIM, memory={"checkpointing": "off"}, packing="off", **changes
    )
    assert place.steps("two")[0]["policy/kl_ref"] == 0
    for step in (2, 3):
        one, two = ({k: v for k, v in adapter(place, run, step).items() if ".lora_" in k} for run in ("one", "two"))
        assert difference(one, two) < 5e-6
    assert difference(place.weights("one", 3), place.weights("two", 3)) < rounding
    if layout == "ddp":
        return
    shutil.rmtree(place.checkpoint("two", 3))
    place.ranks("resume", "two")
    assert difference(adapter(place, "one", 3), adapter(place, "two", 3)) < rounding
    # adapters alone are merged into a sharded model, below new ones, in bfloat16 arithmetic
    shutil.rmtree(place.checkpoint("two", 3))
    savings = ("parallel.mode=fsdp2", "memory.checkpointing=on", "packing=on", "dtype=bfloat16")
    place.ranks("grpo", "mine.yaml", "model=runs/two", "optim.lr=1e-9", "steps=1", *savings, "--name", "three")
    merged = load_file(place.checkpoint("three", 1) / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    read = read_by_peft(place, "two", 2).state_dict()
    expected = {name: value for name, value in read.items() if name in merged}
    assert difference(expected, {name: value.float() for name, value in merged.items()}) < 2e-3


@pytest.mark.slow
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
@pytest.mark.parametrize("way", ["merged", "adapters", "ends"])
def test_vllm_gets_adapters_merged_or_alone_and_a_resumed_run_goes_on_with_them(place, way):
    options = {"enforce_eager": True} | ({"enable_lora": True} if way == "adapters" else {})
    rollout = {"engine": "vllm", "sleep": True, "options": options}
    save_tiny("base", hidden_size=64)
    lora = LORA | ({"modules_to_save": ENDS} if way == "ends" else {})
    settings = place.recipe("mine", "grpo", model="base", lora=lora, rollout=rollout, checkpoint={"every": 2})
    result = place.run("grpo", settings, "steps=2", "--name", "run")
    assert ("gets adapters only" in result.out) == (way == "adapters")
    place.run("resume", "run", "steps=4")
    for row in place.steps("run"):
        assert row["mismatch/probe"] < 1e-5
        assert row["mismatch/probe_warnings"] == 0
        assert row["mismatch/logp_abs_mean"] < 1e-5
