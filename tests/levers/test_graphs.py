"""CUDA graphs: packed rows have one shape, nothing is compiled a second time, and gradients outlive the next graph."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.job import JobSpec
from service.levers import LEVERS, excluded
from service.levers.batching import ROWS
from service.levers.compile import GRAPHS
from tests.child import tiny
from tests.factory import configuration
from training.batches import epoch_steps, padded_width, prepare
from training.levers.compile import own_gradients
from training.recipe import Recipe
from training.samples import IGNORED, Sample, Step, sample_of
from worker.child import steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle, recipe_of

POINT = {lever.name: lever.baseline for lever in LEVERS.values()} | {"task": "causal-lm", "method": "lora"}
SPEC = JobSpec.model_validate({"model": {"source": "org/m"}, "dataset": {"source": "org/d", "max_length": 128}})
SAMPLES = list(range(45))  # of which the last step has fewer than the others

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No compiled code, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def job(llama: Path, tmp_path: Path) -> JobSpec:
    """A job whose samples are short enough to be packed in rows of 128 tokens."""
    return tiny.job(llama, tiny.write(tmp_path / "data" / "data.jsonl", tiny.pairs(60, most=30)), max_length=128)


def recipe(batching: str, compiled: str, padding: str = "multiple-64", micro: int = 4) -> Recipe:
    """The recipe of a trial, with its micro batch size."""
    made = configuration(effective=16, micro=micro, batching=batching, compile=compiled, padding=padding)
    return replace(recipe_of(SPEC, made), micro_batch_size=micro)


def drawn(count: int = 300) -> list[Sample]:
    """Samples of very different lengths, all of whose tokens but the first are learnt."""
    rng, found = random.Random(3), []
    for _ in range(count):
        ids = [rng.randrange(5, 100) for _ in range(min(128, max(4, int(rng.lognormvariate(3.2, 0.9)))))]
        found.append(sample_of(ids, [IGNORED, *ids[1:]]))
    return found


def shapes(plan: list[Step], samples: list[Sample], chosen: Recipe) -> set[tuple[int, ...]]:
    """The shapes of all batches of an epoch."""
    return {
        tuple(tensor.shape)
        for step in plan
        for batch in prepare(step, samples, 0, chosen)[0]
        for tensor in batch.values()
    }


@pytest.mark.parametrize("batching", ROWS)
@pytest.mark.parametrize("micro", [1, 4, 7])
def test_packed_rows_have_one_shape(batching: str, micro: int) -> None:
    """The last rows of a step and of the epoch too; without CUDA graphs there are as many as there were."""
    samples = drawn()
    lengths = [len(ids) for ids, _ in samples]
    for graphs in GRAPHS:
        chosen = recipe(batching, graphs, micro=micro)
        assert shapes(epoch_steps(lengths, 0, chosen), samples, chosen) == {(micro, 128)}
    plain = recipe(batching, "per-layer", micro=micro)
    assert len(shapes(epoch_steps(lengths, 0, plain), samples, plain)) > 1 or micro == 1


@pytest.mark.parametrize("batching", ROWS)
def test_empty_rows_change_nothing_but_the_shape(batching: str) -> None:
    """The same samples in the same rows and steps, as many terms and tokens; in an empty row, nothing is learnt."""
    samples = drawn()
    lengths = [len(ids) for ids, _ in samples]
    chosen, plain = recipe(batching, "whole-reduce-overhead"), recipe(batching, "whole")
    full, ragged = epoch_steps(lengths, 0, chosen), epoch_steps(lengths, 0, plain)
    assert [[[row for row in part if row] for part in step] for step in full] == ragged
    for step, other in zip(full, ragged, strict=True):
        batches, *counts = prepare(step, samples, 0, chosen)
        assert counts == list(prepare(other, samples, 0, plain)[1:])
        for part, batch in zip(step, batches, strict=True):
            empty = [not row for row in part]
            assert bool((batch["labels"][empty] == IGNORED).all())
            assert torch.equal(batch["position_ids"][empty], torch.arange(128).repeat(sum(empty), 1))


def test_other_batchings_are_as_they_were() -> None:
    lengths = [len(ids) for ids, _ in drawn()]
    for batching in ("padded", "sorted", "grouped"):
        chosen = recipe(batching, "whole-reduce-overhead")
        assert not chosen.fills_micro_batches and padded_width(65, chosen) == 128 and padded_width(3, chosen) == 64
        assert epoch_steps(lengths, 0, chosen) == epoch_steps(lengths, 0, recipe(batching, "off"))


def trained(bundle: Bundle, plan: list[Step]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    results = [steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2]) for step in plan]
    return [(float(loss), float(norm)) for loss, norm in results]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batching", ROWS)
def test_one_graph_without_a_break_serves_an_epoch(job: JobSpec, batching: str, attention: str, method: str) -> None:
    """Traced for fixed shapes as CUDA graphs are: nothing of a batch, of a step or of gradients compiles it again."""
    levers = {"batching": batching, "attention": attention, "padding": "multiple-64"}
    plain = tiny.bundle(job, method, **levers)
    wanted = trained(plain, plan_of(plain, SAMPLES, 2))
    bundle = tiny.bundle(job, method, **levers, compile="whole-reduce-overhead")
    own_gradients(bundle.model)
    bundle.model.compile(dynamic=False, fullgraph=True, backend="eager")
    plan = plan_of(bundle, SAMPLES, 2)
    assert len(plan) > 2 and any(not row for step in plan for part in step for row in part)
    trained(bundle, [plan[0][:1]])  # one micro batch, so that all others are seen to need nothing more
    begin_again(bundle, tiny.bundle(job, method, **levers))
    with torch.compiler.set_stance("fail_on_recompile"):
        found = trained(bundle, plan)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [number for step in found for number in step] == pytest.approx(
        [number for step in wanted for number in step], rel=1e-4
    )


def begin_again(bundle: Bundle, fresh: Bundle) -> None:
    """Give a compiled model the weights that it began with, and a new optimizer."""
    bundle.model.load_state_dict(fresh.model.state_dict())
    bundle.new_optimizer()


def test_a_short_last_row_or_micro_batch_would_compile_it_again(job: JobSpec) -> None:
    """The companion: without the filling there are more shapes, and the stance that the test above takes refuses."""
    bundle = tiny.bundle(job, "lora", batching="packed-global", padding="multiple-64")
    bundle.model.compile(dynamic=False, backend="eager")
    plan = plan_of(bundle, SAMPLES, 2)
    trained(bundle, [plan[0][:1]])
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        trained(bundle, plan)


class Replayed(torch.autograd.Function):
    """A product whose gradient lies where the next one will be written, as that of a CUDA graph does."""

    memory = array("f", [0.0] * 4)

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return (rows * weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        (rows,) = ctx.saved_tensors
        written = torch.frombuffer(Replayed.memory, dtype=torch.float32)
        written.copy_(gradients[0] * rows)
        return None, written


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("owned", [True, False])
def test_gradients_outlive_the_next_graph(owned: bool, kept: bool) -> None:
    """Two steps of three micro batches; cleared in between by dropping the gradients, or in place (`kept`)."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(4))
    model.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    if owned:
        own_gradients(model)
    summed = []
    for step in range(2):
        for number in range(3):
            Replayed.apply(torch.full((4,), 10.0 * step + number), model.weight).backward()
        summed.append(float(model.weight.grad[0]))
        if kept:
            model.weight.grad.zero_()
        else:
            model.weight.grad = None
    assert (summed == [3.0, 33.0]) is owned, summed


def test_what_graphs_of_packed_rows_go_with() -> None:
    """sdpa, whose mask has one shape; not kernels that take a length a sample, nor micro batches of a token budget."""
    for batching, attention, allowed in (
        ("packed", "sdpa", True),
        ("packed-global", "sdpa-efficient", True),
        ("packed", "varlen", False),
        ("packed", "flash-attention-2", False),
        ("padding-free", "flash-attention-2", False),
        ("token-budget", "sdpa", False),
        ("grouped", "sdpa", True),
    ):
        point = POINT | {"batching": batching, "attention": attention, "precision": "bf16"}
        point |= {"compile": "whole-reduce-overhead", "padding": "max" if batching == "token-budget" else "multiple-64"}
        assert (excluded(point) is None) is allowed, (batching, attention)
