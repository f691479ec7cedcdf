"""Which tokens a sample has and which of them are learnt, with the templates and tokenizers that people use."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from tokenizers import decoders, pre_tokenizers

from service.tasks import TASKS
from tests.child import tiny
from tests.child.test_data_mistakes import load, refused
from training.errors import TrainingError
from training.model import drawn_layers, keep_layout, quantization
from training.samples import IGNORED
from training.script import save
from training.tasks import masked_lm
from worker.child.data import Data
from worker.child.measure import beside_the_adapter

# Of each, the lines that matter here.
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[assistant]{% if loop.last %}<think>done</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}</s>"
    "{% else %}[{{ m.role }}]{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and system is defined %}{{ system }} {% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def learnt(found: Data, tokenizer: Any, sample: int = 0) -> str:
    """The text of all tokens that are learnt."""
    return str(tokenizer.decode([one for one in found.train[sample][1] if one != -100]))


def test_every_answer_is_learnt_though_the_template_thinks_in_the_last_only(tmp_path: Path, tokenizer: Any) -> None:
    talk = [turn("user", "a"), turn("assistant", "path value"), turn("user", "b"), turn("assistant", "return name")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=QWEN3)
    assert learnt(found, tokenizer) == "path value</s><think>done</think>return name</s>"


@pytest.mark.parametrize("said", ["0", "1", "01", "10"])
def test_an_answer_may_be_a_number(tmp_path: Path, tokenizer: Any, said: str) -> None:
    talk = [turn("user", "a"), turn("assistant", said), turn("user", "b"), turn("assistant", "return name")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=QWEN3)
    assert learnt(found, tokenizer) == f"{said}</s><think>done</think>return name</s>"


PHI = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% else %}<s>{% endif %}"
)


def test_the_end_of_every_answer_is_learnt_where_the_template_ends_the_whole(tmp_path: Path, tokenizer: Any) -> None:
    talk = [turn("user", "a"), turn("assistant", "path value"), turn("user", "b"), turn("assistant", "return name")]
    rows = [{"messages": talk}] * 4
    found = load(tiny.write(tmp_path / "a.jsonl", rows), tokenizer, chat_template=PHI)
    assert learnt(found, tokenizer) == "path value</s>return name</s><s>"
    asked = load(tiny.write(tmp_path / "b.jsonl", [{"messages": talk[:3]}] * 4), tokenizer, chat_template=PHI)
    assert learnt(asked, tokenizer) == "path value</s>"


@pytest.mark.parametrize("content", ["", None])
def test_a_call_of_a_tool_is_learnt_also_where_nothing_is_said(
    tmp_path: Path, tokenizer: Any, content: str | None
) -> None:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    asks = [turn("user", "rain?"), turn("assistant", content, tool_calls=calls)]
    talk = [*asks, turn("tool", "no"), turn("assistant", "it is dry")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=QWEN3)
    assert learnt(found, tokenizer) == "<call>weather</call></s><think>done</think>it is dry</s>"


@pytest.mark.parametrize("answer", ["0.5", "10", "0x1", "100"])
def test_an_answer_that_is_a_number_is_learnt_whole(tmp_path: Path, tokenizer: Any, answer: str) -> None:
    talk = [turn("user", "a"), turn("assistant", answer), turn("user", "b"), turn("assistant", "return")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=QWEN3)
    assert learnt(found, tokenizer) == f"{answer}</s><think>done</think>return</s>"


def test_a_turn_that_nothing_else_may_stand_for_is_not_learnt(tmp_path: Path, tokenizer: Any) -> None:
    """As where a tool's answer has to follow a call: what else such a turn might say, the template refuses."""
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    strict = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    strict += "{{ raise_exception('no call') }}{% endif %}{% endfor %}"
    talk = [turn("user", "rain?"), turn("assistant", "", tool_calls=calls), turn("tool", "no")]
    rows = [{"messages": [*talk, turn("assistant", "it is dry")]}] * 4
    changing = QWEN3.replace("{{ m.content or '' }}", "{{ m.content or ('' if loop.last else ' ') }}")
    changing = changing.replace("<call>", "{{ '' if loop.last else 'did' }}<call>")
    found = load(tiny.write(tmp_path / "a.jsonl", rows), tokenizer, chat_template=strict + changing)
    assert learnt(found, tokenizer) == "<think>done</think>it is dry</s>"


@pytest.mark.parametrize("nothing", ["", None])
def test_an_end_alone_is_not_learnt(tmp_path: Path, tokenizer: Any, nothing: str | None) -> None:
    talk = [turn("user", "a"), turn("assistant", nothing), turn("user", "b"), turn("assistant", "return")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=QWEN3)
    assert learnt(found, tokenizer) == "<think>done</think>return</s>"


@pytest.mark.parametrize("system", ["be brief", "be as brief as any list of names that has been returned so far"])
def test_an_answer_is_learnt_from_its_beginning_wherever_the_system_s_words_are(
    tmp_path: Path, tokenizer: Any, system: str
) -> None:
    talk = [turn("system", system), turn("user", "where?"), turn("assistant", "in the path of the module")]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=MISTRAL)
    assert learnt(found, tokenizer).strip() == "in the path of the module</s>"


def test_a_text_begins_and_ends_as_the_tokenizer_has_it_and_once(tmp_path: Path, tokenizer: Any) -> None:
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    rows = [{"text": "return value"}] * 2 + [{"text": f"{begin}return value{end}"}] * 2
    found = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer)
    assert len({tuple(ids) for ids, _ in found.train}) == 1, "as written, and as the tokenizer would write them"
    ids = found.train[0][0]
    assert ids[-1] == tokenizer.eos_token_id and list(ids).count(tokenizer.eos_token_id) == 1
    puts_one = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    assert (ids[0] == tokenizer.bos_token_id) is puts_one


def test_a_completion_goes_on_with_its_prompt_in_the_same_text(tmp_path: Path, tokenizer: Any) -> None:
    """A tokenizer of SentencePiece begins every text with a space, and a completion is none of its own."""
    spaced = copy.deepcopy(tokenizer)
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.backend_tokenizer.decoder = decoders.ByteLevel()
    rows = [{"prompt": "def path", "completion": "lib_name"}] * 4
    ids, labels = load(tiny.write(tmp_path / "rows.jsonl", rows), spaced).train[0]
    assert "def pathlib_name" in spaced.decode(ids)
    assert "lib_name" in spaced.decode([one for one in labels if one != -100])


def test_columns_that_are_not_read_are_told(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"instruction": "Translate good morning.", "output": "guten Morgen", "language": "de"}] * 20
    (told,) = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer).facts.notes
    read = "'instruction' (prompt) and 'output' (completion)"
    assert told == f"Of the data's columns {read} were read, and not 'language'."
    assert not load(tiny.write(tmp_path / "b.jsonl", tiny.pairs(20, most=20)), tokenizer).facts.notes


@pytest.mark.parametrize("name", ["input", "context"])
def test_what_an_instruction_is_about_follows_it(tmp_path: Path, tokenizer: Any, name: str) -> None:
    """Alpaca's `input` and Dolly's `context`: without it the model learns answers to questions that it is not shown."""
    about = [{"instruction": "return", name: "value", "output": " name"}] * 4
    rows = [*about, {"instruction": "path", name: "", "output": " self"}, {"instruction": "path", "output": " self"}]
    found = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer)
    texts = {tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in (*found.train, *found.validation)}
    assert texts == {"return\nvalue name", "path self"} and learnt(found, tokenizer) in (" name</s>", " self</s>")
    assert found.facts.columns["context"] == name and f"Column '{name}' (context) was appended" in found.facts.notes[0]
    odd = tiny.write(tmp_path / "b.jsonl", [about[0] | {name: {"a": 1}}] * 4)
    assert "which is not text" in refused(load, odd, tokenizer, columns={"context": name})
    found = load(odd, tokenizer)
    assert "context" not in found.facts.columns and f"Column '{name}' was not read as context" in found.facts.notes[0]


def test_what_an_instruction_is_about_may_have_any_name(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"input": "return", "output": " name"}, *[{"input": "return", "output": " name", "about": "value"}] * 4]
    found = load(tiny.write(tmp_path / "a.jsonl", rows), tokenizer, columns={"context": "about"})
    texts = {tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in (*found.train, *found.validation)}
    assert texts == {"return name", "return\nvalue name"}
    assert "needs prompt and completion" in refused(load, tmp_path / "a.jsonl", tokenizer, columns={"context": "input"})
    talk = [{"messages": [turn("user", "a"), turn("assistant", "b")], "about": "c"}] * 4
    refusal = refused(
        load, tiny.write(tmp_path / "b.jsonl", talk), tokenizer, columns={"context": "about"}, chat_template=QWEN3
    )
    assert "dataset.columns.context goes with prompt, and the data was read as messages" in refusal


TOOLS = "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"


@pytest.mark.parametrize("written", [lambda tools: tools, json.dumps])
def test_the_template_is_told_the_tools_of_each_row(tmp_path: Path, tokenizer: Any, written: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    talk = [turn("user", "rain?"), turn("assistant", "path")]
    asked = {"messages": talk, "tools": written(tools)}
    rows = [{"messages": talk}, *[asked] * 8, {"messages": talk, "tools": None}]
    found = load(tiny.write(tmp_path / "a.jsonl", rows), tokenizer, chat_template=TOOLS + QWEN3)
    texts = {tokenizer.decode(ids) for ids, _ in found.train}
    said = "[user]rain?</s>[assistant]<think>done</think>path</s>"
    assert texts == {f"<tool>weather</tool>{said}", said}
    assert all(learnt(found, tokenizer, at) == "<think>done</think>path</s>" for at in range(len(found.train)))
    assert "told the tools of column 'tools'" in found.facts.notes[0]
    deaf = load(tmp_path / "a.jsonl", tokenizer, chat_template=QWEN3)
    assert "The chat template says nothing of tools, so it leaves them out." in deaf.facts.notes
    odd = tiny.write(tmp_path / "b.jsonl", [rows[0] | {"tools": "{weather"}] * 4)
    refusal = refused(load, odd, tokenizer, columns={"tools": "tools"}, chat_template=QWEN3)
    assert "dataset.columns.tools: column 'tools' holds '{weather', which is no JSON" in refusal


def test_a_folder_s_test_file_is_not_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    for name, word in (("data", "return"), ("test", "value"), ("dev-00", "value")):
        tiny.write(tmp_path / "data" / f"{name}.jsonl", [{"text": word}] * 4)
    found = load(tmp_path / "data", tokenizer)
    assert all("value" not in tokenizer.decode(ids) for ids, _ in (*found.train, *found.validation))
    assert "were not trained on: dev-00.jsonl, test.jsonl (dataset.splits.validation may" in " ".join(found.facts.notes)
    tiny.write(tmp_path / "alone" / "test.jsonl", [{"text": "value"}] * 4)
    assert "named after other splits: test.jsonl" in refused(load, tmp_path / "alone", tokenizer)


def test_a_weight_that_is_no_layer_is_for_method_full() -> None:
    recipe: Any = SimpleNamespace(heads=("classifier", "score"))
    assert drawn_layers({"bert.pooler.dense.bias", "pre_classifier.weight"}, recipe) == ["bert.pooler.dense"]
    with pytest.raises(TrainingError, match="lacks mask_emb, which no adapter saves; use method full"):
        drawn_layers({"mask_emb"}, recipe)


def test_files_of_a_folder_that_are_no_data_are_not_read(tmp_path: Path, tokenizer: Any) -> None:
    """Jupyter's copies, what macOS writes beside files, and what the library `datasets` writes beside data."""
    tiny.write(tmp_path / "data" / "train.jsonl", [{"text": "return"}] * 8)
    for name in (".ipynb_checkpoints/train-checkpoint.jsonl", "._train.jsonl", "dataset_infos.json", "val.jsonl"):
        tiny.write(tmp_path / "data" / name, [{"text": "value"}] * 8)
    found = load(tmp_path / "data", tokenizer)
    assert {tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in (*found.train, *found.validation)} == {
        "return"
    }
    assert len(found.train) <= 8 and "not trained on: val.jsonl" in found.facts.notes[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
def test_a_classifier_s_adapter_is_saved_with_what_its_base_is_loaded_with(
    tmp_path: Path, llama: Path, reviews: Path
) -> None:
    bundle = tiny.bundle(tiny.job(llama, reviews, task="sequence-classification"), "lora")
    recipe = replace(bundle.recipe, source_options={"revision": "v1.0"})
    save(bundle.model, bundle.tokenizer, str(llama), tmp_path / "saved", recipe)
    known = transformers.AutoConfig.from_pretrained(tmp_path / "saved" / "base")
    assert len(known.id2label) == 3 and known.pad_token_id == bundle.tokenizer.pad_token_id
    base = transformers.AutoModelForSequenceClassification.from_pretrained(llama, config=known)
    again = PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, bundle.model.eval()(ids).logits, atol=1e-5)
    adapter = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (str(llama), "v1.0")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("targets", ["all-linear", ["query_proj", "query", "dense"]])
@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_layers_that_a_classifier_s_checkpoint_lacks_are_trained_and_saved_with_the_adapter(
    tmp_path: Path, reviews: Path, kind: str, targets: Any, method: str
) -> None:
    """Frozen as they were drawn they would be of no use, and what is loaded again would be another model."""
    if kind == "bert":
        transformers.BertForMaskedLM(tiny.config("bert")).save_pretrained(tmp_path / "model")
    else:
        config = transformers.DebertaV2Config(**tiny.SHAPE, **tiny.IDS, pooler_hidden_size=tiny.SHAPE["hidden_size"])
        transformers.DebertaV2ForMaskedLM(config).save_pretrained(tmp_path / "model")
    source = tiny.with_tokenizer(tmp_path / "model")
    drawn = {"bert": "bert.pooler.dense", "deberta-v2": "pooler.dense"}[kind]
    job = tiny.job(source, reviews, task="sequence-classification", lora={"target_modules": targets})
    bundle = tiny.bundle(job, method, attention="eager")
    names = {name for name, weight in bundle.model.named_parameters() if weight.requires_grad}
    assert {f"base_model.model.{drawn}.modules_to_save.default.{one}" for one in ("weight", "bias")} <= names
    assert not any("pooler" in name and "lora" in name for name in names)
    said = beside_the_adapter(bundle)
    assert said["adapter_saves"] == (drawn,) and drawn in said["adapter_excludes"]
    for weight in bundle.model.parameters():
        if weight.requires_grad:
            weight.data.add_(0.01)
    save(bundle.model, bundle.tokenizer, str(source), tmp_path / "saved", bundle.recipe)
    known = transformers.AutoConfig.from_pretrained(tmp_path / "saved" / "base")
    torch.manual_seed(1)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        source,
        config=known,
        attn_implementation="eager",
        quantization_config=quantization(known, bundle.recipe, [drawn]) if method == "qlora" else None,
    )
    keep_layout(base)
    again = PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, bundle.model.eval()(ids).logits, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by peft
def test_a_head_is_trained_whole_whatever_peft_calls_the_task(
    bert: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SEQ_CLS alone peft leaves the head out of all linear layers; adapted, it could not be trained whole."""
    job = tiny.job(bert, reviews, task="sequence-classification")
    trained = []
    for kind in ("SEQ_CLS", "TOKEN_CLS"):
        monkeypatch.setitem(TASKS, job.task, replace(TASKS[job.task], peft=kind))
        weights = tiny.bundle(job, "lora").model.named_parameters()
        trained.append({name for name, weight in weights if weight.requires_grad})
    assert trained[0] == trained[1] and "base_model.model.classifier.modules_to_save.default.weight" in trained[0]


def test_of_a_masked_text_a_token_at_least_is_learnt_and_never_a_special_one() -> None:
    """Of six tokens 15% are one; of two they would be none."""
    told = SimpleNamespace(all_special_ids=[0, 1], mask_token_id=2, vocab_size=100)
    for token in range(3, 100):
        for ids in ([0, token, 1], [0, token, token, 1], [0, *[token] * 20, 1]):
            shown, labels = masked_lm.masked(ids, told)
            learnt = [at for at, one in enumerate(labels) if one != IGNORED]
            assert len(learnt) == max(1, round(masked_lm.SHARE * (len(ids) - 2)))
            assert all(labels[at] == ids[at] == token for at in learnt)
            assert all(shown[at] == ids[at] for at in range(len(ids)) if at not in learnt)
    assert masked_lm.loss_terms(masked_lm.masked([0, 1], told)) == 0
