"""The training step: normalisation, reference, worst case, and numbers that went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.levers import LEVERS
from tests.child import tiny
from training.errors import TrainingError
from training.samples import Samples, Step, sample_of
from training.step import MOST_SKIPPED
from worker.child import steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.measure import check_reference
from worker.child.probe import full_step, without_learning
from worker.child.timing import Unit
from worker.child.worst import worst_case

SAMPLES = list(range(16))


@pytest.fixture
def made(llama: Path, functions: Path) -> Callable[..., Bundle]:
    """Makes bundles of the tiny Llama."""
    spec = tiny.job(llama, functions)
    return lambda method="full", device=None, **levers: tiny.bundle(spec, method, device, **levers)


def step_gradients(bundle: Bundle, step: Step) -> tuple[float, dict[str, torch.Tensor]]:
    """The step's loss and gradients, nothing updated."""
    batches, items, _ = steps.prepare(bundle, step)
    count = torch.tensor(items)
    loss = sum(float(steps.forward_backward(bundle, batch, count)) for batch in batches)
    return loss, tiny.gradients(bundle.model)


# The step


def test_every_arrangement_of_a_step_learns_the_same(made: Callable[..., Bundle]) -> None:
    """Accumulated ragged micro batches against one batch of all samples."""
    bundle = made(batching="padded")
    (whole,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
    expected_loss, expected = step_gradients(bundle, whole)
    within = [choice.name for choice in LEVERS["batching"].choices if not choice.changes_order]
    within.remove("padding-free")  # with the kernel that it needs: tests/levers/test_families.py
    assert set(within) == {"padded", "sorted", "packed", "token-budget"}
    for batching in within:
        bundle = made(batching=batching)
        for micro in (1, 2, 4):
            (step,) = plan_of(bundle, SAMPLES, micro, effective=16)
            assert len(step) > 1 or batching == "token-budget"
            loss, found = step_gradients(bundle, step)
            assert loss == pytest.approx(expected_loss, abs=1e-5), (batching, micro)
            assert tiny.furthest(found, expected) < 1e-5, (batching, micro)


def test_the_mean_of_micro_batch_means_would_be_seen(made: Callable[..., Bundle]) -> None:
    """The companion: normalising each micro batch by itself, as is often done, is outside what the test allows."""
    bundle = made()
    (step,) = plan_of(bundle, SAMPLES, micro=2, effective=16)
    _, expected = step_gradients(bundle, step)
    batches, _, _ = steps.prepare(bundle, step)
    for batch in batches:
        steps.forward_backward(bundle, batch, (batch["labels"] != -100).sum() * len(batches))
    assert tiny.furthest(tiny.gradients(bundle.model), expected) > 1e-4


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_classifier_s_step_is_normalised_over_its_samples(bert: Path, reviews: Path, micro: int) -> None:
    spec = tiny.job(bert, reviews, task="sequence-classification")
    bundle = tiny.bundle(spec, "full", batching="sorted")
    with steps.without_dropout(bundle.model) as was_on:
        assert was_on
        (whole,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
        (step,) = plan_of(bundle, SAMPLES, micro, effective=16)
        expected_loss, expected = step_gradients(bundle, whole)
        loss, found = step_gradients(bundle, step)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert tiny.furthest(found, expected) < 1e-5


def test_step_0_is_one_step_at_whatever_micro_batch_fits(made: Callable[..., Bundle]) -> None:
    """Also where that does not divide the step's samples, as 3 does not divide 8."""
    losses = []
    for batching in (one for one in LEVERS["batching"].names if one != "padding-free"):  # which needs varlen
        bundle = made(batching=batching)
        request = TrialRequest(configuration=bundle.configuration, origin=Origin.baseline, number=1)
        losses += [check_reference(bundle, SAMPLES, request, largest, []).loss for largest in (1, 3, 5)]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)


def test_without_dropout_puts_it_back(bert: Path, reviews: Path) -> None:
    bundle = tiny.bundle(tiny.job(bert, reviews, task="sequence-classification"), "full")
    (step,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
    first, second = step_gradients(bundle, step)[0], step_gradients(bundle, step)[0]
    assert first != second, "dropout is on"
    one, other = steps.reference_step(bundle, step), steps.reference_step(bundle, step)
    assert one == other, "dropout is off"
    assert step_gradients(bundle, step)[0] != step_gradients(bundle, step)[0], "dropout is on again"


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("GPTBigCodeConfig", {}),  # attn_dropout, a number of its own
        ("SeedOssConfig", {"num_key_value_heads": 2, "head_dim": 16}),  # residual_dropout
        ("FalconConfig", {"attention_dropout": 0.1, "hidden_dropout": 0.1}),  # read from the configuration
    ],
)
def test_without_dropout_finds_it_under_every_name(
    kind: str, rates: dict[str, Any], tmp_path: Path, functions: Path
) -> None:
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": tiny.FEW, "max_position_embeddings": 256}
    config = getattr(transformers, kind)(**(shape | tiny.IDS | rates), initializer_range=0.3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    bundle = tiny.bundle(tiny.job(tiny.with_tokenizer(tmp_path, tiny.FEW), functions), "full")
    (step,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
    assert step_gradients(bundle, step)[0] != step_gradients(bundle, step)[0], "dropout is on"
    assert steps.reference_step(bundle, step) == steps.reference_step(bundle, step)
    assert step_gradients(bundle, step)[0] != step_gradients(bundle, step)[0], "dropout is on again"


def test_the_reference_step_leaves_everything_as_it_is(made: Callable[..., Bundle]) -> None:
    bundle = made("lora")
    before = {name: value.clone() for name, value in bundle.model.state_dict().items()}
    (step,) = plan_of(bundle, SAMPLES, micro=4, effective=16)
    result = steps.reference_step(bundle, step)
    assert result.grad_norm > 0 and result == steps.reference_step(bundle, step)
    assert all(torch.equal(value, before[name]) for name, value in bundle.model.state_dict().items())
    assert all(parameter.grad is None for parameter in bundle.model.parameters())
    assert not bundle.optimizer.state


def test_a_step_updates_as_the_gradients_say_and_clips(made: Callable[..., Bundle]) -> None:
    bundle = made()
    (step,) = plan_of(bundle, SAMPLES, micro=4, effective=16)
    reference = steps.reference_step(bundle, step)
    bundle.optimizer = torch.optim.SGD(bundle.model.parameters(), lr=1.0)
    before = [value.detach().clone() for value in bundle.model.parameters()]
    loss, norm = steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2])
    assert (float(loss), float(norm)) == pytest.approx((reference.loss, reference.grad_norm), rel=1e-5)
    moved = torch.stack([(a - b).norm() for a, b in zip(bundle.model.parameters(), before, strict=True)]).norm()
    expected = min(float(norm), bundle.spec.training.max_grad_norm)
    assert float(moved.detach()) == pytest.approx(expected, rel=1e-3), "a step of the clipped gradient"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (steps.StepResult(float("nan"), 1.0), "step 3 went wrong: its loss is (nan|inf)"),
        (steps.StepResult(float("inf"), 1.0), "step 3 went wrong: its loss is (nan|inf)"),
        (steps.StepResult(1.0, float("nan")), "its gradient norm (nan|inf)"),
        (steps.StepResult(1.0, float("inf")), "its gradient norm (nan|inf)"),
        (steps.StepResult(1.0, 0.0), "its gradient norm 0.0"),
    ],
)
def test_numbers_that_went_wrong(made: Callable[..., Bundle], result: steps.StepResult, says: str) -> None:
    bundle = made()
    with pytest.raises(TrainingError, match=says):
        steps.check(bundle, result, 3)
    steps.check(bundle, steps.StepResult(1.0, 1e-9), 3)


def test_a_gradient_scaler_may_skip_some_steps_but_not_for_ever(made: Callable[..., Bundle]) -> None:
    bundle = made()
    bundle.recipe = replace(bundle.recipe, loss_scaling=True)
    overflow = steps.StepResult(1.0, float("inf"))
    for _ in range(2):  # a good step in between starts the count again
        for number in range(MOST_SKIPPED):
            steps.check(bundle, overflow, number)
        steps.check(bundle, steps.StepResult(1.0, 1.0), 99)
    for number in range(MOST_SKIPPED):
        steps.check(bundle, overflow, number)
    with pytest.raises(TrainingError, match="its gradient norm inf"):
        steps.check(bundle, overflow, 99)
    with pytest.raises(TrainingError, match="its loss is nan"):
        steps.check(bundle, steps.StepResult(float("nan"), float("inf")), 0)


def test_nan_weights_end_the_unit(made: Callable[..., Bundle]) -> None:
    bundle = made()
    with torch.no_grad():
        bundle.model.model.norm.weight[0] = float("nan")
    with pytest.raises(TrainingError, match="step 0 went wrong: its loss is nan"):
        Unit(bundle, 4, plan_of(bundle, SAMPLES, 4)).run()


def test_a_zero_gradient_ends_the_unit(made: Callable[..., Bundle]) -> None:
    bundle = made("lora")
    for name, parameter in bundle.model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.zeros_(parameter)  # with B at zero as well, nothing reaches either
    with pytest.raises(TrainingError, match="gradient norm 0.0"):
        Unit(bundle, 4, plan_of(bundle, SAMPLES, 4)).run()


# The worst case


def test_the_worst_case_of_padded_rows_is_the_longest_sample_everywhere(made: Callable[..., Bundle]) -> None:
    bundle = made(batching="sorted")
    batch, items = worst_case(bundle, 3)
    assert batch["input_ids"].shape == (3, max(bundle.data.lengths))
    assert items == int((batch["labels"] != -100).sum())


@pytest.mark.parametrize(
    ("flash", "shared", "masked"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_the_worst_case_has_no_mask_where_attention_is_dear_without_one(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, flash: bool, shared: bool, masked: bool
) -> None:
    """Where keys' heads are shared, sdpa is told so without a mask, and only the flash kernel can do that."""
    bundle = made(batching="padded")
    monkeypatch.setattr(type(bundle.device), "has_flash_attention", lambda *_: flash)
    monkeypatch.setattr(
        bundle.model.config, "num_key_value_heads", bundle.model.config.num_attention_heads // (1 + shared)
    )
    assert (int(worst_case(bundle, 3)[0]["attention_mask"].min()) == 0) is masked


def test_the_worst_case_of_packed_rows_is_full_and_has_two_samples_a_row(made: Callable[..., Bundle]) -> None:
    bundle = made(batching="packed")
    batch, items = worst_case(bundle, 3)
    length = bundle.spec.dataset.max_length
    assert batch["input_ids"].shape == batch["position_ids"].shape == (3, length)
    assert [int((row == 0).sum()) for row in batch["position_ids"]] == [2, 2, 2]
    assert items == int((batch["labels"] != -100).sum()) > 0


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
def test_nothing_the_data_can_make_is_larger_than_the_worst_case(made: Callable[..., Bundle], batching: str) -> None:
    bundle = made(batching=batching)
    order = list(range(len(bundle.data.lengths)))
    most, _ = worst_case(bundle, 4)
    for step in plan_of(bundle, order, micro=4):
        for batch in steps.prepare(bundle, step)[0]:
            assert batch["input_ids"].numel() <= most["input_ids"].numel()
            assert batch["input_ids"].shape[1] <= most["input_ids"].shape[1]
            # Where all rows are as long, transformers drops the mask, and with it the memory that a mask takes.
            masks = "attention_mask" in batch and not batch["attention_mask"].all()
            assert not masks or not most["attention_mask"].all()


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_no_batch_has_more_to_learn_than_the_worst_case_where_only_that_has_logits(
    made: Callable[..., Bundle], batching: str
) -> None:
    """Of the longest samples, cut at max_length, often only the first words of the answer are learnt."""
    bundle = made(batching=batching, head="chunked")
    length = bundle.recipe.max_length
    cut = sample_of(range(10, 10 + length), [-100] * (length - 2) + [8, 9])
    train = Samples([cut, *bundle.data.train[1:]])
    bundle.data = replace(bundle.data, train=train, lengths=[length, *bundle.data.lengths[1:]])
    most, terms = worst_case(bundle, 4)
    assert terms == int((most["labels"] != -100).sum()) == len(most["target_positions"])
    for step in plan_of(bundle, list(range(len(bundle.data.lengths))), micro=4):
        for batch in steps.prepare(bundle, step)[0]:
            assert len(batch["target_positions"]) <= terms


def test_the_optimizer_s_state_is_there_although_fp16_overflows(made: Callable[..., Bundle]) -> None:
    """A scaler that skips the first updates would have the probe measure without it."""
    bundle = made(optimizer="adamw-foreach")
    bundle.recipe = replace(bundle.recipe, loss_scaling=True)
    bundle.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with without_learning(bundle):
        full_step(bundle, 1)
    assert bundle.optimizer.state and bundle.scaler.get_scale() == 2.0**127


def test_a_worst_case_step_at_rate_zero_leaves_the_weights(made: Callable[..., Bundle]) -> None:
    bundle = made()
    before = steps.trained_sum(bundle.model)
    bundle.optimizer.param_groups[0]["lr"] = bundle.optimizer.param_groups[1]["lr"] = 0.0
    full_step(bundle, 2)
    assert steps.trained_sum(bundle.model) == before and bundle.optimizer.state


@pytest.mark.parametrize(("optimizer", "there"), [("adamw-fused", True), ("adamw-in-backward", False)])
def test_a_worst_case_step_has_the_gradients_of_an_earlier_micro_batch(
    made: Callable[..., Bundle], optimizer: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a step accumulates; an optimizer that steps in the backward pass never does."""
    bundle, seen = made(optimizer=optimizer), []
    original = steps.forward_backward

    def looked(bundle: Bundle, *arguments: Any) -> torch.Tensor:
        trained = [one for one in bundle.model.parameters() if one.requires_grad]
        seen.append({one.grad is not None and not one.grad.any() for one in trained})
        return original(bundle, *arguments)

    monkeypatch.setattr(steps, "forward_backward", looked)
    full_step(bundle, 2)
    assert seen == [{there}]
