"""Images of random pixels, a sharpened tiny model that reads them, and log-probs of its own forward."""

from __future__ import annotations

import random

import torch
from PIL import Image
from tensordict import TensorDict
from torch import Tensor

from llmrl.modules.llm.policies.containers import LogProbs, Masks, Tokens
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.vision import write_media
from llmrl.testing import tiny_model, tiny_processor
from tests.support.causal_models import sharpened

SIZES = [(16, 24), (40, 20), (8, 60), (9, 9)]


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def asks(*sizes: tuple[int, int], seed: int = 0, text: str = "What is it?") -> dict:
    """A user's message with images of these sizes."""
    images = [{"type": "image", "image": noise(*size, seed * 100 + n)} for n, size in enumerate(sizes)]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def image_rows(processor, sizes: list[tuple[tuple[int, int], ...]], seed: int = 0) -> TensorDict:
    """A conversation for each entry: a question with images of these sizes, perhaps none, and an answer of random ids;
    in groups of two.
    """
    generator, renderer = torch.Generator().manual_seed(seed), Renderer(processor)
    asked = [asks(*row, seed=n, text="What is it?" * (n % 3 + 1)) for n, row in enumerate(sizes)]
    prompts = renderer.prompt_ids([[message] for message in asked])
    images = [[part["image"] for part in message["content"] if "image" in part] for message in asked]
    media = [renderer.media(*row) for row in zip(images, prompts, strict=True)]
    answers = [torch.randint(3, 400, (4 + n,), generator=generator) for n in range(len(sizes))]
    ids = [torch.cat(row) for row in zip(prompts, answers, strict=True)]
    masks = [torch.arange(len(row)) >= len(prompt) for row, prompt in zip(ids, prompts, strict=True)]
    return TensorDict(
        {
            "tokens": Tokens.from_rows({"full": ids}),
            "masks": Masks.from_rows({"all_assistant_mask": masks}),
            "log_probs": LogProbs.from_rows({"full": [-5 - torch.rand(len(row), generator=generator) for row in ids]}),
            "advantage": torch.randn(len(ids), 1, 1, generator=generator),
            "group_id": torch.arange(len(ids)) // 2,
            "media": write_media(media, [len(ids)]),
        },
        batch_size=[len(ids)],
    )


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
