"""On CUDA the search begins with what wins there, and leaves out what takes minutes and rarely wins.

First come rows without padding, kernels that are told where samples end, Liger's kernels and a head without logits;
then compiled layers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts, Package
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.states import Origin
from service.contract.task import PlanInput
from service.space import space
from tests.factory import configuration, measured, record
from worker.plan import plan

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
LARGE, SMALL = 80 << 30, 24 << 30


def gpu(facts: Facts, memory: int, *packages: str) -> HardwareFacts:
    """A GPU's facts, with optional packages installed on its machine."""
    installed = {name: Package(version="1") for name in ("peft", "bitsandbytes", *packages)}
    values = {"capability": (9, 0), "has_own_memory": True, "bf16_native": True}
    return facts(device="cuda", memory_bytes=memory, packages=installed, **values)


def trial(made: Configuration, memory: int, seconds: float = 10.0) -> Measurement:
    """All 32 samples of a step fit into the large memory, and four into the small one."""
    micro, peak = (32, 2 << 30) if memory == LARGE else (4, 20 << 30)
    sizes = {"micro_batch_size": micro, "largest_micro_batch": micro, "gradient_accumulation_steps": 32 // micro}
    return measured(made, seconds, peak_bytes=peak, capacity_bytes=memory, **sizes)


def searched(spec: JobSpec, facts: HardwareFacts, trials: int) -> list[dict[str, str]]:
    """The choices of the first trials after the baseline, each of which is a third faster than that."""
    (method,), memory = spec.method, facts.memory_bytes
    history = [record(trial(configuration(method), memory), Origin.baseline, 1)]
    for number in range(2, trials + 2):
        known = PlanInput(spec=spec, facts=facts, history=tuple(history), next_number=number)
        made = plan(known).trials[0].configuration
        history.append(record(trial(made, memory, 7.0), Origin.search, number))
    return [one.measurement.configuration.levers for one in history[1:]]


@pytest.mark.parametrize(
    ("packages", "attention", "kernels", "heads"),
    [
        ((), "varlen", "off", ("logits", "chunked")),
        (("liger_kernel",), "varlen", "liger", ("liger",)),
        (("liger_kernel", "flash_attn"), "flash-attention-2", "liger", ("liger",)),
        (("liger_kernel", "flash_attn_interface"), "flash-attention-3", "liger", ("liger",)),
    ],
)
@pytest.mark.parametrize("memory", [LARGE, SMALL])
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_first_trial_is_the_combination_that_wins_there(
    spec: Spec,
    facts: Facts,
    method: str,
    memory: int,
    packages: tuple[str, ...],
    attention: str,
    kernels: str,
    heads: tuple[str, ...],
) -> None:
    (first,) = searched(spec(method=method), gpu(facts, memory, *packages), 1)
    assert first["precision"] == "bf16-mixed" and first["batching"] in ("padding-free", "packed")
    assert (first["attention"], first["kernels"]) == (attention, kernels) and first["head"] in heads
    assert method == "full" or first["projections"] == "fused"
    assert first["compile"] == "off", "minutes of compiling are not the first that is asked for"
    if memory == SMALL:
        assert first["allocator"] == "expandable" and first["checkpointing"] != "off"


def test_a_classifier_begins_with_similar_lengths_side_by_side(spec: Spec, facts: Facts) -> None:
    job = spec(task="sequence-classification", method="full")
    (first,) = searched(job, gpu(facts, LARGE, "liger_kernel"), 1)
    wanted = {"precision": "bf16-mixed", "batching": "grouped", "attention": "varlen", "kernels": "liger"}
    assert {name: first[name] for name in wanted} == wanted


def test_compiled_layers_follow_soon(spec: Spec, facts: Facts) -> None:
    for memory in (LARGE, SMALL):
        compiled = [one["compile"] for one in searched(spec(), gpu(facts, memory, "liger_kernel"), 5)]
        assert "per-layer" in compiled and {*compiled} <= {"off", "per-layer"}


def test_what_takes_minutes_and_rarely_wins_is_not_searched(spec: Spec, facts: Facts) -> None:
    choices = space(spec(), gpu(facts, LARGE, "liger_kernel"))
    assert "eager" not in choices["attention"] and "multiple-64" in choices["padding"]
    assert "whole-max-autotune" not in choices["compile"]


@pytest.mark.parametrize(("cap", "paged"), [(None, True), (24.0, False), (78.0, True)])
def test_paged_states_are_not_tried_where_a_cap_stands_for_a_smaller_gpu(
    spec: Spec, facts: Facts, cap: float | None, paged: bool
) -> None:
    """Their pages are not torch's, so that they would lie beyond the cap, fast, and count as nothing."""
    here = gpu(facts, LARGE)
    found = space(spec(hardware={"memory_gib": cap} if cap else {}), here)["optimizer"]
    assert ("paged-adamw-32bit" in found) is paged and ("paged-adamw-8bit" in found) is paged
    assert "adamw-8bit" in found
    asked = spec(hardware={"memory_gib": 24.0}, search={"fixed": {"optimizer": "paged-adamw-32bit"}})
    assert space(asked, here)["optimizer"] == ("paged-adamw-32bit",)
