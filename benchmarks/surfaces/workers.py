"""Made-up workers: the facts that a search would be told of common devices, with the usual optional packages."""

from __future__ import annotations

from service.contract.hardware import HardwareFacts, Package

GIB = 1 << 30
COMMON = ("peft", "bitsandbytes", "torchao", "sacrebleu", "rouge_score")
OF_GPUS = (*COMMON, "liger_kernel", "cut_cross_entropy")


def gpu(
    name: str, gib: float, capability: tuple[int, int], cores: int = 16, packages: tuple[str, ...] = OF_GPUS
) -> HardwareFacts:
    """An NVIDIA GPU with memory of its own."""
    return HardwareFacts(
        host="made-up",
        device="cuda",
        name=name,
        memory_bytes=int(gib * GIB),
        cores=cores,
        capability=capability,
        bf16_native=capability >= (8, 0),
        versions={"torch": "2.13"},
        packages={one: Package(version="1") for one in packages},
    )


def cpu(cores: int, gib: float, bf16: bool, packages: tuple[str, ...] = COMMON) -> HardwareFacts:
    """Cores that compute in the host's memory."""
    return HardwareFacts(
        host="made-up",
        device="cpu",
        name=f"CPU with {cores} cores",
        memory_bytes=int(gib * GIB),
        cores=cores,
        bf16_native=bf16,
        versions={"torch": "2.13"},
        packages={one: Package(version="1") for one in packages},
    )


# What CUDA says of cards of 12, 24 and 141 GB, as PyTorch's out-of-memory messages quote it ("GPU 0 has a total
# capacity of 23.65 GiB").
RTX_3080_TI = gpu("NVIDIA GeForce RTX 3080 Ti", 11.76, (8, 6))
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 23.65, (8, 9), packages=(*OF_GPUS, "flash_attn"))
H200 = gpu("NVIDIA H200", 139.8, (9, 0), packages=(*OF_GPUS, "flash_attn", "flash_attn_interface"))
SMALL_CPU = cpu(4, 16, True)
LARGE_CPU = cpu(32, 128, True)
OLD_CPU = cpu(8, 32, False)
