"""An import after which no forked child can use CUDA, as transformers' is beside a GPU where torchao is installed."""

import torch

torch.cuda._is_in_bad_fork = lambda: True
