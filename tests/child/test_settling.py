"""Why the probe lets a size settle: what torch's allocator does near the capacity, on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

from tests.child import tiny
from worker.child import probe
from worker.devices.simulated import Simulated

MIB = 1 << 20


def test_a_run_settles_in_memory_that_a_step_from_an_empty_cache_finds_too_small(llama: Path, functions: Path) -> None:
    """The allocator frees its cache in the first steps, and its peak then is smaller than the same step's in plenty."""
    job = tiny.job(llama, functions, max_length=96, training={"effective_batch_size": 64})

    def retries_and_peak(cap: int, steps_from_empty: tuple[bool, ...]) -> tuple[list[int], int]:
        device = Simulated()
        device.limit(cap)
        found = []
        try:
            bundle = tiny.bundle(job, "lora", device, 64, precision="bf16-mixed")
            with probe.without_learning(bundle):
                probe.full_step(bundle, 1)
                for from_empty in steps_from_empty:
                    before = device.retries()
                    peak, _ = probe.full_step(bundle, 24, from_empty)
                    found.append(device.retries() - before)
        finally:
            device.close()
        return found, peak

    _, plenty = retries_and_peak(2**30, (True,))
    cap = plenty - 2 * MIB
    every, peak = retries_and_peak(cap, (True, True, True))
    assert min(every) > 0 and peak < plenty
    run, _ = retries_and_peak(cap, (True, *[False] * probe.SETTLED_AFTER))
    assert run[0] > 0 and run[-1] == 0
