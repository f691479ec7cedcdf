"""A library that prints while it is imported, as bitsandbytes does on a CPU."""

import sys

print("Failed to load CPU gemm_4bit_forward", file=sys.stderr, flush=True)
print("loaded", flush=True)
