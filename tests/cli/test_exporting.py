"""What the answer says to do next: which export is for whom, the command for each, and what each loses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli import exporting
from service.cli.output import console
from service.contract.hardware import HardwareFacts
from service.contract.recommendation import Contribution, Recommendation
from service.errors import Misconfigured
from service.exports import EXPORTS
from tests.cli.test_cli import Run, run
from tests.exports.test_targets import TARGETS, made

__all__ = ["run"]  # a fixture
Facts = Callable[..., HardwareFacts]


@pytest.fixture
def best(facts: Facts) -> Recommendation:
    """Fused projections, which configuration files cannot say, and every second layer checkpointed."""
    found = made(facts, batching="sorted", projections="fused", checkpointing="every-2")
    brings = Contribution(
        lever="projections", baseline="peft", choice="fused", factor=1.2, low=1.1, high=1.3, reason=""
    )
    return found.model_copy(update={"contributions": (brings,)})


def test_every_export_that_trains_is_listed_with_its_command(best: Recommendation) -> None:
    lines = exporting.listing(best, "job1")
    for name, export in EXPORTS.items():
        listed = f"    dynotune export job1 -f {name} -o {export.file}" in lines
        assert listed is bool(export.fits), name
    assert len({export.file for export in EXPORTS.values() if export.fits}) == len(TARGETS) + 1
    at = lines.index("trl.yaml: for TRL's command line")
    told = lines[at : lines.index("", at)]
    assert any("projections=fused" in line and "1.20 times as long" in line for line in told)
    assert "    Without what it cannot say a run takes about 1.20 times as long." in told
    assert lines[0].startswith("train.py: "), "what loses nothing is the first"
    assert any("json (" in line and "spec (" in line for line in lines[-1:])


def test_the_listing_keeps_trainers_to_one_gpu(facts: Facts) -> None:
    lines = exporting.listing(made(lambda: facts(device="cuda", capability=(9, 0))), "job1")
    assert "    CUDA_VISIBLE_DEVICES=0 trl sft --config trl.yaml" in lines


def test_in_short(best: Recommendation) -> None:
    assert exporting.in_short(None, best) == "nothing"
    assert exporting.in_short(TARGETS["llamafactory"], best) == (
        "projections (about 1.20 times as long); nearly: precision, checkpointing, batching, padding, loading"
    )
    classified = best.model_copy(update={"spec": best.spec | {"task": "sequence-classification"}})
    assert exporting.in_short(TARGETS["axolotl"], classified) == "this export writes no sequence-classification"
    ranked = [export.name for export in exporting.trains(classified)]
    assert ranked[0] == "train.py" and set(ranked[:3]) == {"train.py", "trainer", "accelerate"}
    assert any("Axolotl has no sequence-classification" in line for line in exporting.listing(classified, "j"))


def test_the_answer_ends_with_what_to_do(best: Recommendation, capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.print(exporting.table(best))
    for line in exporting.next_steps("out/recommendation.json"):
        shown.print(line)
    text = capsys.readouterr().out
    assert all(export.name in text for export in EXPORTS.values() if export.fits)
    assert "dynotune export out/recommendation.json -f EXPORT -o FILE" in text


def test_arguments_to_copy(best: Recommendation) -> None:
    told = best.model_copy(
        update={
            "TrainingArguments": {"per_device_train_batch_size": 8, "seed": 0, "optim": "adamw_torch_fused"},
            "from_pretrained": {"dtype": "bfloat16"},
            "BitsAndBytesConfig": {"load_in_4bit": True},
            "LoraConfig": {"r": 16},
            "not_expressible": ("projections=fused: peft has none", "micro_batch_size counts packed rows"),
        }
    )
    assert exporting.to_copy(told) == [
        "For code of your own: TrainingArguments(per_device_train_batch_size=8, optim='adamw_torch_fused')",
        "from_pretrained(dtype='bfloat16')",
        "BitsAndBytesConfig(load_in_4bit=True)",
        "LoraConfig(r=16)",
        "Not said by these: projections=fused: peft has none.",
        "Not said by these: micro_batch_size counts packed rows.",
    ]


def test_a_file_of_another_version_is_told_in_a_sentence(best: Recommendation, run: Run, tmp_path: Path) -> None:
    kept = best.model_dump(mode="json")
    kept["configuration"]["levers"]["optimizer"] = "adamw-9bit"
    (tmp_path / "new.json").write_text(json.dumps(kept))
    told = run("export", "new.json", "-f", "train.py")
    assert told.returncode == 2 and told.stderr.count("\n") == 1
    assert "of this version (configuration.levers: lever 'optimizer' has no choice 'adamw-9bit'" in told.stderr


def test_a_file_is_exported_without_a_control_plane(best: Recommendation, run: Run, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(best.model_dump_json())
    listed = run("export", "best.json")
    assert listed.returncode == 0 and "dynotune export best.json -f axolotl -o axolotl.yaml" in listed.stdout
    (first, *_) = json.loads(run("export", "best.json", "--json").stdout)
    assert (first["export"], first["slower"], first["losses"]) == ("train.py", 1.0, [])
    done = run("export", "best.json", "-f", "axolotl", "-o", "axolotl.yaml")
    assert done.returncode == 0 and done.stdout == ""
    assert (tmp_path / "axolotl.yaml").read_text() == EXPORTS["axolotl"].write(best)
    unknown = run("export", "best.json", "-f", "none")
    assert unknown.returncode == 2 and "There is no export 'none'; there are: " in unknown.stderr


def test_a_job_that_a_trainer_cannot_run_is_refused_in_a_sentence(best: Recommendation, tmp_path: Path) -> None:
    classified = best.model_copy(update={"spec": best.spec | {"task": "sequence-classification"}})
    (tmp_path / "best.json").write_text(classified.model_dump_json())
    with pytest.raises(Misconfigured, match="Unsloth has no sequence-classification"):
        exporting.written(tmp_path / "best.json", "unsloth")
