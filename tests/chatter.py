"""A library that prints while it is imported, as bitsandbytes does on a CPU, and says whether garbage is collected."""

import gc
import sys

print("Failed to load CPU gemm_4bit_forward", file=sys.stderr, flush=True)
print("loaded, garbage is", "collected" if gc.isenabled() else "left", flush=True)
