"""Images in conversations: their tokens, their tensors along the rows, and log-probs that depend on the pixels."""

import base64
import io

import pytest
import torch
from tensordict import TensorDict

from llmrl.data.llm.images import load_image
from llmrl.data.replay_buffers import LazyStackStorage, ReplayBuffer
from llmrl.envs.llm.chat import next_prompt
from llmrl.errors import DataError, TemplateError
from llmrl.modules.llm import TransformersWrapper
from llmrl.modules.llm.engines import SamplingParams, TransformersEngine
from llmrl.modules.llm.log_probs import token_logprobs
from llmrl.modules.llm.rendering import Renderer
from llmrl.modules.llm.vision import load_processor, model_class, read_media, write_media
from llmrl.objectives.llm import GRPOLoss
from llmrl.testing import tiny_tokenizer
from tests.support.conversations import history_td, prompt_after, rows
from tests.support.images import SIZES, asks, noise, own_log_probs, sharp_model

TEXT = {"role": "user", "content": "no image here"}


@pytest.fixture(scope="module")
def vlm():
    return sharp_model()


def policy_of(vlm, **options):
    processor, model = vlm
    generate_kwargs = {"max_new_tokens": 12, "seed": 0, "ignore_eos": True}
    return TransformersWrapper(model, tokenizer=processor, **{"generate_kwargs": generate_kwargs, **options})


def test_ids_and_tensors_are_those_of_the_processor(vlm):
    processor, _ = vlm
    chat = [asks(*SIZES[:2]), {"role": "assistant", "content": "noise"}, asks(SIZES[2], seed=1)]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    made = processor.apply_chat_template([chat], **options)
    renderer = Renderer(processor)
    [ids] = renderer.prompt_ids([chat])
    assert ids.tolist() == made["input_ids"][0].tolist()
    [row] = renderer.render([chat])
    assert torch.equal(row.media["pixel_values"], made["pixel_values"])
    assert torch.equal(row.media["image_grid_thw"], made["image_grid_thw"])
    assert row.media["positions"].tolist() == made["mm_token_type_ids"][0].nonzero().flatten().tolist()
    assert processor.tokenizer.decode(row.ids[row.assistant_mask]) == "noise<|im_end|>"


def test_a_longer_conversation_begins_with_the_shorter_one_and_its_images(vlm):
    renderer = Renderer(vlm[0])
    first, answer = [asks(SIZES[0])], {"role": "assistant", "content": "noise"}
    longer = [*first, answer, {**asks(SIZES[1], seed=1), "role": "tool"}, asks(SIZES[3], seed=2)]
    [prompt] = renderer.prompt_ids([first])
    stream = torch.cat([prompt, torch.tensor(vlm[0].tokenizer("noise<|im_end|>").input_ids)])
    [added] = renderer.extend([stream], [longer], [2])
    assert torch.cat([stream, added]).tolist() == renderer.prompt_ids([longer])[0].tolist()


def test_an_image_may_be_given_in_any_form_and_is_the_same_image(vlm, tmp_path):
    image = noise(16, 24, 5)
    file = io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    text = base64.b64encode(file.getvalue()).decode()
    forms = [{"image": image}, {"path": str(tmp_path / "a.png")}, {"bytes": file.getvalue()}, {"base64": text}]
    forms += [{"image": {"bytes": file.getvalue(), "path": None}}]
    forms += [{"image_url": {"url": f"data:image/png;base64,{text}"}}]
    asked = [{"role": "user", "content": [{"type": "image", **form}]} for form in forms]
    first, *others = Renderer(vlm[0]).render([[user, {"role": "assistant", "content": "a"}] for user in asked])
    assert len(others) == 5
    for row in others:
        assert torch.equal(row.media["pixel_values"], first.media["pixel_values"])


def test_images_that_cannot_be_read_are_named(vlm, tmp_path):
    (tmp_path / "b.png").write_bytes(b"not an image")
    for source, words in ((str(tmp_path / "b.png"), "b.png"), (str(tmp_path / "c.png"), "c.png.*FileNotFoundError")):
        with pytest.raises(DataError, match=words):
            load_image(source)
    with pytest.raises(DataError, match="must be a local file"):
        load_image("https://example.org/a.png")
    with pytest.raises(DataError, match="its keys are type"):
        Renderer(vlm[0]).prompt_ids([[{"role": "user", "content": [{"type": "image"}]}]])
    with pytest.raises(TemplateError, match="images need the model's processor"):
        Renderer(tiny_tokenizer()).prompt_ids([[asks(SIZES[0])]])


def test_a_message_that_quotes_the_placeholder_has_no_image(vlm):
    renderer = Renderer(vlm[0])
    [ids] = renderer.prompt_ids([[{"role": "user", "content": "what is <|image_pad|>?"}]])
    assert vlm[0].image_token_id not in ids.tolist()
    assert "<|image_pad|>" in vlm[0].tokenizer.decode(ids)


def test_processor_and_model_are_loaded_from_a_folder(vlm, tmp_path):
    processor, model = vlm
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    chats = [[asks(SIZES[1])]]
    assert Renderer(loaded).prompt_ids(chats)[0].tolist() == Renderer(processor).prompt_ids(chats)[0].tolist()
    assert type(model_class(str(tmp_path)).from_pretrained(tmp_path)) is type(model)


def rows_of(vlm, chats):
    answered = [[*chat, {"role": "assistant", "content": f"It is {n} things."}] for n, chat in enumerate(chats)]
    rendered = Renderer(vlm[0]).render(answered)
    return [row.ids for row in rendered], [row.media for row in rendered]


def test_scores_are_those_of_the_model_whatever_the_padding(vlm):
    _, model = vlm
    ids, media = rows_of(vlm, [[asks(*SIZES[:2])], [TEXT], [asks(SIZES[2], seed=1)]])
    expected = [own_log_probs(model, *row) for row in zip(ids, media, strict=True)]
    width = max(map(len, ids))
    for side in ("left", "right"):
        ids_BT, attended_BT = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.bool)
        for row, own in enumerate(ids):
            place = slice(width - len(own), None) if side == "left" else slice(len(own))
            ids_BT[row, place], attended_BT[row, place] = own, True
        scores = token_logprobs(model, ids_BT, attended_BT, attended_BT, media=media, packing="auto").log_probs
        for row, own in enumerate(expected):
            torch.testing.assert_close(scores[row][attended_BT[row]], own, atol=1e-5, rtol=0)
    other = [{**media[0], "pixel_values": media[0]["pixel_values"].flip(0)}]
    engine = TransformersEngine(model, eos_token_ids=(), pad_token_id=0)
    assert (engine.score(ids[:1], media=other)[0] - expected[0]).abs().max() > 0.1  # pixels count


def test_what_the_engine_reports_is_what_the_trainer_scores(vlm):
    _, model = vlm
    renderer = Renderer(vlm[0])
    chats = [[asks(*SIZES[:2])], [TEXT], [asks(SIZES[2], seed=1)], [asks(SIZES[0], seed=2)], [asks(SIZES[0], seed=3)]]
    ids = renderer.prompt_ids(chats)
    _, media = rows_of(vlm, chats)
    assert ids[3].tolist() == ids[4].tolist()  # two images of one size: not one prompt
    engine = TransformersEngine(model, eos_token_ids=(), pad_token_id=0, seed=0)
    drawn = engine.generate(ids, SamplingParams(max_new_tokens=20), media=media, seeds=[0, 1, 2, 3, 3])
    assert drawn.ids[3].tolist() != drawn.ids[4].tolist()
    full = [torch.cat(row) for row in zip(ids, drawn.ids, strict=True)]
    for scores, log_probs, own in zip(engine.score(full, media=media), drawn.log_probs, ids, strict=True):
        torch.testing.assert_close(scores[len(own) :], log_probs, atol=1e-5, rtol=0)
    alone = engine.generate(ids[:1], SamplingParams(max_new_tokens=20), media=media[:1], seeds=[0])
    assert alone.ids[0].tolist() == drawn.ids[0].tolist()
    # after images: positions are its own
    text = engine.generate(ids[1:2], SamplingParams(max_new_tokens=20), seeds=[1])
    assert text.ids[0].tolist() == drawn.ids[1].tolist()


def test_a_sampled_image_token_is_an_ordinary_token(vlm):
    """The engine feeds it back as its own embedding; a forward over the whole row must not look for another image."""
    processor, model = vlm
    renderer = Renderer(processor)
    [prompt] = renderer.prompt_ids([[asks(SIZES[1])]])
    media = renderer.media([noise(*SIZES[1], 0)], prompt)
    ids = torch.cat([prompt, torch.tensor([7, processor.image_token_id, 9, 11])])
    [scores] = TransformersEngine(model, eos_token_ids=(), pad_token_id=0).score([ids], media=[media])
    with torch.no_grad():
        kinds = torch.zeros(1, len(prompt), dtype=torch.int64)
        kinds[0, media["positions"]] = 1
        inputs = {name: media[name] for name in ("pixel_values", "image_grid_thw")}
        out = model(input_ids=prompt[None], mm_token_type_ids=kinds, use_cache=True, **inputs)
        position = len(prompt) + int(model.model.rope_deltas)
        log_p = [out.logits[0, -1].log_softmax(-1)]
        for step, token in enumerate([7, processor.image_token_id, 9]):
            at = torch.tensor([[position + step]])
            name = "cache" if "cache" in out else "past_key_values"
            out = model(input_ids=torch.tensor([[token]]), position_ids=at, **{name: out[name]})
            log_p.append(out.logits[0, -1].log_softmax(-1))
    expected = torch.stack([row[token] for row, token in zip(log_p, ids[-4:].tolist(), strict=True)])
    torch.testing.assert_close(scores[-4:], expected, atol=1e-5, rtol=0)


def test_turns_with_images_are_one_stream_and_score_as_they_were_sampled(vlm):
    policy = policy_of(vlm)
    td = policy(history_td([[asks(SIZES[0])], [TEXT]]))
    after = TensorDict(next_prompt(td), batch_size=[2])
    shown = [[{**asks(SIZES[1], seed=4), "role": "tool"}], [asks(SIZES[2], seed=5)]]
    after["history"] = prompt_after(after["history"].prompt, shown)
    second = policy(after)
    scored = policy.get_new_version(generate=False)(second.select("tokens", "masks", "media"))
    masks = rows(second, "masks", "all_assistant_mask")
    for row, first in enumerate(rows(td, "tokens", "full")):
        assert rows(second, "tokens", "full")[row][: len(first)].equal(first)
        assert not masks[row][rows(second, "media", "positions")[row]].any()
        again, drawn = (rows(batch, "log_probs", "full")[row][masks[row]] for batch in (scored, second))
        torch.testing.assert_close(again, drawn, atol=1e-5, rtol=0)
    assert [len(grid) for grid in rows(second, "media", "image_grid_thw")] == [2, 1]


def test_media_travel_through_a_buffer_to_the_loss(vlm):
    policy = policy_of(vlm, num_samples=2)
    td = policy(history_td([[asks(*SIZES[:2])], [TEXT], [asks(SIZES[2], seed=1)]])).reshape(-1)
    td = td.select("tokens", "masks", "log_probs", "media")
    td["advantage"] = torch.linspace(-1, 1, 6).view(6, 1, 1)
    buffer = ReplayBuffer(storage=LazyStackStorage(6))
    buffer.extend(td)
    loss = GRPOLoss(policy_of(vlm, generate=False))
    batch = buffer[:]
    whole = loss(batch)
    assert abs(float(whole.ratio_mean) - 1) < 1e-5
    assert abs(float(whole.ratio_max) - 1) < 1e-4
    counts = loss.count_step(batch)
    parts = [loss(batch[torch.tensor(part)], normalizer=counts).loss_objective for part in ([5, 2], [0, 3, 4], [1])]
    torch.testing.assert_close(sum(parts), whole.loss_objective)
    other = [{**row, "pixel_values": row["pixel_values"].flip(0)} for row in read_media(batch)]
    batch.set("media", write_media(other, [6]))
    assert abs(float(loss(batch).ratio_mean) - 1) > 1e-2


def test_gradients_reach_the_vision_tower(vlm):
    _, model = vlm
    ids, media = rows_of(vlm, [[asks(SIZES[0])]])
    everywhere = torch.ones(1, len(ids[0]), dtype=torch.bool)
    token_logprobs(model, ids[0][None], everywhere, everywhere, media=media).log_probs.sum().backward()
    assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
    model.zero_grad(set_to_none=True)
