"""Estimates a job's memory without its weights and without its hardware: `dynotune estimate`.

The model is drawn on fake tensors and trains a few steps of its real code; weights, gradients, activations and
temporaries are read off. What is not torch's (optimizer state, NF4 storage, the framework itself) is worked out. A
measured line of the same model corrects both ends of the estimated one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from service.contract.configuration import Configuration
from service.contract.estimate import Estimate, EstimateRequest, Known, MethodEstimate
from service.contract.hardware import HardwareFacts
from service.contract.job import METHODS, JobSpec, Method
from service.contract.measurement import MemoryLine
from service.exports.templates.common import parameter_groups
from service.levers import LEVERS
from service.levers.quantization import HEADS
from worker.child import sources
from worker.child.build import Limits, adapted, check_length, load_options
from worker.child.fake import Storages, fake_tensors, real_shapes
from worker.devices import discover
from worker.devices.base import proc_status
from worker.levers import batching, precision
from worker.tasks import TASKS

GIB = 2**30
CUDA_OVERHEAD = 0.5 * GIB  # context and libraries; a measurement replaces it
Micros = tuple[int, int]
SMALL: Micros = (1, 2)
MOST_DRAWN = 256


@dataclass(frozen=True)
class Sizes:
    """Bytes of a step on fake tensors; `saved` and `dequantised` are what NF4 weights would change."""

    parameters: int
    trainable: int
    embedded: int  # of the trainable, those in embeddings
    weights: float
    gradients: float
    peaks: tuple[float, float]  # of micro batches 1 and 2
    held: tuple[float, float]  # by their forward, for backward
    saved: float
    dequantised: float
    idle: float  # bytes of this process with the same libraries imported and threads started, on the host


def estimate(request: EstimateRequest, facts: HardwareFacts, known: tuple[Known, ...], limits: Limits) -> Estimate:
    """All methods; JobProblem for the user's mistakes."""
    started = time.perf_counter()
    spec = request.spec.model_copy(update={"model": request.spec.model.model_copy(update={"weights": "random"})})
    device = facts.device if spec.hardware.device == "auto" else spec.hardware.device
    estimator = _Estimator(spec, device, limits)
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
        ),
    )


def _levers(spec: JobSpec, device: str, facts: HardwareFacts) -> dict[str, str]:
    """What the search would begin with, and what the job fixes."""
    # Of another kind of device than this one nothing is known; most have bf16.
    there = facts if device == facts.device else facts.model_copy(update={"bf16_native": True})
    levers = {
        name: lever.ranked(there)[0] if lever.recipe == "first" else lever.baseline for name, lever in LEVERS.items()
    }
    return drawable(levers | spec.search.fixed)


def drawable(levers: dict[str, str]) -> dict[str, str]:
    """The levers whose shapes can be drawn: kernels, and what reads the batch, have nothing to read on fake tensors."""
    return {name: lever.simulation(levers.get(name, lever.baseline)) for name, lever in LEVERS.items()}


class _Estimator:
    """One job's estimates. Each draws a line at small batches, and one near the largest that it promises."""

    def __init__(self, spec: JobSpec, device: str, limits: Limits) -> None:
        self._spec, self._device, self._limits = spec, device, limits
        kind = discover().get(device)
        self._overhead = CUDA_OVERHEAD if kind is not None and kind.has_own_memory else 0.0
        self._drawn: dict[str, Sizes] = {}

    def method(self, method: str, levers: dict[str, str], capacity: float, known: tuple[Known, ...]) -> MethodEstimate:
        """One method's estimate."""
        length, effective = self._spec.dataset.max_length, self._spec.training.effective_batch_size
        near = self._near(method, levers, length, capacity)
        sizes = self._sizes(method, levers, length, near)
        line, corrected = self._corrected(self._line(method, levers, length, near), method, levers, known, near)
        largest = min(line.largest(capacity), effective or line.largest(capacity))
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
            note="" if largest else f"one sample needs {line.at(1) / GIB:.2f} GiB",
        )

    def _near(self, method: str, levers: dict[str, str], length: int, capacity: float) -> Micros:
        """Two micro batches to draw the line through: the largest that fits by a first line, and half of it.

        Where in the step the peak is depends on the batch, so small ones may show less than large ones have.
        """
        first = min(MOST_DRAWN, self._line(method, levers, length, SMALL).largest(capacity))
        return (first // 2, first) if first > SMALL[1] else SMALL

    def _corrected(
        self, line: MemoryLine, method: str, levers: dict[str, str], known: tuple[Known, ...], near: Micros
    ) -> tuple[MemoryLine, bool]:
        """The line scaled by measured over estimated of the measured configuration most like this one."""
        mine = [one for one in known if one.method == method]
        if not mine:
            return line, False
        nearest = max(mine, key=lambda one: sum(one.levers.get(name) == choice for name, choice in levers.items()))
        same = self._line(method, drawable(nearest.levers), nearest.max_length, near)
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
        """Sizes of a step, drawn once a shape: `full`, or an adapter over a frozen base."""
        drawn: Method = "full" if method == "full" else "lora"
        key = f"{drawn} {length} {micros} {sorted(levers.items())}"
        if key not in self._drawn:
            self._drawn[key] = step_sizes(self._spec, drawn, levers, length, self._limits, micros)
            # The first one's: what fake tensors leave behind, a trial does not have.
            self._overhead = self._overhead or self._drawn[key].idle
        return self._drawn[key]


def _state(sizes: Sizes, levers: dict[str, str]) -> float:
    """Bytes of the optimizer's state."""
    memory = LEVERS["optimizer"].choice(levers["optimizer"]).memory
    embedded = memory.state if memory.embedding_state is None else memory.embedding_state
    return (sizes.trainable - sizes.embedded) * memory.state + sizes.embedded * embedded


def step_sizes(
    spec: JobSpec, method: Method, levers: dict[str, str], length: int, limits: Limits, micros: Micros = SMALL
) -> Sizes:
    """Sizes of a full step of one configuration, at `length` tokens a sample, as two micro batches show them."""
    configuration = Configuration(method=method, levers=levers, effective_batch_size=1, learning_rate=1e-4)
    task = TASKS[spec.task]()
    folder = sources.model_folder(spec.model, limits.roots, limits.allow_pickle, limits.allow_remote_code)
    with torch.device("meta"):
        model = _model(spec, configuration, task, folder, limits)
    trained = [one for one in model.parameters() if one.requires_grad]
    saved, dequantised = _quantised(model, levers)
    idle = _idle_bytes()
    with fake_tensors():
        real_shapes(model)
        peaks, held = _steps(model, spec, levers, length, micros)
    return Sizes(
        parameters=sum(one.numel() for one in model.parameters()),
        trainable=sum(one.numel() for one in trained),
        embedded=sum(
            group["params"][at].numel() for group in parameter_groups(model, 0.0) for at in group["embeddings"]
        ),
        weights=float(sum(one.numel() * one.element_size() for one in {*model.parameters(), *model.buffers()})),
        gradients=float(sum(one.numel() * one.element_size() for one in trained)),
        peaks=peaks,
        held=held,
        saved=saved,
        dequantised=dequantised,
        idle=idle,
    )


def _idle_bytes() -> float:
    """The data segment with what a trial's process imports and starts, but without a model."""
    import peft  # noqa: F401 - a trial with an adapter has it

    # A step of a little of everything starts the threads, and makes what the libraries keep.
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    loss = nn.functional.cross_entropy(layer(torch.ones(2, 128, 64)).flatten(0, 1), torch.zeros(256, dtype=torch.long))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    return float(proc_status()["VmData"])


def _model(spec: JobSpec, configuration: Configuration, task: Any, folder: Any, limits: Limits) -> Any:
    """The model with its adapter and levers, on no device."""
    from transformers import AutoConfig

    options = load_options(configuration)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=limits.allow_remote_code)
    config.use_cache = False
    config.pad_token_id = config.pad_token_id or 0
    check_length(spec, config)
    dtype = (config.dtype or torch.float32) if options["dtype"] == "auto" else options["dtype"]
    model = task.model_class().from_config(config, dtype=dtype, attn_implementation=options["attn_implementation"])
    return adapted(spec, configuration, model, 0).train()


def _quantised(model: nn.Module, levers: dict[str, str]) -> tuple[float, float]:
    """(bytes that quantising saves, bytes of the largest weight dequantised, which a step needs for a moment)."""
    linear = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not _is_head(name)
    ]
    compute = (precision.autocast_dtype(levers) or torch.float32).itemsize
    memory = LEVERS["quantization"].choice(levers["quantization"]).memory
    assert memory.weight is not None, "each form of quantised weights says how large they are"
    saved = sum(one.numel() * (one.element_size() - memory.weight) for one in linear)
    counts = [one.numel() for one in linear]
    alive = sum(counts) if memory.keeps_dequantised else max(counts, default=0)
    return float(saved), float(alive * compute)


def _is_head(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in (*HEADS, "lm_head")


def _steps(
    model: nn.Module, spec: JobSpec, levers: dict[str, str], length: int, micros: Micros
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(peaks of micro batches 1 and 2 with gradients in place, bytes that their forward leaves for backward).

    By the line through `micros`.
    """
    peaks, held = [], []
    with Storages() as storages:
        for tensor in (*model.parameters(), *model.buffers()):
            storages.add(tensor)
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.grad = torch.empty_like(tensor)
        for micro in micros:
            batch = _batch(spec, levers, micro, length)
            storages.peak = before = storages.live
            with precision.autocast(levers, torch.device("cpu")):
                loss = TASKS[spec.task]().loss(model, batch, torch.tensor(micro * length))
            held.append(float(storages.live - before))
            loss.backward()  # type: ignore[no-untyped-call]
            del loss, batch
            peaks.append(float(storages.peak))
    return _at_one_and_two(micros, peaks), _at_one_and_two(micros, held)


def _at_one_and_two(micros: Micros, found: list[float]) -> tuple[float, float]:
    slope = (found[1] - found[0]) / (micros[1] - micros[0])
    one = found[0] - slope * (micros[0] - 1)
    return one, one + slope


def _batch(spec: JobSpec, levers: dict[str, str], micro: int, length: int) -> dict[str, torch.Tensor]:
    """Where a mask is passed, transformers takes a fake one for one that masks, as rows of unequal length have it."""
    ids = torch.ones((micro, length), dtype=torch.long)
    labels = ids[:, 0] if spec.task == "sequence-classification" else ids
    if spec.task == "causal-lm" and not batching.needs_mask(levers["batching"]):
        return {"input_ids": ids, "labels": labels}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
