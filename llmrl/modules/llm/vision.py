"""Images in conversations: the tokens that stand for them in a stream, and the tensors that a model reads.

A chat template writes one placeholder per image. The processor of the Transformers library says which ids take its
place and makes the tensors (Qwen2-VL: "pixel_values" and "image_grid_thw"). A row's media are those tensors, of all its
images in order, with "positions" int64[K]: where in the row's ids the K tokens are that get an image's features. An id
of that kind that was sampled is not among them. A batch has the media of its rows under "media".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from llmrl.data.llm.images import image_key, load_image
from llmrl.data.ragged.stack import stack_columns
from llmrl.data.ragged.tensordicts import inner
from llmrl.errors import TemplateError, UnsupportedError
from llmrl.optional import require

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

Media = dict[str, Tensor]  # of one row

MEDIA, POSITIONS = "media", "positions"
_CACHE_BYTES = 1 << 28


class Vision:
    """The images of conversations, through a processor.

    processor  of an image-text-to-text model: it has an image processor, a tokenizer and a token for an image
    Raises     UnsupportedError for another one

    An image that was read lately is kept: the copies of a group's prompt share their tensors.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor = processor
        token = getattr(processor, "image_token", None)
        if token is None or getattr(processor, "image_processor", None) is None:
            raise UnsupportedError(
                f"Vision: a processor must have an image_processor and an image_token: {type(processor).__name__} has "
                "not."
            )
        convert = processor.tokenizer.convert_tokens_to_ids
        self.placeholder: str = getattr(processor, "boi_token", None) or token  # what templates write
        self.placeholder_id: int = convert(self.placeholder)
        self.image_token_id: int = convert(token)
        self._made: OrderedDict[Any, tuple[list[int], Media]] = OrderedDict()
        self._size = 0
        self.empty: Media = {}  # of a row without images
        image_module = require("PIL.Image", extra="vision", used_by="Vision")
        self.empty = {name: value[:0] for name, value in self._make(image_module.new("RGB", (64, 64)))[1].items()}

    def expand(
        self, ids: Sequence[int], images: Sequence[Any], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids with each placeholder replaced by the ids of its image, and token spans moved along.

        Raises  TemplateError unless there is one placeholder per image; DataError for an image that cannot be read
        """
        places = [place for place, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != len(images):
            raise TemplateError(
                f"Vision: the chat template must write {self.placeholder!r} once for each image: got {len(places)} for "
                f"{len(images)} images; not every template writes those of every role."
            )
        expanded: list[int] = []
        start, moved = 0, [0] * (len(ids) + 1)  # how far the place in front of each id moves
        for place, image in zip(places, images, strict=True):
            new = self._process(image)[0]
            expanded += [*ids[start:place], *new]
            start = place + 1
            moved[start:] = [len(expanded) - start] * (len(moved) - start)
        return [*expanded, *ids[start:]], [(a + moved[a], b + moved[b]) for a, b in spans]

    def media(self, images: Sequence[Any]) -> Media:
        """The tensors of a row's images, without positions."""
        made = [self._process(image)[1] for image in images]
        if len(made) < 2:
            return dict(made[0] if made else self.empty)
        try:
            return {name: torch.cat([media[name] for media in made]) for name in self.empty}
        except RuntimeError as error:
            raise UnsupportedError(
                f"Vision: tensors of several images must be joined along their first dimension: those of "
                f"{type(self.processor).__name__} cannot be ({error}); give each conversation one image."
            ) from error

    def positions(self, ids: Tensor, sampled: Tensor | None = None) -> Tensor:
        """int64[K]: where in ids int64[T] features go; ``sampled`` bool[S], S <= T, are ids that the policy drew."""
        is_image = ids == self.image_token_id
        if sampled is not None:
            is_image[: len(sampled)] &= ~sampled.bool().to(ids.device)
        return is_image.nonzero().flatten()

    def _process(self, source: Any) -> tuple[list[int], Media]:
        key, image = image_key(source)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        made = self._made[key] = self._make(load_image(source) if image is None else image)
        self._size += _num_bytes(made[1])
        while self._size > _CACHE_BYTES and len(self._made) > 1:  # the one just made stays, however large
            self._size -= _num_bytes(self._made.popitem(last=False)[1][1])
        return made

    def _make(self, image: Image) -> tuple[list[int], Media]:
        """The ids that take the placeholder's place, and the tensors, of one image."""
        made = self.processor(text=[self.placeholder], images=[image], return_tensors="pt", add_special_tokens=False)
        ids = made.pop("input_ids")[0].tolist()
        media = {
            name: value for name, value in made.items() if name != "attention_mask" and not name.endswith("type_ids")
        }
        if wrong := [name for name, value in media.items() if not isinstance(value, Tensor) or not value.ndim]:
            raise UnsupportedError(
                f"Vision: a processor's entries must be tensors: {wrong[0]!r} of {type(self.processor).__name__} is a "
                f"{type(media[wrong[0]]).__name__}."
            )
        return ids, media


def _num_bytes(media: Media) -> int:
    return sum(value.nbytes for value in media.values())


def model_class(source: str | PretrainedConfig, **options: Any) -> Any:
    """The auto class that loads a model by its folder, hub name or configuration: one that reads images, or text."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    config = AutoConfig.from_pretrained(source, **options) if isinstance(source, str) else source
    reads_images = getattr(config, "vision_config", None) is not None
    reads_images &= type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def load_processor(source: str, **options: Any) -> ProcessorMixin | PreTrainedTokenizerBase:
    """The processor of a model that reads images, by its folder or hub name; the tokenizer of one that does not.

    A processor that also takes videos is loaded without that part if torchvision is missing, or the part's files.
    """
    import transformers
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError):  # a folder with a tokenizer alone
        config = None
    if getattr(config, "vision_config", None) is None:
        return AutoTokenizer.from_pretrained(source, **options)
    require("PIL.Image", extra="vision", used_by=f"model {source}")
    try:
        processor = AutoProcessor.from_pretrained(source, **options)
    except (ImportError, OSError) as error:
        if not ("orchvision" in str(error) or "video processor" in str(error)):
            raise
        kind = getattr(transformers, PROCESSOR_MAPPING_NAMES[config.model_type])
        processor = image_processor_class(kind).from_pretrained(source, **options)
    if processor.tokenizer.chat_template is None:
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def save_processor(processor: ProcessorMixin | PreTrainedTokenizerBase, folder: Any) -> None:
    """Writes a processor, or a tokenizer alone, to a folder. The settings for images come in a file of their own too:
    vLLM takes those for videos, which may not be here, from there.
    """
    processor.save_pretrained(folder)
    if hasattr(processor, "image_processor"):
        processor.image_processor.save_pretrained(folder)


def image_processor_class(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A class of processors like ``kind``, without the part for videos, which needs torchvision."""

    class WithoutVideos(kind):  # type: ignore[misc,valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    WithoutVideos.__name__ = kind.__name__  # by which it is saved
    return WithoutVideos


# --- media of a batch -------------------------------------------------------------------------------------------------


def write_media(rows: Sequence[Media], batch_size: Sequence[int]) -> TensorDictBase:
    """The entry "media" of a batch: ragged, one row each."""
    return stack_columns({name: [row[name] for row in rows] for name in rows[0]}, batch_size)


def read_media(td: TensorDictBase) -> list[Media] | None:
    """The media of each row of a batch; None if it has none."""
    stack = td.get(MEDIA, None)
    if stack is None:
        return None
    stack = inner(stack)
    if stack.ndim > 1:
        return [row for part in stack.unbind(0) for row in read_media({MEDIA: part})]
    columns = {name: list(stack.get(name, as_list=True)) for name in stack.keys()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def has_images(media: Sequence[Media] | None) -> bool:
    return media is not None and any(len(row[POSITIONS]) for row in media)


def media_inputs(attention_mask: Tensor, media: Sequence[Media]) -> dict[str, Tensor]:
    """A model's inputs for the images of a padded batch bool[B, T]: the tensors, and the tokens that they are for.

    Position ids are not among them: the model derives them from these.
    """
    # Positions count a row's real ids, so padding on either side moves nothing.
    device = attention_mask.device
    is_image_BT = torch.zeros(attention_mask.shape, dtype=torch.bool, device=device)
    for row, (attended, own) in enumerate(zip(attention_mask.bool(), media, strict=True)):
        is_image_BT[row, attended.nonzero().flatten()[own[POSITIONS].to(device)]] = True
    inputs = {name: torch.cat([row[name] for row in media]).to(device) for name in media[0] if name != POSITIONS}
    kinds_BT = is_image_BT.long()
    return {**inputs, "mm_token_type_ids": kinds_BT, "token_type_ids": kinds_BT}


@contextmanager
def only_given_images(model: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replaces image ids that were sampled in the inputs; inside the block the model still embeds them as themselves.

    A model takes each image id for the place of an image, and would find more places than images.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids_BT, given_BT = inputs["input_ids"], inputs["mm_token_type_ids"].bool()
    known = (getattr(base.config, name, None) for name in ("image_token_id", "image_token_index", "video_token_id"))
    stray_BT = torch.isin(ids_BT, ids_BT.new_tensor([number for number in known if number is not None])) & ~given_BT
    if not stray_BT.any():
        yield inputs
        return
    handle = base.get_input_embeddings().register_forward_pre_hook(lambda module, arguments: (ids_BT,))
    try:
        yield {**inputs, "input_ids": ids_BT.masked_fill(stray_BT, 0)}
    finally:
        handle.remove()


# --- the part of a model that reads images ----------------------------------------------------------------------------


def vision_tower(model: nn.Module) -> nn.Module | None:
    """The part of a model that reads images; None if it has none."""
    if getattr(getattr(model, "config", None), "vision_config", None) is None:
        return None
    names = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens")
    found = (module for name, module in model.named_modules() if name.rpartition(".")[2] in names)
    return next(found, None)


def reach_vision_tower(model: nn.Module, log_probs_BT: Tensor) -> Tensor:
    """The log-probs, with a gradient of 0 for a trained vision tower: ranks average the gradients of the same
    parameters, even if one rank's batch has no image.
    """
    tower = vision_tower(model) if torch.is_grad_enabled() else None
    trained = [] if tower is None else [parameter for parameter in tower.parameters() if parameter.requires_grad]
    return log_probs_BT + sum(0.0 * parameter.sum() for parameter in trained) if trained else log_probs_BT


def present(**keywords: Any) -> dict[str, Any]:
    """The keywords that are not None: text-only engines and models need not know ``media`` and ``routes``."""
    return {name: value for name, value in keywords.items() if value is not None}
