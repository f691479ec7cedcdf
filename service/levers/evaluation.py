"""What an evaluation computes. It changes nothing of the training, so it is never searched; its cost is reported."""

from service.levers.base import Choice, Exclusion, Lever, package

LEVER = Lever(
    name="evaluation",
    summary="What an evaluation computes; its batch is found apart, its cost is in the certificate.",
    baseline="loss",
    source="https://huggingface.co/docs/transformers/main_classes/trainer",
    order=200,
    touches_memory=False,
    stage="evaluation",
    changes_evaluation=True,
    choices=(
        Choice("loss", "loss and accuracy, in the training's precision"),
        Choice(
            "loss-16bit",
            "loss and accuracy, the weights cast to 16 bits for as long as it takes",
            searched=False,
            function="in_sixteen_bits",
            training_arguments={"bf16_full_eval": True},
            not_expressible="Trainer evaluates in 16 bits outside of training only; train.py whenever it does",
        ),
        Choice(
            "generation",
            "loss and accuracy, and BLEU and ROUGE-L of 100 generated completions",
            needs=(package("sacrebleu", "BLEU"), package("rouge_score", "ROUGE-L")),
            searched=False,
            function="with_generation",
            options={"generated": 100},
            not_expressible="Trainer computes losses; train.py generates as well",
        ),
    ),
    exclusions=(
        Exclusion(
            {"evaluation": ("generation",), "sees": ("both-ways",)},
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
    ),
)
