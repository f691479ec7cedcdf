"""Batching is applied by worker/trial/arrange.py; here is only what the collator has to know."""

NAME = "batching"


def needs_mask(choice: str) -> bool:
    """Plain padding passes the attention mask, as Trainer's collator does; the others leave it out where they can."""
    return choice == "padded"
