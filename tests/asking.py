"""What torchao asks while it is imported."""

import torch
from torch.utils._triton import has_triton

assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(0) == (9, 0)
assert has_triton()
