"""Prompts with images for vLLM, from ids and tensors that are already processed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmrl.errors import UnsupportedError
from llmrl.modules.llm.engines.vllm.compat import vllm_module
from llmrl.modules.llm.vision import POSITIONS


def prompt_of(llm: Any, ids: list[int], media: Mapping[str, Tensor] | None, version: int) -> Any:
    """A prompt of ids and any images, in a form that vLLM does not process again: it reads exactly these ids.

    Raises  UnsupportedError  for a model that reads no images, or whose tokens of one image are not contiguous
    """
    if media is None or not len(media[POSITIONS]):
        return vllm_module("vllm.inputs").tokens_input(ids)
    processor = getattr(llm.renderer, "mm_processor", None)
    if processor is None:
        raise UnsupportedError("VLLMEngine: images need a model that reads them: this one does not.")
    if getattr(llm.model_config.multimodal_config, "mm_device_do_normalize", False):
        raise UnsupportedError(
            "VLLMEngine: pixels are already normalised, and the LLM must not normalise them again; build it with "
            "mm_device_do_normalize=False."
        )
    inputs = vllm_module("vllm.multimodal.inputs")
    tensors = {name: value for name, value in media.items() if name != POSITIONS}
    features = vllm_module("transformers").BatchFeature(tensors)
    items = inputs.MultiModalKwargsItems.from_hf_inputs(features, processor._get_mm_fields_config(features, {}))
    # vLLM expects a start and a length for each image; media have one list of the positions of all image tokens.
    positions = media[POSITIONS]
    begins = positions.diff(prepend=positions[:1] - 2) != 1  # each image is a run of consecutive positions
    starts, counts = positions[begins].tolist(), begins.cumsum(0).bincount()[1:].tolist()
    if list(items) != ["image"] or len(items["image"]) != len(starts):
        raise UnsupportedError(
            f"VLLMEngine: the tokens of an image must be contiguous, and other tokens must separate two images: got "
            f"{len(starts)} runs of them for the tensors {', '.join(tensors)}; use the TransformersEngine."
        )
    return vllm_module("vllm.inputs").mm_input(
        ids,
        items,
        # vLLM caches embeddings by this key; they depend on the weight version.
        {"image": [f"{version}-{_digest(item)}" for item in items["image"]]},
        {"image": [inputs.PlaceholderRange(offset=s, length=n) for s, n in zip(starts, counts, strict=True)]},
    )


def _digest(item: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(item.get_data().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
