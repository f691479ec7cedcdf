"""Recipes: what an expert would try first on a kind of device, without measuring; a policy to compare with."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.levers import LEVERS
from worker.plan.space import make
from worker.plan.view import View

PRECISIONS = ("bf16-mixed", "fp16-mixed", "tf32", "fp32")  # the first that can be had
BATCHINGS = ("packed", "token-budget", "grouped", "sorted")  # a recipe each, on a device with memory of its own
HOST_BATCHINGS = ("grouped", "token-budget", "packed", "sorted")


def recipes(view: View, effective: int) -> list[Configuration]:
    """The recipes for the job's hardware; where the job allows none of their batchings, one with what it allows."""
    choices = view.choices
    common = {
        name: lever.baseline if lever.baseline in choices[name] else choices[name][0] for name, lever in LEVERS.items()
    }
    common["precision"] = next((one for one in PRECISIONS if one in choices["precision"]), choices["precision"][0])
    batchings = BATCHINGS if view.facts.has_own_memory else HOST_BATCHINGS
    allowed = [one for one in batchings if one in choices["batching"]] or [choices["batching"][0]]
    found = [make(view.spec, view.method, {**common, "batching": one}, effective) for one in allowed]
    if not any(found):
        found = [make(view.spec, view.method, {**common, "batching": choices["batching"][0]}, effective)]
    return [one for one in found if one]
