"""LLaMA-Factory's file: what its checks refuse is not asked for, and what it learns otherwise is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.contract.recommendation import Recommendation
from service.exports import EXPORTS
from service.exports.job_settings import batch
from service.exports.llamafactory import dataset
from tests.exports.test_targets import made, reading
from tests.factory import DATASET

Facts = Callable[..., HardwareFacts]
BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")


def written(recommendation: Recommendation) -> dict[str, Any]:
    """The keys of the file."""
    found: dict[str, Any] = yaml.safe_load(EXPORTS["llamafactory"].write(recommendation))
    return found


def rows(facts: Facts) -> tuple[int, int]:
    """(packed rows of a micro batch, micro batches of a step) for a trainer that takes any number of rows at a time."""
    found = made(facts, batching="packed", attention="flash-attention-2")
    size = batch(found, packs=True)
    return size.micro, size.accumulation


def flat(recommendation: Recommendation) -> str:
    """The whole file in one line, without the signs of its comments."""
    return " ".join(EXPORTS["llamafactory"].write(recommendation).replace("#", " ").split())


def test_a_flash_packed_micro_batch_is_one_row(facts: Facts) -> None:
    """Its collator demands it, in training and evaluation; with a mask, rows lie side by side as measured."""
    micro, steps = rows(facts)
    assert micro > 1
    for attention in ("flash-attention-2", "flash-attention-3"):
        file = written(made(facts, batching="packed", attention=attention))
        assert file["neat_packing"] is True and file["flash_attn"] == "fa2"
        assert [file[name] for name in BATCHES] == [1, micro * steps, 1], attention
    for attention in ("sdpa", "flex"):
        file = written(made(facts, batching="packed", attention=attention))
        assert file["neat_packing"] is True and file["flash_attn"] == "sdpa"
        assert [file[name] for name in BATCHES] == [micro, steps, 16], attention


def test_no_kernel_is_named_that_its_loader_refuses(facts: Facts) -> None:
    assert "flash_attn: fa3" not in EXPORTS["llamafactory"].write(made(facts, attention="flash-attention-3"))
    assert "attention=flash-attention-3, the nearest" in flat(made(facts, attention="flash-attention-3"))


@pytest.mark.parametrize("attention", ["sdpa", "flash-attention-2"])
def test_texts_are_packed_as_pretraining_packs_them(attention: str, facts: Facts) -> None:
    """It takes `neat_packing` and `train_on_prompt` in supervised finetuning only."""
    found = reading(made(facts, batching="packed", attention=attention), ("text",))
    found.spec["training"] |= {"loss_on": "all"}
    file = written(found)
    assert (file["stage"], file["packing"], file["neat_packing"]) == ("pt", True, False)
    assert file["train_on_prompt"] is False and [file[name] for name in BATCHES] == [*rows(facts), 16]
    assert "attend to those before them in the same row" in flat(found)
    asked = reading(found, ("prompt", "completion"))
    assert written(asked)["train_on_prompt"] is True and "attend to those before" not in flat(asked)


def test_it_tells_which_tokens_and_turns_are_not_learnt(facts: Facts) -> None:
    texts, pairs, chats = (
        reading(made(facts), columns) for columns in (("text",), ("prompt", "completion"), ("messages",))
    )
    form = DATASET.form.model_copy(update={"sharegpt": True})
    shared = chats.model_copy(
        update={"dataset": DATASET.model_copy(update={"form": form, "columns": {"messages": "m"}})}
    )
    told = {"does not learn to stop": pairs, "that ends a text is not learnt": texts, "skips conversations": shared}
    for sentence, found in told.items():
        assert [one for one in (texts, pairs, chats, shared) if sentence in flat(one)] == [found], sentence
    turns = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    assert dataset(shared)["tags"] == turns | {"system_tag": "system"}
    assert set(dataset(chats)["tags"]) == set(dataset(shared)["tags"]), "where one is given, no other has a default"
