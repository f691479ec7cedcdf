"""Sequence classification."""

from service.tasks.base import Task

TASK = Task(
    name="sequence-classification",
    summary="One of a few classes for each text.",
    needs="sequence-classification needs text and label",
    column_sets=(("text", "label"),),
    columns={
        "text": ("text", "sentence", "content", "review"),
        "label": ("label", "labels", "target"),
    },
    peft="SEQ_CLS",
    heads=("classifier", "score"),
    labels_are_classes=True,
)
