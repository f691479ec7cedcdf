"""HardwareFacts: what a worker says about the one device it measures on."""

from __future__ import annotations

import hashlib

from pydantic import Field

from service.contract.base import Contract

# Of the host's free memory, which no trial may take, or the system would end this or another process. It is chosen.
HOST_KEPT_BACK = 0.1


class Package(Contract):
    """An optional package on the worker: its version, or why it cannot be used."""

    version: str | None = None
    problem: str | None = None


class HardwareFacts(Contract):
    """One device and the software around it. Only timings of the same `fingerprint` are compared."""

    host: str
    device: str = Field(description="The kind of device, as its file under worker/devices names it.")
    index: int = 0
    uuid: str | None = None
    name: str
    memory_bytes: int = Field(ge=0, lt=2**63)
    cores: int
    capability: tuple[int, int] | None = Field(default=None, description="CUDA compute capability of an NVIDIA GPU.")
    has_own_memory: bool = Field(
        default_factory=lambda data: data.get("capability") is not None,  # for facts that earlier versions stored
        description="The device computes in memory of its own, not the host's.",
    )
    for_one_process: bool = Field(
        default=False, description="The GPU serves one process at a time: NVIDIA's compute mode EXCLUSIVE_PROCESS."
    )
    bf16_native: bool
    driver: str | None = None
    versions: dict[str, str]
    packages: dict[str, Package]
    others: tuple[str, ...] = ()
    topology: str | None = None
    commit: str | None = Field(
        default=None, description="The commit of dynotune's checkout, where it runs from one. Others may measure alike."
    )

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over all that makes timings comparable: device, driver, cores, versions."""
        parts = [self.device, self.name, str(self.memory_bytes >> 30), str(self.cores), str(self.driver)]
        parts += [f"{name}={version}" for name, version in sorted(self.versions.items())]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    @property
    def lock_name(self) -> str:
        """The device's name on its host, the same for every worker that uses the device."""
        return f"{self.device}-{self.uuid or self.index}"

    def has(self, package: str) -> bool:
        """Whether an optional package can be used here."""
        found = self.packages.get(package)
        return found is not None and found.version is not None and found.problem is None
