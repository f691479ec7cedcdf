"""The planted faults, each with its job and what the answer has to say of it; and the cases without a fault."""

from __future__ import annotations

from dataclasses import dataclass, field

NONE, NOISE = "none", "noise"
PLANTED = "PLANTED"  # the environment variable that names the fault of a process


@dataclass(frozen=True)
class Case:
    """A job that fixes `levers`. With `fault` it has a planted fault, and one of `named` must be in what is said of it.

    `fault` is the name of a plant of benchmarks/planted/training_levers. One that is `searched`, not fixed, has to lose
    against the same without it: it is no mistake, only no gain.
    """

    name: str
    method: str = "lora"
    levers: dict[str, str] = field(default_factory=dict)
    fault: str = NONE
    named: tuple[str, ...] = ()
    searched: bool = False


BAD = (
    Case("positions are not restarted", "lora", {"batching": "packed"}, "positions", ("step 0's",)),
    Case("later rows are not restarted", "lora", {"batching": "packed-global"}, "later-rows", ("step 0's",)),
    Case("every second step skipped", "lora", {}, "skips", ("no trained weight",)),
    Case("half the learning rate", "full", {}, "half-rate", ("at the learning rate",)),
    Case("weight decay ignored", "full", {}, "no-decay", ("weight decay",)),
    Case("clipping ignored", "lora", {}, "no-clipping", ("clipped",)),
    Case("half of the labels", "lora", {"batching": "grouped"}, "half-labels", ("loss",)),
    Case("gradients of one adapter alone", "lora", {}, "one-adapter", ("hardly move", "gradient norm")),
    Case("the longest tenth left out", "lora", {"batching": "grouped"}, "drops-longest", ("leaves out", "step 0's")),
    Case("rotated twice", "full", {"checkpointing": "selective"}, "rotates-in-place", ("gradient of",)),
    Case("overflow after 20 steps", "lora", {}, "overflow", ("went wrong",)),
    Case("a leak of 5 MiB a step", "lora", {}, "leak", ("keeps growing",)),
    Case("slow after three steps", "lora", {}, "slow", searched=True),
    Case("evaluation out of memory", "lora", {}, "evaluation", ("memory",)),
)
GOOD = (
    Case("sorted", "lora", {"batching": "sorted"}),
    Case("grouped", "lora", {"batching": "grouped"}),
    Case("packed", "lora", {"batching": "packed"}),
    Case("packed-global", "lora", {"batching": "packed-global"}),
    Case("token-budget", "lora", {"batching": "token-budget"}),
    Case("checkpointing", "lora", {"checkpointing": "full"}),
    Case("head in chunks", "lora", {"head": "chunked"}),
    Case("bf16 and fused AdamW", "lora", {"precision": "bf16-mixed", "optimizer": "adamw-fused"}),
    Case("AdamW of bitsandbytes", "full", {"optimizer": "adamw-bnb-32bit"}),
    Case("full finetuning, grouped", "full", {"batching": "grouped", "optimizer": "adamw-foreach"}),
    Case("full finetuning in bf16, packed", "full", {"batching": "packed", "precision": "bf16-mixed"}),
    Case("eager attention, compiled layers", "lora", {"attention": "eager", "compile": "per-layer"}),
)
# A lever that does nothing.
IDLE = Case("a gain that is noise", "lora", {}, NOISE, searched=True)
