"""What benchmarks/gpu_acceptance.py runs: its parts, one a file, and what they share."""
