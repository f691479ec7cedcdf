"""The optimizer's implementation."""

from service.levers.base import Choice, Lever, Need, package

LEVER = Lever(
    name="optimizer",
    summary="AdamW (Loshchilov & Hutter 2019) in different implementations and state precisions.",
    baseline="adamw-fused",
    source="https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    choices=(
        Choice(
            "adamw-loop",
            "one tensor after another",
            training_arguments={"optim": "adamw_torch"},
            not_expressible="Trainer's adamw_torch lets torch choose foreach on CUDA; train.py sets foreach=False",
        ),
        Choice(
            "adamw-foreach",
            "all tensors of a step in horizontally fused kernels",
            training_arguments={"optim": "adamw_torch"},
            not_expressible="Trainer's adamw_torch lets torch choose foreach; train.py sets foreach=True",
        ),
        Choice("adamw-fused", "one fused kernel", training_arguments={"optim": "adamw_torch_fused"}),
        Choice(
            "adamw-8bit",
            "bitsandbytes AdamW with 8-bit states (Dettmers et al. 2022); tensors below 4,096 elements stay 32-bit",
            needs=(package("bitsandbytes", "8-bit optimizer states"),),
            changes_numerics=True,
            training_arguments={"optim": "adamw_bnb_8bit"},
        ),
        Choice(
            "paged-adamw-8bit",
            "8-bit states that page to host memory when the device is full",
            needs=(
                package("bitsandbytes", "paged optimizer states"),
                Need(
                    lambda facts: facts.device == "cuda",
                    "needs CUDA's managed memory; on a CPU bitsandbytes falls back to adamw-8bit, a choice of its own",
                ),
            ),
            changes_numerics=True,
            training_arguments={"optim": "paged_adamw_8bit"},
        ),
    ),
)
