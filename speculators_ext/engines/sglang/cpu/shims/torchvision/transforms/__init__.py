"""What is imported as ``torchvision.transforms``."""

from torchvision.images import InterpolationMode

__all__ = ["InterpolationMode"]
