"""accelerate's file: its own parser reads it, and it does nothing that the script which it starts does already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS
from service.exports.accelerate import FOR_OTHERS, OTHERS
from service.levers import LEVERS
from tests.exports.test_targets import TARGETS, made, points

Facts = Callable[..., HardwareFacts]
TWICE = [{lever: choice} for lever, words in FOR_OTHERS.items() for choice in words]


def for_others(text: str) -> dict[str, Any]:
    """The keys that stand in the file as comments."""
    told = text.partition("# " + OTHERS.partition("\n")[0])[2]
    lines = [line.removeprefix("#") for line in told.splitlines() if line.startswith("#     ")]
    return yaml.safe_load("\n".join(lines)) or {}


def test_accelerate_reads_its_file(facts: Facts, tmp_path: Path) -> None:
    """accelerate refuses keys that it does not know, but not inside of a section: those are `accelerate launch`'s."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    actions = launch_command_parser()._actions
    options = {option for action in actions for option in action.option_strings}
    backends = {
        str(one).lower() for action in actions if action.dest == "dynamo_backend" for one in action.choices or ()
    }
    said = [point for point in points("full") if any(TARGETS["accelerate"].word(*one).keys for one in point.items())]
    assert {name for point in said for name in point} == {"precision"}
    for point in [*said, *TWICE]:
        text = EXPORTS["accelerate"].write(made(facts, "full", **point))
        written = yaml.safe_load(text)
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(written | for_others(text)))
        config = ClusterConfig.from_yaml_file(str(tmp_path / "accelerate.yaml"))
        assert (config.num_processes, config.use_cpu) == (1, True)
        for name, value in config.dynamo_config.items():
            assert f"--{name}" in options
            assert name != "dynamo_backend" or value.lower() in backends
        assert {f"--fp8_{name}" for name in config.fp8_config or {}} <= options


@pytest.mark.parametrize("point", TWICE, ids=str)
def test_what_the_script_does_is_not_done_again(point: dict[str, str], facts: Facts) -> None:
    """trainer.py compiles and converts by itself: for it, the file says nothing of either."""
    text = EXPORTS["accelerate"].write(made(facts, "full", **point))
    assert {"dynamo_config", "fp8_config"}.isdisjoint(yaml.safe_load(text))
    assert yaml.safe_load(text)["mixed_precision"] == "no"
    (lever,) = point
    assert set(for_others(text)) == {"compile": {"dynamo_config"}, "float8": {"mixed_precision", "fp8_config"}}[lever]


def test_a_script_of_ones_own_is_told_all_of_it(facts: Facts) -> None:
    for lever in ("compile", "float8"):
        assert set(FOR_OTHERS[lever]) == set(LEVERS[lever].names) - {LEVERS[lever].baseline}
    assert for_others(EXPORTS["accelerate"].write(made(facts, "full"))) == {}
    both = for_others(EXPORTS["accelerate"].write(made(facts, "full", compile="per-layer", float8="rowwise")))
    assert set(both) == {"dynamo_config", "mixed_precision", "fp8_config"}
