"""Combinations that are never tried, each with its reason and where that is known from."""

from __future__ import annotations

from service.levers.base import Exclusion
from service.levers.batching import PACKED
from service.levers.optimizer import WHOLE_STEP

AUTOCAST = ("bf16-mixed", "bf16-mixed-uncached", "fp16-mixed")
WHOLE = ("whole", "whole-reduce-overhead", "whole-max-autotune", "whole-cudagraphs")
GRAPHS = ("whole-reduce-overhead", "whole-cudagraphs")
SDPA = ("sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math")
FLASH = ("flash-attention-2", "flash-attention-3")
MASKED = ("eager", *SDPA, "flex")
CHECKPOINTED = ("full", "every-2", "every-4", "selective", "offloaded")
FLOAT8 = ("tensorwise", "rowwise", "rowwise-high-precision-gradients")
FULL_PRECISION = ("fp32", "tf32", "fp32-medium", "fp64")

EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        {"evaluation": ("generation",), "task": ("sequence-classification", "masked-lm")},
        "only causal models generate",
        "https://huggingface.co/docs/transformers/main_classes/text_generation",
    ),
    Exclusion(
        {"evaluation": ("generation",), "loss_on": ("all",)},
        "where every token is learnt, prompt and completion cannot be told apart",
        "https://huggingface.co/docs/trl/sft_trainer",
    ),
    Exclusion(
        {"evaluation": ("generation",), "attention": ("varlen",)},
        "a generated token has no ends of samples to tell the kernel",
        "https://docs.pytorch.org/docs/stable/nn.attention.varlen.html",
    ),
    Exclusion(
        {"optimizer": WHOLE_STEP, "clipping": ("on",)},
        "no two gradients exist at once, so that their norm cannot be clipped: set training.max_grad_norm: 0",
        "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
    ),
    Exclusion(
        {"optimizer": WHOLE_STEP, "precision": ("fp16-mixed",)},
        "a gradient scaler looks at all gradients before the update",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Exclusion(
        {"optimizer": WHOLE_STEP, "batching": ("token-budget", *PACKED)},
        "a step is one micro batch there, and these may cut it into several",
        "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
    ),
    Exclusion(
        {"batching": PACKED, "task": ("sequence-classification",)},
        "a classifier pools one label a row, so rows cannot hold several samples",
        "https://huggingface.co/docs/transformers/model_doc/bert",
    ),
    Exclusion(
        {"batching": ("padding-free",), "attention": MASKED},
        "under a mask one row of all tokens costs the square of its length: 8 x 512 tokens took 14 times as long",
        "https://huggingface.co/docs/transformers/attention_interface",
    ),
    Exclusion(
        {"attention": ("varlen",), "compile": WHOLE},
        "the kernel's lengths are read on the host, which breaks a graph of the whole model",
        "https://docs.pytorch.org/docs/stable/nn.attention.varlen.html",
    ),
    Exclusion(
        {"batching": PACKED, "task": ("masked-lm",), "attention": MASKED},
        "encoders see both ways: only a kernel that is told where samples end keeps them apart",
        "https://huggingface.co/docs/transformers/attention_interface",
    ),
    Exclusion(
        {"batching": PACKED, "attention": SDPA, "compile": WHOLE},
        "compiled as a whole, sdpa gets the dense mask of the packed rows, and no fast kernel takes it",
        "https://github.com/huggingface/transformers/issues/48925",
    ),
    Exclusion(
        {
            "compile": WHOLE,
            "checkpointing": CHECKPOINTED,
            "method": ("lora", "qlora"),
        },
        "adapters, checkpointing and whole-model compile break the graph in most frames; per layer does not",
        "https://github.com/huggingface/peft/issues/1886",
    ),
    Exclusion(
        {"compile": GRAPHS, "padding": ("longest", "multiple-8")},
        "CUDA graphs are made for one shape each, and lengths vary: pad to multiple-64 or max",
        "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    Exclusion(
        {"attention": FLASH, "precision": FULL_PRECISION},
        "flash kernels compute in 16 bits only",
        "https://github.com/Dao-AILab/flash-attention",
    ),
    Exclusion(
        {"attention": ("sdpa-cudnn",), "precision": FULL_PRECISION},
        "cuDNN's attention computes in 16 bits only",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
    ),
    Exclusion(
        {"optimizer": ("adamw-stochastic-rounding",), "precision": ("checkpoint", *FULL_PRECISION, *AUTOCAST, "fp16")},
        "stochastic rounding is for bf16 weights; fp32 ones lose nothing",
        "https://github.com/pytorch/ao/tree/main/torchao/optim",
    ),
    Exclusion(
        {"normalisation": ("low-precision",), "precision": ("checkpoint", *FULL_PRECISION, "bf16", "fp16")},
        "norms run in the weights' format there already",
        "https://docs.mosaicml.com/projects/composer/en/latest/method_cards/low_precision_layernorm.html",
    ),
    Exclusion(
        {"precision": ("bf16", "fp16", "fp64"), "method": ("qlora",)},
        "the base is quantised; its compute precision is bf16-mixed's or fp16-mixed's",
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    ),
    Exclusion(
        {"vocabulary": ("multiple-8", "multiple-64"), "head": ("chunked", "cut-cross-entropy", "liger")},
        "these compute logits themselves, past the padded output layer",
        "https://github.com/apple/ml-cross-entropy",
    ),
    Exclusion(
        {"head": ("chunked", "cut-cross-entropy", "liger"), "compile": WHOLE},
        "labelled positions are chosen by value, which breaks the graph; with Liger the loss was silently wrong",
        "https://github.com/linkedin/Liger-Kernel/pull/1338",
    ),
    Exclusion(
        {"float8": FLOAT8, "compile": ("off", "per-layer-aot-eager", "whole-cudagraphs")},
        "scaling and casting to fp8 only pay when they are compiled into the kernels around",
        "https://github.com/pytorch/ao/tree/main/torchao/float8",
    ),
    Exclusion(
        {"float8": FLOAT8, "precision": ("checkpoint", *FULL_PRECISION, "fp16-mixed", "fp16")},
        "its matmuls take and give bf16",
        "https://github.com/pytorch/ao/tree/main/torchao/float8",
    ),
    Exclusion(
        {"activations": ("half", "fifth"), "compile": ("off", "per-layer-aot-eager", "whole-cudagraphs")},
        "the budget is the compiler's, and nothing is generated there",
        "https://pytorch.org/blog/activation-checkpointing-techniques/",
    ),
    Exclusion(
        {"adapter": ("base-dtype",), "precision": ("fp16-mixed",)},
        "a gradient scaler cannot unscale the gradients of 16-bit weights",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Exclusion(
        {"adapter": ("base-dtype",), "method": ("qlora",)},
        "a quantised base has no format that adapters could share",
        "https://huggingface.co/docs/peft/developer_guides/lora",
    ),
    Exclusion(
        {"padding": ("multiple-8", "multiple-64", "max"), "batching": ("token-budget",)},
        "the budget counts tokens before rows are padded further, so that the batch would outgrow it",
        "https://huggingface.co/docs/transformers/main_classes/data_collator",
    ),
    Exclusion(
        {"compile": GRAPHS, "batching": ("token-budget", *PACKED)},
        "CUDA graphs are made for one shape each, and the number of rows varies",
        "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
    ),
    Exclusion(
        {"adapter": ("dora",), "compile": ("per-layer", "per-layer-max-autotune", *WHOLE)},
        "DoRA breaks the graph in every layer",
        "https://huggingface.co/docs/peft/developer_guides/lora",
    ),
    Exclusion(
        {"adapter": ("dora",), "quantization": ("int8", "torchao-int8", "torchao-float8"), "method": ("qlora",)},
        "peft has DoRA for 4-bit bases",
        "https://huggingface.co/docs/peft/developer_guides/lora",
    ),
    Exclusion(
        {"optimizer": ("galore",), "method": ("lora", "qlora")},
        "adapters have low rank already; projecting their gradients again gains nothing",
        "https://github.com/jiaweizzhao/GaLore",
    ),
    Exclusion(
        {"kernels": ("liger", "liger-rope", "liger-rms-norm"), "normalisation": ("low-precision", "apex-fused")},
        "both replace the norms",
        "https://github.com/linkedin/Liger-Kernel",
    ),
)
