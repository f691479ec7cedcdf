"""The exports that are YAML: no key stands in them twice, and they ask for the CPU where that was measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS
from tests.exports.test_targets import GPU, METHODS, made, points

Facts = Callable[..., HardwareFacts]
FILES = [name for name, export in EXPORTS.items() if export.file.endswith(".yaml")]


class Strict(yaml.SafeLoader):
    """A loader that refuses a key that a mapping has twice, of which YAML's readers silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        assert len(keys) == len(set(keys)), f"twice: {sorted(key for key in keys if keys.count(key) > 1)}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("export", FILES)
@pytest.mark.parametrize("method", METHODS)
def test_no_key_is_written_twice(export: str, method: str, facts: Facts) -> None:
    usual = made(facts, method)
    for point in points(method):
        levers = usual.configuration.levers | point
        chosen = usual.model_copy(update={"configuration": usual.configuration.model_copy(update={"levers": levers})})
        assert yaml.load(EXPORTS[export].write(chosen), Strict), point


@pytest.mark.parametrize("export", FILES)
def test_the_cpu_is_asked_for_whatever_its_kind_is_called(export: str, facts: Facts) -> None:
    """Or where there is a GPU as well, the trainer takes that, with batches that were measured elsewhere."""
    kinds: list[dict[str, Any]] = [{}, {"device": "container"}, GPU]
    host, container, gpu = (yaml.safe_load(EXPORTS[export].write(made(partial(facts, **one)))) for one in kinds)
    assert container == host and not gpu.get("use_cpu")
    assert host.get("use_cpu", export == "axolotl"), "Axolotl has no such key"
