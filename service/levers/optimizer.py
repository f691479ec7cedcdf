"""The optimizer's implementation, the precision of its state, and its family."""

from service.levers.base import CUDA, Asked, Choice, Exclusion, Lever, Memory, Need, capability, cuda, package
from service.levers.precision import AUTOCAST, FULL_PRECISION

STATES = "optimizer states of low precision"
PAGED = Need(
    CUDA.met,
    "needs CUDA's managed memory; on a CPU bitsandbytes falls back to the unpaged one, a choice of its own",
    device=CUDA.device,
)
HOST = Memory(state=0.0)  # the state lies in host memory
EIGHT = 2.06  # two moments of 8 bits, with the scales of their blocks
EMBEDDINGS = "Trainer keeps the 8-bit optimizer's states of trained embeddings in 32 bits; train.py in 8"

IN_BACKWARD = "adamw-in-backward"
WHOLE_STEP = (IN_BACKWARD,)  # a step is one micro batch

LEVER = Lever(
    name="optimizer",
    summary="AdamW (Loshchilov & Hutter 2019) in different implementations and state precisions, and other families.",
    baseline="adamw-fused",
    source="https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    order=90,
    stage="optimizer",
    choices=(
        Choice(
            "adamw-loop",
            "one tensor after another",
            function="adamw",
            options={"foreach": False, "fused": False},
            training_arguments={"optim": "adamw_torch"},
            not_expressible="Trainer's adamw_torch lets torch choose foreach on CUDA; train.py sets foreach=False",
        ),
        Choice(
            "adamw-foreach",
            "all tensors of a step in horizontally fused kernels",
            function="adamw",
            options={"foreach": True},
            memory=Memory(gradient_copies=2),
            change_rank=40,
            asked_by=(Asked({"optim": "adamw_torch"}),),
            training_arguments={"optim": "adamw_torch"},
            not_expressible="Trainer's adamw_torch lets torch choose foreach; train.py sets foreach=True",
        ),
        Choice(
            "adamw-fused",
            "one fused kernel",
            function="adamw",
            options={"fused": True},
            asked_by=(Asked({"optim": "adamw_torch_fused"}),),
            training_arguments={"optim": "adamw_torch_fused"},
        ),
        Choice(
            "adamw-offloaded",
            "states and update in host memory (ZeRO-Offload): the device keeps weights and gradients only, the host 16 "
            "bytes a trained parameter",
            needs=(cuda(),),
            searched=False,
            function="offloaded_adamw",
            memory=HOST,
            not_expressible="Trainer offloads through DeepSpeed only; train.py has an AdamW of the host",
        ),
        Choice(
            IN_BACKWARD,
            "each weight updated as soon as its gradient is there, which is then dropped: no clipping (training."
            "max_grad_norm: 0), and a step is one micro batch",
            searched=False,
            function="in_backward_adamw",
            not_expressible="Trainer steps after the backward pass; train.py in it",
        ),
        Choice(
            "adamw-8bit",
            "bitsandbytes AdamW with 8-bit states (Dettmers et al. 2022); tensors below 4,096 elements stay 32-bit",
            needs=(package("bitsandbytes", "8-bit optimizer states"),),
            changes_numerics=True,
            function="bitsandbytes_optimizer",
            options={"name": "AdamW8bit"},
            memory=Memory(state=EIGHT),
            change_rank=90,
            training_arguments={"optim": "adamw_bnb_8bit"},
            not_expressible=EMBEDDINGS,
        ),
        Choice(
            "adamw-8bit-stable-embedding",
            "adamw-8bit, the states of trained embeddings in 32 bits, as in bitsandbytes' StableEmbedding (without its "
            "norm, which a trained model has no use for)",
            needs=(package("bitsandbytes", "8-bit optimizer states"),),
            changes_numerics=True,
            searched=False,
            function="stable_embedding_optimizer",
            options={"name": "AdamW8bit", "embeddings": 32},
            memory=Memory(state=EIGHT, embedding_state=8.0),
            asked_by=(Asked({"optim": "adamw_bnb_8bit"}), Asked({"optim": "adamw_8bit"})),
            training_arguments={"optim": "adamw_bnb_8bit"},
        ),
        Choice(
            "paged-adamw-8bit",
            "8-bit states that page to host memory when the device is full",
            needs=(package("bitsandbytes", "paged optimizer states"), PAGED),
            changes_numerics=True,
            function="bitsandbytes_optimizer",
            options={"name": "PagedAdamW8bit"},
            memory=HOST,
            asked_by=(Asked({"optim": "paged_adamw_8bit"}),),
            training_arguments={"optim": "paged_adamw_8bit"},
            not_expressible=EMBEDDINGS,
        ),
        Choice(
            "adamw-bnb-32bit",
            "bitsandbytes AdamW with 32-bit states",
            needs=(package("bitsandbytes", "its AdamW kernel"),),
            function="bitsandbytes_optimizer",
            options={"name": "AdamW32bit"},
            not_expressible="Trainer has bitsandbytes' 32-bit AdamW in its paged form only; train.py has it unpaged",
        ),
        Choice(
            "paged-adamw-32bit",
            "32-bit states that page to host memory when the device is full",
            needs=(package("bitsandbytes", "paged optimizer states"), PAGED),
            function="bitsandbytes_optimizer",
            options={"name": "PagedAdamW32bit"},
            memory=HOST,
            asked_by=(Asked({"optim": "paged_adamw_32bit"}),),
            training_arguments={"optim": "paged_adamw_32bit"},
        ),
        Choice(
            "adamw-torchao-8bit",
            "torchao AdamW with 8-bit states",
            needs=(package("torchao", STATES),),
            changes_numerics=True,
            function="torchao_optimizer",
            options={"name": "AdamW8bit"},
            memory=Memory(state=EIGHT),
            asked_by=(Asked({"optim": "adamw_torch_8bit"}),),
            training_arguments={"optim": "adamw_torch_8bit"},
        ),
        Choice(
            "adamw-torchao-4bit",
            "torchao AdamW with 4-bit states",
            needs=(package("torchao", STATES),),
            changes_numerics=True,
            function="torchao_optimizer",
            options={"name": "AdamW4bit"},
            memory=Memory(state=1.06),
            asked_by=(Asked({"optim": "adamw_torch_4bit"}),),
            training_arguments={"optim": "adamw_torch_4bit"},
        ),
        Choice(
            "adamw-torchao-fp8",
            "torchao AdamW with fp8 states",
            needs=(package("torchao", STATES), cuda(), capability(8, 9)),
            changes_numerics=True,
            function="torchao_optimizer",
            options={"name": "AdamWFp8"},
            memory=Memory(state=EIGHT),
            not_expressible="Trainer has no fp8 AdamW; train.py takes torchao's",
        ),
        Choice(
            "adamw-stochastic-rounding",
            "AdamW whose updates of bf16 weights are rounded stochastically, so that small ones are not lost",
            needs=(package("torchao", "stochastic rounding"),),
            changes_numerics=True,
            function="torchao_optimizer",
            options={"name": "_AdamW", "bf16_stochastic_round": True},
            not_expressible="Trainer has no stochastic rounding; train.py takes torchao's AdamW with it",
        ),
        Choice(
            "apex-fused-adam",
            "Apex's FusedAdam: one kernel for all tensors",
            needs=(package("apex", "its fused optimizers"), cuda()),
            function="apex_adamw",
            not_expressible="transformers has dropped Apex's optimizer; train.py takes it",
        ),
        Choice(
            "anyprecision",
            "AdamW with bf16 states, its updates' lost bits kept apart (Kahan summation), from torchdistx",
            needs=(package("torchdistx", "AnyPrecisionAdamW"),),
            changes_numerics=True,
            function="anyprecision",
            memory=Memory(state=6.0),  # two moments and what rounding lost, in 16 bits each
            asked_by=(Asked({"optim": "adamw_anyprecision"}),),
            training_arguments={
                "optim": "adamw_anyprecision",
                "optim_args": "use_kahan_summation=True, momentum_dtype=bfloat16, variance_dtype=bfloat16",
            },
        ),
        Choice(
            "adafactor",
            "factored second moments (Shazeer & Stern 2018), at the job's learning rate",
            changes_numerics=True,
            changes_learning=True,
            function="adafactor",
            memory=Memory(state=0.1),  # a row and a column of each matrix
            asked_by=(Asked({"optim": "adafactor"}),),
            training_arguments={"optim": "adafactor"},
        ),
        Choice(
            "lion",
            "sign of the momentum (Chen et al. 2023); wants a learning rate 3 to 10 times smaller than AdamW's",
            needs=(package("bitsandbytes", "its Lion"),),
            changes_numerics=True,
            changes_learning=True,
            searched=False,
            function="bitsandbytes_optimizer",
            options={"name": "Lion32bit"},
            memory=Memory(state=4.0),  # one moment
            asked_by=(Asked({"optim": "lion_32bit"}),),
            training_arguments={"optim": "lion_32bit"},
        ),
        Choice(
            "galore",
            "AdamW on gradients projected to a low rank (Zhao et al. 2024)",
            needs=(package("galore_torch", "low-rank gradient projection"),),
            changes_numerics=True,
            changes_learning=True,
            searched=False,
            function="galore_adamw",
            asked_by=(Asked({"optim": "galore_adamw"}),),
            training_arguments={
                "optim": "galore_adamw",
                "optim_target_modules": "all-linear",
                "optim_args": "rank=128, update_proj_gap=200, scale=0.25",
            },
            not_expressible="Trainer projects linear layers only; train.py every matrix, as was measured",
        ),
        Choice(
            "sgd",
            "plain stochastic gradient descent: no state at all; wants a learning rate of its own",
            changes_numerics=True,
            changes_learning=True,
            searched=False,
            function="sgd",
            memory=HOST,
            asked_by=(Asked({"optim": "sgd"}),),
            training_arguments={"optim": "sgd"},
        ),
    ),
    exclusions=(
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
            {
                "optimizer": ("adamw-stochastic-rounding",),
                "precision": ("checkpoint", *FULL_PRECISION, *AUTOCAST, "fp16"),
            },
            "stochastic rounding is for bf16 weights; fp32 ones lose nothing",
            "https://github.com/pytorch/ao/tree/main/torchao/optim",
        ),
        Exclusion(
            {"optimizer": ("galore",), "method": ("lora", "qlora")},
            "adapters have low rank already; projecting their gradients again gains nothing",
            "https://github.com/jiaweizzhao/GaLore",
        ),
    ),
)
