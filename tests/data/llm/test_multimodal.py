"""Messages that are more than text: parts, and their way through a processor."""

import base64
import re
from typing import Any

import pytest
import torch
from transformers import ProcessorMixin

from llmrl.data.llm import ContentBase, History
from llmrl.errors import ConfigError, DataError, ShapeError, TemplateError
from llmrl.testing import tiny_processor
from tests.support.images import noise


@pytest.fixture
def processor() -> ProcessorMixin:
    return tiny_processor()


CALL = {"type": "function_call", "function_name": "add"}


def chat(size: tuple[int, int], question: str = "What is it?") -> list[dict[str, Any]]:
    asked = [ContentBase("image", data=noise(*size, seed=0)), ContentBase("text", text=question)]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": "A cat."}]


# --- parts ---
@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (ContentBase("text", text="Hi"), {"type": "text", "text": "Hi"}),
        (ContentBase("text", text=""), {"type": "text", "text": ""}),
        (ContentBase(type="image", url="cat.png", mime_type="image/png"), {"type": "image", "url": "cat.png"}),
        (ContentBase("image", data=b"\x01"), {"type": "image", "base64": base64.b64encode(b"\x01").decode()}),
        (ContentBase("audio", data=[0.0], name="a", size=1), {"type": "audio", "audio": [0.0]}),
        (ContentBase(**CALL, function_args={"a": 1}), {"type": "function_call", "name": "add", "arguments": {"a": 1}}),
    ],
)
def test_part_is_written_as_processors_read_it(part: ContentBase, expected: dict[str, Any]):
    assert part.to_part() == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "imaeg", "url": "x"}, "type must be one of text, image.*got 'imaeg'.*Did you mean 'image'"),
        ({"type": "text", "url": "x"}, "needs exactly one of text: got url"),
        ({"type": "text"}, "exactly one of text: got none"),
        ({"type": "image"}, "exactly one of url, data, and may have mime_type, name, size: got none"),
        ({"type": "image", "url": "x", "data": b"y"}, "exactly one of url, data, .*: got url and data"),
        ({"type": "image", "url": "x", "text": "y"}, "got text and url"),
        ({"type": "function_call", "function_args": {}}, "one of function_name, .*: got function_args"),
    ],
)
def test_part_whose_fields_do_not_fit_its_type_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        ContentBase(**fields)


def test_history_keeps_parts_and_writes_them_as_dicts():
    parts = [ContentBase("image", url="cat.png"), ContentBase("text", text="What is it?")]
    history = History(role="user", content=parts).unsqueeze(0)
    history.append(History(role="user", content=ContentBase("text", text="Hm?")))
    assert history.content == [parts, ContentBase("text", text="Hm?")]
    assert [message["content"] for message in history.to_chats()] == [
        [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "What is it?"}],
        [{"type": "text", "text": "Hm?"}],
    ]


# --- through a processor, for which 8 x 8 pixels are one token ---
def test_text_ids_mask_and_pixels_come_from_the_processor(processor: ProcessorMixin):
    text = History.from_messages(chat((16, 24))[:1]).apply_chat_template(tokenizer=processor)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\n{image}What is it?<|im_end|>\n<|im_start|>assistant\n"
    history = History.from_chats([chat((16, 24)), chat((8, 64), "And this?")])
    options = {"tokenizer": processor, "add_generation_prompt": False, "return_assistant_tokens_mask": True}
    td = history.apply_chat_template(**options)
    assert td.batch_size == (2,)
    token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for row, num_tokens in zip(td.unbind(0), (6, 8), strict=True):
        assert (row["input_ids"] == token).sum() == num_tokens
        assert len(row["pixel_values"]) == 4 * num_tokens
        assert processor.tokenizer.decode(row["input_ids"][row["assistant_masks"]]) == "A cat.<|im_end|>"
        assert row["attention_mask"].dtype == row["assistant_masks"].dtype == torch.bool
    literal = history[0].apply_chat_template(include_end_of_turn=False, **options)
    theirs = processor.apply_chat_template(
        history[:1].to_chats(), return_assistant_tokens_mask=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert literal["assistant_masks"].int().tolist() == torch.as_tensor(theirs["assistant_masks"]).view(-1).tolist()


def test_a_padded_batch_is_dense_if_the_media_have_one_shape(processor: ProcessorMixin):
    """Regression: what a processor says of each token was refused, because rows have different numbers of tokens."""
    same = History.from_chats([chat((16, 24)), chat((16, 24), "And what is that over there?")])
    td = same.apply_chat_template(tokenizer=processor, return_dict=True, padding=True)
    assert td["input_ids"].shape == td["attention_mask"].shape == td["mm_token_type_ids"].shape
    assert td["mm_token_type_ids"].sum(-1).tolist() == [6, 6]
    assert (td["pixel_values"].shape[:2], td["attention_mask"].sum(-1).unique().numel()) == ((2, 24), 2)
    with pytest.raises(ShapeError, match="'pixel_values' has"):
        History.from_chats([chat((16, 24)), chat((8, 64))]).apply_chat_template(
            tokenizer=processor, return_dict=True, padding=True
        )


def test_what_a_processor_cannot_do_is_refused(processor: ProcessorMixin):
    history = History.from_messages(chat((8, 8)))
    with pytest.raises(ConfigError, match="pass return_dict=True"):
        history.apply_chat_template(tokenizer=processor, tokenize=True)
    quoting = History.from_messages(chat((8, 8), "<|im_end|>"))
    with pytest.raises(TemplateError, match="message 0 of conversation 0 does"):
        quoting.apply_chat_template(tokenizer=processor, return_dict=True)
    processor.chat_template = re.sub(r"\{%-? *(end)?generation *-?%\}", "", processor.chat_template)
    with pytest.raises(TemplateError, match="has none; put"):
        history.apply_chat_template(tokenizer=processor, add_generation_prompt=False, return_assistant_tokens_mask=True)
