"""HardwareFacts: what a worker says about the one device it measures on."""

from __future__ import annotations

import hashlib
from typing import Literal

from service.contract.base import Contract


class Package(Contract):
    """An optional package on the worker: its version, or why it cannot be used."""

    version: str | None = None
    problem: str | None = None


class HardwareFacts(Contract):
    """One device and the software around it. Timings are only compared within one `fingerprint`."""

    host: str
    device: Literal["cpu", "cuda"]
    index: int = 0
    uuid: str | None = None
    name: str
    memory_bytes: int
    cores: int
    capability: tuple[int, int] | None = None
    bf16_native: bool
    driver: str | None = None
    versions: dict[str, str]
    packages: dict[str, Package]
    others: tuple[str, ...] = ()
    topology: str | None = None

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over all that makes timings comparable: device, driver, cores, versions."""
        parts = [self.device, self.name, str(self.memory_bytes >> 30), str(self.cores), str(self.driver)]
        parts += [f"{name}={version}" for name, version in sorted(self.versions.items())]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    @property
    def lock_name(self) -> str:
        """The device's name on its host, the same for every worker that would use it."""
        return f"{self.device}-{self.uuid or self.index}"

    def has(self, package: str) -> bool:
        """Whether an optional package can be used here."""
        found = self.packages.get(package)
        return found is not None and found.version is not None and found.problem is None
