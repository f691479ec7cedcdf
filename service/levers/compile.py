"""torch.compile: which part of the model is compiled, by which backend and in which mode."""

from service.levers.base import Asked, Choice, Effect, Exclusion, Lever, Memory, Need, Together, cuda
from service.levers.checkpointing import CHECKPOINTED
from service.levers.float8 import FLOAT8
from service.levers.head import WITHOUT_LOGITS
from service.levers.optimizer import WHOLE_STEP

BY_LAYER = "The baseline's torch_compile compiles the whole model; it was measured compiled layer by layer."
TRAINER = "Trainer's torch_compile compiles the whole model; train.py compiles each layer"
# Choices, for exclusions: those that compile the whole model, record CUDA graphs, generate code, and generate none.
WHOLE = ("whole", "whole-reduce-overhead", "whole-max-autotune", "whole-cudagraphs")
GRAPHS = ("whole-reduce-overhead", "whole-cudagraphs")
GENERATED = ("per-layer", "per-layer-max-autotune", "whole", "whole-reduce-overhead", "whole-max-autotune")
WITHOUT_CODE = ("off", "per-layer-aot-eager", "whole-cudagraphs")

# Compiled code computes again in the backward pass what costs little, instead of keeping it: AOTAutograd's min-cut
# partitioner (https://pytorch.org/functorch/stable/notebooks/aot_autograd_optimizations.html). How much that saves
# differs from model to model: a little is expected, and the memory lines of trials correct it. Nothing is expected of
# CUDA graphs, which keep memory of their own from one replay to the next.
PARTITIONED = Memory(activations=0.85)
GENERATES = Need(
    lambda facts: facts.capability is None or facts.capability >= (7, 0),
    "needs a GPU of compute capability 7.0 or newer, for which Triton generates code",
)

LEVER = Lever(
    name="compile",
    summary="Fuse and generate kernels with torch.compile (inductor); the time it takes is counted in the run.",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    order=110,
    stage="compiled",
    simulated=(),
    families=(("per-layer", "per-layer-max-autotune"), ("whole", "whole-reduce-overhead")),
    choices=(
        Choice("off", "eager mode"),
        Choice(
            "per-layer",
            "each transformer layer compiled in place, dynamic shapes: keeps sdpa's is_causal path",
            # With checkpointing the whole model's graph breaks under adapters.
            asked_by=(
                Asked({"torch_compile": True, "gradient_checkpointing": True}, BY_LAYER),
                Asked({"torch_compile": True, "activation_checkpointing": True}, BY_LAYER),
            ),
            needs=(GENERATES,),
            changes_numerics=True,
            function="compile_layers",
            not_expressible=TRAINER,
            effect=Effect(0.87, 0.15, host=1.2, once=25.0),
            memory=PARTITIONED,
        ),
        Choice(
            "per-layer-max-autotune",
            "each layer, with kernels chosen by timing them: a long compile",
            needs=(cuda(),),
            changes_numerics=True,
            function="compile_layers",
            options={"mode": "max-autotune-no-cudagraphs"},
            not_expressible=TRAINER,
            effect=Effect(0.88, 0.15, once=90.0),
            memory=PARTITIONED,
        ),
        Choice(
            "whole",
            "the whole model, dynamic shapes; sdpa then gets a dense mask",
            needs=(GENERATES,),
            changes_numerics=True,
            function="compile_whole",
            asked_by=(Asked({"torch_compile": True}),),
            training_arguments={"torch_compile": True},
            effect=Effect(0.87, 0.15, host=1.25, once=60.0),
            memory=PARTITIONED,
        ),
        Choice(
            "whole-reduce-overhead",
            "the whole model in CUDA graphs, one a shape: wants rows padded to few lengths; packed rows get one shape",
            needs=(cuda(),),
            changes_numerics=True,
            function="compile_in_graphs",
            options={"mode": "reduce-overhead"},
            training_arguments={"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
            effect=Effect(0.9, 0.25, once=90.0),
        ),
        Choice(
            "whole-max-autotune",
            "the whole model, kernels chosen by timing them",
            needs=(cuda(),),
            changes_numerics=True,
            searched=False,
            function="compile_whole",
            options={"mode": "max-autotune-no-cudagraphs"},
            training_arguments={"torch_compile": True, "torch_compile_mode": "max-autotune-no-cudagraphs"},
            memory=PARTITIONED,
        ),
        Choice(
            "whole-cudagraphs",
            "the whole model in CUDA graphs of eager kernels: no code is generated",
            needs=(cuda(),),
            searched=False,
            function="compile_in_graphs",
            options={"backend": "cudagraphs"},
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
    together=(
        Together(
            {"attention": ("eager",), "compile": GENERATED},
            0.85,
            "compiled, the mask and the softmax of plain attention become one kernel",
        ),
        Together(
            {"kernels": ("liger",), "compile": GENERATED},
            1.08,
            "both fuse the operations between matmuls, so that the second gains less",
        ),
    ),
    exclusions=(
        Exclusion(
            {"attention": ("varlen",), "compile": WHOLE},
            "the kernel's lengths are read on the host, which breaks a graph of the whole model",
            "https://docs.pytorch.org/docs/stable/nn.attention.varlen.html",
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
            {"compile": WHOLE, "checkpointing": ("offloaded",)},
            "the hooks that move layers' inputs to host memory break the graph at every layer; per layer does not",
            "https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html",
        ),
        Exclusion(
            {"compile": GRAPHS, "optimizer": WHOLE_STEP},
            "gradients have to be kept beside the graphs, and this optimizer takes each as soon as it is there",
            "https://github.com/pytorch/pytorch/issues/169545",
        ),
        Exclusion(
            {"head": WITHOUT_LOGITS, "compile": WHOLE},
            "labelled positions are chosen by value, which breaks the graph; with Liger the loss was silently wrong",
            "https://github.com/linkedin/Liger-Kernel/pull/1338",
        ),
        Exclusion(
            {"float8": FLOAT8, "compile": WITHOUT_CODE},
            "scaling and casting to fp8 only pay when they are compiled into the kernels around",
            "https://github.com/pytorch/ao/tree/main/torchao/float8",
        ),
    ),
)
