"""The long-lived worker process: claims tasks and runs each in a child process of its own.

It keeps the task's lease and the device's lock, starts children through the sandbox, and never imports torch.
"""
