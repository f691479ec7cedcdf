"""Choices that need a GPU or a package that is not here: what they call, with stand-ins for what is missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from service.levers import LEVERS
from tests.child import tiny
from training.errors import TrainingError
from training.levers import (
    allocator,
    attention,
    float8,
    head,
    kernels,
    normalisation,
    optimizer,
    quantization,
)
from training.levers import compile as compiling
from worker.child.lacking import lacking_kernels


class Recorder:
    """Remembers how it was called."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.answer = answer

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls.append((args, more))
        return self.answer(*args, **more) if callable(self.answer) else self.answer


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of that name, and its parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def groups() -> list[dict[str, Any]]:
    matrix, vector = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
    return [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("module", "name", "make", "expected"),
    [
        ("apex.optimizers", "FusedAdam", optimizer.apex_adamw, {"lr": 1e-3, "adam_w_mode": True}),
        (
            "torchdistx.optimizers",
            "AnyPrecisionAdamW",
            optimizer.anyprecision,
            {
                "lr": 1e-3,
                "use_kahan_summation": True,
                "momentum_dtype": torch.bfloat16,
                "variance_dtype": torch.bfloat16,
            },
        ),
        ("galore_torch", "GaLoreAdamW", optimizer.galore_adamw, {"lr": 1e-3, "eps": 1e-8}),
    ],
)
def test_optimizers_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, make: Any, expected: dict[str, Any]
) -> None:
    made = torch.optim.SGD(groups())
    kind = Recorder(made)
    install(monkeypatch, "galore_torch.galore_projector", GaLoreProjector=Recorder)
    install(monkeypatch, module, **{name: kind})
    given = groups()
    assert make(given, 1e-3) is made
    ((passed,), more) = kind.calls[0]
    assert passed is given and more == expected
    assert ("rank" in passed[0]) is (name == "GaLoreAdamW") and "rank" not in passed[1], "vectors are not projected"
    is_read = Recorder in torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    assert is_read is (name == "GaLoreAdamW"), "a checkpoint that holds its projections can be read"


def test_torchaos_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = Recorder("made")
    install(monkeypatch, "torchao.optim", _AdamW=adamw)
    assert optimizer.torchao_optimizer(groups(), 1e-3, name="_AdamW", bf16_stochastic_round=True) == "made"
    more = adamw.calls[0][1]
    assert more["bf16_stochastic_round"] is True and float(more["lr"]) == pytest.approx(1e-3)


def test_liger_patches_only_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(
        rope: bool = True, rms_norm: bool = True, swiglu: bool = True, fused_linear_cross_entropy: bool = True
    ) -> None:
        raise AssertionError("the instance is patched, not the class")

    patch = Recorder()
    members = {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": apply}, "_apply_liger_kernel_to_instance": patch}
    install(monkeypatch, "liger_kernel.transformers.monkey_patch", **members)
    model = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    kernels.liger_kernels(model, ["rms_norm"])
    expected = {"rope": False, "rms_norm": True, "swiglu": False, "fused_linear_cross_entropy": False}
    assert patch.calls[0][1] == {"model": model} | expected
    with pytest.raises(ValueError, match="Liger has no geglu for llama models"):
        kernels.liger_kernels(model, ["geglu"])
    with pytest.raises(ValueError, match="Liger has no kernels for bert models"):
        kernels.liger_kernels(SimpleNamespace(config=SimpleNamespace(model_type="bert")), ["rope"])


def test_a_model_says_which_of_ligers_kernels_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no trial of a classifier, or of a model with another activation, is spent on them."""
    assert lacking_kernels("bert") == {}, "Liger is not installed, so that no trial has its kernels"

    def some(rope: bool = True, rms_norm: bool = True, geglu: bool = True) -> None: ...

    def all_of_them(rope: bool = True, rms_norm: bool = True, swiglu: bool = True) -> None: ...

    def ungated(rope: bool = True, rms_norm: bool = True) -> None: ...

    members = {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": all_of_them, "gemma": some, "phi": ungated}}
    install(monkeypatch, "liger_kernel.transformers.monkey_patch", **members)
    assert lacking_kernels("llama") == {}
    no_swiglu = "Liger has no swiglu for gemma models"
    assert lacking_kernels("gemma") == {"kernels=liger-swiglu": no_swiglu}, "all at once takes its GeGLU"
    assert lacking_kernels("phi")["kernels=liger"] == "Liger has no swiglu, geglu for phi models"
    assert set(lacking_kernels("bert")) == {f"kernels=liger{one}" for one in ("", "-rope", "-rms-norm", "-swiglu")}


def test_the_hub_s_kernels_are_there_or_the_choice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps a layer's own code without a word where it can load no kernel."""
    install(monkeypatch, "kernels", Mode=SimpleNamespace(TRAINING="training"))
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    model.config = SimpleNamespace(model_type="llama")
    model[0].forward = model[0].forward  # as others may have given it before

    def found(use: bool, mode: str) -> None:
        assert use and mode == "training"
        model[1].forward = lambda rows: rows

    model.set_use_kernels = lambda *_, **__: None
    with pytest.raises(ValueError, match="no kernel for any layer of a llama model"):
        kernels.hub_kernels(model)
    model.set_use_kernels = found
    kernels.hub_kernels(model)


@pytest.mark.parametrize("which", ["cut", "liger"])
def test_fused_cross_entropies_get_labelled_positions_only(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    model = tiny.draw("llama").to(torch.bfloat16)
    ids = torch.arange(12).reshape(2, 6)
    labels = ids.clone()
    labels[0, :3] = -100
    expected = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(8)).loss

    def cut(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        """As the release on PyPI has it, without a bias."""
        assert reduction == "sum" and bool((target >= 0).all())
        return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target, reduction="sum")

    kernel = Recorder(cut)
    install(monkeypatch, "cut_cross_entropy", linear_cross_entropy=kernel)
    fused = Recorder(lambda weight, hidden, target, bias: cut(hidden, weight, target, "sum"))
    install(monkeypatch, "liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=lambda **_: fused)
    (head.cut_cross_entropy if which == "cut" else head.liger_cross_entropy)(model)
    loss = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(8)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert len((kernel if which == "cut" else fused).calls) == 1
    model.eval()
    assert model(input_ids=ids).logits.shape == (2, 6, tiny.VOCAB), "an evaluation has logits"


@pytest.mark.parametrize(
    ("dtype", "bias", "said"), [(torch.float32, False, "in 16 bits only"), (torch.bfloat16, True, "takes no bias")]
)
def test_what_cut_cross_entropy_cannot_is_said(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, said: str
) -> None:
    model = tiny.draw("llama").to(dtype)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(tiny.VOCAB, dtype=dtype))
    install(monkeypatch, "cut_cross_entropy", linear_cross_entropy=Recorder())
    head.cut_cross_entropy(model)
    ids = torch.arange(12).reshape(2, 6)
    with pytest.raises(TrainingError, match=said):
        model(input_ids=ids, labels=ids)


def test_float8_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Recorder()
    config = SimpleNamespace(from_recipe_name=lambda recipe: f"config of {recipe}")
    install(monkeypatch, "torchao.float8", convert_to_float8_training=convert, Float8LinearConfig=config)
    model = tiny.draw("llama")
    float8.float8_linear(model, "rowwise")
    (passed,), more = convert.calls[0]
    assert passed is model and more["config"] == "config of rowwise"
    takes, layer = more["module_filter_fn"], model.model.layers[0]
    assert takes(layer.mlp.up_proj, "") and not takes(layer.input_layernorm, "") and not takes(model.lm_head, "")
    layer.mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(60, 32))
    assert not takes(layer.mlp.up_proj, ""), "60 is no multiple of 16"
    classifier = tiny.draw("bert")
    float8.float8_linear(classifier, "rowwise")
    takes = convert.calls[1][1]["module_filter_fn"]
    assert takes(classifier.bert.encoder.layer[0].output.dense, "")
    assert not takes(classifier.bert.pooler.dense, ""), (
        "it has a row a sample, of which a micro batch may have any number"
    )


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = tiny.draw("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        head.chunked_cross_entropy(model)


def test_apex_norms_take_over_weights_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex.normalization", FusedLayerNorm=torch.nn.LayerNorm)
    model = tiny.draw("bert").eval()
    ids = torch.arange(12).reshape(2, 6)
    before = model(input_ids=ids).logits
    normalisation.apex_norms(model)
    assert torch.allclose(model(input_ids=ids).logits, before)
    assert all("forward" in vars(module) for module in normalisation.norms_of(model))


@pytest.mark.parametrize("old", [False, True])
def test_the_varlen_kernel_of_both_signatures(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    calls: list[dict[str, Any]] = []

    def new_kernel(  # 2.13
        query: Any,
        key: Any,
        value: Any,
        cu_seq_q: Any,
        cu_seq_k: Any,
        max_q: int,
        max_k: int,
        *,
        scale: Any = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Any:
        calls.append(
            {"window": window_size, "scale": scale, "gqa": enable_gqa, "heads": key.shape[1], "dtype": query.dtype}
        )
        return query

    def old_kernel(  # 2.10
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False
    ) -> Any:
        calls.append({"causal": is_causal, "heads": key.shape[1], "dtype": query.dtype})
        return query

    install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=old_kernel if old else new_kernel)
    q, k = torch.ones(8, 4, 16), torch.ones(8, 2, 16)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    out = attention._kernel(q, k, k, ends, 5, 0.25, (-1, 0))
    assert out.dtype is torch.float32 and out.shape == q.shape
    (call,) = calls
    assert call["dtype"] is torch.bfloat16
    if old:
        assert call["causal"] is True and call["heads"] == 4, "key heads are repeated where the kernel cannot"
        with pytest.raises(ValueError, match="no sliding window"):
            attention._kernel(q, k, k, ends, 5, None, (15, 0))
    else:
        assert call == {"window": (-1, 0), "scale": 0.25, "gqa": True, "heads": 2, "dtype": torch.bfloat16}


def test_varlen_says_what_it_lacks() -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="needs cu_seq_lens_q"):
        attention.varlen_attention(SimpleNamespace(), q, q, q)
    with pytest.raises(ValueError, match="no dropout"):
        attention.varlen_attention(
            SimpleNamespace(), q, q, q, dropout=0.1, cu_seq_lens_q=torch.tensor([0, 4]), max_length_q=4
        )


def test_process_wide_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: seen.update({name: on}))
    attention.sdpa_backends(cudnn=True)
    assert seen == {"flash": False, "mem_efficient": False, "cudnn": True, "math": True}
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)  # to have it back afterwards
    keys = torch.ones(1, 2, 4, 8)
    assert sdpa_attention.use_gqa_in_sdpa(None, keys, keys)
    attention.sdpa_backends(mem_efficient=True)
    assert not sdpa_attention.use_gqa_in_sdpa(None, keys, keys), "its kernel takes equally many heads only"
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", lambda text: seen.update(settings=text))
    allocator.expandable_segments()
    assert seen["settings"] == "expandable_segments:True"


def test_compile_passes_mode_and_backend_on() -> None:
    model = tiny.draw("llama")
    calls = []
    for layer in compiling.layers_of(model):
        layer.compile = lambda **more: calls.append(more)
    compiling.compile_layers(model, mode="max-autotune-no-cudagraphs")
    assert calls == [{"dynamic": True, "mode": "max-autotune-no-cudagraphs"}] * 2
    model.compile = lambda **more: calls.append(more)
    compiling.compile_whole(model)
    compiling.compile_in_graphs(model, backend="cudagraphs")
    assert calls[-2:] == [{"dynamic": True}, {"dynamic": False, "backend": "cudagraphs"}]


def test_torchao_quantises_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    made = Recorder("made")
    monkeypatch.setattr(transformers, "TorchAoConfig", made)
    for choice in ("torchao-int8", "torchao-float8"):
        format_of = Recorder(choice)
        name = LEVERS["quantization"].choice(choice).options["name"]
        install(monkeypatch, "torchao.quantization", **{name: format_of})
        assert quantization.quantised_by_torchao(["score"], torch.bfloat16, name) == "made"
        assert format_of.calls == [((), {"set_inductor_config": False})]
        assert made.calls[-1] == ((choice,), {"modules_to_not_convert": ["score"]})
