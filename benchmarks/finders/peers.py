"""The other finders, each used as its documentation shows, in the child, on what the case builds.

Each takes a function that builds model, data and optimizer, and one that tells the parent `begun` (a size is
tried), `step` (a training step begins) and `accepted` (the size's steps all ran).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.finders.messages import Accepted, Begun, Step
from service.contract.base import Contract
from training.recipe import task_of
from training.step import autocast
from worker.child import probe
from worker.child.build import Bundle
from worker.child.worst import worst_case

Made = Callable[[], Bundle]
Send = Callable[[Contract], None]

STEPS = 3
ACCELERATE_START = 256
LIGHTNING_START = 2
ROWS = 4096


def accelerate(made: Made, send: Send, _scratch: str) -> int:
    """`find_executable_batch_size` around a training function that makes its own model and optimizer."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=ACCELERATE_START)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        send(Begun(size=batch_size))
        bundle = made()
        for _ in range(STEPS):
            send(Step())
            probe.full_step(bundle, batch_size)
        send(Accepted(size=batch_size))
        return batch_size

    return int(train())


def _lightning(mode: str) -> Callable[[Made, Send, str], int]:
    def find(made: Made, send: Send, scratch: str) -> int:
        """`Tuner.scale_batch_size` on a module whose `batch_size` sizes its loader of worst-case rows."""
        import pytorch_lightning
        from pytorch_lightning.tuner import Tuner

        bundle = made()
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=1,
            gradient_clip_val=bundle.spec.training.max_grad_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
        module = _module(bundle, send)
        found = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=STEPS, init_val=LIGHTNING_START)
        return int(found or 0)

    return find


def _module(bundle: Bundle, send: Send) -> Any:
    import pytorch_lightning
    import torch
    from torch.utils.data import DataLoader

    terms = worst_case(bundle, 1)[1]

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        """The case's model, precision and optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = bundle.model
            self.batch_size = LIGHTNING_START
            self.ran = 0

        def on_train_start(self) -> None:
            self.ran = 0
            send(Begun(size=self.batch_size))

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            send(Step())
            rows = batch["input_ids"].shape[0]
            assert rows == self.batch_size, f"{rows} rows came where {self.batch_size} were asked for"
            with autocast(bundle.device.torch, bundle.recipe):
                return task_of(bundle.recipe).summed_loss(self.model, batch, torch.tensor(rows * terms))

        def on_train_batch_end(self, *_: Any) -> None:
            self.ran += 1
            if self.ran == STEPS:
                send(Accepted(size=self.batch_size))

        def configure_optimizers(self) -> Any:
            return bundle.optimizer

        def train_dataloader(self) -> Any:
            def collate(rows: list[int]) -> Any:
                return worst_case(bundle, len(rows))[0]

            return DataLoader(range(ROWS), batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    return Module()


FINDERS: dict[str, Callable[[Made, Send, str], int]] = {
    "accelerate": accelerate,
    "lightning-power": _lightning("power"),
    "lightning-binsearch": _lightning("binsearch"),
}
