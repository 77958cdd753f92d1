"""Prints the table of docs/scaling.md: the settings with which each model trains with GRPO on each set of GPUs."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmrl.train.gpus import parse_gpu
from llmrl.train.models.shape import ModelShape, model_shape
from llmrl.train.planning.fitting import remedies, with_changes
from llmrl.train.planning.memory import plan_memory, trainer_gpus
from llmrl.train.settings.grpo import GRPOConfig

QWEN25 = {"num_key_value_heads": 8, "vocab_size": 152064, "num_attention_heads": 40, "hidden_size": 5120}
MODELS = {
    "0.5B": ("qwen2", QWEN25 | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    "3B": ("qwen2", QWEN25 | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    "7B": ("qwen2", QWEN25 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4}),
    "14B": ("qwen2", QWEN25 | {"intermediate_size": 13824, "num_hidden_layers": 48}),
    "32B": ("qwen2", QWEN25 | {"intermediate_size": 27648, "num_hidden_layers": 64}),
    "70B": ("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}),
    "30B-A3B": ("qwen3_moe", {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}),
}  # fmt: skip
WORDS = {
    "memory.checkpointing=on": "ckpt",
    "parallel.mode=fsdp2": "fsdp2",
    "memory.offload=activations": "act-offload",
    "memory.offload=parameters": "offload",
    "lora.r=16": "lora",
    "lora.quantize=nf4": "nf4",
    "rollout.over_ranks=True": "over_ranks",
    "optim.name=adamw_8bit": "8bit",
    "optim.name=adamw_offload": "opt-offload",
}


def shape_of(name: str) -> ModelShape:
    family, sizes = MODELS[name]
    with torch.device("meta"):
        return model_shape(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)))


def cell(config: GRPOConfig, shape: ModelShape, gpus: str) -> str:
    """The settings that make the run fit, and the GiB that it then needs per GPU."""
    gpu = parse_gpu(gpus)
    changes = remedies(config, shape, gpu)
    if changes is None:
        return "-"
    config = with_changes(config, changes)
    trainers = trainer_gpus(config, gpu).count
    plan = plan_memory(config, shape, num_gpus=trainers, low_precision=True, capacity=gpu.bytes)
    named = [WORDS.get(f"{name}={value}", f"{name.rpartition('.')[2]}={value}") for name, value in changes.items()]
    if plan.checkpointing and "ckpt" not in named:
        named.append("ckpt")
    return f"{', '.join(named) or 'defaults'}: {plan.peak / 2**30:.0f}"


def heading(size: str) -> str:
    """The column of ``--gpu 24:8x2``: 2 x 8 x 24 GB."""
    memory, _, count = size.partition(":")
    return " x ".join([*reversed(count.split("x")), memory]) + " GB"


def table() -> str:
    config = GRPOConfig(model="x", env={"name": "gsm8k"}, rollout={"engine": "vllm"})
    sizes = [f"{size}:{count}" for count in ("1", "8", "8x2") for size in (24, 40, 80)]
    lines = ["| model | " + " | ".join(map(heading, sizes)) + " |"]
    lines.append("|" + "---|" * (len(sizes) + 1))
    for name in MODELS:
        shape = shape_of(name)
        lines.append(f"| {name} | " + " | ".join(cell(config, shape, size) for size in sizes) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
