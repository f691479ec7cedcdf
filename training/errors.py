"""The one error of the training code."""

from __future__ import annotations


class TrainingError(Exception):
    """A sentence for the user. `blame` says what went wrong: the job, the configuration, the numbers or the memory."""

    def __init__(self, sentence: str, blame: str = "job") -> None:
        super().__init__(sentence)
        self.blame = blame
