"""What an evaluation computes: nothing of the training is changed by it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child import tiny
from training.evaluation import guesses
from training.levers import evaluation
from training.samples import sample_of
from worker.child import soak, steps
from worker.child.build import Bundle


@pytest.fixture
def made(llama: Path, functions: Path) -> Callable[..., Bundle]:
    """Makes bundles of the tiny Llama."""
    return lambda method="full", **levers: tiny.bundle(tiny.job(llama, functions), method, **levers)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("choice", ["loss", "loss-16bit", "generation"])
def test_an_evaluation_leaves_the_training_as_it_was(made: Callable[..., Bundle], method: str, choice: str) -> None:
    bundle, alone = made(method, evaluation=choice), made(method)
    before = {name: one.clone() for name, one in bundle.model.named_parameters()}
    found, expected = soak.evaluate(bundle, 4), soak.evaluate(alone, 4)
    assert found.loss == pytest.approx(expected.loss, rel=1e-2 if choice == "loss-16bit" else 1e-6)
    assert (found.loss == expected.loss) is (choice != "loss-16bit"), "it is really computed in 16 bits"
    assert set(found.scores) == ({"bleu", "rouge_l"} if choice == "generation" else set())
    assert (found.generating is not None) is (choice == "generation")
    assert all(torch.equal(one, before[name]) for name, one in bundle.model.named_parameters())
    batches, items, _ = steps.prepare(bundle, [[[0], [1]]])
    first = [float(value) for value in steps.optimizer_step(bundle, batches, items)]
    assert first == [float(value) for value in steps.optimizer_step(alone, batches, items)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_many_compiled_layers_generate(llama: Path, functions: Path, tmp_path: Path) -> None:
    """More layers than torch keeps code for, where each would be compiled for itself."""
    spec = tiny.job(tiny.changed(llama, tmp_path / "deep", num_hidden_layers=10), functions)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": "random"})})
    bundle = tiny.bundle(spec, "full", evaluation="generation", compile="per-layer-aot-eager")
    bundle.compile()
    steps.optimizer_step(bundle, *steps.prepare(bundle, [[[0]]])[:2])
    assert set(soak.evaluate(bundle, 4).scores) == {"bleu", "rouge_l"}


def test_prompts_side_by_side_generate_as_alone(made: Callable[..., Bundle]) -> None:
    bundle = made()
    bundle.model.eval()
    prompts = [list(bundle.data.train[at][0][: 2 + 3 * at]) for at in range(3)]
    together = evaluation.generated_ids(bundle.model, prompts, 6, bundle.pad)
    alone = [evaluation.generated_ids(bundle.model, [prompt], 6, bundle.pad)[0] for prompt in prompts]

    def said(ids: list[int]) -> list[int]:
        return [one for one in ids if one != bundle.pad]

    assert [said(ids) for ids in together] == [said(ids) for ids in alone]
    assert all(said(ids) for ids in together)


def test_the_scores_are_those_of_the_completions(made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = made()
    samples = bundle.data.train[:6]
    pairs = sorted((evaluation.asked_and_answer(one) for one in samples), key=lambda pair: len(pair[0]))
    asked: list[tuple[list[list[int]], int]] = []

    def scores(answer: Callable[[list[int]], list[int]]) -> dict[str, float]:
        answers = [answer(right) for _, right in pairs]

        def generated(_: Any, prompts: list[list[int]], longest: int, pad: int) -> list[list[int]]:
            asked.append((prompts, longest))
            return [answers.pop(0) for _ in prompts]

        monkeypatch.setattr(evaluation, "generated_ids", generated)
        with evaluation.with_generation(bundle.model, 6) as score:
            assert score is not None
            return score(samples, 4, 40, bundle.tokenizer)

    right = scores(lambda right: right)
    assert right["bleu"] == pytest.approx(100.0) and right["rouge_l"] == pytest.approx(100.0)
    assert right["generation_seconds"] > 0
    assert [len(prompts) for prompts, _ in asked] == [4, 2]
    assert all(max(map(len, prompts)) + longest <= 40 for prompts, longest in asked), "within max_length"
    assert scores(lambda right: [])["rouge_l"] == 0.0
    halves = scores(lambda right: right[: len(right) // 2])
    assert 20 < halves["rouge_l"] < 90


@pytest.mark.parametrize(
    ("labels", "asked", "answer"),
    [
        ([-100, -100, 7, 8], [5, 6], [7, 8]),
        ([-100, -100, 7, -100, 9], [5, 6, 7, 8], [9]),  # of a conversation its last answer
        ([-100, -100, 7, 8, -100], [5, 6], [7, 8]),
        ([-100, 6, 7, 8], [], [6, 7, 8]),  # plain text
        ([-100, -100], [], []),
    ],
)
def test_what_is_asked_and_answered(labels: list[int], asked: list[int], answer: list[int]) -> None:
    sample = sample_of([5, 6, 7, 8, 9][: len(labels)], labels)
    assert evaluation.asked_and_answer(sample) == (asked, answer)


def test_where_nothing_is_asked_nothing_is_scored(made: Callable[..., Bundle]) -> None:
    bundle = made()
    with evaluation.with_generation(bundle.model, 100) as score:
        assert score is not None
        assert score([sample_of([5, 6], [-100, 6]), sample_of([8], [-100])], 2, 64, bundle.tokenizer) == {}


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_a_classifier_made_from_another_kind_is_evaluated_as_it_is_trained(
    bert: Path, reviews: Path, tmp_path: Path, kind: str
) -> None:
    """A checkpoint's `problem_type` says which loss the model computes by itself."""
    changed = tiny.changed(bert, tmp_path / "bert", problem_type=kind)
    bundle = tiny.bundle(tiny.job(changed, reviews, task="sequence-classification"), "full")
    same = tiny.bundle(tiny.job(bert, reviews, task="sequence-classification"), "full")
    assert soak.evaluate(bundle, 4).loss == soak.evaluate(same, 4).loss


def test_an_evaluation_holds_the_logits_of_one_batch(made: Callable[..., Bundle]) -> None:
    """As the probe's, which runs one batch."""
    bundle, held = made(), []
    head = bundle.model.get_output_embeddings()
    made_before: list[weakref.ref[torch.Tensor]] = []

    def look(_: object, __: object, output: torch.Tensor) -> None:
        held.append(sum(one() is not None for one in made_before))
        made_before.append(weakref.ref(output))

    head.register_forward_hook(look)
    validation = bundle.data.train[:6]
    recipe = replace(bundle.recipe, evaluation_batch_size=2)
    with torch.no_grad():
        guesses(bundle.model, validation, bundle.pad, bundle.device.torch, recipe)
    assert held == [0, 0, 0]
