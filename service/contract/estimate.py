"""Estimate: the memory that a job would need, computed from shapes, without its hardware and its weights."""

from __future__ import annotations

from pydantic import Field

from service.contract.base import Contract
from service.contract.job import Asked, JobSpec, Method
from service.contract.measurement import MemoryLine


class Known(Contract):
    """A memory line that an earlier trial has measured of the same model on the same hardware."""

    method: Method
    levers: dict[str, str]
    max_length: int
    line: MemoryLine


class EstimateRequest(Asked):
    """A job, and the memory into which it has to fit."""

    spec: JobSpec
    memory_gib: float = Field(gt=0, le=1_000_000, description="Memory of one device in GiB.")


class MethodEstimate(Contract):
    """One method's memory in GiB, and the largest micro batch expected to fit, in samples of `max_length` tokens.

    `activations_gib` and `temporary_gib` are for one sample; the rest does not grow with the batch.
    """

    levers: dict[str, str]
    parameters: int
    trainable_parameters: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    temporary_gib: float
    overhead_gib: float
    line: MemoryLine
    largest_micro_batch: int = Field(description="0 when not even one sample fits.")
    corrected: bool = Field(default=False, description="Scaled by a real measurement of this model on this hardware.")
    note: str = Field(default="", description="Why no sample fits, or what of the job limits the largest micro batch.")


class Estimate(Contract):
    """The estimates of all methods, and a sentence that says what they are based on."""

    memory_gib: float
    max_length: int
    device: str
    methods: dict[str, MethodEstimate]
    seconds: float
    statement: str
