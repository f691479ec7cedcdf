"""Writes docs/job.md from the job's schema: `python docs/make_job.py`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.contract.job import JobSpec

HEAD = """# The job file

Every key of a job, in YAML or JSON. Only `model.source` and `dataset.source` are needed. Made from
`service/contract/job.py` by `python docs/make_job.py`.

```yaml
name: support-bot
model: {source: Qwen/Qwen3-0.6B}
dataset:
  source: data/chats.jsonl
  max_length: 2048
  splits: {validation_fraction: 0.05}
method: [lora, qlora]
lora: {r: 16, alpha: 32, target_modules: all-linear}
training: {epochs: 3, learning_rate: 2.0e-4, effective_batch_size: 32}
search: {minutes: 60, verify: standard, objective: wall-clock}
hardware: {device: cuda, memory_gib: 24}
baseline: {per_device_train_batch_size: 4, bf16: true}      # what you run today: the speed-up is over this
```

`POST /v1/jobs:validate` answers a job with all its defaults, or says in a sentence what is wrong with it, and where.
"""
DATA = """
## What data looks like

One row of each form:

| form | row | learnt |
|---|---|---|
| conversation | `{"messages": [{"role": "user", "content": "…"}, …]}` | what the assistant says |
| prompt and completion | `{"prompt": "…", "completion": "…"}` | the completion |
| text | `{"text": "…"}` | every token; with `masked-lm`, the masked ones |
| with `task: sequence-classification` | `{"text": "…", "label": "spam"}` | the class |

Files are jsonl, json (one row a line, or one array), csv (commas, semicolons or tabs) or parquet. Usual other names
(`question` and `answer`, `instruction` and `output`, ShareGPT's `conversations` with `from` and `value`) are
understood; yours are named in `dataset.columns`. Which columns were not read, what was assumed, and how many rows hold
nothing to learn and were left out, the recommendation's `notes` say.

- **Conversations.** Calls of tools are learnt where the chat template writes them; turns of `weight` 0 are not. The
  template is told a conversation's `tools`. A tokenizer without a template needs `dataset.chat_template`.
- **Prompts.** An instruction's `input` or `context` follows it on a line of its own.
- **Labels** are all whole numbers from 0 on, or all names; negative and fractional numbers are refused. Names, and
  numbers with gaps, are numbered in sorted order, which the trained model's `id2label` keeps. Beside a classifier's
  adapter they lie in the folder `base`, with which its base model has to be loaded:
  `config = AutoConfig.from_pretrained("output/base")`, then
  `PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(BASE, config=config), "output")`.
- **Masks** of a masked model are drawn once for each sample, and are the same for all configurations and epochs.
- **Many rows.** Of more than 20,000 rows, or 100 million bytes of text, a sample that stands for all is tokenised and
  measured, and a note says so; `train.py` trains on all rows.
- **Scores.** `search.fixed: {evaluation: generation}` generates completions and scores them with BLEU and ROUGE-L (the
  extra `metrics`: `pip install -e '.[metrics]'` on the worker); the certificate says how long that took.

Relative paths count from the folder in which `dynotune` is called; over REST and in Python, from the folder in which
`serve` was started, and the `train.py` of such a job has to be run there too. Local files have to be below that folder,
or below those that `DYNOTUNE_DATA_ROOTS` names when `serve` starts.
"""
# What a key's value may be, where the schema's words would not be understood by those who write YAML.
VALUES = {
    "lora.target_modules": "text, or a list of texts",
    "baseline": "`default`, or a mapping",
    "method": "`lora`, `qlora`, `full`, or a list of them",
    "search.again": "a mapping of `effective_batch_size`, `micro_batch_size` and `learning_rate`",
}
TABLE = ("| key | value | unless given | what |", "|---|---|---|---|")
KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what it refers to in its place, and of a value or null the value."""
    options = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(options) == 1:
        return dict(schema) | resolved(options[0], definitions)
    if "$ref" in schema:
        return definitions[schema["$ref"].rsplit("/", 1)[1]] | dict(schema)
    return dict(schema)


def value(schema: Mapping[str, Any]) -> str:
    """What a key's value may be."""
    if choices := schema.get("enum"):
        return ", ".join(f"`{one}`" for one in choices)
    if schema["type"] == "array":
        return f"list of {value(schema['items'])}"
    if schema["type"] == "object":
        return "mapping of text to text"
    bounds = [
        f"{word} {schema[name]:,}"
        for name, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "more than"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "less than"),
        )
        if name in schema and abs(schema[name]) < 2**31 - 1
    ]
    return ", ".join([KINDS[schema["type"]], *bounds])


def default(key: str, schema: Mapping[str, Any], needed: bool) -> str:
    """What holds where the key is not given."""
    if needed:
        return "**needed**"
    given = schema.get("default")
    if given in (None, [], {}):
        return "–"
    values = given if isinstance(given, list) else [json.dumps(given).strip('"')]
    return ", ".join(f"`{one}`" for one in values)


def sections(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str
) -> Iterator[tuple[str, str, list[str]]]:
    """(a section's place in the job, what it is, its keys' lines), for the schema and the sections within it."""
    lines, inner = [], []
    for name, given in schema["properties"].items():
        key, one = f"{place}{name}", resolved(given, definitions)
        if "properties" in one and key not in VALUES:
            inner.append((key, one))
            continue
        what = VALUES.get(key) or value(one)
        cells = (f"`{name}`", what, default(key, one, name in schema.get("required", ())), one.get("description", ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    yield place.rstrip("."), schema.get("description", ""), lines
    for key, one in inner:
        yield from sections(one, definitions, f"{key}.")


def text() -> str:
    """The whole page."""
    schema = JobSpec.model_json_schema()
    parts = [HEAD]
    for place, summary, lines in sections(schema, schema["$defs"], ""):
        title = f"`{place}`" if place else "At the top"
        told = textwrap.fill(" ".join(summary.split()), 120)
        parts.append("\n".join([f"## {title}", "", told, "", *TABLE, *lines]))
    return "\n".join([parts[0], "\n\n".join(parts[1:]), DATA])


if __name__ == "__main__":
    Path(__file__).with_name("job.md").write_text(text(), "utf-8")
