"""Masked language modelling's targets (Devlin et al. 2018): chosen once a sample, the same at every epoch."""

from __future__ import annotations

import random
import zlib
from typing import Any

from service.exports.templates.common import IGNORED, Sample, sample_of

SHARE = 0.15


def masked(ids: list[int], tokenizer: Any) -> Sample:
    """15% of the tokens are to be guessed: 8 in 10 of them are masked, 1 is another token, 1 stays; at least one is.

    Special tokens are left alone. The choice follows from the sample's own tokens, so that every run of every
    configuration has the same.
    """
    special = set(tokenizer.all_special_ids)
    candidates = [at for at, one in enumerate(ids) if one not in special]
    if not candidates:
        return sample_of(ids, [IGNORED] * len(ids))
    rng = random.Random(zlib.crc32(repr(ids).encode()))
    chosen = rng.sample(candidates, max(1, round(SHARE * len(candidates))))
    shown, labels = list(ids), [IGNORED] * len(ids)
    for at in chosen:
        labels[at] = ids[at]
        luck = rng.random()
        if luck < 0.8:
            shown[at] = tokenizer.mask_token_id
        elif luck < 0.9:
            shown[at] = rng.randrange(tokenizer.vocab_size)
    return sample_of(shown, labels)
