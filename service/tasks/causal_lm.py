"""Causal language modelling."""

from service.tasks.base import Task

TASK = Task(
    name="causal-lm",
    summary="Predict each token from those before it: prompts with completions, chats, or plain text.",
    needs="causal-lm needs prompt and completion, messages, or text",
    column_sets=(("prompt", "completion"), ("messages",), ("text",)),
    columns={
        "prompt": ("prompt", "instruction", "question", "input"),
        "completion": ("completion", "response", "answer", "output"),
        "messages": ("messages", "conversations"),
        "text": ("text", "sentence", "content", "review"),
        "context": ("input", "context"),
        "tools": ("tools",),
    },
    beside={"context": "prompt", "tools": "messages"},
    peft="CAUSAL_LM",
    needs_mask=False,
    null_is_empty_text=True,
)
