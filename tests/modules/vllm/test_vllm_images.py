"""vLLM with images: it reads the very ids and tensors that the trainer scores, and agrees on their log-probs."""

import copy
import importlib
from contextlib import closing

import pytest
import torch

from llmrl.errors import UnsupportedError
from llmrl.modules.llm.engines import AsyncVLLMEngine, SamplingParams, TransformersEngine, VLLMEngine
from llmrl.modules.llm.rendering import Renderer
from llmrl.testing import tiny_model
from tests.support.images import SIZES, asks, noise, own_log_probs, sharp_model
from tests.support.vllm import assert_rows_close


def has_torchvision() -> bool:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # missing, or a build for a GPU beside a torch without one
        return False
    return True


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not has_torchvision(), reason="vLLM's Qwen2-VL needs a torchvision of this torch's build"),
]


def rows_of(processor):
    renderer = Renderer(processor)
    shown = (SIZES[:2], (), SIZES[2:3], SIZES[3:4])
    images = [[noise(*size, n) for n, size in enumerate(sizes)] for sizes in shown]
    chats = [[asks(*sizes)] if sizes else [{"role": "user", "content": "no image"}] for sizes in shown]
    ids = renderer.prompt_ids(chats)
    return ids, [renderer.media(*row) for row in zip(images, ids, strict=True)]


@pytest.mark.parametrize("kind", ["in_process", pytest.param("async", marks=pytest.mark.slow)])
def test_sampling_and_scoring_agree_with_the_trainer_on_images(kind):
    processor, model = sharp_model()
    make = VLLMEngine if kind == "in_process" else AsyncVLLMEngine
    options = {"max_model_len": 256, "max_num_batched_tokens": 512, "eos_token_ids": (), "seed": 0}
    with closing(make(model, tokenizer=processor, **options)) as engine:
        ids, media = rows_of(processor)
        trainer = TransformersEngine(copy.deepcopy(model), eos_token_ids=(), pad_token_id=0)

        def check(params):
            drawn = engine.generate(ids, params, media=media, seeds=[0, 1, 2, 3])
            full = [torch.cat(row) for row in zip(ids, drawn.ids, strict=True)]
            scores, own = engine.score(full, media=media), trainer.score(full, media=media)
            assert_rows_close(scores, own)
            assert_rows_close(drawn.log_probs, [row[len(prompt) :] for row, prompt in zip(own, ids, strict=True)])
            return drawn

        check(SamplingParams(max_new_tokens=16))
        sampled = torch.cat([ids[0], torch.tensor([7, processor.image_token_id, 9])])  # an image's token, drawn
        assert_rows_close(*(one.score([sampled], media=media[:1]) for one in (engine, trainer)))

        _, changed = sharp_model(seed=1)  # also the part that reads images: what vLLM kept of them is stale
        engine.update_weights(changed.state_dict(), version=1)
        trainer.update_weights(changed.state_dict(), version=1)
        check(SamplingParams(max_new_tokens=8))
        assert_rows_close(trainer.score(ids[:1], media=media[:1]), [own_log_probs(changed, ids[0], media[0])])


def test_a_model_of_text_alone_refuses_images():
    ids, media = rows_of(sharp_model()[0])
    model, refused = tiny_model(heads=2, vocab_size=600), pytest.raises(UnsupportedError, match="images need a model")
    with closing(VLLMEngine(model, max_model_len=256, eos_token_ids=())) as engine, refused:
        engine.generate(ids, SamplingParams(max_new_tokens=2), media=media)
