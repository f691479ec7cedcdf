"""The child process that runs one trial: it loads data and model, probes memory and times. It alone imports torch."""
