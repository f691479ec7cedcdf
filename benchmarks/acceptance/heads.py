"""Part `heads`: what the choices of the lever `head` take, beside the products that their loss cannot do without.

Hidden states of 16,384 tokens in bf16 under autocast, a Llama's output layer, forward and backward. `frozen` is the
layer as adapters leave it, in bf16 and without a gradient; `trained` that of full finetuning, in fp32 and with one.
`products` are the layer's matrix products alone, for logits' gradients drawn at random: logits, the hidden states'
gradient, and that of the weights where they are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.acceptance.models import SHAPES
from benchmarks.acceptance.place import Part, Place, Step
from benchmarks.store import Row
from service.levers.head import LEVER

LAYERS = ("frozen", "trained")
PRODUCTS = "products"


def child(name: str, tokens: int, vocabulary: int, hidden_size: int) -> Row:
    """Milliseconds, or a reason, by layer and choice; and how far the hidden states' gradient is from the logits'."""
    import torch

    from benchmarks.acceptance.clock import median_seconds, pick_device
    from training.samples import IGNORED

    clock = pick_device()
    device = clock.torch
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens), device=device)
    labels[0, 0] = IGNORED  # no row's first token is learnt
    found: Row = {"model": name}
    for layer in LAYERS:
        expected: Any = None
        for choice in (PRODUCTS, *LEVER.names):
            try:
                model = base(vocabulary, hidden_size, layer == "trained", device)
                forward = loss(choice, model, hidden, labels)
                wanted = [hidden, *(one for one in model.parameters() if one.requires_grad)]
                with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                    incoming = torch.randn_like(forward()) if choice == PRODUCTS else None

                def both(forward: Any = forward, wanted: list[Any] = wanted, incoming: Any = incoming) -> Any:
                    with torch.autocast(device.type, torch.bfloat16):
                        out = forward()
                    return torch.autograd.grad(out, wanted, incoming)[0]

                found[f"{layer}/{choice}"] = median_seconds(both, clock) * 1e3
                gradient = both().float()
                expected = gradient if choice == LEVER.baseline else expected
                if choice != PRODUCTS and expected is not None:
                    found[f"{layer}/{choice}/away"] = float((gradient - expected).norm() / gradient.norm())
            except Exception as error:  # noqa: BLE001 - a choice that cannot must not cost the others
                found.setdefault(f"{layer}/{choice}", repr(error)[:160])
    return found


def base(vocabulary: int, hidden_size: int, is_trained: bool, device: Any) -> Any:
    """What a head's functions need of a causal language model: an output layer, a configuration and a loss."""
    import torch
    from transformers import LlamaConfig
    from transformers.loss.loss_utils import ForCausalLMLoss

    class Base(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.config = LlamaConfig(hidden_size=hidden_size, vocab_size=vocabulary)
            self.loss_function = ForCausalLMLoss
            self.lm_head = torch.nn.Linear(hidden_size, vocabulary, bias=False, device=device)
            torch.manual_seed(1)  # the same weights for each choice
            torch.nn.init.normal_(self.lm_head.weight, std=0.02)
            if not is_trained:
                self.requires_grad_(False).to(torch.bfloat16)

        def get_output_embeddings(self) -> Any:
            return self.lm_head

    return Base()


def loss(choice: str, model: Any, hidden: Any, labels: Any) -> Callable[[], Any]:
    """The loss of a choice, told like a trial's which positions are learnt; for PRODUCTS the logits."""
    from training.batches import target_positions
    from training.recipe import Choice, apply

    if choice == PRODUCTS:
        return lambda: model.lm_head(hidden)
    if (function := LEVER.choice(choice).function) is not None:
        apply(Choice(LEVER.name, function, LEVER.choice(choice).options), model)
    told = {"num_items_in_batch": labels.numel() - 1, "target_positions": target_positions(labels)}
    return lambda: model.loss_function(model.lm_head(hidden), labels, model.config.vocab_size, **told)


def steps(place: Place) -> list[Step]:
    """One a model's shape."""

    def step(name: str) -> Step:
        shape = SHAPES[name]
        sizes = place.pick((16_384, shape["vocab_size"], shape["hidden_size"]), (64, 512, 64))
        return Step(f"heads/{name}", 30, lambda here: here.child("heads", name, *sizes))

    return [step(name) for name in place.pick(("llama-1b", "llama-8b"), ("llama-1b",))]


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """Milliseconds by model and layer; a choice that cannot is a dash, its reason is in the JSON."""
    columns = (PRODUCTS, *LEVER.names)
    lines = [f"{'model':10} {'layer':8}" + "".join(f"{name:>19}" for name in columns) + "   (ms, forward+backward)"]
    for row in rows.values():
        for layer in LAYERS if "reason" not in row else ():
            times = [row[f"{layer}/{name}"] for name in columns]
            figures = "".join(f"{'-' if isinstance(one, str) else f'{one:.2f}':>19}" for one in times)
            lines.append(f"{row['model']:10} {layer:8}{figures}")
    return lines


PART = Part("heads", steps, show)
