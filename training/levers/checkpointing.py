"""Activation checkpointing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from training.errors import TrainingError


def checkpointed(model: Any) -> list[Any]:
    """The layers that transformers can checkpoint; ValueError when this model has no such layer."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ValueError(f"{model.config.model_type} models have no layers that can be checkpointed one by one")
    return found


def checkpoint_layers(model: Any, every: int = 1, **more: Any) -> None:
    """In every `every`-th layer, keep only the input, and compute the rest again in the backward pass."""
    arguments = {"use_reentrant": False, **more}
    # Its name before transformers 5.23 is gradient_checkpointing_enable.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": arguments})
    for number, layer in enumerate(checkpointed(model)):
        layer.gradient_checkpointing = number % every == 0
    if not all(parameter.requires_grad for parameter in model.parameters()):
        model.enable_input_require_grads()  # or no gradient would reach the adapters through frozen layers


DEAR = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "transformers::grouped_mm_fallback",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
FLASH = ("_flash_attn_forward", "_flash_attn_varlen_forward")  # flash_attn's, and the hub's in a namespace of its own


def keep_what_is_dear(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep the results of matmuls and attention, and compute everything else again."""
    name = operation.name().partition(".")[0]
    dear = name in DEAR or name.partition("::")[2] in FLASH
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(model: Any) -> None:
    """Checkpoint every layer, but keep the results that are expensive to compute."""
    checkpoint_layers(model, context_fn=partial(create_selective_checkpoint_contexts, keep_what_is_dear))


def checkpoint_offloaded(model: Any) -> None:
    """Checkpoint every layer and keep its input in host memory, copied there and back during the computation.

    The hooks that copy would break a compiled graph. So they are around a layer's call, in a subclass of each class of
    layers, and what is compiled of a layer lies within.
    """
    checkpoint_layers(model)
    offloading, classes = Offloading(), {}
    for layer in checkpointed(model):
        layer.gradient_checkpointing = False  # or it would be checkpointed once more, within
        if type(layer) not in classes:
            classes[type(layer)] = called_through(offloading, type(layer))
        layer.__class__ = classes[type(layer)]


def called_through(offloading: Offloading, kind: type) -> type:
    """A subclass of layers that are called through `offloading` in training."""

    def call(self: Any, *inputs: Any, **more: Any) -> Any:
        called = partial(kind.__call__, self, **more)
        return offloading.checkpoint(called, *inputs) if self.training else called(*inputs)

    return type(kind.__name__, (kind,), {"__call__": call})


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to gain from a copy in host memory, as the tensor lies there."""
    return tensor.is_cpu


class Offloading:
    """Layers' inputs on their way to host memory and back: one in each direction at a time, on a stream of its own.

    In the forward pass an input is copied while its layer computes, and leaves the device when the next begins. In
    the backward pass it is fetched while the layer after it computes. The last layer's is needed first, and is still
    there. The host waits for nothing; the device waits for a copy where it ends later than the computation.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.newest: Kept | None = None  # the only one whose tensor may still be on the device in the forward pass

    def checkpoint(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a layer's function, of whose values only the first input is kept, in host memory.

        Saved tensors are handed to hooks. Before torch 2.13, a layer's inputs are among them only if checkpointing is
        reentrant; otherwise they stay on the device.
        """
        if not inputs or in_host_memory(inputs[0]):
            return checkpoint(function, *inputs, use_reentrant=False)
        reentrant = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
        with torch.autograd.graph.saved_tensors_hooks(partial(self.pack, inputs[0].data_ptr()), self.unpack):
            return checkpoint(function, *inputs, use_reentrant=reentrant)

    def pack(self, address: int, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of a saved tensor: the tensor itself unless it is the one at that address."""
        if tensor.data_ptr() != address:
            return tensor  # a mask, say, which all layers share
        if self.stream is None:
            self.stream = torch.get_device_module(tensor.device).Stream(tensor.device)
        if self.newest is not None:
            self.newest.leave()
        self.newest = Kept(tensor, self.newest, self.stream)
        return self.newest

    def unpack(self, kept: Any) -> torch.Tensor:
        """The saved tensor, on the device; begins to copy the one that is needed next."""
        if isinstance(kept, torch.Tensor):
            return kept
        if kept is self.newest:
            self.newest = None
        tensor = kept.fetch()
        kept.leave()
        before = kept.before()
        if before is not None:
            before.fetch()
        return tensor


class Kept:
    """A saved tensor: in host memory, on the device, or in both while a copy is made.

    The source is kept until the device waits for the end of the copy, so that its memory is not reused before. Device
    memory is allocated on the computation's stream, so only later computation reuses it; `record_stream` would do as
    well, but delay the reuse by as much as the host is ahead.
    """

    def __init__(self, tensor: torch.Tensor, before: Kept | None, stream: Any) -> None:
        # Weak, or a step's first tensor would keep the last of the step before.
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.device, self.stream = tensor.device, stream
        self.version: int | None = tensor._version  # of what is copied; None once the tensor came back
        self.on_device: torch.Tensor | None = tensor
        self.on_host = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
        self.copy(self.on_host, tensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the side stream, after all work queued so far.

        That work may have written the source, or read the memory that the target reuses.
        """
        streams = torch.get_device_module(self.device)
        self.stream.wait_stream(streams.current_stream(self.device))
        with streams.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.copied = self.stream.record_event()

    def fetch(self) -> torch.Tensor:
        """The tensor on the device, which has to `leave` before it is used; its copy begins if there is none."""
        if self.on_device is None:
            self.version = None
            self.on_device = torch.empty_like(self.on_host, device=self.device)
            self.copy(self.on_device, self.on_host)
        return self.on_device

    def leave(self) -> None:
        """Have the device wait for the last copy, and forget the tensor there, which others may hold.

        TrainingError when its layer has changed it meanwhile, as nobody knows which values were copied.
        """
        if self.on_device is not None and self.version not in (None, self.on_device._version):
            sentence = "a layer of the model changes its own input in place, so that checkpointing cannot offload it"
            raise TrainingError(sentence, "configuration")
        torch.get_device_module(self.device).current_stream(self.device).wait_event(self.copied)
        self.on_device = None
