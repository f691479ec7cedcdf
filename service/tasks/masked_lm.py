"""Masked language modelling."""

from service.tasks.base import Task

TASK = Task(
    name="masked-lm",
    summary="Guess the masked tokens of a text from what stands on both sides.",
    needs="masked-lm needs text",
    column_sets=(("text",),),
    columns={"text": ("text", "sentence", "content", "review")},
    peft=None,
)
