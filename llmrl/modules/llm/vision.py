"""Images in conversations: the tokens that represent them in a stream, and the tensors that a model reads.

A chat template writes one placeholder per image. The Transformers processor replaces it by image token ids and makes
the tensors (Qwen2-VL: "pixel_values" and "image_grid_thw"). A row's media are these tensors of all its images in order,
and "positions" int64[K]: the indices of the row's K ids whose embeddings image features replace. Image token ids that
the policy sampled are not included. A batch stores the media of its rows under "media".
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
from llmrl.modules.llm.packing import unwrapped
from llmrl.optional import require

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

Media = dict[str, Tensor]  # the image tensors and positions of one row

MEDIA, POSITIONS = "media", "positions"
_CACHE_BYTES = 1 << 28


class Vision:
    """The images of conversations, through a processor.

    processor  the processor of an image-text-to-text model, with an image processor, a tokenizer and an image token
    Raises     UnsupportedError for any other

    Recently read images are cached, so the copies of a group's prompt share their tensors.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.processor = processor
        token = getattr(processor, "image_token", None)
        if token is None or getattr(processor, "image_processor", None) is None:
            raise UnsupportedError(
                f"Vision: a processor must have an image_processor and an image_token: {type(processor).__name__} "
                "lacks one."
            )
        convert = processor.tokenizer.convert_tokens_to_ids
        self.placeholder: str = getattr(processor, "boi_token", None) or token  # what templates write
        self.placeholder_id: int = convert(self.placeholder)
        self.image_token_id: int = convert(token)
        self._made: OrderedDict[Any, tuple[list[int], Media]] = OrderedDict()
        self._size = 0
        self.empty: Media = {}  # the media of a row without images
        image_module = require("PIL.Image", extra="vision", used_by="Vision")
        self.empty = {name: value[:0] for name, value in self._make(image_module.new("RGB", (64, 64)))[1].items()}

    def expand(
        self, ids: Sequence[int], images: Sequence[Any], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Replaces each placeholder by the ids of its image, and shifts the token spans accordingly.

        Raises  TemplateError unless there is one placeholder per image; DataError for an image that cannot be read
        """
        places = [place for place, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != len(images):
            raise TemplateError(
                f"Vision: the chat template must write {self.placeholder!r} once for each image: got {len(places)} for "
                f"{len(images)} images; some templates leave out the images of some roles."
            )
        expanded: list[int] = []
        start, moved = 0, [0] * (len(ids) + 1)  # moved[i]: the shift of the boundary before id i
        for place, image in zip(places, images, strict=True):
            new = self._process(image)[0]
            expanded += [*ids[start:place], *new]
            start = place + 1
            moved[start:] = [len(expanded) - start] * (len(moved) - start)
        return [*expanded, *ids[start:]], [(a + moved[a], b + moved[b]) for a, b in spans]

    def media(self, images: Sequence[Any]) -> Media:
        """The tensors of a row's images, without "positions"."""
        made = [self._process(image)[1] for image in images]
        if len(made) < 2:
            return dict(made[0] if made else self.empty)
        try:
            return {name: torch.cat([media[name] for media in made]) for name in self.empty}
        except RuntimeError as error:
            raise UnsupportedError(
                f"Vision: tensors of several images must be joined along their first dimension: those of "
                f"{type(self.processor).__name__} cannot be ({error}); give each conversation only one image."
            ) from error

    def positions(self, ids: Tensor, sampled: Tensor | None = None) -> Tensor:
        """int64[K]: indices of ids int64[T] that get features; none where ``sampled`` bool[S], S <= T, is True."""
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
        while self._size > _CACHE_BYTES and len(self._made) > 1:  # the newest entry stays, however large
            self._size -= _num_bytes(self._made.popitem(last=False)[1][1])
        return made

    def _make(self, image: Image) -> tuple[list[int], Media]:
        """The ids that replace the placeholder, and the tensors, of one image."""
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
    """The auto class that loads a model, given its folder, hub name or configuration: image-text-to-text or causal."""
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


def load_processor(
    source: str, *, model: str | None = None, **options: Any
) -> ProcessorMixin | PreTrainedTokenizerBase:
    """Loads the processor of a model that reads images, or the tokenizer of one that does not, by folder or hub name.
    ``model``: where the model's configuration is, if not in ``source``.

    A processor that also reads videos is loaded without its video part if torchvision or that part's files are missing.
    """
    import transformers
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(model or source, **options)
    except (OSError, ValueError):  # the folder may hold only a tokenizer
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
    """Writes a processor or a tokenizer to a folder. The image settings are also written to their own file: vLLM reads
    the video settings from that file if the processor has no video part.
    """
    processor.save_pretrained(folder)
    if hasattr(processor, "image_processor"):
        processor.image_processor.save_pretrained(folder)


def image_processor_class(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A subclass of the processor class ``kind`` without the video part, which needs torchvision."""

    class WithoutVideos(kind):  # type: ignore[misc,valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    WithoutVideos.__name__ = kind.__name__  # saved processors store the class name
    return WithoutVideos


# --- media of a batch -------------------------------------------------------------------------------------------------


def write_media(rows: Sequence[Media], batch_size: Sequence[int]) -> TensorDictBase:
    """The ragged entry "media" of a batch, from the media of its rows."""
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
    """A model's inputs for the images of a padded batch bool[B, T]: the tensors, and masks of the image tokens.

    They include no position ids: the model derives those from these inputs.
    """
    # "positions" index a row's real ids, so padding on either side does not shift them.
    device = attention_mask.device
    is_image_BT = torch.zeros(attention_mask.shape, dtype=torch.bool, device=device)
    for row, (attended, own) in enumerate(zip(attention_mask.bool(), media, strict=True)):
        is_image_BT[row, attended.nonzero().flatten()[own[POSITIONS].to(device)]] = True
    inputs = {name: torch.cat([row[name] for row in media]).to(device) for name in media[0] if name != POSITIONS}
    kinds_BT = is_image_BT.long()
    return {**inputs, "mm_token_type_ids": kinds_BT, "token_type_ids": kinds_BT}


@contextmanager
def only_given_images(model: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hides sampled image ids from the model; inside the block it still embeds them as ordinary tokens.

    A model expects image features for every image id in its inputs, and would find more such ids than images.
    """
    base = unwrapped(model)
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


# --- vision tower -----------------------------------------------------------------------------------------------------


def vision_tower(model: nn.Module) -> nn.Module | None:
    """The part of a model that reads images; None if it has none."""
    if getattr(getattr(model, "config", None), "vision_config", None) is None:
        return None
    names = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens")
    found = (module for name, module in model.named_modules() if name.rpartition(".")[2] in names)
    return next(found, None)


def reach_vision_tower(model: nn.Module, log_probs_BT: Tensor) -> Tensor:
    """Connects the log-probs to a trained vision tower with a gradient of 0: all ranks must average gradients of the
    same parameters, even if one rank's batch has no image.
    """
    tower = vision_tower(model) if torch.is_grad_enabled() else None
    trained = [] if tower is None else [parameter for parameter in tower.parameters() if parameter.requires_grad]
    return log_probs_BT + sum(0.0 * parameter.sum() for parameter in trained) if trained else log_probs_BT


def present(**keywords: Any) -> dict[str, Any]:
    """The keywords that are not None, so that text-only engines and models need not accept ``media`` and ``routes``."""
    return {name: value for name, value in keywords.items() if value is not None}
