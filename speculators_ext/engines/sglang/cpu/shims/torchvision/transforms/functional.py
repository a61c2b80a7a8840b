"""What is imported as ``torchvision.transforms.functional``."""

from torchvision.images import InterpolationMode, pil_to_tensor

__all__ = ["InterpolationMode", "pil_to_tensor"]
