"""A block on a model that has trained another one is what it is in a fresh process, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.child import ChildMessage, Order, Prepared, Preparing, Result, RunAgain, RunBlock, RunReplay
from service.contract.job import JobSpec
from tests.child import tiny
from tests.factory import configuration, measured
from training.errors import TrainingError
from worker.child import again
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.replay import trained_tensors
from worker.child.timing import Unit
from worker.child.warmup import warm
from worker.devices.cpu import Cpu
from worker.devices.simulated import Simulated

FORMS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "fp32": ("lora", {"precision": "fp32"}, {}),
    "autocast": ("lora", {"precision": "bf16-mixed"}, {}),
    "scaled": ("lora", {"precision": "fp16-mixed"}, {}),
    "16-bit": ("lora", {"precision": "bf16-mixed", "adapter": "base-dtype"}, {}),
    "dora": ("lora", {"precision": "fp32", "adapter": "dora"}, {}),
    "fused": ("lora", {"precision": "fp32", "adapter": "rslora", "projections": "fused"}, {}),
    "4-bit": ("qlora", {"precision": "bf16-mixed"}, {}),
    "embedding": ("lora", {"precision": "fp32"}, {"target_modules": ["q_proj", "embed_tokens"], "dropout": 0.1}),
    "pattern": ("lora", {"precision": "fp32"}, {"target_modules": r".*\.[qv]_proj"}),
}


def asked(bundle: Bundle, seed: int, **changes: Any) -> RunBlock:
    """The request for a block of a bundle's configuration."""
    candidate = measured(bundle.configuration.model_copy(update=changes), micro_batch_size=4)
    place = tiny.workplace(Path(bundle.spec.model.source))
    return RunBlock(workplace=place, spec=bundle.spec, candidate=candidate, block=seed, seed=seed, stays=True)


def trained(bundle: Bundle, samples: list[int]) -> Unit:
    """The bundle's unit of these samples, trained once."""
    unit = Unit(bundle, 4, plan_of(bundle, samples, 4))
    warm(unit)
    unit.run()
    return unit


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter")
@pytest.mark.parametrize("form", FORMS)
def test_a_block_after_another_is_what_it_is_in_a_fresh_process(llama: Path, functions: Path, form: str) -> None:
    method, levers, lora = FORMS[form]
    spec = tiny.job(llama, functions, lora={"r": 4, "alpha": 8} | lora)
    made = configuration(method, 8, None, **levers)
    fresh = tiny.built(spec, made, seed=4)
    first_weights = {name: one.clone() for name, one in trained_tensors(fresh.model).items()}
    expected = trained(fresh, list(range(16)))
    bundle = tiny.built(spec, made, seed=3)
    kept = {name: id(one) for name, one in trained_tensors(bundle.model).items()}
    marks = again.frozen(bundle.model)
    trained(bundle, list(range(16, 32)))
    assert again.can_reset(bundle) and again.frozen(bundle.model) == marks, "training leaves the base as it was"
    again.reset(bundle, asked(bundle, 4))
    found = trained_tensors(bundle.model)
    assert {name: id(one) for name, one in found.items()} == kept, "the same tensors hold the new weights"
    assert first_weights.keys() == found.keys()
    assert all(torch.equal(one, found[name]) for name, one in first_weights.items())
    assert again.frozen(bundle.model) == marks
    unit = trained(bundle, list(range(16)))
    # An embedding's gradient is added up by threads in no fixed order; other masks of dropout would move much more.
    assert unit.losses == pytest.approx(expected.losses, rel=1e-6)
    assert unit.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


def test_the_learning_rate_is_the_requests(llama: Path, functions: Path) -> None:
    bundle = tiny.bundle(tiny.job(llama, functions), "lora")
    again.reset(bundle, asked(bundle, 1, learning_rate=0.5))
    assert bundle.optimizer.param_groups[0]["lr"] == bundle.recipe.learning_rate == 0.5
    assert not bundle.optimizer.state and bundle.recipe.seed == 1


def test_compiled_code_is_kept(llama: Path, functions: Path) -> None:
    bundle, compiled = tiny.bundle(tiny.job(llama, functions), "lora"), []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    bundle.model.compile(backend=backend, dynamic=True)
    trained(bundle, list(range(8)))
    count = len(compiled)
    assert count
    again.reset(bundle, asked(bundle, 1))
    trained(bundle, list(range(8)))
    assert len(compiled) == count
    torch._dynamo.reset()


def test_nothing_of_the_block_before_is_in_memory(llama: Path, functions: Path) -> None:
    """On a simulated GPU, whose allocator knows every byte."""
    device = Simulated()
    try:
        bundle = tiny.bundle(tiny.job(llama, functions), "lora", device)
        trained(bundle, list(range(16)))
        live, peak, held = device.live(), device.peak(), device.used()
        again.reset(bundle, asked(bundle, 1))
        assert device.live() < live, "the optimizer's state is gone"
        assert device.peak() == device.used() < held, "and so is what the allocator kept"
        trained(bundle, list(range(16)))
        assert device.live() == live and device.peak() <= peak
    finally:
        device.close()


def test_heads_full_finetuning_and_random_weights_are_built_anew(
    llama: Path, bert: Path, functions: Path, reviews: Path
) -> None:
    """A head is drawn with the base, which full finetuning changes, and random weights are drawn under the seed."""
    assert not again.can_reset(tiny.bundle(tiny.job(llama, functions), "full"))
    assert not again.can_reset(tiny.bundle(tiny.job(bert, reviews, task="sequence-classification"), "lora"))
    spec = tiny.job(llama, functions)
    drawn = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": "random"})})
    assert not again.can_reset(tiny.bundle(drawn, "lora"))


def test_a_base_that_was_written_to_is_noticed(llama: Path, functions: Path) -> None:
    bundle = tiny.bundle(tiny.job(llama, functions), "lora")
    marks = again.frozen(bundle.model)
    with torch.no_grad():
        next(one for one in bundle.model.parameters() if not one.requires_grad).mul_(1.0)
    assert again.frozen(bundle.model) != marks


def test_an_adapter_on_other_layers_is_refused(llama: Path, functions: Path) -> None:
    bundle = tiny.bundle(tiny.job(llama, functions), "lora")
    bundle.model.peft_config["default"].target_modules = {"q_proj"}
    with pytest.raises(TrainingError, match="other layers"):
        again.reset(bundle, asked(bundle, 1))


Serve = Callable[..., tuple[Result, list[Result]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Serves requests on the CPU: the last result, and those after which the child stayed."""
    monkeypatch.setattr(Cpu, "limit", lambda *_: None)

    def run(first: RunBlock | RunReplay, *others: RunBlock | RunReplay) -> tuple[Result, list[Result]]:
        left, told = list(others), []

        def tell(message: ChildMessage) -> None:
            if not isinstance(message, Preparing | Prepared):
                assert isinstance(message, Result)
                told.append(message)

        def hear() -> Order:
            return RunAgain(request=left.pop(0))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".(is_)?gradient_checkpointing.* is deprecated", FutureWarning)
            result = again.serve(first, Cpu(), tell, hear)
        assert not left
        return result, told

    return run


def requests(spec: JobSpec, model: Path, data: Path, method: str = "lora") -> tuple[RunBlock, RunReplay]:
    """A block and a replay that may stay."""
    candidate = measured(configuration(method, 8, precision="fp32"), micro_batch_size=4)
    given: dict[str, Any] = {
        "workplace": tiny.workplace(model, data.parent),
        "spec": spec,
        "candidate": candidate,
        "stays": True,
    }
    return RunBlock(block=0, seed=1, **given), RunReplay(seed=7, count=2, samples_a_step=4, **given)


def test_a_child_stays_until_the_last_request(llama: Path, functions: Path, serve: Serve) -> None:
    block, replay = requests(tiny.job(llama, functions), llama, functions)
    last, told = serve(block, block.model_copy(update={"block": 1, "seed": 2, "stays": False}))
    assert len(told) == 1 and told[0].stays and not last.stays
    assert told[0].block and last.block and (told[0].block.process, last.block.process) == (None, 0)
    other = replay.model_copy(update={"seed": 8, "stays": False})
    again_replayed, _ = serve(replay, other)
    alone, none = serve(other)
    assert alone.replay == again_replayed.replay and not none


def test_a_child_that_cannot_be_asked_again_does_not_stay(llama: Path, functions: Path, serve: Serve) -> None:
    _, replay = requests(tiny.job(llama, functions), llama, functions, "full")
    last, told = serve(replay)
    assert last.replay and not last.stays and not told
