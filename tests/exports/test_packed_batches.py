"""How many packed rows a trainer gets at a time, so that a step holds nearly the samples that were asked for."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from service.exports import EXPORTS, job_settings
from tests.exports.test_targets import Facts, made


def test_packed_rows_are_counted_as_rows(facts: Facts) -> None:
    """200,000 tokens in 1,000 samples: a step's 32 samples are 12.5 rows of 512 tokens."""
    found = made(facts, batching="packed", attention="flash-attention-2")
    for export, micro in (
        ("axolotl", "micro_batch_size"),
        ("ms-swift", "per_device_train_batch_size"),
        ("trl.yaml", "per_device_train_batch_size"),
    ):
        written = yaml.safe_load(EXPORTS[export].write(found))
        assert (written[micro], written["gradient_accumulation_steps"]) == (6, 2), export
    masked = yaml.safe_load(EXPORTS["trl.yaml"].write(made(facts, batching="packed")))
    assert (masked["per_device_train_batch_size"], masked["gradient_accumulation_steps"]) == (1, 12)
    unpacked = yaml.safe_load(EXPORTS["ms-swift"].write(made(facts, batching="packed")))
    assert (unpacked["packing"], unpacked["per_device_train_batch_size"]) == (False, 8)


@pytest.mark.parametrize(
    ("rows", "most", "split"),
    [(12, 8, (6, 2)), (8, 8, (8, 1)), (9, 8, (4, 2)), (3, 2, (1, 3)), (2, 8, (2, 1)), (1, 8, (1, 1)), (11, 8, (6, 2))],
)
def test_a_step_of_packed_rows_holds_nearly_the_effective_batch(rows: int, most: int, split: tuple[int, int]) -> None:
    assert job_settings.split(rows, most) == split


@settings(deadline=None)  # a loaded machine is no mistake
@given(st.integers(1, 300), st.integers(1, 64))
def test_no_step_of_packed_rows_is_far_from_the_effective_batch(rows: int, most: int) -> None:
    micro, steps = job_settings.split(rows, most)
    assert 1 <= micro <= most and abs(micro * steps - rows) <= 0.15 * rows
