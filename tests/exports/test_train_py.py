"""train.py: the exported script trains exactly as the worker's own loop does, stands alone, evaluates and saves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from service.contract.child import Workplace
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.exports import EXPORTS
from service.levers import LEVERS
from service.recommend import recommend
from service.tasks import TASKS
from tests.factory import DATASET, configuration, measured, record
from training.batches import epoch_steps
from worker.child import soak, steps
from worker.child.build import build, recipe_of
from worker.devices import open_device

ROOT = Path(__file__).resolve().parents[2]
EXPORTS_FOLDER = ROOT / "service" / "exports"
# peft, and who must run with transformers 5.17 as well, asks for checkpointing by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
STEPS = 5  # of 4 steps an epoch, so the second epoch's order is seen as well


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Script and worker take every CPU they may; models this small are faster on one, and do not jostle others."""
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiny models with weights, and a dataset for each: see SOURCES."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 8193, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}
    # Larger than usual, so that attention across samples or a wrong position changes the loss visibly.
    llama = LlamaConfig(**shape, num_key_value_heads=2, initializer_range=0.2)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    BertForMaskedLM(BertConfig(**shape)).bert.save_pretrained(folder / "bert")  # without the pooler of classifiers
    roberta = RobertaConfig(**shape | {"max_position_embeddings": 80, "attention_probs_dropout_prob": 0.0})
    RobertaForMaskedLM(roberta).save_pretrained(folder / "roberta")
    for name in ("llama", "bert", "roberta"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "examples" / "llama-13m" / file, folder / name)
    rng = random.Random(0)
    words = ["def", "return", "self", "value", "for", "name", "in", "range", "class", "import", "None", "True", "key"]

    def text(most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, most)))

    functions = [{"prompt": text(6), "completion": text(30)} for _ in range(40)]
    topics = [{"text": text(40), "label": rng.randrange(3)} for _ in range(40)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "roberta")
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(3)
    tokenizer.save_pretrained(folder / "roberta")
    texts = [{"text": row["text"]} for row in topics]
    for name, rows in (("functions", functions), ("topics", topics), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SOURCES = {
    "causal-lm": ("llama", "functions.jsonl"),
    "sequence-classification": ("bert", "topics.jsonl"),
    "masked-lm": ("roberta", "texts.jsonl"),
}


def recommended(spec: JobSpec, made: Configuration, facts: HardwareFacts) -> Recommendation:
    """The recommendation after one good trial of the configuration."""
    there = [kind for kinds in TASKS[spec.task].column_sets[:1] for kind in kinds]
    columns = {kind: TASKS[spec.task].columns[kind][0] for kind in there}
    dataset = DATASET.model_copy(update={"columns": columns, "formats": (".jsonl",)})
    found = recommend("job1", spec, facts, (record(measured(made, evaluation_batch_size=3, dataset=dataset)),), {})
    assert found is not None
    return found


def job(models: Path, made: Configuration, task: str = "causal-lm", **training: Any) -> JobSpec:
    """A job on a tiny model."""
    model, data = SOURCES[task]
    return JobSpec.model_validate(
        {
            "model": {"source": str(models / model)},
            "task": task,
            "dataset": {
                "source": str(models / data),
                "max_length": 64,
                "splits": {"validation_fraction": 0.25},
            },
            "method": made.method,
            "lora": {"r": 4, "alpha": 16, "dropout": 0.1 if task == "sequence-classification" else 0.0},
            "training": {
                "effective_batch_size": 8,
                "learning_rate": made.learning_rate,
                "weight_decay": 0.1,
                "warmup_ratio": 0.2,
                "seed": 7,
                **training,
            },
        }
    )


def script(text: str, folder: Path) -> ModuleType:
    """The exported text as a module."""
    path = folder / "train.py"
    path.write_text(text)
    found = importlib.util.spec_from_file_location("exported_train", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def rates(schedule: str) -> list[float]:
    """The learning rate's factors over STEPS steps, the first of them warming up."""
    after = [(step - 1) / (STEPS - 1) for step in range(1, STEPS)]
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda done: 1 - done,
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
        "constant": lambda done: 1.0,
    }
    return [0.0, *(shapes[schedule](done) for done in after)]


def by_worker(spec: JobSpec, made: Configuration, micro: int) -> tuple[list[steps.StepResult], soak.Evaluation]:
    """The same run by the worker's own rooms: each step's result, and the evaluation."""
    place = Workplace(device="cpu", data_roots=(Path("/"),), hub_cache=Path("/nowhere"))
    bundle = build(spec, made, open_device("cpu"), place, spec.training.seed)
    recipe = replace(bundle.recipe, micro_batch_size=micro)
    plan = [step for epoch in range(2) for step in epoch_steps(bundle.data.lengths, epoch, recipe)]
    results = []
    for step, factor in zip(plan, rates(spec.training.schedule), strict=False):
        for group in bundle.optimizer.param_groups:
            group["lr"] = made.learning_rate * factor
        loss, norm = steps.optimizer_step(bundle, *steps.prepare(bundle, step)[:2])
        results.append(steps.StepResult(float(loss), float(norm)))
    evaluation = soak.evaluate(bundle, 3)
    return results, evaluation


CASES: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "padded lora": ({"method": "lora", "batching": "padded", "attention": "eager"}, "causal-lm", {}),
    "sorted full": (
        {"method": "full", "batching": "sorted", "optimizer": "adamw-loop"},
        "causal-lm",
        {"schedule": "cosine"},
    ),
    "grouped lora": ({"method": "lora", "batching": "grouped"}, "causal-lm", {"schedule": "constant"}),
    "grouped full": ({"method": "full", "batching": "grouped"}, "causal-lm", {"max_grad_norm": 0.1}),
    "packed full": ({"method": "full", "batching": "packed", "optimizer": "adamw-foreach"}, "causal-lm", {}),
    "packed lora": ({"method": "lora", "batching": "packed", "checkpointing": "full"}, "causal-lm", {}),
    "packed lora bf16": ({"method": "lora", "batching": "packed", "precision": "bf16-mixed"}, "causal-lm", {}),
    "stable embedding": ({"method": "full", "optimizer": "adamw-8bit-stable-embedding"}, "causal-lm", {}),
    "packed qlora": ({"method": "qlora", "batching": "packed", "optimizer": "adamw-8bit"}, "causal-lm", {}),
    "classify full": ({"method": "full", "batching": "padded", "precision": "fp32"}, "sequence-classification", {}),
    "classify lora": ({"method": "lora", "batching": "sorted"}, "sequence-classification", {}),
    "classify qlora": ({"method": "qlora", "batching": "sorted"}, "sequence-classification", {}),
    "side by side": ({"method": "full", "batching": "padding-free", "attention": "varlen"}, "causal-lm", {}),
    "token budget": ({"method": "full", "batching": "token-budget", "head": "chunked"}, "causal-lm", {}),
    "packed global": ({"method": "lora", "batching": "packed-global", "adapter": "rslora"}, "causal-lm", {}),
    "checkpointed": ({"method": "lora", "checkpointing": "every-2", "adapter": "attention-only"}, "causal-lm", {}),
    "selective": ({"method": "full", "checkpointing": "selective", "padding": "multiple-64"}, "causal-lm", {}),
    "offloaded": ({"method": "lora", "checkpointing": "offloaded"}, "causal-lm", {}),
    "nf4": ({"method": "qlora", "quantization": "nf4", "vocabulary": "multiple-64"}, "causal-lm", {}),
    "int8": ({"method": "qlora", "quantization": "int8", "optimizer": "adamw-bnb-32bit"}, "causal-lm", {}),
    "in backward": (
        {"method": "full", "optimizer": "adamw-in-backward", "batching": "sorted", "micro": "8"},
        "causal-lm",
        {"max_grad_norm": 0},
    ),
    "norms": ({"method": "full", "precision": "bf16-mixed", "normalisation": "low-precision"}, "causal-lm", {}),
    "classify max": ({"method": "full", "padding": "max", "optimizer": "adafactor"}, "sequence-classification", {}),
    "masked": ({"method": "lora", "batching": "sorted"}, "masked-lm", {}),
    "masked packed": ({"method": "full", "batching": "packed", "attention": "varlen"}, "masked-lm", {}),
    "workers": ({"method": "lora", "loading": "workers-2", "batching": "sorted"}, "causal-lm", {}),
    "16-bit evaluation": ({"method": "full", "evaluation": "loss-16bit"}, "causal-lm", {}),
    "generation": ({"method": "lora", "evaluation": "generation"}, "causal-lm", {}),
    "all tokens": ({"method": "lora", "batching": "packed"}, "causal-lm", {"loss_on": "all"}),
    "evaluated on the way": ({"method": "lora"}, "causal-lm", {"evaluation_steps": 2}),
    "fused projections": ({"method": "lora", "projections": "fused", "checkpointing": "full"}, "causal-lm", {}),
    # Below an adapter the first layer, whose input needs no gradient, would be compiled apart from the others.
    "compiled": ({"method": "full", "compile": "per-layer-aot-eager"}, "causal-lm", {}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")  # on one core
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_worker_does(
    case: str, models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts], capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, gradient norms and the evaluation equal the worker's, with dropout where the model has it."""
    levers, task, training = CASES[case]
    micro = int(levers.get("micro", 2))
    levers = {name: choice for name, choice in levers.items() if name != "micro"}
    made = configuration(effective=8, micro=micro, **levers).model_copy(update={"learning_rate": 5e-3})
    spec = job(models, made, task, **training)
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)
    log = tmp_path / "log.jsonl"
    module.main(["--max-steps", str(STEPS), "--device", "cpu", "--output", str(tmp_path / "out"), "--log", str(log)])
    *lines, evaluation = [json.loads(line) for line in log.read_text().splitlines()]
    between = [line for line in lines if "evaluation_loss" in line]
    assert len(between) == (2 if training.get("evaluation_steps") else 0)
    lines = [line for line in lines if "evaluation_loss" not in line]

    results, theirs = by_worker(spec, made, micro)
    assert [line["loss"] for line in lines] == pytest.approx([one.loss for one in results], rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx([one.grad_norm for one in results], rel=1e-4)
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [5e-3 * factor for factor in rates(spec.training.schedule)]
    )
    assert evaluation["evaluation_loss"] == pytest.approx(theirs.loss, rel=1e-5)
    assert evaluation["evaluation_accuracy"] == pytest.approx(theirs.accuracy)
    assert {name: evaluation[f"evaluation_{name}"] for name in theirs.scores} == pytest.approx(theirs.scores)
    assert "evaluation on 10 samples" in capsys.readouterr().out


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
def test_it_arranges_an_epoch_as_the_worker_does(
    batching: str, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """Step for step and row for row, over more samples than grouping looks at together."""
    spec = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})
    made = configuration(effective=8, micro=4, batching=batching)
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)
    lengths = random.Random(5).choices(range(1, 1025), k=203)
    recipe = replace(recipe_of(spec, made), micro_batch_size=4)
    assert module.epoch_steps(lengths, 3) == epoch_steps(lengths, 3, recipe)


def test_it_runs_by_itself_elsewhere(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """A process in another folder, without this repository in sight: exit 0, and what it saved loads."""
    from peft import PeftModel

    made = configuration(effective=8, batching="packed")
    spec = job(models, made)
    (tmp_path / "train.py").write_text(EXPORTS["train.py"].write(recommended(spec, made, facts())))
    shutil.copy(models / "functions.jsonl", tmp_path / "mine.jsonl")
    command = [sys.executable, "-I", "train.py", "--max-steps", "3", "--data", "mine.jsonl", "--device", "cpu"]
    done = subprocess.run([*command, "--output", "adapter"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr and "non-padding tokens/s" in done.stderr, "a progress bar"
    assert "evaluation on 10 samples after 3 steps: loss" in done.stdout
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models / "llama"), tmp_path / "adapter")
    assert any("lora_B" in name and value.abs().sum() > 0 for name, value in loaded.named_parameters())
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        models / "llama"
    )


def test_a_full_model_is_saved_to_be_used(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """The saved model loads, changed, in fp32, and generates with its cache."""
    made = configuration(method="full", effective=8, precision="fp32")
    module = script(EXPORTS["train.py"].write(recommended(job(models, made), made, facts())), tmp_path)
    module.main(["--max-steps", "2", "--device", "cpu", "--output", str(tmp_path / "out")])
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (models / "llama", tmp_path / "out"))
    assert after.config.use_cache is True
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_it_stops_when_numbers_go_wrong(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """NaN ends the run with a sentence, and nothing is saved."""
    made = configuration(method="full", effective=8, precision="fp32")
    module = script(EXPORTS["train.py"].write(recommended(job(models, made), made, facts())), tmp_path)
    train = module.train

    def broken(model: Any, *args: Any) -> int:
        model.lm_head.weight.data.fill_(math.nan)
        steps: int = train(model, *args)
        return steps

    module.train = broken  # type: ignore[attr-defined]
    with pytest.raises(module.TrainingError, match="step 1 went wrong: its loss is nan"):
        module.main(["--max-steps", "2", "--device", "cpu", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_fp16_skips_an_overflow_and_goes_on(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """A scaler's first scales overflow: the update is skipped, the learning rate waits, and training goes on."""
    made = configuration(method="full", effective=8, precision="fp16-mixed")
    module = script(
        EXPORTS["train.py"].write(recommended(job(models, made, warmup_ratio=0.0), made, facts())), tmp_path
    )
    scaler = module.torch.amp.GradScaler
    module.torch = type("Torch", (), {"__getattr__": lambda _, name: getattr(torch, name)})()  # type: ignore[attr-defined]
    module.torch.amp = type("Amp", (), {"GradScaler": lambda device: scaler(device, init_scale=2.0**24)})
    log = tmp_path / "log.jsonl"
    module.main(["--max-steps", "16", "--device", "cpu", "--output", str(tmp_path / "out"), "--log", str(log)])
    lines = [json.loads(line) for line in log.read_text().splitlines()][:-1]
    skipped = [not math.isfinite(line["grad_norm"]) for line in lines]
    assert skipped[0] and not skipped[-1]
    assert lines[0]["learning_rate"] == lines[skipped.index(False)]["learning_rate"] > lines[-1]["learning_rate"]


def test_a_classifier_head_is_trained_in_fp32(
    models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """Under autocast the base is 16-bit, and nothing that is trained is."""
    made = configuration(effective=8, precision="bf16-mixed")
    spec = job(models, made, "sequence-classification")
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)
    seen: list[Any] = []

    def looked(model: Any, *_: Any) -> int:
        seen.append(model)
        return 0

    module.train = looked  # type: ignore[attr-defined]
    module.main(["--device", "cpu", "--output", str(tmp_path / "out")])
    (model,) = seen
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert model.config.num_labels == 3


def test_the_text_is_the_recommendations(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """It compiles, imports nothing of dynotune, holds strange names unharmed, and follows the recommendation."""
    made = configuration(effective=8)
    spec = job(models, made)
    text = EXPORTS["train.py"].write(recommended(spec, made, facts()))
    compile(text, "train.py", "exec")
    assert "import service" not in text and "import worker" not in text and "from service" not in text
    assert "LEARNING_RATE = 0.0002\n" in text
    changed = made.model_copy(update={"learning_rate": 3.5e-4})
    assert "LEARNING_RATE = 0.00035\n" in EXPORTS["train.py"].write(recommended(spec, changed, facts()))
    strange = "a\"b\\\n''' é {\"x\": None}\n"
    odd = spec.model_copy(update={"model": spec.model.model_copy(update={"source": strange})})
    module = script(EXPORTS["train.py"].write(recommended(odd, made, facts(name=strange))), tmp_path)
    assert strange == module.MODEL and module.__doc__ is not None and strange in module.__doc__


def test_the_text_is_clean(models: Path, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """ruff finds nothing in the joined file: sorted imports, none unused, no long line of ours."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    assert ruff is not None, "ruff comes with the extra dev"
    spec = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})
    made = configuration()
    (tmp_path / "train.py").write_text(
        EXPORTS["train.py"].write(recommended(spec, made, facts(name="CPU", versions={})))
    )
    command = [ruff, "check", "--isolated", "--line-length=120", "--select=E,F,I,UP,B,SIM", "--ignore=SIM108"]
    done = subprocess.run([*command, str(tmp_path / "train.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "choice"), [(lever.name, choice.name) for lever in LEVERS.values() for choice in lever.choices]
)
def test_every_choice_of_the_catalogue_is_applied_by_it(
    models: Path, facts: Callable[..., HardwareFacts], name: str, choice: str
) -> None:
    """The chosen function is in the script and called; what was not chosen is not in it."""
    chosen = LEVERS[name].choice(choice)
    made = configuration(LEVERS[name].methods[0], 8, 4, **{name: choice})
    text = EXPORTS["train.py"].write(recommended(job(models, made), made, facts()))
    compile(text, "train.py", "exec")
    if chosen.function and name != "batching":
        assert all(str(value).replace("'", '"') in text for value in chosen.options.values())
    others = {one.function for one in LEVERS[name].choices if one.function} - {chosen.function, "checkpoint_layers"}
    assert not [one for one in others if f"def {one}(" in text]
