"""Recipes where CUDA does something of its own: each body runs on a CPU, too."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from llmrl.testing import tiny_model, tiny_tokenizer
from llmrl.train.gpus import find_gpu

ON_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
VISION = {"architecture": "qwen2_vl", "hidden_size": 32, "layers": 1, "heads": 2}
LOSSES = {"float32": 1e-4, "bfloat16": 0.05}


@pytest.fixture
def on(monkeypatch):
    """Hides the GPUs from runs on a CPU; says whether a run on the device is on a GPU."""

    def choose(device: str) -> bool:
        if device == "cpu":
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        return device == "cuda"

    return choose


@pytest.mark.parametrize("dtype", list(LOSSES))
@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_resumed_where_it_was_and_recomputed_layers_change_nothing(place, on, device, dtype):
    on_gpu, options = on(device), {"dtype": dtype, "checkpoint": {"every": 2}, "steps": 4}
    place.train("sft", "one", **options)
    place.train("sft", "again", **options, memory={"checkpointing": "on"})
    for row, other in zip(place.steps("one"), place.steps("again"), strict=True):
        assert row["policy/loss"] == pytest.approx(other["policy/loss"], abs=LOSSES[dtype])
        assert row["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=10 * LOSSES[dtype])
    place.cut_back("one", "two", to=2)
    place.run("resume", "two")
    place.same("one", "two", tolerance=LOSSES[dtype] if on_gpu else 0.0, step=4)
    metrics = place.metrics("one")
    assert all(row["perf/peak_gb"] > 0 for row in metrics)
    if on_gpu:  # of tensors, not of the process
        assert max(row["perf/peak_gb"] for row in metrics) < 2
    has_peak = on_gpu and dtype == "bfloat16" and find_gpu(torch.device("cuda"), 1).flops
    assert [0 < row.get("perf/mfu", 0) < 1 for row in metrics] == [bool(has_peak)] * 4


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), DEVICES[1]])
def test_images_and_adapters_are_sampled_and_trained_alike(place, on, device):
    pytest.importorskip("peft")
    on(device)
    shared = {"model": VISION, "env": {"name": "colours", "dataset": None, "reward": None}, "steps": 2}
    shared |= {"prompts_per_step": 2, "zero_variance": "keep", "eval": {"rows": 2, "max_tokens": 2}}
    for name, changes in {"whole": {"model_options": {"freeze_vision": False}}, "adapted": {"lora": {"r": 2}}}.items():
        place.train("grpo", name, dtype="float32", **shared, **changes)
        assert all(abs(row["mismatch/kl"]) < 1e-5 and row["policy/grad_norm"] >= 0 for row in place.steps(name))


# --- vLLM on the GPU of the trainer -----------------------------------------------------------------------------------

HEADS_OF_32 = {"hidden_size": 64, "layers": 1, "heads": 2}  # the smallest that vLLM's kernels compute
ADAPTERS = {"model": "base", "lora": {"r": 2, "quantize": "nf4"}, "checkpoint": {"every": 2}, "optim": {"lr": 1e-3}}
PICTURES = {"model": {**VISION, **HEADS_OF_32}, "env": {"name": "colours", "dataset": None, "reward": None}}
GRAPHS = {"model": HEADS_OF_32, "rollout": {"own_process": True, "options": {"enforce_eager": False}}}
CASES = {"adapters": ADAPTERS, "pictures": PICTURES, "graphs": GRAPHS}


def beside_an_engine(place, name):
    """The settings of a case, and the files of its model."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, **HEADS_OF_32).save_pretrained(place.path / "base")
    tokenizer.save_pretrained(place.path / "base")
    rollout = {"engine": "vllm", **CASES[name].get("rollout", {})}
    return {**CASES[name], "rollout": rollout, "zero_variance": "keep", "dtype": "bfloat16"}


@pytest.mark.vllm
@pytest.mark.parametrize("name", list(CASES))
def test_what_runs_beside_an_engine_on_one_gpu_passes_the_plan_without_one(place, name):
    pytest.importorskip("vllm")
    if name == "adapters":
        pytest.importorskip("bitsandbytes")
    words = ("1 x H100", "engine     vLLM", "% of the GPU's memory", "asleep during updates")
    place.plan("grpo", "--gpu", "H100:1", words=words, **beside_an_engine(place, name))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(CASES))
def test_quantised_models_images_and_cuda_graphs_are_sampled_by_an_engine_on_the_same_gpu(place, name):
    pytest.importorskip("vllm")
    if name == "adapters":
        pytest.importorskip("bitsandbytes")
    recipe = place.recipe(name, "grpo", **beside_an_engine(place, name))
    place.finish(place.process("grpo", recipe, "--name", name), words=["asleep during updates"])
    rows = place.metrics(name)
    assert len(rows) == 3
    for row in rows:
        assert row["mismatch/probe_warnings"] == 0
        assert row["mismatch/probe"] < 0.1, "in bfloat16"
        assert row["perf/sync_gb_s"] > 0
        assert row["policy/grad_norm"] >= 0
    if name == "adapters":
        place.run("export", name, "merged", "--merge", "--dtype", "float32", "--checkpoint", "step2")
        whole, base = (load_file(place.path / folder / "model.safetensors") for folder in ("merged", "base"))
        assert whole.keys() == base.keys()
        assert place.weights(name, 3).keys() >= base.keys(), "no longer in 4 bits"
