"""What is imported by name."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

__all__ = ["ImageReadMode", "InterpolationMode", "decode_image", "pil_to_tensor"]


class ImageReadMode(Enum):
    """How an image file is read; none is."""

    RGB = "RGB"


class InterpolationMode(Enum):
    """How an image is resized; none is."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def decode_image(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: images need torchvision itself."""
    raise NotImplementedError("this is a stand-in for torchvision, for text models only")


pil_to_tensor = decode_image
