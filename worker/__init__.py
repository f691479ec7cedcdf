"""The worker: claims tasks, measures each trial in a child process of its own. Only the child's rooms import torch."""
