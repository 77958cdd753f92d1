"""Tiny models in folders, as users have them: with tied and with untied embeddings."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from llmrl.modules.llm.vision import model_class, save_processor
from llmrl.testing import tiny_model, tiny_processor, tiny_tokenizer


def save_tiny(folder: Path | str, *, tied: bool = True, **sizes: object) -> PreTrainedModel:
    """Writes a random model, and its tokenizer or processor, to ``folder``, and returns the model. 487 rows of
    embeddings, a prime number: ranks get unequal parts of them.
    """
    tokenizer = tiny_processor() if sizes.get("architecture") == "qwen2_vl" else tiny_tokenizer()
    config = tiny_model(tokenizer, **{"hidden_size": 32, "layers": 1, "heads": 2, "vocab_size": 487} | sizes).config
    config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).from_config(config, dtype=torch.float32).eval()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    model.save_pretrained(folder)
    save_processor(tokenizer, folder)
    return model


def save_tied_as(folder: Path | str, form: str) -> None:
    """Writes a model whose configuration ties its head to its embeddings, with files of another form.

    form    "both": the files have the embeddings and an equal head; "head": a head alone; "own head": a head of other
            values, which Transformers therefore does not tie; "bin": files of torch
    """
    model = save_tiny(folder)
    file, head = Path(folder) / "model.safetensors", model.get_output_embeddings().weight.detach()
    weights = load_file(file)
    if form == "bin":
        torch.save(model.state_dict(), file.with_name("pytorch_model.bin"))
        file.unlink()
        return
    if form == "head":
        del weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = head.flip(0).contiguous() if form == "own head" else head.clone()
    save_file(weights, file, metadata={"format": "pt"})
