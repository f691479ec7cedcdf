"""What a proof is for: faults of the kind that a kernel, an optimizer or a batching can have are found and named.

Each fault is planted into a real candidate on a tiny model, which is replayed beside the real reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer

from benchmarks.planted import faults
from benchmarks.planted.faults import Plant, stepping, wrapped_optimizer
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.replay import Proof, Replay
from tests.child import tiny
from tests.factory import DATASET, configuration, measured, replay
from worker.child import replay as replays
from worker.plan import proof

SEED = 7
NOISES: dict[str, proof.Noise] = {}  # by method, as a verification measures it once


def replayed(
    spec: JobSpec,
    candidate: Measurement,
    steps: tuple[tuple[int, ...], ...] = (),
    seed: int = SEED,
    rate: float = 1.0,
    stirs: bool = True,
) -> Replay:
    made = candidate.configuration
    bundle = tiny.built(spec, made.model_copy(update={"learning_rate": made.learning_rate * rate}), seed=seed)
    if steps:
        given, plan = replays.followed(steps, bundle.data.lengths, candidate.micro_batch_size or 1)
        return replays.replay(bundle, plan, given, stirs)
    size = proof.samples_a_step(candidate)
    count, micro = proof.PROOF_STEPS[spec.search.verify], candidate.micro_batch_size or 1
    given, plan = replays.arranged(bundle, count, size, micro, seed, proof.first_samples(spec, candidate))
    return replays.replay(bundle, plan, given, stirs)


@pytest.fixture
def proved(
    llama: Path, tmp_path: Path, facts: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Proof]:
    """Proves a configuration, with a fault planted into the candidate's replay only."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(120, most=50))
    training = {"effective_batch_size": 32, "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
    job = tiny.job(llama, data, training=training, search={"verify": "quick"})
    dataset = tiny.bundle(job).data.facts

    def prove(plant: Plant | None = None, method: str = "lora", **levers: str) -> Proof:
        plain = configuration(method, 32).model_copy(update={"learning_rate": 1e-3})
        made = plain.model_copy(update={"levers": plain.levers | {"precision": "fp32"} | levers})
        candidate = measured(made, micro_batch_size=2, check_grad_norm=1.0, dataset=dataset)
        spec, reference = proof.exposed(job, candidate), proof.references_of(candidate, facts())[0][1]
        with monkeypatch.context() as patch:
            if plant:
                plant(patch)
            ours = replayed(spec, candidate, stirs=proof.stirs(candidate))
        theirs = replayed(spec, reference, ours.steps, stirs=proof.stirs(candidate))
        if method not in NOISES:
            half = ours.steps[:5]
            faster = replayed(spec, reference, half, rate=proof.RATE_CHANGE)
            NOISES[method] = proof.noise(theirs, faster, replayed(spec, reference, half, seed=SEED + 1))
        return proof.prove(spec, candidate, ours, theirs, NOISES[method])

    return prove


GOOD: list[tuple[str, dict[str, str]]] = [
    ("lora", {"batching": "grouped"}),
    ("lora", {"batching": "packed"}),
    ("lora", {"batching": "packed-global"}),
    ("lora", {"batching": "token-budget"}),
    ("lora", {"batching": "sorted", "checkpointing": "full"}),
    ("lora", {"head": "chunked"}),
    ("lora", {"optimizer": "adamw-foreach", "attention": "eager"}),
    ("lora", {"optimizer": "adamw-fused", "precision": "bf16-mixed"}),
    ("lora", {"optimizer": "adamw-bnb-32bit"}),
    ("full", {"batching": "grouped", "optimizer": "adamw-foreach"}),
    ("full", {"precision": "bf16-mixed", "batching": "packed"}),
    ("full", {"checkpointing": "full", "head": "chunked"}),
    ("qlora", {"batching": "grouped"}),
    ("full", {"checkpointing": "selective"}),
    ("lora", {"optimizer": "adamw-offloaded"}),
    *(("lora", {"adapter": adapter}) for adapter in ("base-dtype", "attention-only", "rslora", "dora")),
]


@pytest.mark.parametrize(("method", "levers"), GOOD)
def test_what_is_right_passes(proved: Callable[..., Proof], method: str, levers: dict[str, str]) -> None:
    found = proved(method=method, **levers)
    assert found.reasons == (), found
    assert found.steps >= proof.PROOF_STEPS["quick"] and found.samples >= 40


FAULTS: list[tuple[str, Plant, str, dict[str, str], str]] = [
    ("positions that are not restarted", faults.positions_go_on, "lora", {"batching": "packed"}, "step 0's"),
    *(
        ("positions of later rows", faults.later_rows_go_on, "lora", {"batching": batching}, "step 0's")
        for batching in ("packed", "packed-global")
    ),
    *(
        ("the last alone", faults.the_last_micro_batch_alone, "lora", {"batching": batching}, "step 0's")
        for batching in ("padded", "packed", "packed-global", "token-budget", "padding-free")
    ),
    ("every second step skipped", wrapped_optimizer(stepping(lambda at: at % 2 == 0)), "lora", {}, "no trained weight"),
    ("one step and no more", wrapped_optimizer(stepping(lambda at: at == 0)), "lora", {}, "no trained weight changed"),
    ("half the rate", wrapped_optimizer(faults.half_rate), "lora", {}, "at the learning rate"),
    ("half the rate", wrapped_optimizer(faults.half_rate), "full", {}, "at the learning rate"),
    ("no decay", wrapped_optimizer(faults.no_decay), "full", {"batching": "grouped"}, "weight decay"),
    ("no decay", wrapped_optimizer(faults.no_decay), "lora", {}, "weight decay"),
    ("no clipping", faults.no_clipping, "lora", {}, "clipped"),
    ("half of the labels", faults.half_of_the_labels, "lora", {"batching": "grouped"}, "step 0's loss"),
    ("one adapter alone", faults.one_adapter_alone, "lora", {"checkpointing": "full"}, "hardly move"),
    (
        "rotated twice",
        faults.rotates_in_place,
        "full",
        {"checkpointing": "selective"},
        "step 0's gradient of model.layers",
    ),
    *(
        (f"{matrix} times {factor}", faults.gradients_times(matrix, factor), method, {}, said)
        for method, matrix in (("lora", "lora_A"), ("lora", "lora_B"), ("full", "q_proj"))
        for factor, said in ((-1.0, "away from the reference's, 60% allowed"), (1.5, "1.50 times as large"))
    ),
    ("the longest left out", faults.without_the_longest_tenth, "lora", {"batching": "grouped"}, "leaves out 4 of "),
]


@pytest.mark.parametrize(
    ("name", "plant", "method", "levers", "said"),
    FAULTS,
    ids=["-".join((one[0], one[2], *one[3].values())) for one in FAULTS],
)
def test_what_is_wrong_is_named(
    proved: Callable[..., Proof], name: str, plant: Plant, method: str, levers: dict[str, str], said: str
) -> None:
    found = proved(plant, method, **levers)
    assert any(said in reason for reason in found.reasons), (name, found)


@pytest.mark.parametrize("rate", [1e-6, 2e-4, 1e-2])
@pytest.mark.parametrize("verify", proof.PROOF_STEPS)
def test_the_strong_decay_is_within_what_a_job_may_say(llama: Path, tmp_path: Path, rate: float, verify: str) -> None:
    """The replay's job goes to the child as JSON, where it is checked like any other."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(10))
    training = {"learning_rate": rate, "weight_decay": 0.01, "max_grad_norm": 1.0}
    job = tiny.job(llama, data, training=training, search={"verify": verify})
    made = configuration("lora", 8).model_copy(update={"learning_rate": rate})
    exposed = proof.exposed(job, measured(made, micro_batch_size=2, check_grad_norm=1.0))
    assert JobSpec.model_validate_json(exposed.model_dump_json()) == exposed
    over_all_steps = exposed.training.weight_decay * rate * proof.PROOF_STEPS[verify]
    assert over_all_steps == pytest.approx(proof.SHRINKAGE)


def test_a_rotary_kernel_that_writes_in_place_is_right_beside_all_else(proved: Callable[..., Proof]) -> None:
    """Only the results that selective checkpointing keeps are rotated twice, which the norm of all gradients hides."""
    assert proved(faults.rotates_in_place, "full", checkpointing="full").reasons == ()


def test_steps_of_half_the_size_are_seen(llama: Path, functions: Path) -> None:
    """The reference follows the candidate's steps, so that nothing else tells."""
    made = configuration("lora", 8)
    candidate = measured(made, micro_batch_size=2, check_grad_norm=1.0)
    halves = replay(proof.samples_a_step(candidate) // 2)
    found = proof.prove(tiny.job(llama, functions), candidate, halves, halves, proof.Noise(0.01, 0.01, 5))
    assert found.reasons == ("it takes 10 optimizer steps for 20 samples, not 5",)


def test_a_job_that_is_not_steady_proves_nothing_by_that(llama: Path, functions: Path) -> None:
    candidate = measured(configuration("lora", 8), micro_batch_size=2, check_grad_norm=1.0)
    theirs = replay(proof.samples_a_step(candidate))
    astray = theirs.model_copy(update={"moved": {name: 0.3 * way for name, way in theirs.moved.items()}})
    found = proof.prove(tiny.job(llama, functions), candidate, astray, theirs, proof.Noise(0.6, 0.6, 5))
    assert "moved 0.30 times as far" in found.reasons[0]


@pytest.mark.parametrize("batching", ["padded", "packed", "packed-global", "sorted", "grouped", "token-budget"])
def test_data_of_few_samples_are_trained_again_until_there_are_steps_to_compare(
    llama: Path, tmp_path: Path, batching: str
) -> None:
    """Of 30 rows and an effective batch of 64, one step would be all: an optimizer that stops after it would pass."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(30, most=20))
    job = tiny.job(llama, data, search={"verify": "quick"})
    made = configuration("lora", 64, precision="fp32", batching=batching)
    bundle = tiny.built(job, made)
    rows = len(bundle.data.lengths)
    dataset = DATASET.model_copy(update={"rows": rows})
    for micro in (2, 16, 64):
        candidate = measured(made, micro_batch_size=micro, dataset=dataset)
        size = proof.samples_a_step(candidate)
        assert size <= rows
        given, plan = replays.arranged(bundle, 10, size, micro, SEED)
        trained = sorted(sample for step in plan for part in step for row in part for sample in row)
        assert len(plan) == 10 and trained == sorted(given) and len(given) == 10 * size


@pytest.mark.parametrize(("rank", "alpha"), [(4, 1.0), (16, 32.0), (64, 512.0)])
def test_an_adapter_is_drawn_small_beside_its_layers(llama: Path, functions: Path, rank: int, alpha: float) -> None:
    """And the same each time, so that candidate and reference begin alike. A large alpha would else overflow."""
    models = []
    for _ in range(2):
        models.append(tiny.bundle(tiny.job(llama, functions, lora={"r": rank, "alpha": alpha}), "lora").model)
        replays.stir_adapter(models[-1])
    first, second = (dict(one.named_parameters()) for one in models)
    assert all(torch.equal(first[name], weight) for name, weight in second.items())
    layers = [one for one in models[0].modules() if isinstance(one, LoraLayer)]
    assert layers
    for layer in layers:
        added = layer.get_delta_weight("default")
        assert 0.02 < added.std() / layer.get_base_layer().weight.std() < 1.0
