"""The long-lived worker process: claims tasks and runs each in a child process of its own.

It holds the lease, the device's lock and the sandbox, and it never imports torch.
"""
