"""What a surface is: a job whose configurations have known true scores, and noisy measurements of them."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from typing import Literal

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement

Kind = Literal["recorded", "mechanistic", "synthetic"]
NOISE = 0.01  # the standard deviation of a timing's logarithm


def normal(*parts: object) -> float:
    """A standard normal number that depends on nothing but the parts (Box and Muller 1958)."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "big") / 2**64 for at in (0, 8))
    return math.sqrt(-2 * math.log(1 - first)) * math.cos(2 * math.pi * second)


class Surface(ABC):
    """A job of one method with a known truth.

    `switches` is how far the best is from what the search begins with: the fewest levers of the best that have to be
    switched, in the baseline or in a recipe, to come within 2% of the best; None where it was not computed. `lacks` are
    the choices (`lever=choice`) that the job's model cannot have, which a trial reports.
    """

    kind: Kind
    name: str
    spec: JobSpec
    facts: HardwareFacts
    switches: int | None = None

    def __init__(self) -> None:
        self.lacks: dict[str, str] = {}
        self._scores: dict[str, float] = {}
        self._measured: dict[tuple[str, int], Measurement] = {}

    @property
    @abstractmethod
    def best(self) -> float:
        """The best true score over all valid configurations of the job's search space and its baseline."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The rows that the job trains on, which decide the effective batches that the search tries."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digits that change when the surface does."""

    @abstractmethod
    def _true_score(self, configuration: Configuration) -> float: ...

    @abstractmethod
    def _measure(self, configuration: Configuration, seed: int) -> Measurement: ...

    def true_score(self, configuration: Configuration) -> float:
        """The noiseless seconds of the user's run by its objective; infinite where it cannot run or is unstable."""
        key = configuration.key
        if key not in self._scores:
            self._scores[key] = self._true_score(configuration)
        return self._scores[key]

    def trial_share(self, configuration: Configuration) -> float:
        """The share that a configuration's trial has of the time that trials of all of them took; 0 if none ran."""
        return 0.0

    def measure(self, configuration: Configuration, seed: int) -> Measurement:
        """What a trial would report. A configuration that is measured again with the same seed gives the same."""
        key = configuration.key, seed
        if key not in self._measured:
            self._measured[key] = self._measure(configuration, seed)
        return self._measured[key]

    def forget(self) -> None:
        """Drop what was measured, so that many seeds do not fill the memory."""
        self._measured.clear()

    def noise(self, configuration: Configuration, seed: int) -> float:
        """The factor by which a timing of a configuration is off."""
        return math.exp(NOISE * normal(self.name, configuration.key, seed))
