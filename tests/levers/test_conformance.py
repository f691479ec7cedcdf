"""Every choice of the catalogue is applied, learns what the baseline learns, and is written by the exporters.

A new lever or choice is picked up here without a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts, Package
from service.contract.job import JobSpec, Method
from service.contract.recommendation import RecommendedConfiguration
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.devices import device_facts
from service.exports.arguments import arguments
from service.levers import LEVERS, METHOD_NEEDS, excluded, exclusions, of_task
from service.levers.adapter import ATTENTION
from service.levers.optimizer import WHOLE_STEP
from tests.child import tiny
from training.errors import TrainingError
from training.levers.compile import layers_of as layers
from training.step import autocast
from worker.child import probe, steps
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.measure import LEARNS_OTHERWISE, check_reference

METHODS = tuple(METHOD_NEEDS)
SAMPLES = list(range(8))
CPU = HardwareFacts(
    host="here",
    device="cpu",
    name="this CPU",
    memory_bytes=1 << 34,
    cores=2,
    bf16_native=False,
    versions={"python": "3.11"},
    # torchao is here under `make test-torchao` only.
    packages={name: Package(version="1") for name in ("peft", "bitsandbytes", "torchao") if find_spec(name)},
)
HERE = CPU if tiny.DEVICE == "cpu" else device_facts()[0]
EVERY = [(lever.name, choice.name) for lever in LEVERS.values() for choice in lever.choices]


def runnable(facts: HardwareFacts) -> list[tuple[str, str]]:
    """What runs there; asked for by name, a choice whose needs are only soft does as well."""
    return [(name, choice) for name, choice in EVERY if LEVERS[name].choice(choice).missing(facts, asked=True) is None]


RUNNABLE = runnable(HERE)
POINT = {lever.name: lever.baseline for lever in LEVERS.values()} | {"precision": "fp32"}
TASKS = {"llama": "causal-lm", "bert": "sequence-classification"}
BESIDE = {"cut-cross-entropy": {"precision": "bf16-mixed"}}  # what a choice needs: this one does not take fp32
APPLIED = [
    # A whole model's code grows with its layers, one of which is enough to see that it is right.
    ("shallow" if choice == "whole" else model, method, name, choice)
    for model, task in TASKS.items()
    for method in METHODS
    for name, choice in RUNNABLE
    # Compiling takes long and is the same for every method: once a choice, and the plainest one for the BERT too.
    if (choice == "off" or name != "compile" or (method == "lora" and (model == "llama" or choice == "per-layer")))
    and LEVERS[name].applies(method, task)
    and name != "experts"  # tests/levers/test_families.py has models with experts
    and not (model == "bert" and name == "kernels" and choice != "off")  # Liger has none for it
    and excluded(POINT | {name: choice, "method": method} | of_task(task) | BESIDE.get(choice, {})) is None
]
# How far step 0 may be from the reference's (loss, gradient norm). The suite says so, not the lever.
EXACT, ROUNDED = (1e-5, 1e-5), (1e-3, 1e-2)
STEPS = 3
REFERENCES: dict[tuple[str, str], steps.StepResult] = {}


@pytest.fixture(scope="session")
def models(
    llama: Path, functions: Path, bert: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, JobSpec]:
    """Jobs of the Llama, of its first layer, and of the BERT without dropout: losses are to fall, kernels have none."""
    folder = tmp_path_factory.mktemp("conformance")
    first = tiny.changed(llama, folder / "llama", num_hidden_layers=1)
    plain = tiny.changed(bert, folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    jobs = {"llama": tiny.job(llama, functions), "shallow": tiny.job(first, functions)}
    return jobs | {"bert": tiny.job(plain, reviews, task=TASKS["bert"])}


@pytest.fixture
def build(models: dict[str, JobSpec]) -> Callable[..., Bundle]:
    """Builds a tiny model, the Llama unless said otherwise, with some levers changed."""
    return lambda method, model="llama", **levers: tiny.bundle(models[model], method, **levers)


@pytest.fixture
def reference(build: Callable[..., Bundle]) -> Callable[[str, str], steps.StepResult]:
    """Step 0 of a method in fp32, padded, with every other lever at its baseline."""

    def of(model: str, method: str) -> steps.StepResult:
        if (model, method) not in REFERENCES:
            bundle = build(method, model)
            REFERENCES[model, method] = check_reference(bundle, SAMPLES, request(bundle, None), 4, [])
        return REFERENCES[model, method]

    return of


def request(bundle: Bundle, against: steps.StepResult | None) -> TrialRequest:
    """A trial of the bundle's configuration, to be compared with a reference."""
    return TrialRequest(
        configuration=bundle.configuration,
        origin=Origin.recipe if against else Origin.baseline,
        number=1,
        reference_loss=against.loss if against else None,
        reference_grad_norm=against.grad_norm if against else None,
    )


def test_every_choice_is_applied_by_something() -> None:
    for name, lever in LEVERS.items():
        assert import_module(f"service.levers.{name}").LEVER is lever
        for choice in lever.choices:
            if choice.function:
                assert lever.stage != "data", "a function that nobody calls"
                assert callable(getattr(import_module(f"training.levers.{name}"), choice.function))
            else:
                assert lever.stage in ("data", "load", "base", "model", "compiled", "loading", "evaluation")


@pytest.mark.parametrize("name", LEVERS)
def test_a_lever_says_what_it_is(name: str) -> None:
    lever = LEVERS[name]
    assert lever.summary.endswith(".") and lever.source.startswith("https://")
    assert len(set(lever.names)) == len(lever.names) >= 2
    assert lever.choice(lever.baseline).missing(HERE) is None, "the baseline runs everywhere"
    assert not lever.choice(lever.baseline).changes_order and not lever.choice(lever.baseline).changes_numerics
    with pytest.raises(KeyError):
        lever.choice("nonsense")


@pytest.mark.parametrize(("name", "choice"), EVERY)
def test_unmet_needs_are_said_in_a_sentence(name: str, choice: str) -> None:
    bare = HERE.model_copy(update={"packages": {}})
    for need in LEVERS[name].choice(choice).needs:
        assert len(need.sentence) > 20
        if not need.met(bare):
            alone = replace(LEVERS[name].choice(choice), needs=(need,))
            assert alone.missing(bare) == need.sentence
            assert alone.missing(bare, asked=True) == (None if need.soft else need.sentence)


def test_exclusions_say_why_and_each_one_tells() -> None:
    for exclusion in exclusions():
        assert exclusion.reason and exclusion.reference.startswith("https://")
        assert excluded({name: values[0] for name, values in exclusion.when.items()}) is exclusion


def test_a_cpu_runs_all_that_needs_neither_a_gpu_nor_an_optional_package() -> None:
    """Guards the tests below: a need that is wrongly unmet must not make them pass by running nothing."""
    gpu, here = CPU.model_copy(update={"device": "cuda", "capability": (9, 0), "bf16_native": True}), runnable(CPU)
    for name, choice in set(EVERY) - set(here):
        missing = LEVERS[name].choice(choice).missing(gpu, asked=True)
        assert missing is None or "pip install" in missing, (name, choice, missing)
    assert len(here) >= 45


# Applied


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize(("model", "method", "name", "choice"), APPLIED)
def test_a_choice_starts_from_the_reference_and_learns(
    build: Callable[..., Bundle],
    reference: Callable[[str, str], steps.StepResult],
    model: str,
    method: str,
    name: str,
    choice: str,
) -> None:
    expected = reference(model, method)  # first, as some choices change what the process computes with
    bundle = build(method, model, **{name: choice} | BESIDE.get(choice, {}))
    assert Configuration.model_validate_json(bundle.configuration.model_dump_json()) == bundle.configuration
    if bundle.compiled:
        if choice != "whole":
            bundle.model.enable_input_require_grads()  # or the first layer would be compiled apart from the others
        bundle.compile()
    chosen = LEVERS[name].choice(choice)
    # Another precision is rounded otherwise, and so is what is quantised, which is held to its own weights below.
    rounds = chosen.changes_numerics or name in ("precision", "quantization")
    loss, norm = LEARNS_OTHERWISE if chosen.changes_learning else ROUNDED if rounds else EXACT
    found = check_reference(bundle, SAMPLES, request(bundle, expected), 4, [])  # TrainingError when it is away
    assert found.loss == pytest.approx(expected.loss, rel=loss)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=norm)
    frozen = {key: tiny.numbers_of(w).clone() for key, w in bundle.model.named_parameters() if not w.requires_grad}
    assert bool(frozen) is (method != "full")
    sums, losses = [steps.trained_sum(bundle.model)], []
    for number in range(STEPS):
        (step,) = plan_of(bundle, SAMPLES, micro=8 if choice in WHOLE_STEP else 4, effective=8)
        result = steps.StepResult(*map(float, steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2])))
        steps.check(bundle, result, number)
        losses.append(result.loss)
        sums.append(steps.trained_sum(bundle.model))
    assert len(set(sums)) == 1 + STEPS, "the weights change at every step"
    assert losses[-1] < losses[0], "the same samples again and again: their loss falls"
    after = dict(bundle.model.named_parameters())
    assert all(torch.equal(tiny.numbers_of(after[key]), value) for key, value in frozen.items())


def test_a_model_that_computes_something_else_is_refused(build: Callable[..., Bundle]) -> None:
    """The companion: the tolerances are narrow enough to see one wrong layer."""
    bundle = build("lora")
    against = check_reference(bundle, SAMPLES, request(bundle, None), 4, [])
    for layer in layers(bundle.model)[:1]:
        layer.self_attn.scaling *= 3
    with torch.no_grad():
        for parameter in layers(bundle.model)[0].parameters():
            parameter.mul_(1.5)
    with pytest.raises(TrainingError, match="step 0's"):
        check_reference(bundle, SAMPLES, request(bundle, against), 4, [])


def test_switches_are_really_set(build: Callable[..., Bundle]) -> None:
    """What a lever sets is visible where the library keeps it: a lever that does nothing would pass the rest."""
    for attention in ("eager", "sdpa"):
        assert build("lora", attention=attention).model.config._attn_implementation == attention
    assert not any(getattr(layer, "gradient_checkpointing", False) for layer in layers(build("full").model))
    assert all(layer.gradient_checkpointing for layer in layers(build("full", checkpointing="full").model))
    wanted = {"adamw-loop": "AdamW", "adamw-8bit": "AdamW8bit", "paged-adamw-8bit": "PagedAdamW8bit"}
    wanted |= {"adamw-bnb-32bit": "AdamW32bit", "adafactor": "Adafactor", "lion": "Lion32bit", "sgd": "SGD"}
    for choice, kind in wanted.items():
        assert kind in {one.__name__ for one in type(build("full", optimizer=choice).optimizer).__mro__}
    flags = [build("full", optimizer=choice).optimizer.defaults for choice in ("adamw-foreach", "adamw-fused")]
    assert [(one["foreach"], one["fused"]) for one in flags] == [(True, None), (None, True)]


@pytest.mark.parametrize(
    ("choice", "embedded"), [("adamw-8bit", torch.uint8), ("adamw-8bit-stable-embedding", torch.float32)]
)
def test_the_states_of_embeddings_are_in_32_bits_where_asked(
    build: Callable[..., Bundle], choice: str, embedded: torch.dtype
) -> None:
    bundle = build("full", optimizer=choice)
    probe.full_step(bundle, 1)
    states = {name: bundle.optimizer.state[one]["state1"].dtype for name, one in bundle.model.named_parameters()}
    large = {name for name, one in bundle.model.named_parameters() if one.numel() >= 4096}
    assert len(large) > 2 and "model.embed_tokens.weight" in large
    wanted = dict.fromkeys(large, torch.uint8) | {"model.embed_tokens.weight": embedded}
    assert {name: states[name] for name in large} == wanted


def test_precision_sets_the_weights_and_autocast(build: Callable[..., Bundle]) -> None:
    def dtypes(bundle: Bundle) -> tuple[set[torch.dtype], set[torch.dtype]]:
        parameters = list(bundle.model.parameters())
        return (
            {one.dtype for one in parameters if one.requires_grad},
            {one.dtype for one in parameters if not one.requires_grad},
        )

    assert dtypes(build("full", precision="bf16-mixed")) == ({torch.float32}, set())
    assert dtypes(build("lora", precision="bf16-mixed")) == ({torch.float32}, {torch.bfloat16})
    assert dtypes(build("lora")) == ({torch.float32}, {torch.float32})
    for precision, expected in (("fp32", torch.float32), ("bf16-mixed", torch.bfloat16)):
        bundle = build("lora", precision=precision)
        with autocast(bundle.device.torch, bundle.recipe):
            ones = torch.ones(2, 2, device=tiny.DEVICE)
            assert (ones @ ones).dtype is expected


@pytest.mark.parametrize("choice", [one for name, one in RUNNABLE if name == "quantization"])
def test_a_quantised_base_computes_what_its_dequantised_weights_do(build: Callable[..., Bundle], choice: str) -> None:
    """int8 rounds what goes in as well, so it is further away."""
    import bitsandbytes as bnb

    quantised, plain = build("qlora", quantization=choice), build("lora")
    weights = dict(plain.model.named_parameters())
    for name, one in quantised.model.named_parameters():
        if type(one).__name__ == "Params4bit":
            weights[name].data.copy_(bnb.functional.dequantize_4bit(one.data, one.quant_state))
        elif type(one).__name__ == "Int8Params":
            layer = quantised.model.get_submodule(name.rpartition(".")[0]).state  # it has them since it was first run
            weights[name].data.copy_(layer.CB.float() * layer.SCB.float()[:, None] / 127)
        else:
            weights[name].data.copy_(tiny.numbers_of(one.data))
    found, expected = (steps.reference_step(one, plan_of(one, SAMPLES, 4, 8)[0]) for one in (quantised, plain))
    most = (5e-3, 3e-2) if choice == "int8" else (1e-5, 1e-4)
    assert found.loss == pytest.approx(expected.loss, rel=most[0])
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=most[1])


def test_qlora_weights_are_nf4_doubly_quantised(build: Callable[..., Bundle]) -> None:
    import bitsandbytes as bnb

    for precision, compute in (("fp32", torch.float32), ("bf16-mixed", torch.bfloat16)):
        bundle = build("qlora", precision=precision)
        found = [module for module in bundle.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
        assert len(found) == 14, "seven a layer; the head is not quantised"
        assert {module.weight.quant_type for module in found} == {"nf4"}
        assert all(module.weight.quant_state.nested for module in found)
        assert {module.compute_dtype for module in found} == {compute}


# Exported


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing(_kwargs)?. is deprecated:FutureWarning")  # by 5.23
@pytest.mark.parametrize(
    ("method", "name", "choice"),
    [(method, *one) for method in METHODS for one in EVERY if LEVERS[one[0]].applies(method, "causal-lm")],
)
def test_the_libraries_take_what_the_exporters_write(
    tmp_path: Path,
    llama: Path,
    functions: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    name: str,
    choice: str,
) -> None:
    import transformers
    from peft import LoraConfig
    from transformers import training_args

    # TrainingArguments asks whether this machine has TF32; the one it is written for has.
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    levers = {lever.name: lever.baseline for lever in LEVERS.values()} | {name: choice}
    configuration = RecommendedConfiguration(
        method=method,
        levers=levers,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        effective_batch_size=8,
        evaluation_batch_size=16,
        learning_rate=2e-4,
        rows_are_packed=levers["batching"] == "packed",
    )
    spec, here = tiny.job(llama, functions), (name, choice) in RUNNABLE
    written = arguments(spec, configuration, on_host=here)
    made = transformers.TrainingArguments(**written["TrainingArguments"], output_dir=str(tmp_path))
    for key, value in written["TrainingArguments"].items():
        seen = getattr(made, key)
        assert getattr(seen, "value", seen) == value, key
    assert made.logging_nan_inf_filter is False
    assert (written["LoraConfig"] is None) is (method == "full")
    if method != "full":
        lora = LoraConfig(**written["LoraConfig"])
        assert (lora.r, lora.lora_alpha) == (4, 8)
        assert lora.target_modules == ("all-linear" if choice != "attention-only" else set(ATTENTION))
    by_bitsandbytes = method == "qlora" and not choice.startswith("torchao")
    assert (written["BitsAndBytesConfig"] is None) is not by_bitsandbytes
    if by_bitsandbytes:
        quantization = transformers.BitsAndBytesConfig(**written["BitsAndBytesConfig"])
        assert quantization.load_in_8bit is (choice == "int8")
        assert choice == "int8" or quantization.bnb_4bit_quant_type == "nf4"
        assert quantization.bnb_4bit_use_double_quant is (choice not in ("nf4", "int8"))
        assert isinstance(quantization.bnb_4bit_compute_dtype, torch.dtype)
    options = written["from_pretrained"]
    assert options["dtype"] == "auto" or isinstance(getattr(torch, options["dtype"]), torch.dtype)
    if name not in ("precision", "attention") and LEVERS[name].baseline != choice:
        base = arguments(
            spec,
            configuration.model_copy(update={"levers": levers | {name: LEVERS[name].baseline}}),
            on_host=here,
        )
        kinds = ("TrainingArguments", "LoraConfig", "BitsAndBytesConfig", "from_pretrained")
        same = all(written[kind] == base[kind] for kind in kinds)
        assert not same or written["not_expressible"], "a choice that changes nothing must say that it is not written"


@pytest.mark.parametrize(("name", "choice"), [one for one in RUNNABLE if one[0] in ("precision", "attention")])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_exported_arguments_load_what_was_measured(
    build: Callable[..., Bundle], llama: Path, functions: Path, method: Method, name: str, choice: str
) -> None:
    from transformers import AutoModelForCausalLM

    measured = build(method, **{name: choice})
    configuration = RecommendedConfiguration(
        method=method,
        levers=measured.configuration.levers,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        effective_batch_size=8,
        evaluation_batch_size=16,
        learning_rate=2e-4,
        rows_are_packed=False,
    )
    written = arguments(tiny.job(llama, functions), configuration)
    loaded = AutoModelForCausalLM.from_pretrained(llama, **written["from_pretrained"])
    base = measured.model.get_base_model() if method != "full" else measured.model
    assert loaded.config._attn_implementation == base.config._attn_implementation
    assert loaded.get_input_embeddings().weight.dtype is base.get_input_embeddings().weight.dtype
