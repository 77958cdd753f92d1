"""`llmrl export`: a checkpoint as a folder that Transformers and peft load, whole or absent."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from llmrl.commands.export import _whole_or_absent
from llmrl.errors import RunFolderError


@pytest.fixture
def taught(place):
    place.train("sft", "taught", env={"name": "sums"}, eval={"rows": 4, "max_tokens": 4}, steps=2)
    return place


def run_card(place, folder):
    """Runs the code of a model card beside the folder, as a reader would; returns what it prints."""
    code = (place.path / folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    words = [sys.executable, "-c", code.replace("max_new_tokens=256", "max_new_tokens=4")]
    ended = subprocess.run(words, cwd=place.path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def logits(model):
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        return model(ids).logits.float()


def test_the_folder_is_the_checkpoint_in_bfloat16_with_its_template_and_a_card(taught):
    before = os.umask(0o027)  # of a group that serves the model
    try:
        taught.run("export", "taught", "out")
    finally:
        os.umask(before)
    checkpoint = taught.checkpoint("taught", 2)
    for files, mode in ((taught.path / "out", 0o640), (checkpoint, 0o666 & ~before)):
        assert {path.stat().st_mode & 0o777 for path in files.iterdir()} == {mode}
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
    assert "pip install torch transformers\n" in card
    assert "| loss | " in card
    assert run_card(taught, "out").strip()


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


def test_only_files_that_the_checkpoint_lists_are_exported_and_no_links(taught):
    secret, checkpoint = taught.path / "secret", taught.checkpoint("taught", 2)
    secret.write_text("mine")
    (checkpoint / "notes.txt").symlink_to(secret)
    (checkpoint / "more.json").write_text("{}")
    taught.run("export", "taught", "out")
    assert not {"notes.txt", "more.json"} & {path.name for path in (taught.path / "out").iterdir()}
    (taught.path / "moved").write_bytes((checkpoint / "config.json").read_bytes())
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to(taught.path / "moved")
    assert "config.json is a link" in taught.run("export", "taught", "out2", code=3).err
    (checkpoint / "config.json").unlink()
    os.mkfifo(checkpoint / "config.json")
    assert "'config.json' is not a file" in taught.run("export", "taught", "out2", code=3).err


def test_weights_that_do_not_fit_on_the_disk_leave_nothing_and_say_so(tmp_path):
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RunFolderError, match="make room"), _whole_or_absent(tmp_path / "out"):
        raise full
    assert not list(tmp_path.iterdir())


def test_a_hub_that_cannot_be_reached_leaves_the_folder(taught):
    taught.run("export", "taught", "out", "--push", "someone/model", code=3, words=["hf auth login"])  # it is offline
    assert AutoModelForCausalLM.from_pretrained(taught.path / "out").config.model_type == "qwen2"


@pytest.mark.slow
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
    assert run_card(place, "alone").strip()
    earlier = logits(AutoModelForCausalLM.from_pretrained(place.path / "earlier"))
    assert not torch.allclose(earlier, whole, atol=1e-6)


@pytest.mark.slow
def test_a_reward_model_keeps_its_head(place):
    place.train("reward", "judge", steps=1)
    place.run("export", "judge", "out", "--dtype", "float32")
    model = AutoModelForSequenceClassification.from_pretrained(place.path / "out")
    for name, value in place.weights("judge", 1).items():
        assert torch.equal(model.state_dict()[name], value), name
    assert "AutoModelForSequenceClassification" in (place.path / "out/README.md").read_text()
    assert math.isfinite(float(run_card(place, "out")))
