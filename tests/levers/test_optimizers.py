"""Optimizers of our own: where they differ from torch's AdamW is in where and when they update, not in what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from service.levers import LEVERS
from tests.child import tiny
from tests.levers.test_conformance import CPU, runnable
from training.errors import TrainingError
from training.levers import optimizer
from training.optimization import gradient_norm, parameter_groups
from worker.child import steps
from worker.child.arrange import candidates

SAMPLES = list(range(8))


def trained(make: Any, kind: torch.dtype = torch.float32, clip: float = 0.0) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and gradient norms after five steps with a falling rate; one weight gets no gradient at first."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]).to(kind)
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0},
    ]
    made, norms = make(groups, 1e-2), []
    recipe: Any = SimpleNamespace(max_grad_norm=clip, steps_in_backward=hasattr(made, "held"))
    for step in range(5):
        for group in made.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        out = model[0](torch.randn(4, 6, dtype=kind))
        (model[1](out) if step else out).square().sum().backward()
        norms.append(float(gradient_norm(model, made, recipe)))
        made.step()
        made.zero_grad()
    return [one.detach().clone() for one in model.parameters()], norms


@pytest.mark.parametrize(("make", "clip"), [(optimizer.offloaded_adamw, 0.5), (optimizer.in_backward_adamw, 0.0)])
def test_they_update_as_adamw_does(make: Any, clip: float) -> None:
    weights, norms = trained(make, clip=clip)
    expected, expected_norms = trained(lambda groups, rate: optimizer.adamw(groups, rate, fused=True), clip=clip)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for ours, theirs in zip(weights, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


# All that run here. The offloaded one does, too, although it is of no use without a GPU.
HERE = [LEVERS["optimizer"].choice(choice) for name, choice in runnable(CPU) if name == "optimizer"]
HERE += [LEVERS["optimizer"].choice("adamw-offloaded")]


@pytest.mark.parametrize("choice", HERE, ids=lambda choice: choice.name)
def test_a_run_goes_on_where_it_was_saved(choice: Any, tmp_path: Path) -> None:
    """As train.py and transformers' Trainer resume: the states, the rate of the schedule, and the weights."""
    inputs = torch.randn(6, 4, 96, generator=torch.Generator().manual_seed(0))

    class Run:
        """A layer that is trained with a falling rate, from other weights each time."""

        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            self.model = torch.nn.Linear(96, 96).to(torch.bfloat16)
            groups = [
                {"params": [self.model.weight], "weight_decay": 0.1, "embeddings": []},
                {"params": [self.model.bias], "weight_decay": 0.0, "embeddings": []},
            ]
            self.optimizer = getattr(optimizer, choice.function)(groups, 1e-2, **choice.options)
            self.schedule = get_scheduler("linear", self.optimizer, 1, 8)

        def train(self, first: int, last: int) -> list[torch.Tensor]:
            """The weights after these steps."""
            for step in range(first, last):
                self.model(inputs[step].to(torch.bfloat16)).square().mean().backward()
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            return [one.detach().clone() for one in self.model.parameters()]

    without_a_break = Run(1).train(0, 6)
    run = Run(1)
    halfway = run.train(0, 3)
    torch.save([run.optimizer.state_dict(), run.schedule.state_dict(), halfway], tmp_path / "saved.pt")
    run = Run(2)
    states, schedule, weights = torch.load(tmp_path / "saved.pt", weights_only=True)
    run.optimizer.load_state_dict(states)
    run.schedule.load_state_dict(schedule)
    for one, weight in zip(run.model.parameters(), weights, strict=True):
        one.data.copy_(weight)
    for ours, theirs, before in zip(run.train(3, 6), without_a_break, halfway, strict=True):
        moved, away = (float((theirs - one).abs().max()) for one in (before, ours))
        assert moved > 0 and away <= 0.2 * moved


def test_states_have_the_formats_in_which_they_were_saved(tmp_path: Path) -> None:
    """Also where the weights have others: torch would give the states theirs."""

    def made() -> Any:
        groups = [{"params": [torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))], "weight_decay": 0.0}]
        return optimizer.adafactor(groups, 1e-2)

    def formats(of: Any) -> dict[str, torch.dtype]:
        (state,) = of.state.values()
        return {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}

    first, second = made(), made()
    (weight,) = first.param_groups[0]["params"]
    weight.grad = torch.full_like(weight, 0.1)
    first.step()
    torch.save(first.state_dict(), tmp_path / "saved.pt")
    second.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    assert formats(second) == formats(first)
    assert torch.float32 in formats(second).values()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The states that bitsandbytes' paged optimizers ask pages for, as they are asked for, without a GPU."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    asked: list[torch.Tensor] = []

    def buffer(_: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        asked.append(torch.zeros_like(weight, dtype=dtype))
        return asked[-1]

    monkeypatch.setattr(Optimizer8bit, "get_state_buffer", buffer)
    return asked


@pytest.mark.parametrize("name", ["PagedAdamW32bit", "PagedAdamW8bit"])
def test_paged_states_are_in_pages_again_after_a_checkpoint_was_loaded(pages: list[torch.Tensor], name: str) -> None:
    def made() -> Any:
        groups = [{"params": [torch.nn.Parameter(torch.ones(64, 64))], "weight_decay": 0.0}]
        return optimizer.paged_optimizer(groups, 1e-2, name)

    first, second = made(), made()
    (weight,) = first.param_groups[0]["params"]
    weight.grad = torch.full_like(weight, 0.1)
    first.step()
    saved = first.state_dict()
    pages.clear()
    second.load_state_dict(saved)
    (state,), (theirs,) = second.state.values(), first.state.values()
    assert [any(state[name] is one for one in pages) for name in ("state1", "state2")] == [True, True]
    assert torch.equal(state["state1"], theirs["state1"]) and bool(state["state1"].any())


def test_a_paged_optimizer_forgets_in_its_own_pages(pages: list[torch.Tensor], llama: Path, functions: Path) -> None:
    """Nothing frees them, so that a new optimizer would take as many again."""
    bundle = tiny.bundle(tiny.job(llama, functions), "full")
    groups = [{"params": list(bundle.model.parameters()), "weight_decay": 0.0}]
    bundle.optimizer = optimizer.paged_optimizer(groups, 1e-2, "PagedAdamW32bit")
    batches, items, _ = steps.prepare(bundle, [[[one] for one in SAMPLES]])
    steps.optimizer_step(bundle, batches, items)
    count = len(pages)
    assert count and any(bool(one.any()) for one in pages)
    bundle.recipe = replace(bundle.recipe, learning_rate=3e-3)
    steps.replace_optimizer(bundle)
    assert not any(bool(one.any()) for one in pages)
    assert {group["lr"] for group in bundle.optimizer.param_groups} == {3e-3}
    steps.optimizer_step(bundle, batches, items)
    assert len(pages) == count


def test_weights_that_are_loaded_before_the_first_step_are_the_hosts_too() -> None:
    """accelerate loads an optimizer's own states as it wraps it, and a checkpoint's weights may be there by then."""
    weight = torch.nn.Parameter(torch.zeros(4))
    made = optimizer.offloaded_adamw([{"params": [weight], "weight_decay": 0.0}], 0.1)
    weight.data.fill_(7.0)
    made.load_state_dict(made.state_dict())
    weight.grad = torch.ones(4)
    made.step()
    assert float(weight.detach()[0]) == pytest.approx(7.0 - 0.1)


def test_the_hosts_copies_are_in_full_precision() -> None:
    """Updates too small for bf16 add up there, where plain bf16 loses them."""
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    made = optimizer.offloaded_adamw([{"params": [weight], "weight_decay": 0.0}], 1e-4)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        made.step()
    assert float(weight.detach()[0]) == pytest.approx(1 - 100 * 1e-4, abs=4e-3)


def test_held_it_measures_gradients_and_drops_them() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    made = optimizer.InBackwardAdamW([{"params": [weight], "weight_decay": 0.0}], 0.1)
    with made.held():
        (3 * weight).sum().backward()
    assert float(made.norm()) == 6.0 and weight.grad is None
    assert torch.equal(weight.detach(), torch.ones(4)), "nothing is updated"
    (3 * weight).sum().backward()
    assert not torch.equal(weight.detach(), torch.ones(4))


def test_states_are_where_the_loop_looks_for_them(llama: Path, functions: Path) -> None:
    """Forgetting zeroes the state in place; a new optimizer takes the old one's hooks off."""
    bundle = tiny.bundle(tiny.job(llama, functions), "full", optimizer="adamw-in-backward")
    batches, items, _ = steps.prepare(bundle, [[[one] for one in SAMPLES]])
    steps.optimizer_step(bundle, batches, items)
    moments = [state["exp_avg"] for state in bundle.optimizer.state.values()]
    assert moments and all(bool(one.any()) for one in moments)
    steps.zero_optimizer_state(bundle)
    assert not any(bool(one.any()) for one in moments)
    bundle.new_optimizer()
    steps.optimizer_step(bundle, batches, items)
    assert not any(bool(one.any()) for one in moments), "the old optimizer does nothing any more"


def test_a_step_in_the_backward_pass_is_one_micro_batch(llama: Path, functions: Path) -> None:
    bundle = tiny.bundle(tiny.job(llama, functions), "full", optimizer="adamw-in-backward")
    effective = bundle.configuration.effective_batch_size
    assert candidates(bundle, effective + 3) == [effective]
    with pytest.raises(TrainingError, match=f"{effective} samples, of which {effective - 1} fit"):
        candidates(bundle, effective - 1)
    with pytest.raises(TrainingError, match="one micro batch"):
        steps.optimizer_step(bundle, *steps.prepare(bundle, [[[0]], [[1]]])[:2])


class Quantised(torch.Tensor):  # type: ignore[misc]
    """A state as torchao keeps it: a tensor whose parts are codes, scales, and the table of what codes stand for."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor) -> None:
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "qmap"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"torchao's states have no {func}")


def test_quantised_states_are_forgotten_where_they_are() -> None:
    """A new optimizer would make them again in the first step that is timed."""
    state = {"step": torch.tensor(3.0), "exp_avg": Quantised(torch.ones(4), torch.ones(2), torch.ones(8))}
    made: Any = SimpleNamespace(optimizer=SimpleNamespace(state={"weight": state}), scaler=None)
    kept = state["exp_avg"]
    steps.zero_optimizer_state(made)
    assert state["exp_avg"] is kept and not kept.codes.any() and not kept.scale.any() and not state["step"]
    assert bool(kept.qmap.all())


def test_no_bias_decays_whatever_its_shape() -> None:
    """Those of all experts of a layer are one matrix."""
    layer = torch.nn.Module()
    layer.weight, layer.gate_up_proj_bias = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    layer.norm, layer.frozen = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    layer.frozen.requires_grad = False
    decayed, others = parameter_groups(layer, SimpleNamespace(weight_decay=0.1))  # type: ignore[arg-type]
    assert decayed["weight_decay"] == 0.1 and [id(one) for one in decayed["params"]] == [id(layer.weight)]
    assert others["weight_decay"] == 0.0
    assert [id(one) for one in others["params"]] == [id(layer.gate_up_proj_bias), id(layer.norm)]
