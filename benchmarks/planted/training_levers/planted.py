"""Plants the faults."""

from typing import Any


def plant(model: Any, name: str) -> None:
    """Plant a fault into this process."""
    from benchmarks.planted import faults

    optimizers = {
        "skips": faults.stepping(lambda at: at % 2 == 0),
        "half-rate": faults.half_rate,
        "no-decay": faults.no_decay,
        "overflow": faults.after_each_step(faults.overflowing),
        "leak": faults.after_each_step(faults.leaking()),
        "slow": faults.after_each_step(faults.slowing()),
    }
    others = {
        "positions": faults.positions_go_on,
        "later-rows": faults.later_rows_go_on,
        "no-clipping": faults.no_clipping,
        "half-labels": faults.half_of_the_labels,
        "one-adapter": faults.one_adapter_alone,
        "rotates-in-place": faults.rotates_in_place,
        "drops-longest": faults.without_the_longest_tenth,
        "evaluation": faults.evaluation_without_memory,
    }
    planted = faults.wrapped_optimizer(optimizers[name]) if name in optimizers else others[name]
    planted(faults.Forever())


def leave(model: Any) -> None:
    """Change nothing."""
