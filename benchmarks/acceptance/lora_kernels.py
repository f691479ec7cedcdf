"""Part `lora-kernels`: what LoRA costs over the frozen base, by peft and by one fused autograd function.

The MLP and the query, key and value projections of a Llama layer, bf16 base, fp32 adapters of rank 16, forward and
backward under autocast. `profile` is what peft adds to the base alone: where that is little, no kernel can pay.
"""

from __future__ import annotations

from typing import Any

from benchmarks.acceptance.models import SHAPES
from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row

RANK, ALPHA = 16, 32
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def layer(shape: dict[str, Any], device: Any) -> Any:
    """A Llama's layer with adapters everywhere, none of them zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(**shape | {"num_hidden_layers": 1, "vocab_size": 64})
    model = LlamaModel(config).to(device, torch.bfloat16)
    wanted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    adapted = get_peft_model(model, wanted).base_model.model.layers[0]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted


def forwards(made: Any) -> dict[str, dict[str, Any]]:
    """Group -> way -> forward."""
    from training.levers.projections import together

    mlp, attention = made.mlp, made.self_attn
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]

    def base_mlp(x: Any) -> Any:
        gate, up = mlp.gate_proj.base_layer(x), mlp.up_proj.base_layer(x)
        return mlp.down_proj.base_layer(mlp.act_fn(gate) * up)

    def fused_mlp(x: Any) -> Any:
        gate, up = together(x, [mlp.gate_proj, mlp.up_proj])
        return together(mlp.act_fn(gate) * up, [mlp.down_proj])[0]

    return {
        "mlp": {"base": base_mlp, "peft": mlp, "fused": fused_mlp},
        "qkv": {
            "base": lambda x: sum(one.base_layer(x).sum() for one in qkv),
            "peft": lambda x: sum(one(x).sum() for one in qkv),
            "fused": lambda x: sum(one.sum() for one in together(x, qkv)),
        },
    }


def child(name: str, tokens: int, dry: bool) -> Row:
    """Milliseconds by group and way, and how far the fused gradients are from peft's."""
    import torch

    from benchmarks.acceptance.clock import median_seconds, pick_device

    clock = pick_device()
    device = clock.torch
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPES[name].items() if key not in ("architectures", "model_type")}
    made = layer(shape | (SMALL if dry else {}), device)
    x = torch.randn(1, tokens, made.mlp.gate_proj.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    found: Row = {}
    for group, ways in forwards(made).items():
        gradients = {}
        for way, forward in ways.items():

            def both(forward: Any = forward) -> None:
                with torch.autocast(device.type, torch.bfloat16):
                    out = forward(x)
                out.float().square().mean().backward()

            found[f"{group}/{way}"] = median_seconds(both, clock) * 1e3
            made.zero_grad()
            x.grad = None
            both()
            learnt = [x, *made.parameters()]
            gradients[way] = [one.grad.clone() for one in learnt if one.grad is not None]
        pairs = zip(gradients["peft"], gradients["fused"], strict=True)
        found[f"{group}/away"] = max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)
    return found


def steps(place: Place) -> list[Step]:
    """One a model's shape."""

    def step(name: str) -> Step:
        arguments = (name, place.pick(8192, 64), place.dry)
        return Step(f"lora-kernels/{name}", 40, lambda here: here.child("lora_kernels", *arguments))

    return [step(name) for name in place.pick(("llama-1b", "llama-8b"), ("llama-1b",))]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """Milliseconds, what LoRA adds by each way, and the ratio that decides."""
    lines = []
    for key, row in rows.items():
        for group in ("mlp", "qkv") if "reason" not in row else ():
            base, peft, fused = (row[f"{group}/{way}"] for way in ("base", "peft", "fused"))
            costs = f"base {base:.2f} ms, peft {peft:.2f} (+{peft / base - 1:.0%}), fused {fused:.2f}"
            away = f"gradients {row[f'{group}/away']:.1e} away"
            lines.append(f"{key.rpartition('/')[2]} {group}: {costs}: {peft / fused:.2f}x of peft; {away}")
    return lines


PART = Part("lora-kernels", steps, show)
