"""The catalogue of levers, as data. Each file of this folder declares one as LEVER; nothing else lists them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.folders import declared
from service.levers.base import Choice, Exclusion, Lever, Need, package
from service.levers.checks import mistakes
from service.tasks import TASKS


def discover() -> dict[str, Lever]:
    """All levers by name, sorted by the `order` that each declares. Looks at every folder of the package's path."""
    found: dict[str, Lever] = declared(__name__, __path__, "LEVER", attrgetter("name"), helpers=("base", "checks"))
    levers = {lever.name: lever for lever in sorted(found.values(), key=lambda lever: (lever.order, lever.name))}
    if wrong := mistakes(levers, {**CIRCUMSTANCES, "task": tuple(TASKS)}):
        raise ValueError("; ".join(wrong))
    return levers


METHOD_NEEDS: dict[str, tuple[Need, ...]] = {
    "lora": (package("peft", "LoRA adapters"),),
    "qlora": (package("peft", "LoRA adapters"), package("bitsandbytes", "NF4 weights of QLoRA")),
    "full": (),
}
# The facts of a job that exclusions look at beside its levers, with the values that each may have. The job's task
# declares `labels` and `sees`: what it predicts, and whether a token attends to later ones.
CIRCUMSTANCES: dict[str, tuple[str, ...]] = {
    "task": tuple(TASKS),
    "labels": ("classes", "tokens"),
    "sees": ("both-ways", "back"),
    "method": tuple(METHOD_NEEDS),
    "clipping": ("on", "off"),
    "loss_on": ("completion", "all"),
    "max_length": ("multiple-16", "other"),
}
LEVERS: dict[str, Lever] = discover()


def exclusions() -> list[Exclusion]:
    """The combinations that are never tried, each declared by one of the levers that it is about."""
    return [exclusion for lever in LEVERS.values() for exclusion in lever.exclusions]


def excluded(point: Mapping[str, str]) -> Exclusion | None:
    """The first exclusion that forbids a point (the choice of every lever, and the circumstances), or None."""
    return next((exclusion for exclusion in exclusions() if exclusion.hits(point)), None)


def circumstances(spec: JobSpec, method: str) -> dict[str, str]:
    """The values of all CIRCUMSTANCES in a job with one of its methods."""
    return {
        **of_task(spec.task),
        "method": method,
        "clipping": "on" if spec.training.max_grad_norm else "off",
        "loss_on": spec.training.loss_on,
        "max_length": "other" if spec.dataset.max_length % 16 else "multiple-16",
    }


def of_task(name: str) -> dict[str, str]:
    """The values of those CIRCUMSTANCES that a job's task decides."""
    task = TASKS[name]
    labels, sees = "classes" if task.labels_are_classes else "tokens", "both-ways" if task.needs_mask else "back"
    return {"task": name, "labels": labels, "sees": sees}


def chosen(levers: Mapping[str, str]) -> list[Choice]:
    """The catalogue's entries of a configuration's choices."""
    return [LEVERS[name].choice(choice) for name, choice in levers.items()]


def as_fixed(spec: JobSpec, configuration: Configuration) -> bool:
    """Whether a configuration has what the job fixes, wherever that has an effect with its method and the task."""
    return all(
        configuration.levers[name] == choice or not LEVERS[name].applies(configuration.method, spec.task)
        for name, choice in spec.search.fixed.items()
    )


def taken_back(spec: JobSpec, best: Configuration, baseline: Configuration) -> dict[str, Configuration]:
    """Lever -> the best configuration with that lever as the baseline has it, where that is a valid combination.

    Each may fit another micro batch, so none is set.
    """
    found = {}
    for name, choice in best.levers.items():
        if choice == baseline.levers[name] or not LEVERS[name].applies(best.method, spec.task):
            continue
        levers = {**best.levers, name: baseline.levers[name]}
        if not excluded({**levers, **circumstances(spec, best.method)}):
            found[name] = best.model_copy(update={"levers": levers}).at_micro_batch(None)
    return found


def is_compiled(levers: Mapping[str, str]) -> bool:
    """Whether a configuration compiles code before it trains, which takes time in every process."""
    return any(LEVERS[name].stage == "compiled" and LEVERS[name].choice(levers[name]).function for name in levers)


def packages() -> dict[str, list[str]]:
    """Optional Python package -> the methods and the choices (`lever=choice`) that need it."""
    found: dict[str, list[str]] = {}
    needs = [(f"method {method}", needs) for method, needs in METHOD_NEEDS.items()]
    needs += [(f"{lever.name}={choice.name}", choice.needs) for lever in LEVERS.values() for choice in lever.choices]
    for name, wanted in needs:
        for need in wanted:
            for one in need.packages:
                found.setdefault(one, []).append(name)
    return found


def unknown(name: str, choice: str | None = None) -> str | None:
    """A sentence when a lever or its choice does not exist, listing those that do; else None."""
    if name not in LEVERS:
        return f"there is no lever {name!r}; known levers: {', '.join(LEVERS)}"
    if choice is not None and choice not in LEVERS[name].names:
        return f"lever {name!r} has no choice {choice!r}; it has: {', '.join(LEVERS[name].names)}"
    return None


__all__ = [
    "CIRCUMSTANCES",
    "LEVERS",
    "METHOD_NEEDS",
    "Choice",
    "Exclusion",
    "Lever",
    "as_fixed",
    "chosen",
    "circumstances",
    "discover",
    "excluded",
    "exclusions",
    "is_compiled",
    "of_task",
    "packages",
    "taken_back",
    "unknown",
]
