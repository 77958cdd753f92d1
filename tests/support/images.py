"""Images of random pixels, a sharpened tiny model that reads them, and log-probs of its own forward."""

from __future__ import annotations

import random

import torch
from PIL import Image
from torch import Tensor

from llmrl.testing import tiny_model, tiny_processor
from tests.support.causal_models import sharpened

SIZES = [(16, 24), (40, 20), (8, 60), (9, 9)]


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def asks(*sizes: tuple[int, int], seed: int = 0, text: str = "What is it?") -> dict:
    """A user's message with images of these sizes."""
    images = [{"type": "image", "image": noise(*size, seed * 100 + n)} for n, size in enumerate(sizes)]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def sharp_model(seed: int = 0):
    """A processor, and a model to which a wrong pixel or position makes a difference of nats."""
    processor = tiny_processor()
    return processor, sharpened(tiny_model(processor, architecture="qwen2_vl", heads=2, seed=seed))


@torch.no_grad()
def own_log_probs(model, ids: Tensor, media: dict[str, Tensor]) -> Tensor:
    """float32[T] by one forward of the whole model; the sampled ids must not spell the token of an image."""
    inputs = {}
    if len(media["positions"]):
        kinds = torch.zeros(1, len(ids), dtype=torch.int64)
        kinds[0, media["positions"]] = 1
        inputs = {name: value for name, value in media.items() if name != "positions"} | {"mm_token_type_ids": kinds}
    log_p = model(input_ids=ids[None], **inputs).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]])
