"""`llmrl export`: a checkpoint as a folder that Transformers and peft load, whole or absent."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture
def taught(place):
    place.train("sft", "taught", env={"name": "sums"}, eval={"rows": 4, "max_tokens": 4}, steps=2)
    return place


def logits(model):
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        return model(ids).logits.float()


def test_the_folder_is_the_checkpoint_in_bfloat16_with_its_template_and_a_card(taught):
    taught.run("export", "taught", "out")
    checkpoint = taught.checkpoint("taught", 2)
    folder = taught.path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for name, value in taught.weights("taught", 2).items():
        assert torch.equal(model.state_dict()[name], value.bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert not {"trainer.pt", "checksums.json"} & {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert "| sums | " in card
    assert "`optim.lr: 0.01` (taught.yaml" in card
    assert "library_name: transformers" in card


def test_the_card_holds_no_secrets_of_the_settings(taught):
    tools = [{"mcp": {"server": {"command": "x", "env": {"NAME": "SECRET1"}}, "tool": "lookup"}}]
    settings = yaml.safe_load((taught.path / "runs/taught/config.yaml").read_text())
    settings["env"] |= {"tools": tools, "max_turns": 2}
    (taught.path / "runs/taught/config.yaml").write_text(yaml.safe_dump(settings))
    info = json.loads((taught.path / "runs/taught/run.json").read_text())
    info["origins"]["env.tools"] = "command line"
    info["arguments"] += [f"env.tools={json.dumps(tools)}", "model=http://me:SECRET2@host"]
    (taught.path / "runs/taught/run.json").write_text(json.dumps(info))
    taught.run("export", "taught", "out")
    card = (taught.path / "out/README.md").read_text()
    assert "env.tools" in card
    assert "SECRET" not in card
    assert "SECRET" not in taught.run("show", "taught").out


def test_nothing_is_written_over_and_what_fails_leaves_nothing(taught):
    taught.rows("out", [{"kept": 1}])
    taught.run("export", "taught", "out", code=2)
    assert json.loads((taught.path / "out").read_text()) == {"kept": 1}
    taught.run("export", "taught", "new", "--merge", code=2)  # no adapters
    taught.run("export", "taught", "new", "--checkpoint", "step9", code=3)
    weights = taught.checkpoint("taught", 2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    taught.run("export", "taught", "new", code=3, words=["model.safetensors has"])
    assert sorted(path.name for path in taught.path.iterdir() if "new" in path.name) == []


def test_a_hub_that_cannot_be_reached_leaves_the_folder(taught):
    taught.run("export", "taught", "out", "--push", "someone/model", code=3, words=["hf auth login"])  # it is offline
    assert AutoModelForCausalLM.from_pretrained(taught.path / "out").config.model_type == "qwen2"


def test_adapters_are_exported_alone_or_merged(place):
    peft = pytest.importorskip("peft")
    place.train("sft", "adapted", lora={"r": 2}, steps=2, checkpoint={"every": 1, "keep": 2})
    for name, *options in (("alone",), ("merged", "--merge"), ("earlier", "--merge", "--checkpoint", "step1")):
        place.run("export", "adapted", name, "--dtype", "float32", *options)
    checkpoints = place.path / "runs/adapted/checkpoints"
    whole = logits(AutoModelForCausalLM.from_pretrained(checkpoints / "step2"))
    merged = logits(AutoModelForCausalLM.from_pretrained(place.path / "merged"))
    adapted = logits(peft.AutoPeftModelForCausalLM.from_pretrained(place.path / "alone"))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(adapted, whole, rtol=1e-4, atol=1e-5)
    assert (place.path / "alone" / "chat_template.jinja").exists()
    earlier = logits(AutoModelForCausalLM.from_pretrained(place.path / "earlier"))
    assert not torch.allclose(earlier, whole, atol=1e-6)


def test_a_reward_model_keeps_its_head(place):
    place.train("reward", "judge", steps=1)
    place.run("export", "judge", "out", "--dtype", "float32")
    model = AutoModelForSequenceClassification.from_pretrained(place.path / "out")
    for name, value in place.weights("judge", 1).items():
        assert torch.equal(model.state_dict()[name], value), name
    assert "AutoModelForSequenceClassification" in (place.path / "out/README.md").read_text()
