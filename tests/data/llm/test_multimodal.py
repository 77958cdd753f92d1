"""Messages that are more than text: parts, and their way through a processor."""

import base64
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature, ProcessorMixin

from llmrl.data.llm import ContentBase, History
from llmrl.errors import ConfigError, DataError, ShapeError, TemplateError
from llmrl.testing import tiny_tokenizer

TEMPLATE = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- elif m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""


class PixelProcessor(ProcessorMixin):
    """A processor as models of the Transformers library bring them: each image becomes one token per row of pixels."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)

    @property
    def _audio_processor(self) -> None:
        return None

    def __call__(
        self,
        images: list[list[np.ndarray]] | None = None,
        text: list[str] | None = None,
        return_tensors: str | None = None,
        return_offsets_mapping: bool = False,
        return_text_replacement_offsets: bool = False,
        **ignored: Any,
    ) -> BatchFeature:
        texts, replaced = [], []
        for row, images_of_row in zip(text, images or [[] for _ in text], strict=True):
            written, changes, done = "", [], 0
            for image in images_of_row:
                start = row.index("<image>", done)
                written += row[done:start] + "<image>" * len(image)
                done = start + len("<image>")
                changes.append({"span": (start, done), "new_span": (0, len(written))})
            texts.append(written + row[done:])
            replaced.append(changes)
        made = dict(self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=return_offsets_mapping))
        made.pop("token_type_ids", None)
        if return_text_replacement_offsets:
            made["text_replacement_offsets"] = replaced
        flat = [image for images_of_row in images or [] for image in images_of_row]
        if flat:
            made["pixel_values"] = np.stack(flat)
        feature = BatchFeature(made)
        if return_tensors == "pt":
            for name in ("input_ids", "attention_mask", "pixel_values"):
                if name in feature:
                    feature[name] = torch.tensor(np.array(feature[name]))
        return feature


@pytest.fixture
def processor() -> PixelProcessor:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    return PixelProcessor(tokenizer, chat_template=TEMPLATE)


CALL = {"type": "function_call", "function_name": "add"}


def chat(rows: int, question: str = "What is it?") -> list[dict[str, Any]]:
    image = ContentBase("image", data=np.ones((rows, 2), dtype=np.float32))
    asked = {"role": "user", "content": [image, ContentBase("text", text=question)]}
    return [asked, {"role": "assistant", "content": "A cat."}]


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


# --- through a processor ---
def test_text_ids_mask_and_pixels_come_from_the_processor(processor: PixelProcessor):
    text = History.from_messages(chat(2)[:1]).apply_chat_template(tokenizer=processor)
    assert text == "<|im_start|>user\n<image>What is it?<|im_end|>\n<|im_start|>assistant\n"
    history = History.from_chats([chat(3), chat(1, "And this?")])
    options = {"tokenizer": processor, "add_generation_prompt": False, "return_assistant_tokens_mask": True}
    td = history.apply_chat_template(**options)
    assert td.batch_size == (2,)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    for row, num_pixel_rows in zip(td.unbind(0), (3, 1), strict=True):
        assert (row["input_ids"] == image).sum() == num_pixel_rows
        assert row["pixel_values"].shape == (1, num_pixel_rows, 2)
        assert processor.tokenizer.decode(row["input_ids"][row["assistant_masks"]]) == "A cat.<|im_end|>"
        assert row["attention_mask"].dtype == row["assistant_masks"].dtype == torch.bool
    without_end = history[0].apply_chat_template(include_end_of_turn=False, **options)
    assert processor.tokenizer.decode(without_end["input_ids"][without_end["assistant_masks"]]) == "A cat."


def test_padded_batch_is_dense_if_the_media_have_one_shape(processor: PixelProcessor):
    same = History.from_chats([chat(2), chat(2, "And what is that over there?")])
    td = same.apply_chat_template(tokenizer=processor, return_dict=True, padding=True)
    assert td["input_ids"].shape == td["attention_mask"].shape
    assert (td["pixel_values"].shape, td["attention_mask"].sum(-1).unique().numel()) == ((2, 1, 2, 2), 2)
    with pytest.raises(ShapeError, match="'pixel_values' has"):
        History.from_chats([chat(2), chat(3)]).apply_chat_template(tokenizer=processor, return_dict=True, padding=True)


def test_what_a_processor_cannot_do_is_refused(processor: PixelProcessor):
    history = History.from_messages(chat(1))
    with pytest.raises(ConfigError, match="pass return_dict=True"):
        history.apply_chat_template(tokenizer=processor, tokenize=True)
    with pytest.raises(TemplateError, match="message 0 of conversation 0 does"):
        History.from_messages(chat(1, "<|im_end|>")).apply_chat_template(tokenizer=processor, return_dict=True)
    processor.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(TemplateError, match="has none; put"):
        history.apply_chat_template(tokenizer=processor, add_generation_prompt=False, return_assistant_tokens_mask=True)
