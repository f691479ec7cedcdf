"""What goes wrong on a GPU only, or only with many shapes, as far as a CPU can show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from service.contract.child import ChildFailed
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.levers import LEVERS, circumstances, excluded
from tests.child import tiny
from training.batches import collate
from training.evaluation import evaluate
from training.levers.checkpointing import keep_what_is_dear
from training.levers.compile import compile_in_graphs, compile_layers, compile_whole, set_compiler_up
from training.levers.normalisation import low_precision_norms
from worker.child import entry, steps
from worker.child.arrange import plan_of
from worker.child.measure import check_reference

Facts = Callable[..., HardwareFacts]
POINT = {lever.name: lever.baseline for lever in LEVERS.values()} | {"task": "causal-lm", "method": "full"}


@pytest.fixture
def fresh() -> Any:
    """No compiled code and the compiler's own settings, before and after."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = limit, False


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quantised_base_computes_in_the_checkpoints_dtype(
    llama: Path, functions: Path, tmp_path: Path, dtype: str
) -> None:
    """What Trainer does unasked: precision=checkpoint has no autocast, and bitsandbytes' own default would be fp32."""
    import bitsandbytes as bnb

    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    bundle = tiny.bundle(tiny.job(folder, functions), "qlora", precision="checkpoint")
    found = {one.compute_dtype for one in bundle.model.modules() if isinstance(one, bnb.nn.Linear4bit)}
    assert found == {getattr(torch, dtype)}


@pytest.mark.parametrize("way", [compile_layers, compile_whole, compile_in_graphs])
def test_every_way_to_compile_keeps_wrong_gradients_away(way: Callable[[Any], None], monkeypatch: Any) -> None:
    """The setting of https://github.com/pytorch/pytorch/issues/193061 is off before anything is compiled."""
    from torch._inductor import config

    seen = list[bool]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: seen.append(config.triton.mix_order_reduction))
    with config.patch({"triton.mix_order_reduction": True}):
        way(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    assert seen == [False]


def test_chained_norms_have_right_gradients() -> None:
    """What the setting breaks is right without it: so many rows are reduced in both orders at once where it is on.

    Only a GPU's generated kernels can have wrong gradients; elsewhere only the graph of the backward pass is looked at.
    """
    set_compiler_up()
    on_gpu = tiny.DEVICE == "cuda"
    rows, width = (8192, 768) if on_gpu else (6, 32)  # inductor fuses from 4,096 rows and 5 x 2^20 elements on

    def chained(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.rms_norm(x, (width,), first)
        return torch.nn.functional.layer_norm(inner + x, (width,), second).square().sum()

    torch.manual_seed(0)
    options = {"dtype": torch.float32 if on_gpu else torch.float64, "requires_grad": True, "device": tiny.DEVICE}
    given = [torch.randn(shape, **options) for shape in ((rows, width), (width,), (width,))]
    plain = torch.autograd.grad(chained(*given), given)
    backend = "inductor" if on_gpu else "aot_eager"
    compiled = torch.autograd.grad(torch.compile(chained, backend=backend)(*given), given)
    for one, other in zip(plain, compiled, strict=True):
        assert float((one - other).norm() / one.norm()) < (1e-4 if on_gpu else 1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_dropout_switched_off_compiles_nothing_again(bert: Path, reviews: Path, fresh: None) -> None:
    job = tiny.job(bert, reviews, task="sequence-classification")
    bundle = tiny.bundle(job, "full", compile="per-layer-aot-eager")
    bundle.compile()
    (step,) = plan_of(bundle, list(range(8)), 4, 8)
    batches, terms, _ = steps.prepare(bundle, step)
    steps.optimizer_step(bundle, batches, terms)
    before = graphs()
    assert before > 0
    request = TrialRequest(configuration=bundle.configuration, origin=Origin.baseline, number=1)
    check_reference(bundle, list(range(8)), request, 4, [])
    assert graphs() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_all_kinds_of_batches_of_a_run_are_compiled(model: str, request: pytest.FixtureRequest, fresh: None) -> None:
    """With and without a mask, as where all rows were cut at max_length; one row and several; training and evaluation.

    The layers share their code, and the first one's input has no gradient under an adapter: each kind counts twice.
    """
    task = {"llama": "causal-lm", "bert": "sequence-classification"}[model]
    data = request.getfixturevalue("functions" if model == "llama" else "reviews")
    bundle = tiny.bundle(tiny.job(request.getfixturevalue(model), data, task=task), "lora", checkpointing="every-2")
    bundle.recipe = SimpleNamespace(**{**vars(bundle.recipe), "compiled": ()})  # type: ignore[assignment]
    bundle.compile()  # more kinds than it may compile are an error from here on
    compile_layers(bundle.model, backend="eager")
    longest = max(bundle.data.train, key=lambda one: len(one[0]))
    short = (longest[0][:-3], longest[1][:-3] or longest[1])
    for rows in ([[longest]] * 3, [[longest], [short]], [[longest]], [[longest]] * 5):
        batch = collate(rows, bundle.pad, bundle.recipe)
        steps.optimizer_step(bundle, [batch], len(rows))
    evaluate(bundle.model, [longest, short], bundle.tokenizer, bundle.device.torch, bundle.recipe)
    evaluate(bundle.model, [longest], bundle.tokenizer, bundle.device.torch, bundle.recipe)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_too_many_shapes_for_compiled_code_are_said(llama: Path, functions: Path, fresh: None) -> None:
    """Otherwise torch goes on without compiled code, and a timing would hold that."""
    bundle = tiny.bundle(tiny.job(llama, functions), "lora")
    for layer in bundle.model.base_model.model.model.layers:
        layer.compile(dynamic=False, backend="eager")
    torch._dynamo.config.recompile_limit = 2
    bundle.recipe = SimpleNamespace(**{**vars(bundle.recipe), "compiled": ()})  # type: ignore[assignment]
    bundle.compile()
    with pytest.raises(Exception) as caught:
        for length in (4, 8, 12, 16):
            bundle.model(input_ids=torch.ones((1, length), dtype=torch.long, device=tiny.DEVICE))
    told = entry._failure(caught.value, [])
    assert isinstance(told, ChildFailed) and (told.outcome, told.reason) == (Outcome.invalid, entry.TOO_MANY_SHAPES)


def test_fp8_gets_rows_of_a_multiple_of_16_tokens() -> None:
    for padding, batching, allowed in (
        ("longest", "padded", False),
        ("multiple-8", "packed", False),
        ("multiple-64", "grouped", True),
    ):
        point = POINT | {"precision": "bf16-mixed", "float8": "tensorwise", "compile": "per-layer"}
        assert (excluded(point | {"padding": padding, "batching": batching}) is None) == allowed
    for length in (96, 100):  # a full row is as long, and is not rounded up beyond the model's positions
        job = JobSpec.model_validate(
            {"model": {"source": "org/m"}, "dataset": {"source": "org/d", "max_length": length}, "method": "full"}
        )
        made = point | {"batching": "grouped", "padding": "multiple-64"} | circumstances(job, "full")
        assert (excluded(made) is None) == (length % 16 == 0)


def test_low_precision_norms_take_16_bit_weights() -> None:
    """The frozen base under an adapter has them; torch's LayerNorm takes no input of another dtype."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)).to(torch.bfloat16)
    low_precision_norms(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](torch.randn(2, 16)).dtype is torch.bfloat16


def test_selective_checkpointing_keeps_what_attention_computed() -> None:
    from torch.nn.attention import varlen

    assert varlen
    kept = [
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten.mm.default,
        SimpleNamespace(name=lambda: "flash_attn::_flash_attn_varlen_forward"),
        SimpleNamespace(name=lambda: "_flash_attn2_3f9a::_flash_attn_forward"),
    ]
    assert {keep_what_is_dear(None, one) for one in kept} == {CheckpointPolicy.MUST_SAVE}
    assert keep_what_is_dear(None, torch.ops.aten.gelu.default) is CheckpointPolicy.PREFER_RECOMPUTE


def test_medium_precision_is_tf32_on_a_gpu(facts: Facts) -> None:
    medium = LEVERS["precision"].choice("fp32-medium")
    assert medium.missing(facts(bf16_native=True)) is None
    said = medium.missing(facts(device="cuda", capability=(9, 0), bf16_native=True))
    assert said is not None and "tf32" in said
