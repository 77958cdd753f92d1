"""Recipes where CUDA does something of its own: each body runs on a CPU, too."""

from __future__ import annotations

import pytest
import torch

from llmrl.train.memory import find_gpu

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


@pytest.mark.parametrize("device", DEVICES)
def test_images_and_adapters_are_sampled_and_trained_alike(place, on, device):
    pytest.importorskip("peft")
    on(device)
    shared = {"model": VISION, "env": {"name": "colours", "dataset": None, "reward": None}, "steps": 2}
    shared |= {"prompts_per_step": 2, "zero_variance": "keep", "eval": {"rows": 2, "max_tokens": 2}}
    for name, changes in {"whole": {"model_options": {"freeze_vision": False}}, "adapted": {"lora": {"r": 2}}}.items():
        place.train("grpo", name, dtype="float32", **shared, **changes)
        assert all(abs(row["mismatch/kl"]) < 1e-5 and row["policy/grad_norm"] >= 0 for row in place.steps(name))
