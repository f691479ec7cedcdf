"""What the collator has to know of the batching; the arrangement itself is worker/child/arrange.py."""

from service.exports.templates.common import padded_width
from service.levers import LEVERS
from service.levers.batching import PACKED


def is_packed(choice: str) -> bool:
    """Packed rows carry position_ids that restart at each sample, also where a row holds one sample only."""
    return choice in PACKED


def needs_mask(choice: str) -> bool:
    """Plain padding passes the attention mask, as Trainer's collator does; the others leave it out where they can."""
    return choice == "padded"


def width(longest: int, padding: str, most: int) -> int:
    """The tokens that rows are padded to under a choice of the lever padding."""
    return padded_width(longest, LEVERS["padding"].choice(padding).options["multiple"], most)
