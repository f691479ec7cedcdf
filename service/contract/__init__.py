"""The data that user, control plane, worker and child process exchange: frozen pydantic models, no I/O.

Each file has the models of one subject, such as the job, the configuration, the measurement or the task.
"""
