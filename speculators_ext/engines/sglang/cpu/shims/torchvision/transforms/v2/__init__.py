"""What transformers imports as ``torchvision.transforms.v2``."""
