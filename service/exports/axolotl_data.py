"""Where Axolotl finds a job's data, how it makes samples of the rows, and what it makes of them in another way."""

from __future__ import annotations

from typing import Any

from service.contract.recommendation import Recommendation
from service.exports.job_settings import data_of, hub_configuration, loader, spec_of


def about_rows(recommendation: Recommendation) -> list[str]:
    """Sentences on what Axolotl makes of the rows beside what it is told."""
    data = data_of(recommendation)
    if "text" in data.columns and data.at_max_length:
        return ["texts longer than sequence_len are split, not cut: all of their pieces are trained on"]
    if "messages" in data.columns:
        if spec_of(recommendation).training.loss_on == "all":
            learnt = "what the turns say is learnt, and neither the names of the roles nor what is between the turns"
        else:
            learnt = (
                "the token that ends the assistant's turns is learnt only if it is the tokenizer's eos_token: where "
                "the chat template ends them with another, such as Gemma's <end_of_turn>, add the line eot_tokens: "
                '["<end_of_turn>"]'
            )
        return [
            "a column 'system', if the data has one, is put before conversations that do not begin with a system turn",
            learnt,
        ]
    return []


def dataset(recommendation: Recommendation) -> dict[str, Any]:
    """Where the data is, and how a row becomes a prompt."""
    spec, data = spec_of(recommendation), data_of(recommendation)
    file = data.is_local and not data.is_folder
    place = {
        "path": spec.dataset.source,
        **({"ds_type": loader(data)} if file else {"split": spec.dataset.splits.train}),
        **({"revision": spec.dataset.revision} if spec.dataset.revision and not data.is_local else {}),
        **({"name": named} if (named := hub_configuration(recommendation)) else {}),
    }
    if "messages" in data.columns:
        template = data.form.chat_template
        found: dict[str, Any] = {
            "type": "chat_template",
            "field_messages": data.columns["messages"],
            **({"chat_template": "jinja", "chat_template_jinja": template} if template else {}),
            "roles_to_train": ["assistant"],
            **({"field_tools": data.columns["tools"]} if "tools" in data.columns else {}),
        }
        if data.form.sharegpt:
            found["message_property_mappings"] = {"role": "from", "content": "value"}
        return place | found
    if "text" in data.columns:
        return place | {"type": "completion", "field": data.columns["text"]}
    form = {
        "system_prompt": "",
        "field_system": "no such column",  # unset, it is `system`, and a column of that name is put before each prompt
        "field_instruction": data.columns["prompt"],
        "field_output": data.columns["completion"],
        **({"field_input": data.columns["context"]} if "context" in data.columns else {}),
        "format": "{instruction}\n{input}" if "context" in data.columns else "{instruction}",
        "no_input_format": "{instruction}",
    }
    return place | {"type": form}
