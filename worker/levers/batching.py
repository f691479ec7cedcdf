"""Batching is applied by worker/trial/arrange.py; here is only what the collator has to know."""

NAME = "batching"


def is_packed(choice: str) -> bool:
    """Packed rows carry position_ids that restart at each sample, also where a row holds one sample only."""
    return choice == "packed"


def needs_mask(choice: str) -> bool:
    """Plain padding passes the attention mask, as Trainer's collator does; the others leave it out where they can."""
    return choice == "padded"
