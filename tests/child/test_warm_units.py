"""What a unit does before and while it is timed: all shapes are run first, and a short one is trained again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.child import tiny
from training.batches import padded_width
from worker.child import timing
from worker.child.arrange import plan_of, shape_of
from worker.child.timing import Unit, time_unit
from worker.child.warmup import warm
from worker.devices.simulated import Simulated, World

FAST = World(flops=1e12, bandwidth=1e12, first_call_seconds=0.0, segment_seconds=0.0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No compiled code, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(llama: Path, functions: Path, choice: str = "whole-cudagraphs") -> Unit:
    """A unit whose rows have several widths, of a model that is compiled for each of them by itself."""
    bundle = tiny.bundle(tiny.job(llama, functions), "lora", compile=choice)
    bundle.model.compile(dynamic=False, backend="eager")
    made = Unit(bundle, 4, plan_of(bundle, list(range(16)), 4))
    lengths = bundle.data.lengths
    assert len({shape_of(micro, lengths, bundle.recipe) for step in made.plan for micro in step}) > 2
    assert padded_width(5, bundle.recipe) == 5
    return made


@pytest.mark.parametrize("is_warm", [True, False])
def test_compiled_code_meets_no_new_width_in_a_timing(llama: Path, functions: Path, is_warm: bool) -> None:
    made = compiled(llama, functions)
    if is_warm:
        warm(made)
    else:  # the companion: one shape alone leaves others to be compiled while they are timed
        made.plan, whole = made.plan[:1], made.plan
        made.plan[0] = made.plan[0][:1]
        made.run()
        made.plan = whole
    with torch.compiler.set_stance("fail_on_recompile"):
        if is_warm:
            assert made.run() and made.passes == 1
        else:
            with pytest.raises(RuntimeError, match="recompile"):
                made.run()


@pytest.mark.parametrize(("choice", "runs"), [("whole-cudagraphs", 3), ("whole", 1)])
def test_a_shape_of_cuda_graphs_runs_until_its_graph_is_replayed(
    llama: Path, functions: Path, monkeypatch: pytest.MonkeyPatch, choice: str, runs: int
) -> None:
    """Its first call runs without a graph, its second records one; neither is what a run's steps take."""
    made = compiled(llama, functions, choice)
    monkeypatch.setattr(made.bundle.device, "first_call_per_shape", True)
    warm(made)
    shapes = {shape_of(micro, made.bundle.data.lengths, made.bundle.recipe) for step in made.plan for micro in step}
    assert sorted(made.warmed) == sorted([*shapes] * runs)


def test_a_small_models_unit_is_trained_until_it_tells(
    llama: Path, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may be through with it in no time; it is timed for LEAST_TIMED_SECONDS, whatever the passes asked for."""
    device = Simulated(world=FAST)
    try:
        bundle = tiny.bundle(tiny.job(llama, functions), "lora", device)
        made = Unit(bundle, 4, plan_of(bundle, list(range(16)), 4))
        assert made.run()
        once = made.pieces.seconds()
        monkeypatch.setattr(timing, "LEAST_TIMED_SECONDS", 6.5 * once)
        time_unit(made, passes=1, extra=0)
        assert made.passes > 6 and 0 <= made.pieces.seconds() - timing.LEAST_TIMED_SECONDS < once
        monkeypatch.setattr(timing, "LEAST_TIMED_SECONDS", 1e9)
        monkeypatch.setattr(timing, "MOST_PASSES", 9)
        time_unit(made, passes=1, extra=0)
        assert made.passes == 9, "not for ever"
    finally:
        device.close()
