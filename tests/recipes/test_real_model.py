"""SmolLM2-135M-Instruct: weights, a tokenizer and a template that were not made for these tests."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.modules.llm import Renderer, TransformersWrapper
from llmrl.modules.llm.conversation import TurnSampler
from llmrl.modules.llm.engines import SamplingParams, VLLMEngine
from llmrl.run.metrics import read_metrics
from llmrl.train.adapter_files import ADAPTER

MODEL = Path(__file__).parents[2] / "models" / "smollm2"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "complete").exists(), reason="scripts/real_model has not made the model"),
]
ASK, TELL = {"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": "5"}
CHATS = [
    [ASK, TELL],
    [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of Norway?"},
        {"role": "assistant", "content": "Oslo."},
        {"role": "user", "content": "And of Sweden?"},
        {"role": "assistant", "content": "Stockholm."},
    ],
]
SFT = {"model": str(MODEL), "data": {"path": "chats.jsonl"}, "steps": 3, "batch_size": 3, "epochs": 1.0}
SFT |= {"optim": {"lr": 1e-4, "warmup": 1}, "samples": 0, "checkpoint": {"every": 0}}
GRPO = {"model": str(MODEL), "prompts_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 8}, "samples": 0}
GRPO |= {"optim": {"lr": 1e-5, "warmup": 1, "schedule": "constant"}, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def chats(place):
    place.rows("chats.jsonl", [{"messages": chat} for chat in CHATS])
    return place


def by_hand(model, tokenizer):
    """-log p of what the assistant wrote, with the end of each turn, per token; the spans come from the text."""
    total, count = 0.0, 0
    for chat in CHATS:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained, at = torch.zeros(len(encoded.input_ids), dtype=torch.bool), 0
        for message in chat:
            if message["role"] == "assistant":
                start = text.index("<|im_start|>assistant\n", at) + len("<|im_start|>assistant\n")
                at = start + len(message["content"] + "<|im_end|>")
                assert text[start:at] == message["content"] + "<|im_end|>"
                trained |= torch.tensor([start <= low < at for low, _ in encoded.offset_mapping])
        ids = torch.tensor([encoded.input_ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        total, count = total - log_probs[trained[1:]].sum().item(), count + int(trained[1:].sum())
    return total / count


def assert_two_ranks_do_the_same(chats, read, start):
    """As the run "one". AdamW divides by the size of a gradient, so weights whose gradient is all rounding differ: what
    the steps added is compared as one vector.
    """
    chats.ranks("sft", "mine.yaml", "--name", "two", "parallel.mode=fsdp2")
    for one, two in zip(chats.metrics("one"), chats.metrics("two"), strict=True):
        for name in ("policy/loss", "policy/grad_norm", "tokens/trained"):
            assert one[name] == pytest.approx(two[name], rel=1e-4), f"{name} of step {one['step']}"
    one, two = read("one"), read("two")
    moved = torch.stack([(value - start.get(name, 0)).norm() for name, value in one.items()]).norm()
    apart = torch.stack([(value - two[name]).norm() for name, value in one.items()]).norm()
    assert moved > 0
    assert apart < 0.01 * moved


def test_examples_are_learned_and_exported_and_two_ranks_with_sharded_weights_are_one_process(chats, tokenizer):
    """The first loss is that of the model computed by hand; the tied weights are saved once and read as trained."""
    chats.run("sft", chats.recipe("mine", "sft", **SFT), "--name", "one")
    losses = [row["policy/loss"] for row in chats.metrics("one")]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert losses[0] == pytest.approx(by_hand(model, tokenizer), abs=1e-4)
    assert losses[2] < losses[0] - 0.5
    chats.run("export", "one", "out", "--dtype", "float32")
    exported = AutoModelForCausalLM.from_pretrained(chats.path / "out")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert by_hand(exported, tokenizer) < losses[2]
    again = AutoTokenizer.from_pretrained(chats.path / "out")
    assert again.apply_chat_template(CHATS[2]) == tokenizer.apply_chat_template(CHATS[2])
    assert_two_ranks_do_the_same(chats, lambda name: chats.weights(name, 3), model.state_dict())


def test_two_ranks_with_adapters_are_one_process(chats):
    def read(name):
        """Of an adapter what starts at zero."""
        saved = load_file(chats.checkpoint(name, 3) / ADAPTER / "adapter_model.safetensors")
        return {name: value for name, value in saved.items() if "lora_B" in name}

    chats.run("sft", chats.recipe("mine", "sft", **SFT, lora={"r": 4}), "--name", "one")
    assert_two_ranks_do_the_same(chats, read, {})


def test_rewards_move_the_model_and_a_resumed_run_goes_on_with_the_same_numbers(place):
    """The engine's log-probs are the trainer's, on a vocabulary and lengths that no test chose."""
    place.rows("prompts.jsonl", [{"prompt": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(8)])
    (place.path / "short.py").write_text("def share(completion):\n    return len(completion) / 100\n")
    task = {"env": {"name": "chat", "dataset": "prompts.jsonl", "reward": "short:share"}}
    place.train("grpo", "whole", steps=3, **GRPO, **task)
    place.cut_back("whole", "parted", to=2)
    place.run("resume", "parted")
    whole, parted = (place.steps(name) for name in ("whole", "parted"))
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert whole[2]["reward/mean"] == parted[-1]["reward/mean"]
    weights = [place.weights(name, 3) for name in ("whole", "parted")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    start = AutoModelForCausalLM.from_pretrained(MODEL).state_dict()
    assert any(not torch.equal(start[name], value) for name, value in weights[0].items())


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def answers(engine, tokenizer, plain):
    """Greedy answers to three questions are those of Transformers, with its log-probs; the arithmetic is right."""
    sampler = TurnSampler(Renderer(tokenizer), engine, SamplingParams(max_new_tokens=12, temperature=0.0))
    for chat in (chat[:-1] for chat in CHATS):
        [turn] = sampler.sample(chat)
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert turn.prompt_ids.tolist() == prompt["input_ids"][0].tolist()
        expected = plain.generate(**prompt, max_new_tokens=12, do_sample=False)[0, len(turn.prompt_ids) :]
        assert turn.ids.tolist() == expected.tolist()
        with torch.no_grad():
            logits = plain(turn.stream[None]).logits[0, len(turn.prompt_ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, turn.ids[:, None]).squeeze(-1)
        assert torch.allclose(turn.log_probs, own, atol=1e-3)
        if chat == [ASK]:
            assert "5" in turn.message["content"]


def test_the_engine_answers_as_transformers_does(tokenizer, plain):
    answers(TransformersWrapper(plain, tokenizer=tokenizer).engine, tokenizer, plain)


@pytest.mark.vllm
def test_vllm_answers_as_transformers_does(tokenizer, plain):
    with contextlib.closing(VLLMEngine(str(MODEL), tokenizer=tokenizer, seed=0, max_model_len=256)) as engine:
        answers(engine, tokenizer, plain)


def test_the_notebook_runs_and_its_model_answers_better(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "models").symlink_to(MODEL.parent)
    notebook = nbformat.read(MODEL.parents[1] / "docs" / "notebooks" / "first_run.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    rewards = [row["reward/mean"] for row in read_metrics(folder / "first_run/runs/first") if "reward/mean" in row]
    assert rewards[0] <= 0.3
    assert rewards[-1] >= 0.8
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert printed.rstrip().endswith("is cold."), "the chat at the end"
    assert "\x1b[1A" not in printed, "a cell cannot move the cursor up"
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output and "text/html" in output["data"]
    ]
    assert "rgba(0,114,178" in shown[0], "trained tokens"
    assert "first_run/runs/first/report.html" in shown[1]
