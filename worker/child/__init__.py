"""The child process of one trial: build, data, probe, measure, watch. The only rooms that import torch."""
