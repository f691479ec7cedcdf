"""Estimates a job's memory without its weights and without its hardware: `dynotune estimate`.

The model is built of fake tensors and trains a few steps of its real code; the bytes of weights, gradients,
activations and temporaries are counted on the way. Optimizer state, NF4 storage and the framework itself are not seen
by torch's fake tensors, so they are computed. A measured memory line of the same model, where the database has one,
corrects the estimated line in both its rest and its slope.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from service.contract.child import Workplace
from service.contract.configuration import Configuration
from service.contract.estimate import Estimate, EstimateRequest, Known, MethodEstimate
from service.contract.hardware import HardwareFacts
from service.contract.job import METHODS, JobSpec, Method
from service.contract.measurement import MemoryLine
from service.levers import LEVERS
from training.model import dtype_of
from training.optimization import embedding_weights
from training.recipe import Recipe, task_of
from training.step import autocast
from worker.child import sources
from worker.child.build import adapted, check_length, load_config, loading, recipe_of
from worker.child.fake import Storages, fake_tensors, real_shapes
from worker.child.lacking import class_of
from worker.devices import discover
from worker.devices.base import proc_status

GIB = 2**30
CUDA_OVERHEAD = 0.5 * GIB  # an assumed size of CUDA's context and libraries, until a measurement corrects the line
Micros = tuple[int, int]
SMALL: Micros = (1, 2)
OF_THE_HOST = " This is for the worker's CPU; for a GPU, set hardware: {device: cuda} in the job."
MOST_SIMULATED = 256  # samples of the largest batch that is simulated, which bounds the estimate's time


@dataclass(frozen=True)
class Sizes:
    """Bytes of a step on fake tensors, whose weights are not quantised.

    Quantised weights would take `saved` bytes less, and for a moment `dequantised` bytes more.
    """

    parameters: int
    trainable: int
    embedded: int  # trainable parameters that are in embeddings
    weights: float
    gradients: float
    peaks: tuple[float, float]  # of micro batches of 1 and 2 samples
    held: tuple[float, float]  # what the forward pass of 1 and 2 samples saves for the backward pass
    saved: float
    dequantised: float
    idle: float  # host bytes of a process that has imported the same libraries and started their threads


def estimate(
    request: EstimateRequest, facts: HardwareFacts, known: tuple[Known, ...], workplace: Workplace
) -> Estimate:
    """The estimate of each method (LoRA, QLoRA, full finetuning); TrainingError for the user's mistakes."""
    started = time.perf_counter()
    spec = request.spec.model_copy(update={"model": request.spec.model.model_copy(update={"weights": "random"})})
    device = facts.device if spec.hardware.device == "auto" else spec.hardware.device
    estimator = _Estimator(spec, device, workplace)
    levers = _levers(spec, device, facts)
    methods = {method: estimator.method(method, levers, request.memory_gib * GIB, known) for method in METHODS}
    corrected = any(one.corrected for one in methods.values())
    return Estimate(
        memory_gib=request.memory_gib,
        max_length=spec.dataset.max_length,
        device=device,
        methods=methods,
        seconds=time.perf_counter() - started,
        statement=(
            f"Estimated from shapes for samples of {spec.dataset.max_length} tokens"
            + (", corrected by a measurement of this model on this hardware." if corrected else "; nothing was run.")
            + ("" if facts.has_own_memory or spec.hardware.device != "auto" else OF_THE_HOST)
        ),
    )


def _levers(spec: JobSpec, device: str, facts: HardwareFacts) -> dict[str, str]:
    """The levers' choices that the search would begin with, and in their place those that the job fixes."""
    # The facts are this machine's. Another kind of device is assumed to compute bf16 natively, as most do.
    there = facts if device == facts.device else facts.model_copy(update={"bf16_native": True})
    levers = {name: (*lever.ranked(there), lever.baseline)[0] for name, lever in LEVERS.items()}
    return simulable(levers | spec.search.fixed)


def simulable(levers: dict[str, str]) -> dict[str, str]:
    """The levers with each choice that fake tensors cannot run replaced by one that takes about the same memory.

    Custom kernels, and code that reads the batch's values, have no values to read in a fake tensor.
    """
    return {name: lever.simulation(levers.get(name, lever.baseline)) for name, lever in LEVERS.items()}


class _Estimator:
    """One job's estimates. Each fits a memory line at 1 and 2 samples, and a second near the largest size by that."""

    def __init__(self, spec: JobSpec, device: str, workplace: Workplace) -> None:
        self._spec, self._device, self._workplace = spec, device, workplace
        kind = discover().get(device)
        self._overhead = CUDA_OVERHEAD if kind is not None and kind.has_own_memory else 0.0
        self._simulated: dict[str, Sizes] = {}

    def method(self, method: str, levers: dict[str, str], capacity: float, known: tuple[Known, ...]) -> MethodEstimate:
        """One method's estimate."""
        length = self._spec.dataset.max_length
        near = self._near(method, levers, length, capacity)
        sizes = self._sizes(method, levers, length, near)
        line, corrected = self._corrected(self._line(method, levers, length, near), method, levers, known, near)
        largest, note = _largest(self._spec, line, capacity)
        saved, dequantised = (sizes.saved, sizes.dequantised) if method == "qlora" else (0.0, 0.0)
        activations = sizes.held[1] - sizes.held[0]
        return MethodEstimate(
            levers=levers,
            parameters=sizes.parameters,
            trainable_parameters=sizes.trainable,
            weights_gib=(sizes.weights - saved) / GIB,
            gradients_gib=sizes.gradients / GIB,
            optimizer_gib=_state(sizes, levers) / GIB,
            activations_gib=activations / GIB,
            temporary_gib=(max(0.0, sizes.peaks[1] - sizes.peaks[0] - activations) + dequantised) / GIB,
            overhead_gib=self._overhead / GIB,
            line=line,
            largest_micro_batch=largest,
            corrected=corrected,
            note=note,
        )

    def _near(self, method: str, levers: dict[str, str], length: int, capacity: float) -> Micros:
        """The two micro batches to fit the line through: the largest that fits by a first line, and half of it.

        The batch size decides at which moment of a step memory peaks, so a line through small batches may be too flat.
        """
        first = min(MOST_SIMULATED, self._line(method, levers, length, SMALL).largest(capacity))
        return (first // 2, first) if first > SMALL[1] else SMALL

    def _corrected(
        self, line: MemoryLine, method: str, levers: dict[str, str], known: tuple[Known, ...], near: Micros
    ) -> tuple[MemoryLine, bool]:
        """(the line corrected by a measurement, True), or (the line as it is, False) where there is no measurement.

        Rest and slope are scaled by measured over estimated of the measured configuration that is most like this one.
        """
        mine = [one for one in known if one.method == method]
        if not mine:
            return line, False
        nearest = max(mine, key=lambda one: sum(one.levers.get(name) == choice for name, choice in levers.items()))
        same = self._line(method, simulable(nearest.levers), nearest.max_length, near)
        rest = nearest.line.rest_bytes / same.rest_bytes
        slope = nearest.line.slope_bytes / same.slope_bytes
        scaled = MemoryLine(
            rest_bytes=line.rest_bytes * rest,
            slope_bytes=line.slope_bytes * slope,
            update_bytes=line.update_bytes * rest,
        )
        return scaled, True

    def _line(self, method: str, levers: dict[str, str], length: int, micros: Micros) -> MemoryLine:
        sizes = self._sizes(method, levers, length, micros)
        saved, dequantised = (sizes.saved, sizes.dequantised) if method == "qlora" else (0.0, 0.0)
        slope = max(1.0, sizes.peaks[1] - sizes.peaks[0])
        fixed = _state(sizes, levers) + self._overhead - saved
        temporary = LEVERS["optimizer"].choice(levers["optimizer"]).memory.gradient_copies
        return MemoryLine(
            rest_bytes=sizes.peaks[0] - slope + fixed + dequantised,
            slope_bytes=slope,
            update_bytes=sizes.weights + sizes.gradients * temporary + fixed,
        )

    def _sizes(self, method: str, levers: dict[str, str], length: int, micros: Micros) -> Sizes:
        """The sizes of a step, simulated once for each combination of arguments; QLoRA shares LoRA's simulation."""
        simulated: Method = "full" if method == "full" else "lora"
        key = f"{simulated} {length} {micros} {sorted(levers.items())}"
        if key not in self._simulated:
            self._simulated[key] = step_sizes(self._spec, simulated, levers, length, self._workplace, micros)
            # Only the first simulation's: later ones also count what earlier fake tensors have left in this process.
            self._overhead = self._overhead or self._simulated[key].idle
        return self._simulated[key]


def _largest(spec: JobSpec, line: MemoryLine, capacity: float) -> tuple[int, str]:
    """(the largest micro batch, a note on it where it is 0, or where the job and not the memory sets the limit)."""
    fit = line.largest(capacity)
    if fit == 0:
        return 0, f"one sample needs {line.at(1) / GIB:.2f} GiB"
    limits = {
        "training.effective_batch_size": spec.training.effective_batch_size,
        "search.max_micro_batch_size": spec.search.max_micro_batch_size,
    }
    least, name = min(((most, name) for name, most in limits.items() if most), default=(fit, ""))
    return (least, f"limited by {name}; {fit:,} would fit") if least < fit else (fit, "")


def _state(sizes: Sizes, levers: dict[str, str]) -> float:
    """Bytes of the optimizer's state."""
    memory = LEVERS["optimizer"].choice(levers["optimizer"]).memory
    embedded = memory.state if memory.embedding_state is None else memory.embedding_state
    return (sizes.trainable - sizes.embedded) * memory.state + sizes.embedded * embedded


def step_sizes(
    spec: JobSpec, method: Method, levers: dict[str, str], length: int, workplace: Workplace, micros: Micros = SMALL
) -> Sizes:
    """The sizes of a full step of one configuration at `length` tokens a sample, simulated at two micro batches."""
    configuration = Configuration(method=method, levers=levers, effective_batch_size=1, learning_rate=1e-4)
    recipe, folder = recipe_of(spec, configuration), sources.model_folder(spec.model, workplace)
    with torch.device("meta"):
        model = _model(spec, recipe, folder, workplace)
    trained = [one for one in model.parameters() if one.requires_grad]
    embeddings = embedding_weights(model)
    saved, dequantised = _quantised(model, levers, recipe)
    idle = _idle_bytes()
    with fake_tensors():
        real_shapes(model)
        peaks, held = _steps(model, recipe, length, micros)
    return Sizes(
        parameters=sum(one.numel() for one in model.parameters()),
        trainable=sum(one.numel() for one in trained),
        embedded=sum(one.numel() for one in trained if id(one) in embeddings),
        weights=float(sum(one.numel() * one.element_size() for one in {*model.parameters(), *model.buffers()})),
        gradients=float(sum(one.numel() * one.element_size() for one in trained)),
        peaks=peaks,
        held=held,
        saved=saved,
        dequantised=dequantised,
        idle=idle,
    )


def _idle_bytes() -> float:
    """The data segment's bytes of a process that has imported and started what a trial does, but has no model."""
    import peft  # noqa: F401 - a trial with an adapter imports it

    # A step of a tiny model starts the libraries' threads and makes them allocate what they keep.
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    loss = nn.functional.cross_entropy(layer(torch.ones(2, 128, 64)).flatten(0, 1), torch.zeros(256, dtype=torch.long))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    return float(proc_status()["VmData"])


def _model(spec: JobSpec, recipe: Recipe, folder: Any, workplace: Workplace) -> Any:
    """The model with its adapter and levers, on whichever device torch's default is (the caller's meta device)."""
    config = load_config(folder, {"trust_remote_code": workplace.allow_remote_code})
    config.use_cache = False
    config.pad_token_id = config.pad_token_id or 0
    check_length(spec, config)
    dtype = (config.dtype or torch.float32) if recipe.weights == "auto" else dtype_of(recipe)
    class_of(config, recipe)
    # Unset, it is sdpa too, or eager where the model lacks sdpa.
    attention = None if recipe.attention == "sdpa" else recipe.attention
    with loading():
        model = task_of(recipe).model_class().from_config(config, dtype=dtype, attn_implementation=attention)
    return adapted(model, recipe).train()


def _quantised(model: nn.Module, levers: dict[str, str], recipe: Recipe) -> tuple[float, float]:
    """(bytes that quantising the weights saves, bytes of dequantised weights that a step needs at the same time).

    The latter is the largest weight's, or all weights' where the kernel keeps them dequantised until backward.
    """
    linear = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not _is_head(name, recipe)
    ]
    compute = getattr(torch, recipe.autocast or "float32").itemsize
    memory = LEVERS["quantization"].choice(levers["quantization"]).memory
    assert memory.weight is not None, "each form of quantised weights says how large they are"
    saved = sum(one.numel() * (one.element_size() - memory.weight) for one in linear)
    counts = [one.numel() for one in linear]
    alive = sum(counts) if memory.keeps_dequantised else max(counts, default=0)
    return float(saved), float(alive * compute)


def _is_head(name: str, recipe: Recipe) -> bool:
    """Whether a module is an output layer, which is not quantised."""
    return name.rsplit(".", 1)[-1] in (*recipe.heads, "lm_head")


def _steps(
    model: nn.Module, recipe: Recipe, length: int, micros: Micros
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(peak bytes, bytes that the forward pass saves for backward), each for micro batches of 1 and of 2 samples.

    The micro batches that run are `micros`; the line through them gives the values of 1 and 2. Gradients are in place.
    """
    peaks, held = [], []
    with Storages() as storages:
        for tensor in (*model.parameters(), *model.buffers()):
            storages.add(tensor)
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.grad = torch.empty_like(tensor)
        for micro in micros:
            batch = _batch(recipe, micro, length)
            storages.peak = before = storages.live
            with autocast(torch.device("cpu"), recipe):
                loss = task_of(recipe).summed_loss(model, batch, torch.tensor(micro * length))
            held.append(float(storages.live - before))
            loss.backward()  # type: ignore[no-untyped-call]
            del loss, batch
            peaks.append(float(storages.peak))
    return _at_one_and_two(micros, peaks), _at_one_and_two(micros, held)


def _at_one_and_two(micros: Micros, found: list[float]) -> tuple[float, float]:
    slope = (found[1] - found[0]) / (micros[1] - micros[0])
    one = found[0] - slope * (micros[0] - 1)
    return one, one + slope


def _batch(recipe: Recipe, micro: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of `micro` samples of `length` tokens.

    transformers drops a mask that masks nothing, but cannot look into a fake one, so attention takes the memory that
    rows of unequal length take.
    """
    ids = torch.ones((micro, length), dtype=torch.long)
    labels = ids[:, 0] if recipe.labels_are_classes else ids
    if not recipe.masked:
        return {"input_ids": ids, "labels": labels}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
