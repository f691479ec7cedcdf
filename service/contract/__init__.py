"""What travels between user, control plane and worker: frozen pydantic models, no I/O.

One file a thing: job, configuration, hardware, measurement, task, recommendation.
"""
