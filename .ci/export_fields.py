"""Which keys the trainers know that dynotune exports to: read from their wheels, kept in tests/exports/fields.

`python .ci/export_fields.py` downloads each wheel without what it depends on (a wheel that is there already is not
downloaded again), reads the names of fields and choices from its source without running any of it, and writes one JSON
file a trainer, with the version and the checksum of each wheel. With `--check` nothing is written: the exit code is 1
where a file is not what the wheels say. The names are facts about interfaces; no code is kept.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, FIELDS = ROOT / "build" / "export-wheels", ROOT / "tests" / "exports" / "fields"
SCHEMAS, HPARAMS, SWIFT = "axolotl/utils/schemas", "llamafactory/hparams", "swift/arguments"
ARGUMENTS = "transformers/training_args.py"
# Trainer -> its wheels: (package, version, {file: classes, or Class.function, or CONSTANT}).
SOURCES: dict[str, list[tuple[str, str, dict[str, list[str]]]]] = {
    "transformers": [("transformers", "5.23.0", {ARGUMENTS: ["TrainingArguments", "OptimizerNames"]})],
    "trl": [
        (
            "trl",
            "1.16.0",
            {
                "trl/trainer/base_config.py": ["_BaseConfig"],
                "trl/trainer/sft_config.py": ["SFTConfig"],
                "trl/trainer/model_config.py": ["ModelConfig"],
                "trl/scripts/utils.py": ["ScriptArguments", "DatasetMixtureConfig", "DatasetConfig"],
            },
        ),
    ],
    "axolotl": [
        (
            "axolotl",
            "0.19.0",
            {
                f"{SCHEMAS}/config.py": ["AxolotlInputConfig"],
                f"{SCHEMAS}/model.py": ["ModelInputConfig", "ModelOutputConfig"],
                f"{SCHEMAS}/peft.py": ["LoraConfig"],
                f"{SCHEMAS}/training.py": ["HyperparametersConfig", "SelectiveCheckpointingConfig"],
                f"{SCHEMAS}/deprecated.py": ["RemappedParameters"],
                f"{SCHEMAS}/datasets.py": ["SFTDataset", "UserDefinedPrompterType"],
                f"{SCHEMAS}/fp8.py": ["FP8Config"],
                f"{SCHEMAS}/enums.py": ["CustomSupportedOptimizers", "CANONICAL_ATTN_IMPLS"],
                "axolotl/integrations/liger/args.py": ["LigerArgs"],
                "axolotl/integrations/cut_cross_entropy/args.py": ["CutCrossEntropyArgs"],
            },
        ),
        ("transformers", "5.16.1", {ARGUMENTS: ["OptimizerNames"]}),
    ],
    "llamafactory": [
        (
            "llamafactory",
            "0.9.5",
            {
                f"{HPARAMS}/data_args.py": ["DataArguments"],
                f"{HPARAMS}/finetuning_args.py": ["FinetuningArguments", "LoraArguments"],
                f"{HPARAMS}/model_args.py": ["ModelArguments", "BaseModelArguments", "QuantizationArguments"],
                f"{HPARAMS}/training_args.py": ["TrainingArguments", "Fp8Arguments"],
                "llamafactory/extras/constants.py": ["AttentionFunction"],
                "llamafactory/data/parser.py": ["DatasetAttr"],
            },
        ),
        ("transformers", "5.6.0", {ARGUMENTS: ["TrainingArguments", "OptimizerNames"]}),
    ],
    "ms-swift": [
        (
            "ms-swift",
            "4.6.0",
            {
                f"{SWIFT}/base_args/base_args.py": ["BaseArguments"],
                f"{SWIFT}/base_args/data_args.py": ["DataArguments"],
                f"{SWIFT}/base_args/model_args.py": ["ModelArguments"],
                f"{SWIFT}/base_args/quant_args.py": ["QuantizeArguments"],
                f"{SWIFT}/base_args/template_args.py": ["TemplateArguments"],
                f"{SWIFT}/sft_args.py": ["SftArguments"],
                f"{SWIFT}/tuner_args.py": ["TunerArguments"],
                "swift/trainers/arguments.py": ["TrainArgumentsMixin"],
            },
        ),
        ("transformers", "5.19.0", {ARGUMENTS: ["TrainingArguments", "OptimizerNames"]}),
    ],
    "unsloth": [
        (
            "unsloth",
            "2026.10.9",
            {
                "unsloth/models/loader.py": ["FastLanguageModel.from_pretrained"],
                "unsloth/models/llama.py": ["FastLlamaModel.get_peft_model"],
            },
        ),
        ("trl", "1.15.0", {"trl/trainer/base_config.py": ["_BaseConfig"], "trl/trainer/sft_config.py": ["SFTConfig"]}),
        ("transformers", "5.17.0", {ARGUMENTS: ["TrainingArguments", "OptimizerNames"]}),
    ],
    "accelerate": [("accelerate", "1.15.0", {})],
}


def wheel(package: str, version: str) -> Path:
    """The wheel's file, downloaded if it is not there."""
    name = f"{package.replace('-', '_')}-{version}-*.whl"
    if not (found := list(WHEELS.glob(name))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, f"--dest={WHEELS}", f"{package}=={version}"], check=True)
        found = list(WHEELS.glob(name))
    return found[0]


def names(tree: ast.Module, wanted: str) -> list[str]:
    """The fields of a class or the values of an enumeration, the parameters of a function, or a constant's strings."""
    outer, _, inner = wanted.partition(".")
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == wanted for one in node.targets):
            return sorted(one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant))
        if not isinstance(node, ast.ClassDef) or node.name != outer:
            continue
        if inner:
            (function,) = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == inner]
            return [one.arg for one in function.args.args]
        fields = [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        values = [one.value for one in node.body if isinstance(one, ast.Assign)]
        return fields or [one.value for one in values if isinstance(one, ast.Constant)]
    raise SystemExit(f"there is no {wanted} any more")


def read(package: str, version: str, files: dict[str, list[str]]) -> dict[str, Any]:
    """What is kept of a wheel."""
    path = wheel(package, version)
    with zipfile.ZipFile(path) as archive:
        (metadata,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        needs = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
        trees = {file: ast.parse(archive.read(file)) for file in files}
    return {
        "package": package,
        "version": version,
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "requires": sorted(one for one in needs if "extra ==" not in one or 'extra == "torch"' in one),
        "names": {name: names(trees[file], name) for file, wanted in files.items() for name in wanted},
    }


def main() -> int:
    """Write the files, or compare them; exit code 1 where one is not what the wheels say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    WHEELS.mkdir(parents=True, exist_ok=True)
    FIELDS.mkdir(parents=True, exist_ok=True)
    stale = []
    for trainer, sources in SOURCES.items():
        text = json.dumps([read(*source) for source in sources], indent=1) + "\n"
        path = FIELDS / f"{trainer}.json"
        if check and (not path.exists() or path.read_text("utf-8") != text):
            stale.append(trainer)
        elif not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"{', '.join(stale)}: not what the wheels say; run python .ci/export_fields.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
