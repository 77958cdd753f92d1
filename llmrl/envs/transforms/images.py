"""Transforms of images: `ToTensorImage` and `Resize`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llmrl.data.specs import Bounded, TensorSpec, Unbounded
from llmrl.envs.transforms.base import Keys
from llmrl.envs.transforms.entries import EntryTransform
from llmrl.errors import ConfigError, ShapeError, check_choice

_SMOOTH = ("bilinear", "bicubic")


class ToTensorImage(EntryTransform):
    """Converts images [*, H, W, C] to [*, C, H, W] in ``dtype`` (default: the default float dtype). Integers are
    divided by 255; ``from_int`` True or False forces the division on or off for any dtype.

    >>> from tensordict import TensorDict
    >>> image = torch.full((4, 5, 3), 255, dtype=torch.uint8)
    >>> pixels = ToTensorImage()(TensorDict(pixels=image))["pixels"]
    >>> pixels.shape, pixels.max()
    (torch.Size([3, 4, 5]), tensor(1.))
    """

    def __init__(
        self,
        from_int: bool | None = None,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        self.from_int, self.dtype = from_int, torch.get_default_dtype() if dtype is None else dtype

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise ShapeError(f"ToTensorImage: an image must be [*, H, W, C]: got shape {tuple(value.shape)}.")
        divide = not value.is_floating_point() if self.from_int is None else self.from_int
        value = value.movedim(-1, -3).to(self.dtype)
        return value / 255 if divide else value

    def _entry_spec(self, spec: TensorSpec) -> TensorSpec:
        *lead, height, width, channels = spec.shape
        shape = (*lead, channels, height, width)
        if not isinstance(spec, Bounded):
            return Unbounded(shape, spec.device, self.dtype)
        ends = map(self._apply_transform, (spec.low, spec.high))
        return Bounded(*ends, shape, spec.device, self.dtype)


class Resize(EntryTransform):
    """Resizes images [*, C, H, W] to [*, C, w, h] with `torch.nn.functional.interpolate`; without ``h``, a square.

    interpolation  "bilinear" and "bicubic", with antialiasing; "nearest", "nearest-exact" and "area", without.
                   Integers are rounded and clamped to the range of their dtype

    >>> from tensordict import TensorDict
    >>> Resize(2, in_keys=["pixels"])(TensorDict(pixels=torch.ones(3, 8, 6)))["pixels"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: str = "bilinear",
        *,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
    ):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        check_choice("Resize", "interpolation", interpolation, (*_SMOOTH, "nearest", "nearest-exact", "area"))
        self.size = (w, w if h is None else h)
        if min(self.size) < 1:
            raise ConfigError(f"Resize: w and h must be at least 1: got {self.size}.")
        self.interpolation = interpolation

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise ShapeError(f"Resize: an image must be [*, C, H, W]: got shape {tuple(value.shape)}.")
        images = value.reshape(-1, *value.shape[-3:])
        whole = not images.is_floating_point()
        options = {"antialias": True, "align_corners": False} if self.interpolation in _SMOOTH else {}
        out = F.interpolate(images.float() if whole else images, self.size, mode=self.interpolation, **options)
        if whole:
            limits = torch.iinfo(value.dtype)
            out = out.round().clamp(limits.min, limits.max).to(value.dtype)
        return out.reshape(*value.shape[:-2], *self.size)

    def _entry_spec(self, spec: TensorSpec) -> TensorSpec:
        shape = (*spec.shape[:-2], *self.size)
        if isinstance(spec, Bounded) and self.interpolation != "bicubic":  # bicubic overshoots
            return Bounded(spec.low.min().item(), spec.high.max().item(), shape, spec.device, spec.dtype)
        return Unbounded(shape, spec.device, spec.dtype)
