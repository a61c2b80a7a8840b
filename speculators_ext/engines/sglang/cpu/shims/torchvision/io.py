"""What transformers imports as ``torchvision.io``."""

from torchvision.images import ImageReadMode, decode_image

__all__ = ["ImageReadMode", "decode_image"]
