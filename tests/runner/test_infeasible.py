"""A cap below what a single sample needs: the answer is that, with the bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from service.contract.child import Workplace
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from tests import tiny
from tests.factory import configuration
from worker.runner.main import environment
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Sandbox

LENGTH = 4096  # of 8,192 possible tokens each: four copies of the logits are half a GiB
GIB = 0.75


def test_a_cap_below_one_sample_is_infeasible_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]
) -> None:
    for name, value in environment().items():
        monkeypatch.setitem(os.environ, name, value)
    body = tiny.job(tmp_path, hardware={"memory_gib": GIB, "device": "cpu"})
    folder = tmp_path / "model"
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"max_position_embeddings": LENGTH}))
    row = {"prompt": "def", "completion": "return value " * LENGTH}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    body["dataset"]["max_length"] = LENGTH
    request = TrialRequest(
        configuration=configuration(effective=8), origin=Origin.baseline, number=1, seconds_limit=120
    )
    sandbox = Sandbox(False)
    place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path / "hub")
    bench = Bench(sandbox, facts(), tmp_path, place)
    found, log = measure(bench, JobSpec.model_validate(body), "job", request, lambda _: None, lambda: False, None)
    sandbox.close()
    assert found is not None and found.outcome is Outcome.infeasible, (found, log)
    said = re.fullmatch(
        r"not even a micro batch of 1 fits; [\d.]+ GiB were held and [\d.]+ GiB \(([\d,]+) bytes\) needed to go on",
        found.reason,
    )
    assert said is not None, found.reason
    assert int(said[1].replace(",", "")) > GIB * 2**30 * 0.95
    assert [probe.peak_bytes for probe in found.probes] == [None]
