"""torch.compile: what of the model, by which backend, in which mode."""

from service.levers.base import Choice, Lever, cuda

TRAINER = "Trainer's torch_compile compiles the whole model; train.py compiles each layer"

LEVER = Lever(
    name="compile",
    summary="Fuse and generate kernels with torch.compile (inductor); the time it takes is counted in the run.",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    stage="compiled",
    choices=(
        Choice("off", "eager mode"),
        Choice(
            "per-layer",
            "each transformer layer compiled in place, dynamic shapes: keeps sdpa's is_causal path",
            changes_numerics=True,
            function="compile_layers",
            not_expressible=TRAINER,
        ),
        Choice(
            "per-layer-max-autotune",
            "each layer, with kernels chosen by timing them: a long compile",
            needs=(cuda(),),
            changes_numerics=True,
            function="compile_layers",
            options={"mode": "max-autotune-no-cudagraphs"},
            not_expressible=TRAINER,
        ),
        Choice(
            "whole",
            "the whole model, dynamic shapes; sdpa then gets a dense mask",
            changes_numerics=True,
            function="compile_model",
            training_arguments={"torch_compile": True},
        ),
        Choice(
            "whole-reduce-overhead",
            "the whole model in CUDA graphs, one a shape: wants rows padded to few lengths",
            needs=(cuda(),),
            changes_numerics=True,
            function="compile_model",
            options={"dynamic": False, "mode": "reduce-overhead"},
            training_arguments={"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
        ),
        Choice(
            "whole-max-autotune",
            "the whole model, kernels chosen by timing them",
            needs=(cuda(),),
            changes_numerics=True,
            searched=False,
            function="compile_model",
            options={"mode": "max-autotune-no-cudagraphs"},
            training_arguments={"torch_compile": True, "torch_compile_mode": "max-autotune-no-cudagraphs"},
        ),
        Choice(
            "whole-cudagraphs",
            "the whole model in CUDA graphs of eager kernels: no code is generated",
            needs=(cuda(),),
            searched=False,
            function="compile_model",
            options={"dynamic": False, "backend": "cudagraphs"},
            training_arguments={"torch_compile": True, "torch_compile_backend": "cudagraphs"},
        ),
        Choice(
            "per-layer-aot-eager",
            "each layer traced, nothing generated: shows what tracing alone does",
            searched=False,
            function="compile_layers",
            options={"backend": "aot_eager"},
            not_expressible=TRAINER,
        ),
    ),
)
