"""Recipes with models that read images: the embedded task, data with columns of images, the plan."""

import io
import json
import math

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from llmrl.data.llm.dataset_files import load_rows
from llmrl.data.llm.images import load_image
from llmrl.data.llm.rows import to_messages, to_prompt
from llmrl.envs.llm.rewards import JudgeReward
from llmrl.envs.llm.tasks.colours import COLOURS, colours_demonstrations, colours_problems
from llmrl.errors import DataError
from llmrl.modules.llm.vision import vision_tower
from llmrl.objectives.llm import RewardLoss
from llmrl.testing import tiny_model, tiny_processor
from llmrl.train.data.preferences import tokenize_pairs
from llmrl.train.models.lora import add_adapters
from llmrl.train.models.shape import decoder_blocks, model_shape
from llmrl.train.planning.memory import plan_memory
from llmrl.train.settings import SFTConfig
from llmrl.train.settings.preferences import DPOConfig
from tests.support.images import noise

VISION = {"architecture": "qwen2_vl", "hidden_size": 32, "layers": 1, "heads": 2}
COLOURS_GRPO = {"model": VISION, "env": {"name": "colours", "dataset": None, "reward": None}, "steps": 2}


def picture(seed=0):
    file = io.BytesIO()
    noise(16, 16, seed).save(file, "PNG")
    return file.getvalue()


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_examples_and_reward_train_a_model_that_reads_images(place):
    words = ("images the vision tower is trained", "GiB of tensors in RAM", "never packed")
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
    place.train("sft", "a", model=VISION, data=data, code=3, words=("column 'image' of broken.jsonl:2", "broken.png"))
    env = {"dataset": place.rows("missing.jsonl", [{"prompt": "What?", "images": ["none.png"], "answer": "a"}])}
    place.train(
        "grpo", "b", model=VISION, env=env, code=3, words=("column 'images' of missing.jsonl:1", "FileNotFoundError")
    )
    long = {"model": VISION, "data": {"path": place.rows("long.jsonl", rows[:1])}, "max_length": 4}
    place.train("sft", "d", **long, too_long="truncate", code=3, words=("long.jsonl:1: ", "with images cannot be cut"))
    data = {"path": place.rows("text.jsonl", rows[:1])}
    place.train("sft", "c", data=data, code=3, words=("images need the model's processor",))


def test_marks_in_texts_are_the_places_of_images_and_paths_begin_at_the_file(place, tmp_path, monkeypatch):
    """Regression: the images went to the front, and the prompt kept the text `<image>`."""
    for n in range(2):
        (place.path / f"{n}.png").write_bytes(picture(n))
    said = {"role": "user", "content": "First <image> then <image>: same?"}
    row = {"messages": [said, {"role": "assistant", "content": "<image> is a mark."}], "images": ["0.png", "1.png"]}
    part = {"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "What?"}]}
    inside = {"messages": [part, {"role": "assistant", "content": "Noise."}]}
    rows = load_rows(place.path / place.rows("marks.jsonl", [row, inside, row | {"images": ["0.png"]}]))
    monkeypatch.chdir(tmp_path)
    paths = [{"type": "image", "image": str(place.path / f"{n}.png")} for n in range(2)]
    texts = [{"type": "text", "text": text} for text in ("First ", " then ", ": same?")]
    assert to_messages(rows[0])[0]["content"] == [texts[0], paths[0], texts[1], paths[1], texts[2]]
    assert to_messages(rows[0])[1]["content"] == "<image> is a mark."
    assert to_prompt(rows[0])["query"][0] == to_messages(rows[0])[0]
    assert to_messages(rows[1])[0]["content"][0] == paths[0]
    with pytest.raises(DataError, match=r"marks.jsonl:3 must have as many images .*: got 1 images for 2 "):
        to_messages(rows[2])
    rows[1]["messages"][0]["content"][0]["image"] = "none.png"
    with pytest.raises(DataError, match=r"marks.jsonl:2, message 1: image: 'none.png'"):
        to_messages(rows[1])


# --- pairs ------------------------------------------------------------------------------------------------------------


def pairs_of(place, sizes):
    """A file of pairs, each about images of these sizes, perhaps none."""
    rows = []
    for n, row in enumerate(sizes):
        names = [f"{n}-{k}.png" for k in range(len(row))]
        for k, name in enumerate(names):
            noise(*row[k], 10 * n + k).save(place.path / name)
        rows.append({"prompt": f"What is {n}?", "images": names, "chosen": "a" * (n + 1), "rejected": "noise, I think"})
    return place.rows("pairs.jsonl", rows)


@torch.no_grad()
def answer_log_prob(processor, model, row, answer, *, blank=False):
    """Of an answer and its end of turn, by the processor's own template and one forward of the Transformers model."""
    images = [load_image(name) for name in row["images"]]
    images = [Image.new("RGB", image.size) for image in images] if blank else images
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": row["prompt"]}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([chat], **options)
    start = processor.apply_chat_template([chat[:1]], add_generation_prompt=True, **options)["input_ids"].shape[1]
    ids = inputs["input_ids"][0]
    end = start + ids[start:].tolist().index(processor.tokenizer.eos_token_id) + 1
    log_p = model(**inputs).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return log_p[start - 1 : end - 1].sum().item()


def test_pairs_with_images_have_the_log_probs_of_the_model_and_its_pixels(place):
    data = {"path": pairs_of(place, [[(16, 24)], [], [(40, 20), (9, 9)], [(8, 60)]]), "rows": None}
    rows = [json.loads(line) for line in (place.path / "pairs.jsonl").read_text().splitlines()]
    settings = {"model": VISION, "data": data, "batch_size": 4, "steps": 2, "tokens_per_microbatch": 60}
    place.train("dpo", "pairs", words=("4 pairs", "images the vision tower is frozen"), **settings)
    processor = tiny_processor()
    model = tiny_model(processor, **VISION)
    first, last = place.steps("pairs")
    for column in ("chosen", "rejected"):
        own = [answer_log_prob(processor, model, row, row[column]) for row in rows]
        assert first[f"preference/{column}_logp"] == pytest.approx(sum(own) / 4, abs=1e-5)
        blind = [answer_log_prob(processor, model, row, row[column], blank=True) for row in rows]
        assert first[f"preference/{column}_logp"] != pytest.approx(sum(blind) / 4, abs=1e-3), "pixels count"
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["preference/margin"] > 0


def test_pairs_with_images_that_cannot_be_trained_are_refused(place):
    path = pairs_of(place, [[(16, 24)], [(9, 9)]])
    words = ("a reward model reads text alone", "Qwen2VLForConditionalGeneration", "llmrl dpo")
    place.plan("reward", model=VISION, data={"path": path}, eval={"rows": 500}, code=2, words=words)
    place.plan("reward", data={"path": path}, eval={"rows": 500}, code=3, words=("images need the model's processor",))
    place.plan("dpo", data={"path": path}, code=3, words=("images need the model's processor",))
    parts = [{"type": "image", "image": str(place.path / "0-0.png")}, {"type": "text", "text": "this"}]
    row = {"prompt": "Which?", "chosen": [{"role": "assistant", "content": parts}], "rejected": "none"}
    data = {"path": place.rows("answers.jsonl", [row])}
    place.plan("dpo", model=VISION, data=data, code=3, words=("assistant message must have no image",))
    place.plan("sft", model=VISION, data={**data, "completion_column": "chosen"}, code=3, words=("must have no image",))
    pairs = tokenize_pairs(DPOConfig(model="tiny", data={"path": path}), tiny_processor())
    with pytest.raises(DataError, match="a reward network reads text only"):
        RewardLoss(torch.nn.Identity()).count_step(pairs.as_rows())


def test_rewards_that_read_text_refuse_images(place):
    place.train("reward", "judge", steps=1)
    model = {"reward_model": {"model": "runs/judge"}}
    judged = {**COLOURS_GRPO["env"], "rewards": [model]}
    changes = {**COLOURS_GRPO, "env": judged}
    place.plan("grpo", code=3, words=("reward_model: reads text alone", "has images"), **changes)
    judge = {"url": "http://localhost:1/v1", "model": "gpt"}
    changes["env"] = {**judged, "rewards": [{"judge": judge}]}
    place.plan("grpo", code=3, words=("judge 'gpt', query of row 1: reads text alone", "has images"), **changes)
    changes["env"]["rewards"] = [{"judge": {**judge, "prompt": "Is {completion} {answer}?"}}]
    place.plan("grpo", **changes)  # it is shown no image
    texts = {
        "env": {"reward": None, "rewards": [model, {"judge": {**judge, "prompt": "Is {completion} in {picture}?"}}]}
    }
    url = "data:image/png;base64,"
    picture = [{"role": "user", "content": [{"type": "image", "image": url}]}]
    rows = [{"prompt": "Which?", "answer": "red", "picture": picture}]
    texts["env"]["dataset"] = place.rows("pictures.jsonl", rows)
    place.plan("grpo", code=3, words=("judge 'gpt', picture of row 1: reads text alone", "has images"), **texts)
    asked = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    with pytest.raises(DataError, match="judge 'gpt', query: reads text alone"):
        JudgeReward(**judge).message("red", query=asked)


def test_images_of_problems_that_are_only_measured_are_refused_before_weights_are_loaded(place):
    (place.path / "0.png").write_bytes(picture())
    held_out = {"dataset": place.rows("measured.jsonl", [{"prompt": "What?", "image": "0.png", "answer": "a"}])}
    words = ("images need the model's processor",)
    place.plan("grpo", eval=held_out, code=3, words=words)
    env = {"name": "chat", "dataset": "prompts.jsonl", "reward": "vowels:share"}
    place.plan("sft", eval=held_out, env=env, code=3, words=words)
    place.train("grpo", "blind", steps=1)
    place.run("eval", "blind", "--data", "measured.jsonl", code=3, words=words)
    rows = [{"prompt": "What?", "image": name, "answer": "a"} for name in ("0.png", "gone.png")]
    both = {"dataset": place.rows("both.jsonl", rows), "rows": 1}
    place.plan("sft", model=VISION, eval=both, env=env)
    stop = {"at_least": 0.5, "rows": 2}  # with rows of its own
    place.plan("sft", model=VISION, eval=both, env=env, stop=stop, code=3, words=("gone.png",))
    (place.path / "0.png").unlink()
    place.plan("grpo", model=VISION, eval=held_out, code=3, words=("0.png",))


# --- adapters, several ranks ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_are_those_of_the_text_layers_and_the_engine_samples_by_them(place):
    pytest.importorskip("peft")
    words = ("model_options.freeze_vision=true",)
    place.plan("grpo", model_options={"freeze_vision": False}, lora={"r": 2}, code=2, words=words, **COLOURS_GRPO)
    changes = {**COLOURS_GRPO, "prompts_per_step": 2, "zero_variance": "keep", "eval": {"rows": 2, "max_tokens": 2}}
    place.train("grpo", "adapted", lora={"r": 2}, **changes)
    assert [abs(row["mismatch/kl"]) < 1e-6 for row in place.steps("adapted")] == [True, True]
    saved = load_file(place.checkpoint("adapted", 2) / "adapter" / "adapter_model.safetensors")
    assert saved
    assert not [name for name in saved if "visual" in name or ".layers." not in name]
    model = tiny_model(tiny_processor(), **VISION)
    model.model.visual.q_proj = torch.nn.Linear(4, 4)  # some families name its layers as those of the decoder
    config = SFTConfig(model=VISION, data={"path": "colours"}, lora={"r": 2})
    adapted = add_adapters(config, model)
    assert not [name for name, _ in adapted.named_modules() if "visual" in name and "lora" in name]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "layout"), [("sft", "ddp"), ("dpo", "fsdp2")])
def test_two_processes_train_on_rows_with_and_without_images_as_one_does(place, recipe, layout):
    path = pairs_of(place, [[(16, 24)], [], [(40, 20), (9, 9)], [], [], [(8, 60)]])
    data = {"path": path, "rows": None} | ({"completion_column": "chosen"} if recipe == "sft" else {})
    changes = {"data": data, "batch_size": 5, "tokens_per_microbatch": 60, "optim": {"lr": 1e-2}}
    options = {"sizes": VISION, "model_options": {"freeze_vision": False}}
    place.train_as_one_and_as_ranks(recipe, f"parallel.mode={layout}", step=3, steps=3, **changes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_processes_sample_and_train_with_images_as_one_does(place, layout):
    changes = {**COLOURS_GRPO, "prompts_per_step": 2, "zero_variance": "keep", "eval": {"rows": 2, "max_tokens": 2}}
    changes |= {"model_options": {"freeze_vision": False}, "optim": {"lr": 1e-2}, "steps": 3}
    del changes["model"]
    place.train_as_one_and_as_ranks("grpo", f"parallel.mode={layout}", step=3, sizes=VISION, **changes)


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


def test_every_colour_is_shown_right_in_two_thirds_of_its_demonstrations():
    """Regression: all wrong answers were those to red and cyan, so one of them was never learned."""
    pairs = list(zip(colours_problems(), colours_demonstrations(), strict=True))
    for colour in COLOURS:
        right = [shown["answer"] == colour for row, shown in pairs if row["answer"] == colour]
        assert sum(right) / len(right) == pytest.approx(2 / 3 + 1 / 18, abs=0.05)  # a random one may be right, too


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
