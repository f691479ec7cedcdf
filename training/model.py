"""The model: its configuration, its weights, its adapter, and the levers that change it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from training.errors import TrainingError
from training.packing import know_packed_rows, know_single_rows, offset_positions
from training.recipe import Recipe, apply, task_of
from training.samples import Samples


def build_model(
    source: str | Path, tokenizer: Any, splits: Sequence[Samples], device: torch.device, recipe: Recipe
) -> Any:
    """The model on the device, in training mode, with its adapter and all levers applied, but not yet compiled."""
    before_loading(recipe)
    config = model_config(source, tokenizer, splits, recipe)
    torch.manual_seed(recipe.seed)  # for the weights that are initialised at random: all, or those of a new head
    model = (
        random_model(config, device, recipe) if recipe.random_weights else loaded_model(source, config, device, recipe)
    )
    know_padding(model, tokenizer)
    change_base(model, recipe)
    if recipe.lora is not None:
        model = with_adapter(model, recipe)
    change_model(model, recipe)
    model.train()
    return model


def before_loading(recipe: Recipe) -> None:
    """What has to be set before a model is loaded: a CPU's caches of kernels, matmuls' precision, and some levers.

    oneDNN, and torch's layer over it, each keep the kernels of the last 1,024 shapes that they met in 16 bits. Batches
    of many lengths bring new shapes at every step, and what is kept fragments the heap: a run takes twice the memory.
    128 serve all layers of a micro batch (oneDNN's developer guide, "Primitive Cache"; pytorch issue 29893). Matmuls'
    precision is set also where it is torch's own default, as NVIDIA's containers begin with another.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")
    if recipe.matmul:
        torch.set_float32_matmul_precision(recipe.matmul)
    if not recipe.masked:
        if recipe.packed:
            know_packed_rows()
        else:
            know_single_rows()
    for choice in recipe.before_loading:
        apply(choice)


def model_config(source: str | Path, tokenizer: Any, splits: Sequence[Samples], recipe: Recipe) -> Any:
    """The model's configuration for this task and data."""
    config = AutoConfig.from_pretrained(source, **recipe.source_options)
    check_vocabulary(config, tokenizer, splits)
    config.use_cache = False  # with a cache, transformers would not see where packed samples begin
    task_of(recipe).set_up(config, splits)
    if recipe.classes:
        config.label2id = recipe.classes
        config.id2label = {number: label for label, number in recipe.classes.items()}
    return config


def check_vocabulary(config: Any, tokenizer: Any, splits: Sequence[Samples]) -> None:
    """TrainingError where the data holds a token for which the model has no embedding.

    It may have been added to a tokenizer. It would be an IndexError of some step, and on a GPU the end of the process.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(int(torch.frombuffer(part.ids, dtype=torch.int32).max()) for part in splits)
    if size is not None and largest >= size:
        raise TrainingError(
            f"model.source: the data holds {tokenizer.convert_ids_to_tokens(largest)!r}, token {largest} of its "
            f"tokenizer, and the model has embeddings for {size} tokens; resize them"
        )


def know_padding(model: Any, tokenizer: Any) -> None:
    """Tell the model its padding token once the model is made, as Trainer does.

    Known earlier, the embedding of that token, which often is the end token too, would get no gradient.
    """
    model.config.pad_token_id = tokenizer.pad_token_id


def loaded_model(
    source: str | Path, config: Any, device: torch.device, recipe: Recipe, whole: Sequence[str] = ()
) -> Any:
    """The pretrained model on the device, quantised if the recipe says so, except for its head and the layers `whole`.

    A classifier's `drawn` are the layers besides its head that the checkpoint lacks, such as DeBERTa's pooler.
    """
    model, found = (
        task_of(recipe)
        .model_class()
        .from_pretrained(
            source,
            config=config,
            device_map={"": device},
            dtype=dtype_of(recipe),
            attn_implementation=recipe.attention,
            use_safetensors=None if recipe.pickled_weights else True,  # a pickle can run code when it is read
            quantization_config=quantization(config, recipe, whole) if recipe.quantization else None,
            output_loading_info=True,
            **recipe.source_options,
        )
    )
    if recipe.lora is not None and recipe.heads:
        model.drawn = drawn_layers(found["missing_keys"], recipe)
        if recipe.quantization and model.drawn and not whole:
            whole = model.drawn
            del model
            torch.manual_seed(recipe.seed)
            return loaded_model(source, config, device, recipe, whole)
    elif recipe.lora is not None:
        refuse_drawn(model, found["missing_keys"])
    if recipe.quantization:
        keep_layout(model)
    return model


def drawn_layers(missing: set[str], recipe: Recipe) -> list[str]:
    """The layers of the missing weights, except the head's; TrainingError where a weight is in no layer."""
    beside = [key for key in missing if not any(part.endswith(recipe.heads) for part in key.split("."))]
    if alone := [key for key in beside if "." not in key]:
        raise TrainingError(f"model.source: the checkpoint lacks {alone[0]}, which no adapter saves; use method full")
    return sorted({key.rpartition(".")[0] for key in beside})


def refuse_drawn(model: Any, missing: set[str]) -> None:
    """TrainingError where the checkpoint lacks weights: an adapter neither trains nor saves randomly drawn ones.

    Weights that are tied to others are not missing.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    there = {weight.data_ptr() for name, weight in every.items() if name not in missing}
    if drawn := sorted(name for name in every.keys() & missing if every[name].data_ptr() not in there):
        raise TrainingError(
            f"model.source: the checkpoint lacks {drawn[0]}, which would be drawn at random, and an adapter neither "
            "trains nor saves it; use a checkpoint that has it, or method full"
        )


def keep_layout(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights when a model is first evaluated on a CPU with AVX512-BF16.

    It would not undo that when training goes on, and the repacking fails on rows shorter than a quantisation block.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(config: Any, recipe: Recipe, whole: Sequence[str]) -> Any:
    """The quantization config of the frozen base model. Heads and the layers `whole` are trained, so they are left out.

    It computes in autocast's dtype, or in the checkpoint's own if that is what the recipe asks for.
    """
    own = config.dtype if recipe.weights == "auto" and config.dtype is not None else torch.float32
    compute = getattr(torch, recipe.autocast) if recipe.autocast else own
    return apply(recipe.quantization, [*recipe.heads, *whole] or None, compute)  # type: ignore[arg-type]


def dtype_of(recipe: Recipe) -> Any:
    """The dtype in which weights are loaded; "auto" is the checkpoint's own."""
    return "auto" if recipe.weights == "auto" else getattr(torch, recipe.weights)


def random_model(config: Any, device: torch.device, recipe: Recipe) -> Any:
    """A model with randomly initialised weights: good for timing, and to train from scratch.

    The weights are drawn in fp32 and then cast, so that every precision starts from the same weights.
    """
    model = task_of(recipe).model_class().from_config(config, dtype=torch.float32, attn_implementation=recipe.attention)
    if recipe.quantization:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return loaded_model(folder, config, device, recipe)
    if recipe.weights not in ("auto", "float32"):
        for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
            parameter.data = parameter.data.to(getattr(torch, recipe.weights))
    model.to(device)
    return model


def change_base(model: Any, recipe: Recipe) -> None:
    """Apply the levers that change the model before it gets an adapter."""
    for choice in recipe.on_base:
        apply(choice, model)


def with_adapter(model: Any, recipe: Recipe) -> Any:
    """The frozen model with its LoRA adapter; ValueError when the model has none of the target modules.

    Layers drawn at random are trained in full and saved with the adapter, as the head is: frozen, they would be of no
    use, and whoever loads the adapter would draw others.
    """
    model.requires_grad_(False)
    adapter = LoraConfig(**recipe.lora)  # type: ignore[arg-type]
    if recipe.heads:
        drawn = getattr(model, "drawn", [])
        adapter.modules_to_save = [*drawn] or None  # peft adds the head to the list
        adapter.exclude_modules = not_adapted(model, drawn, adapter.target_modules == "all-linear", recipe)
    torch.manual_seed(recipe.seed)  # peft draws the adapter from the global generator
    model = get_peft_model(model, adapter, autocast_adapter_dtype=recipe.autocast_adapter)
    if recipe.autocast and recipe.autocast_adapter:
        for parameter in model.parameters():  # peft leaves a classifier's head in the base model's 16-bit dtype
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def change_model(model: Any, recipe: Recipe) -> None:
    """Apply the levers that change the whole model, its adapter included."""
    for choice in recipe.on_model:
        apply(choice, model)
    if recipe.packed:
        offset_positions(model)


def not_adapted(model: Any, drawn: Sequence[str], all_linear: bool, recipe: Recipe) -> list[str] | None:
    """The linear layers that get no adapter because they are trained in full; None where there are none.

    They are those in the layers `drawn` and, if all others get one, the head and its parts, as DistilBERT's
    `pre_classifier`: peft trains in full every module whose name ends in a head's, and excludes only SEQ_CLS heads.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = {name for name in linear if any(f"{name}.".startswith(f"{layer}.") for layer in drawn)}
    if all_linear:
        last = {name.rpartition(".")[2] for name in linear}
        found |= {name for name in last if name.endswith(recipe.heads)}
    return sorted(found) or None


def compile_model(model: Any, recipe: Recipe) -> None:
    """Compile the model, or parts of it, if the recipe says so."""
    for choice in recipe.compiled:
        apply(choice, model)
