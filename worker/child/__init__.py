"""The child process that runs one trial: it loads data and model, probes memory and times. Only it and worker.devices import torch."""
