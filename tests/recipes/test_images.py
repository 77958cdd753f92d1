"""Recipes with models that read images: the embedded task, data with columns of images, the plan."""

import io
import json

import pytest

from llmrl.data.llm.dataset_files import load_rows, to_messages, to_prompt
from llmrl.envs.llm.tasks.colours import COLOURS, colours_problems
from llmrl.errors import DataError
from llmrl.modules.llm.vision import vision_tower
from llmrl.testing import tiny_model, tiny_processor
from llmrl.train.memory import plan_memory
from llmrl.train.model_shape import decoder_blocks, model_shape
from llmrl.train.settings import SFTConfig
from tests.support.images import noise

VISION = {"architecture": "qwen2_vl", "hidden_size": 32, "layers": 1, "heads": 2}
COLOURS_GRPO = {"model": VISION, "env": {"name": "colours", "dataset": None, "reward": None}, "steps": 2}


def picture(seed=0):
    file = io.BytesIO()
    noise(16, 16, seed).save(file, "PNG")
    return file.getvalue()


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_examples_and_reward_train_a_model_that_reads_images(place):
    words = ("images the part that reads them is trained", "GiB of tensors in RAM", "never packed")
    data = {"path": "colours", "rows": 24}
    unfrozen = {"freeze_vision": False}
    place.train("sft", "taught", model=VISION, data=data, steps=2, model_options=unfrozen, words=words)
    options = {"prompts_per_step": 2, "zero_variance": "keep", "eval": {"rows": 6, "max_tokens": 4}}
    place.train("grpo", "improved", **{**COLOURS_GRPO, **options, "model": "runs/taught"}, words=("frozen (",))
    for row in place.steps("improved"):
        assert abs(row["mismatch/kl"]) < 1e-6  # the engine and the trainer agree, pixels included
        assert row["policy/grad_norm"] >= 0
    assert place.checkpoints("improved") == ["step2"]


def test_data_with_images_are_read_from_files_and_parquet(place):
    for n in range(2):
        (place.path / f"{n}.png").write_bytes(picture(n))
    one = {"prompt": "What?", "image": "0.png", "answer": "a"}
    two = {"prompt": "And?", "images": ["0.png", "1.png"], "answer": "b"}
    env = {"dataset": place.rows("asked.jsonl", [one, two])}
    place.train("grpo", "asked", model=VISION, env=env, steps=1, prompts_per_step=2)
    assert [row["rollout/failed"] for row in place.steps("asked")] == [0]
    row = {"prompt": "What?", "image": {"bytes": picture(), "path": None}, "completion": "Noise."}
    data = {"path": place.rows("rows.parquet", [row]), "rows": None}
    place.train("sft", "rows", model=VISION, data=data, steps=1, batch_size=1)
    assert place.steps("rows")[0]["tokens/trained"] > 0


def test_an_image_that_is_missing_or_broken_is_named_with_its_row_and_column(place):
    (place.path / "broken.png").write_bytes(picture()[:60])
    (place.path / "good.png").write_bytes(picture())
    rows = [{"prompt": "What?", "image": f"{name}.png", "completion": "a"} for name in ("good", "broken")]
    data = {"path": place.rows("broken.jsonl", rows)}
    place.train("sft", "a", model=VISION, data=data, code=3, words=("column 'image' of row 2", "broken.png"))
    env = {"dataset": place.rows("missing.jsonl", [{"prompt": "What?", "images": ["none.png"], "answer": "a"}])}
    place.train("grpo", "b", model=VISION, env=env, code=3, words=("column 'images' of row 1", "FileNotFoundError"))
    data = {"path": place.rows("text.jsonl", rows[:1])}
    place.train("sft", "c", data=data, code=3, words=("images need the model's processor",))


# --- rows and shapes --------------------------------------------------------------------------------------------------


def test_images_take_the_places_that_messages_leave_for_them(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    places = [{"type": "text", "text": "This"}, {"type": "image"}]
    chat = [{"role": "user", "content": places}, {"role": "assistant", "content": "noise"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": chat, "images": ["a.png"]}) + "\n")
    [row] = load_rows(path)
    image = {"type": "image", "image": str(tmp_path / "a.png")}
    assert to_messages(row)[0]["content"] == [places[0], image]
    assert to_prompt(row) == {"query": [{"role": "user", "content": [places[0], image]}], "answer": "noise"}
    with pytest.raises(DataError, match="got 2 images for 1 parts"):
        to_messages({**row, "image": row["images"][0]}, number=1)


def test_no_shade_of_the_embedded_task_is_in_two_splits():
    problems = [row for name in ("train", "validation", "test") for row in colours_problems(name)]
    shades = [row["image"].getpixel((0, 0)) for row in problems]
    assert len(set(shades)) == len(shades)
    assert {row["answer"] for row in colours_problems("test")} == set(COLOURS)


def test_a_frozen_part_costs_weights_and_neither_gradients_nor_moments():
    model = tiny_model(tiny_processor(), architecture="qwen2_vl", heads=2)
    config = SFTConfig(model="tiny", data={"path": "colours"})
    trained = plan_memory(config, model_shape(model), num_gpus=1, low_precision=False)
    tower = vision_tower(model).requires_grad_(False)
    shape = model_shape(model)
    frozen = plan_memory(config, shape, num_gpus=1, low_precision=False)
    size = 4 * sum(parameter.numel() for parameter in tower.parameters())
    assert frozen.training["weights"] == trained.training["weights"] == 4 * shape.parameters
    assert trained.training["gradients"] - frozen.training["gradients"] == size
    assert trained.training["optimizer"] - frozen.training["optimizer"] == 2 * size
    assert len(decoder_blocks(model)) == shape.num_blocks == 2  # of the text alone
    assert shape.frozen * 4 == size


@pytest.mark.slow
def test_a_tiny_model_learns_the_names_of_colours_by_examples_and_then_by_reward(place):
    place.run("sft", "colours_sft", "--name", "taught")
    place.run("grpo", "colours_grpo", "model=runs/taught", "--name", "improved")
    lines = map(json.loads, (place.path / "runs" / "improved" / "metrics.jsonl").read_text().splitlines())
    scores = [line["eval/colours/mean"] for line in lines if "eval/colours/mean" in line]
    assert scores[0] <= 0.75, "a third of the examples is wrong"
    assert scores[-1] >= max(0.8, scores[0] + 0.1)
