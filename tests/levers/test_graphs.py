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
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.exports import EXPORTS
from service.levers import LEVERS, excluded
from service.levers.batching import ROWS
from service.levers.compile import GRAPHS
from tests.child import tiny
from tests.exports.test_train_py import job as exported_job
from tests.exports.test_train_py import models, recommended, script
from tests.factory import configuration
from training.batches import epoch_steps, padded_width, prepare
from training.levers.compile import own_gradients
from training.recipe import Recipe
from training.samples import IGNORED, Sample, Step, sample_of
from worker.child import measure, steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle, recipe_of

__all__ = ["models"]  # a fixture

POINT = {lever.name: lever.baseline for lever in LEVERS.values()} | {"task": "causal-lm", "method": "lora"}
SPEC = JobSpec.model_validate({"model": {"source": "org/m"}, "dataset": {"source": "org/d", "max_length": 128}})
SAMPLES = list(range(45))  # of which the last step has fewer than the others

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's own
    pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning"),  # peft, by the old name
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No compiled code, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.fixture
def job(llama: Path, tmp_path: Path) -> JobSpec:
    """A job whose samples are short enough to be packed in rows of 128 tokens, for a model of one layer: more of them
    are traced one by one, and show nothing else."""
    first = tiny.changed(llama, tmp_path / "llama", num_hidden_layers=1)
    return tiny.job(first, tiny.write(tmp_path / "data" / "data.jsonl", tiny.pairs(60, most=30)), max_length=128)


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


def test_a_row_of_several_samples_is_rounded_up_beyond_max_length() -> None:
    """float8 needs that, while a row of one sample must not go past the model's positions."""
    chosen = replace(recipe("padding-free", "off"), pad_multiple=64, max_length=100)
    assert [padded_width(longest, chosen) for longest in (3, 65, 100, 101, 130)] == [64, 100, 100, 128, 192]


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
    levers: dict[str, Any] = {"batching": batching, "attention": attention, "padding": "multiple-64"}
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


@pytest.mark.skipif(tiny.DEVICE != "cuda", reason="needs an NVIDIA GPU, and DYNOTUNE_TEST_DEVICE=cuda")
@pytest.mark.parametrize("batching", [*ROWS, "grouped"])
@pytest.mark.parametrize("compiled", GRAPHS)
def test_on_a_gpu_micro_batches_add_up(job: JobSpec, compiled: str, batching: str) -> None:
    """Steps of several micro batches by recorded graphs, which were recorded by then: as without them."""
    levers: dict[str, Any] = {"batching": batching, "padding": "multiple-64"}
    plain, bundle = tiny.bundle(job, **levers), tiny.bundle(job, **levers, compile=compiled)
    bundle.compile()
    plan = plan_of(bundle, SAMPLES, 1)  # rows that hold several samples are few a step
    assert len(plan[0]) > 1
    wanted, found = (trained(one, [*plan, *plan, *plan]) for one in (plain, bundle))
    for step, other in zip(found, wanted, strict=True):
        assert step == pytest.approx(other, rel=1e-2)


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


def test_a_trial_runs_to_its_end(job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU but for the graphs themselves: one is made for each size of micro batch that is tried, all full."""
    compile_model, device, seen = torch.nn.Module.compile, tiny.device(), set()

    def compiled(model: Any, dynamic: bool, mode: str) -> None:
        model.register_forward_pre_hook(lambda *given: seen.add(tuple(given[2]["input_ids"].shape)), with_kwargs=True)
        compile_model(model, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(measure, "unit_size", lambda *_: 32)
    capacity = device.used() + (1 << 30)
    monkeypatch.setattr(device, "capacity", lambda: capacity)
    levers: dict[str, Any] = {"batching": "packed-global", "padding": "multiple-64", "compile": "whole-reduce-overhead"}
    request = TrialRequest(
        configuration=configuration("lora", 16, precision="fp32", **levers), origin=Origin.baseline, number=1, passes=1
    )
    place = tiny.workplace(Path(job.model.source), Path(job.dataset.source).parent)
    found, _ = measure.run_trial(job, request, device, place, lambda _: None)
    assert found.outcome is Outcome.ok and found.tokens_per_second
    assert {tokens for _, tokens in seen} == {128}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(seen) > 2
    assert torch._dynamo.config.recompile_limit > 9, "there are as many sizes that are worth timing"


def test_a_padded_run_has_more_shapes_than_torch_compiles_for_unasked(
    llama: Path, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial times several sizes of micro batch, each with its own shapes: torch's limit is 8, of all."""
    compile_model = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda one, dynamic, mode: compile_model(one, dynamic=dynamic, backend="eager")
    )
    bundle = tiny.bundle(tiny.job(llama, functions), padding="multiple-64", compile="whole-reduce-overhead")
    bundle.compile()
    for length in range(4, 16):
        bundle.model(input_ids=torch.ones((1, length), dtype=torch.long, device=tiny.DEVICE))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 12


def test_the_exported_script_does_the_same(
    models: Path, tmp_path: Path, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's plan of an epoch, batches of one shape, and gradients that stay where they are from step to step."""
    levers: dict[str, Any] = {"batching": "packed", "padding": "multiple-64", "compile": "whole-reduce-overhead"}
    made = configuration(effective=8, micro=4, **levers)
    spec, asked, places, seen = exported_job(models, made), [], set(), set()
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)
    lengths = random.Random(5).choices(range(1, 65), k=203)
    wanted = replace(recipe_of(spec, made), micro_batch_size=4)
    assert module.epoch_steps(lengths, 3) == epoch_steps(lengths, 3, wanted)

    def compiled(model: Any, **more: Any) -> None:
        asked.append(more)
        model.register_forward_pre_hook(lambda *given: seen.add(tuple(given[2]["labels"].shape)), with_kwargs=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda one: places.add((id(one), one.grad.data_ptr())))

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(module, "evaluate", lambda *_: {"loss": 0.0})
    module.main(["--max-steps", "3", "--device", "cpu", "--output", str(tmp_path / "out")])
    assert asked == [{"dynamic": False, "mode": "reduce-overhead"}] and seen == {(4, 64)}
    assert len(places) == len({one for one, _ in places}) > 2


def test_a_compiling_script_keeps_wrong_gradients_away(
    models: Path, tmp_path: Path, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting of https://github.com/pytorch/pytorch/issues/193061 is off before anything is compiled."""
    from torch._inductor import config

    made, seen = configuration(effective=8, micro=4, compile="per-layer"), list[bool]()
    spec = exported_job(models, made)
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: seen.append(config.triton.mix_order_reduction))
    with config.patch({"triton.mix_order_reduction": True}):
        module.main(["--max-steps", "1", "--device", "cpu", "--output", str(tmp_path / "out")])
    assert seen and not any(seen)


class Replayed(torch.autograd.Function):  # type: ignore[misc]
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
