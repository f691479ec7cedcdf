"""The child process of one trial: loads data and model, probes memory, times. Only it and devices import torch."""
