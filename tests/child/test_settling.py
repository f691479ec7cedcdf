"""Why the probe lets a size settle: what torch's allocator does near the capacity, on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.child import tiny
from worker.child import probe, steps
from worker.child.arrange import plan_of
from worker.child.size_search import SETTLED_AFTER
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
                    peak = probe.full_step(bundle, 24, from_empty).step
                    found.append(device.retries() - before)
        finally:
            device.close()
        return found, peak

    _, plenty = retries_and_peak(2**30, (True,))
    cap = plenty - 2 * MIB
    every, peak = retries_and_peak(cap, (True, True, True))
    assert min(every) > 0 and peak < plenty
    run, _ = retries_and_peak(cap, (True, *[False] * SETTLED_AFTER))
    assert run[0] > 0 and run[-1] == 0


def trained(model: Path, rows: Path, method: str, size: int, accumulation: int, mebibytes: int) -> list[int]:
    """Train at a size as a soak does: the longest samples, rows of all lengths, the longest; each step's retries."""
    rows = tiny.write(rows, tiny.pairs(200))
    job = tiny.job(model, rows, max_length=64, training={"effective_batch_size": accumulation * size})
    device = Simulated()
    device.limit(mebibytes * MIB)
    try:
        bundle = tiny.bundle(job, method, device, accumulation * size, precision="bf16-mixed")
        probe.fits(bundle, size)
        probe.fits(bundle, 1)
        lengths = bundle.data.lengths
        assert min(lengths) < 10 and max(lengths) == 64
        longest_first = sorted(range(len(lengths)), key=lambda one: -lengths[one])
        retries = []
        for indices in (longest_first, range(len(lengths)), longest_first[::-1], longest_first):
            for step in plan_of(bundle, list(indices)[: accumulation * size], size):
                batches, terms, _ = steps.prepare(bundle, step)
                before = device.retries()
                steps.optimizer_step(bundle, batches, terms)
                retries.append(device.retries() - before)
    finally:
        device.close()
    return retries


def test_training_at_a_size_beyond_the_peaks_frees_the_cache_once(llama: Path, tmp_path: Path) -> None:
    """By their peaks 46 samples fit (test_simulated.py); 53 are trained."""
    retries = trained(llama, tmp_path / "rows.jsonl", "lora", 53, 2, 349)
    assert len(retries) == 4 and not any(retries[1:])


def test_full_finetuning_runs_out_of_memory_where_the_probes_steps_fit(llama: Path, tmp_path: Path) -> None:
    """Which is why the probe follows no second line there. The steps that fit are those of `probe.fits`."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(llama, tmp_path / "rows.jsonl", "full", 40, 1, 300)
    assert any(frame.name == "optimizer_step" for frame in raised.traceback)
