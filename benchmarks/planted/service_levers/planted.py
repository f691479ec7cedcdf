"""The lever with a planted fault: the one that PLANTED names."""

import os

from benchmarks.planted.cases import BAD, IDLE, NONE, PLANTED
from service.levers.base import Choice, Effect, Lever

LEVER = Lever(
    name="planted",
    summary="A fault in the process that trains.",
    baseline=NONE,
    source="benchmarks/planted",
    stage="model",
    choices=(
        Choice(NONE, "no fault"),
        *(
            Choice(one.fault, one.name, function="plant", options={"name": one.fault}, effect=Effect(0.8))
            for one in BAD
            if one.fault == os.environ.get(PLANTED)
        ),
        *(
            Choice(one.fault, "nothing is changed", function="leave", effect=Effect(0.8))
            for one in (IDLE,)
            if one.fault == os.environ.get(PLANTED)
        ),
    ),
)
