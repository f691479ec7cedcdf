"""train.py and its user: mistakes are told in a sentence before anything is trained, and a log has all rates."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS
from tests.child import tiny
from tests.exports.test_train_py import recommended, script
from tests.factory import configuration


@pytest.fixture
def text(tmp_path: Path, facts: Callable[..., HardwareFacts]) -> str:
    """A script that trains a tiny model in full."""
    made = configuration(method="full", effective=8, precision="fp32")
    model = tiny.save("llama", tmp_path / "model", vocabulary=tiny.FEW)
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(40))
    spec = tiny.job(model, data, method="full", training={"effective_batch_size": 8, "warmup_ratio": 0.1})
    return EXPORTS["train.py"].write(recommended(spec, made, facts()))


def test_a_rate_that_is_a_tensor_is_logged(text: str, tmp_path: Path) -> None:
    """As it is with torchao's optimizers."""
    module, log = script(text, tmp_path), tmp_path / "log.jsonl"
    module.LEARNING_RATE = torch.tensor(0.25)  # type: ignore[attr-defined]
    module.main(["--max-steps", "2", "--device", "cpu", "--output", str(tmp_path / "out"), "--log", str(log)])
    assert [json.loads(line).get("learning_rate") for line in log.read_text().splitlines()] == [0.0, 0.25, None]


@pytest.mark.parametrize("name", ["folder", "rows.csv"])
def test_data_of_another_form_is_told(text: str, tmp_path: Path, name: str) -> None:
    """What was measured was one .jsonl file, so the script reads nothing else."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "train.py", "--data", name, "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"train.py: {name} cannot be read in the form of the data that was")


def test_a_run_of_one_step_learns(text: str, tmp_path: Path) -> None:
    """A warm-up's first step has a learning rate of 0, so it must not be the only one. The log's folder is made."""
    module, log = script(text, tmp_path), tmp_path / "not" / "there" / "log.jsonl"
    module.main(["--max-steps", "1", "--device", "cpu", "--output", str(tmp_path / "out"), "--log", str(log)])
    assert json.loads(log.read_text().splitlines()[0])["learning_rate"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-steps", "0"], "--max-steps is 0, and must be more than 0"),
        (["--max-steps", "-5"], "--max-steps is -5, and must be more than 0"),
        (["--save-every", "0"], "--save-every is 0, and must be more than 0"),
        (["--epochs", "0"], "--epochs is 0, and must be more than 0"),
        (["--device", "tpu"], "--device is tpu; it may be cpu, cuda, or a GPU of several such as cuda:1"),
        (["--device", "cuda:0"], "--device is cuda:0, but torch sees no GPU here"),
    ],
)
def test_what_no_run_can_have_is_refused(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        script(text, tmp_path).main(arguments)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_other_columns_are_told(text: str, tmp_path: Path) -> None:
    module = script(text, tmp_path)
    rows = [*tiny.pairs(39), {"question": "a", "completion": "b"}]
    data = tiny.write(tmp_path / "mine.jsonl", rows)
    with pytest.raises(module.TrainingError, match="has no column prompt; it has question, completion"):
        module.main(["--data", str(data), "--device", "cpu", "--output", str(tmp_path / "out")])


def test_a_token_without_an_embedding_is_told(text: str, tmp_path: Path) -> None:
    """Of a large dataset only some rows were measured; another one may hold a token that was added to the tokenizer."""
    module = script(text, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    data = tiny.write(tmp_path / "mine.jsonl", [*tiny.pairs(39), {"prompt": "a", "completion": "<new>"}])
    with pytest.raises(module.TrainingError, match="the data holds '<new>', token .* resize them"):
        module.main(["--data", str(data), "--device", "cpu", "--output", str(tmp_path / "out")])


def test_a_run_that_is_past_its_end_is_not_resumed(text: str, tmp_path: Path) -> None:
    module = script(text, tmp_path)
    to = ["--device", "cpu", "--output", str(tmp_path / "out"), "--save-every", "1"]
    module.main(["--max-steps", "2", *to])
    with pytest.raises(module.TrainingError, match="the checkpoint is of step 2, and this run ends after 1"):
        module.main(["--max-steps", "1", "--resume", *to])


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(
    tmp_path: Path, facts: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dropout, too, it draws what the run would have drawn."""
    made = configuration(method="full", effective=8, precision="fp32")
    model = tiny.save("llama", tmp_path / "model", vocabulary=tiny.FEW)
    settings = json.loads((model / "config.json").read_text()) | {"attention_dropout": 0.2}
    (model / "config.json").write_text(json.dumps(settings))
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(40))
    spec = tiny.job(model, data, method="full", training={"effective_batch_size": 8, "warmup_ratio": 0.5})
    module = script(EXPORTS["train.py"].write(recommended(spec, made, facts())), tmp_path)

    def run(name: str, *more: str) -> list[tuple[float, float, float]]:
        log = tmp_path / f"{name}.jsonl"
        to = ["--output", str(tmp_path / name), "--log", str(log), "--save-every", "2", "--device", "cpu"]
        with contextlib.suppress(KeyboardInterrupt):
            module.main(["--max-steps", "6", *to, *more])
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [(one["step"], one["loss"], one["grad_norm"]) for one in lines if "loss" in one]

    whole = run("whole")
    saving = module.save_checkpoint

    def save_and_end(model: object, kept: object, step: int, path: Path) -> None:
        saving(model, kept, step, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as ending:
        ending.setattr(module, "save_checkpoint", save_and_end)
        assert run("ended") == whole[:2]
    assert run("ended", "--resume") == whole and len(whole) == 6


def test_the_device_is_not_waited_for_after_each_step(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only once in a while, before a checkpoint and at the end: a GPU that is waited for runs out of work."""
    module, log, events = script(text, tmp_path), tmp_path / "log.jsonl", []
    launched, saved = module.optimizer_step, module.save_checkpoint

    def launch(*given: Any) -> Any:
        events.append("launched")
        return launched(*given)

    def save(*given: Any) -> None:
        events.append(f"saved after {len(log.read_text().splitlines())} lines")
        saved(*given)

    monkeypatch.setattr(module, "WINDOW", float("inf"))
    monkeypatch.setattr(module, "optimizer_step", launch)
    monkeypatch.setattr(module, "save_checkpoint", save)
    to = ["--output", str(tmp_path / "out"), "--log", str(log), "--save-every", "4", "--device", "cpu"]
    module.main(["--max-steps", "6", *to])
    assert events == ["launched"] * 4 + ["saved after 4 lines"] + ["launched"] * 2
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["step"] for one in lines if "loss" in one] == [1, 2, 3, 4, 5, 6]
    rates = [one["learning_rate"] for one in lines if "loss" in one]
    assert rates[0] == 0 and rates[1] == max(rates) and len(set(rates)) == 6


def test_a_model_without_a_tokenizer_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    """transformers raises a ValueError there, as do levers that do not go with a model."""
    (tmp_path / "train.py").write_text(text)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).unlink()
    command = [sys.executable, "-I", "train.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(said) == 1 and "tokenizer" in said[0], done.stderr
