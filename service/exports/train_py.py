"""train.py: one file, plain torch, transformers and peft, that trains exactly as the trial did.

It is the code of the package `training`, which a trial imports, specialised for one recipe (specialise.py). The package
is read as text: the control plane imports none of it that needs torch.
"""

from __future__ import annotations

from service.contract.recommendation import Recommendation
from service.exports.base import Export
from service.exports.printing import fields_of, script


def write(recommendation: Recommendation) -> str:
    """The script, with the recommendation's configuration written into it."""
    chosen = recommendation.configuration
    return script(fields_of(recommendation, chosen.levers, chosen.micro_batch_size), _head(recommendation))


def _head(recommendation: Recommendation) -> str:
    """What was seen, how to run the script, and what it needs."""
    evidence, environment = recommendation.evidence, recommendation.environment
    versions = " ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    faster = f", {evidence.speedup:.2f}x the baseline" if evidence.speedup else ""
    unsure = "" if recommendation.stability.stable else ", not verified"
    return f"""Finetune with the fastest stable configuration that dynotune measured. This file is yours: change it.

    python train.py [--model M] [--data D] [--epochs E] [--max-steps N] [--output DIR] [--resume] [--log FILE]

Measured: {evidence.tokens_per_second:,.0f} non-padding tokens/s{faster}{unsure},
on {environment.get("name", "an unnamed device")} ({versions}).
On a CPU, set OMP_WAIT_POLICY=PASSIVE before starting it, as dynotune did: it matters where others compute too.
"""


EXPORT = Export(
    "train.py",
    "a script that trains exactly as was measured, with torch, transformers and peft",
    write,
    "train.py",
    "a run that reaches what was measured, on one device",
)
