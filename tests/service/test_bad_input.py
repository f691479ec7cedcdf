"""A user's mistake: one clear sentence, a stable code, a pointer into the body, and nothing queued."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.settings import Settings
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]
JSON, YAML = {"Content-Type": "application/json"}, {"Content-Type": "application/yaml"}
MODEL = {"source": "model", "weights": "random"}


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"model": {"source": "./nowhere"}}, "/model/source", "does not exist"),
        ({"model": {"source": "model"}}, "/model/weights", "weights: random"),
        ({"model": {}}, "/model/source", "model.source is missing"),
        ({"dataset": {"source": "./no.jsonl"}}, "/dataset/source", "does not exist"),
        ({"dataset": {"source": "empty.jsonl"}}, "/dataset/source", "is empty"),
        ({"dataset": {"source": "broken.jsonl"}}, "/dataset/source", "line 2: not JSON"),
        (
            {"dataset": {"source": "data.jsonl", "columns": {"text": "body"}}},
            "/dataset/columns/text",
            "there are: prompt",
        ),
        ({"dataset": {"source": "data.jsonl", "splits": {"column": "s"}}}, "/dataset/splits/column", "no column 's'"),
        (
            {"dataset": {"source": "labels.csv"}, "task": "sequence-classification"},
            "/dataset/columns/label",
            "'negative' beside '1'; labels are all",
        ),
        ({"dataset": {"source": "data.jsonl", "max_length": 4096}}, "/dataset/max_length", "1024 tokens only"),
        ({"dataset": {"source": "data.jsonl", "max_length": 0}}, "/dataset/max_length", "greater than or equal to 8"),
        ({"dataset": {"source": "/etc/hosts.jsonl"}}, "/dataset/source", "outside the allowed folders"),
        ({"search": {"levers": ["atention"]}}, "/search/levers/0", "known levers: precision"),
        ({"search": {"fixed": {"attention": "fast"}}}, "/search/fixed/attention", "it has: eager, sdpa"),
        (
            {"search": {"fixed": {"precision": "fp16-mixed"}}, "hardware": {"device": "cpu"}},
            "/search/fixed/precision",
            "precision=fp16-mixed needs an NVIDIA GPU, and hardware.device is cpu",
        ),
        ({"search": {"minutes": -1}}, "/search/minutes", "greater than 0"),
        ({"search": {"verify": "deep"}}, "/search/verify", "'quick', 'standard' or 'strict'"),
        ({"training": {"effective_batch_size": 0}}, "/training/effective_batch_size", "greater than or equal to 1"),
        ({"training": {"learning_rate": "high"}}, "/training/learning_rate", "not 'high'"),
        ({"task": "image-classification"}, "/task", "there are: causal-lm, masked-lm, sequence-classification"),
        ({"method": ["lora", "magic"]}, "/method/1", "'lora', 'qlora' or 'full'"),
        ({"colour": "red"}, "/colour", "not a known field"),
        ({"dataset": "d.jsonl"}, "/dataset", "dataset: must be a mapping, not 'd.jsonl'"),
        ({"search": {"levers": "precision"}}, "/search/levers", "must be a list, not 'precision'"),
        ({"search": {"seed": 2**32}}, "/search/seed", "less than or equal to 4294967295"),
        ({"training": {"seed": 10**30}}, "/training/seed", "less than or equal to"),
        ({"training": {"epochs": "inf"}}, "/training/epochs", "must be a finite number"),
        ({"training": {"max_grad_norm": 10**400}}, "/training/max_grad_norm", "must be a number"),
        ({"training": {"effective_batch_size": True}}, "/training/effective_batch_size", "cannot be true"),
        ({"training": {"effective_batch_size": 1.5}}, "/training/effective_batch_size", "must be a whole number"),
        ({"lora": {"target_modules": ["q", 5]}}, "/lora/target_modules", "text or a list of text"),
        ({"lora": {"target_modules": "(?i)[\u0001-\U0010ffff]"}}, "/lora/target_modules", "printable ASCII"),
        ({"baseline": {"note": "x" * (1 << 16)}}, "", "and 65,536 is the most that is kept"),
        ({"labels": {"a": 1}}, "/labels/a", "labels.a: must be text, not 1"),
        ({"labels": {"k" * 201: "v"}}, "/labels/" + "k" * 201, "at most 200 characters"),
        ({"labels": {"k": "v" * 201}}, "/labels/k", "at most 200 characters"),
        ({"hardware": {"name": "x" * 201}}, "/hardware/name", "at most 100 characters"),
        ({"hardware": {"memory_gib": 1e300}}, "/hardware/memory_gib", "less than or equal to"),
        ({"hardware": {"device": "gpu"}}, "/hardware/device", "'gpu' is no kind of device; NVIDIA's GPUs are 'cuda'"),
        ({"name": "a\0b"}, "", "name holds a NUL"),
        ({"name": "a\nb"}, "/name", "name: must be one line of text without control characters, not 'a\\nb'"),
        ({"name": "\x1b[2J"}, "/name", "not '\\x1b[2J'"),
        ({"name": "  "}, "/name", "must be one line of text"),
        ({"labels": {"a/b": "\u202etxt"}}, "/labels/a~1b", "control characters"),
        ({"labels": {"\0": "v"}}, "", "labels holds a NUL"),
        ({"baseline": {"a": ["\ud83d"]}}, "", "baseline.a holds a NUL or half a character"),
        ({"baseline": 5}, "/baseline", "must be 'default' or a mapping of TrainingArguments, not 5"),
        ({"baseline": {"a": {"b": "x"}, "optim": ["x"]}}, "/baseline/optim", "must be text"),
        ({"baseline": {"per_device_train_batch_size": 2**40}}, "/baseline/per_device_train_batch_size", "from 1 to"),
        (
            {"baseline": {"gradient_acumulation_steps": 2}},
            "/baseline/gradient_acumulation_steps",
            "did you mean gradient_acc",
        ),
        ({"baseline": {"fp16": True, "bf16": True}}, "/baseline/fp16", "a run is in bf16 or in fp16"),
        ({"baseline": {"fp16": True}, "hardware": {"device": "cpu"}}, "/baseline/fp16", "needs an NVIDIA GPU"),
        (
            {"search": {"fixed": {"quantization": "nf4"}}, "method": "lora"},
            "/search/fixed/quantization",
            "quantization=nf4 means nothing to causal-lm with method lora",
        ),
        (
            {"task": "masked-lm", "dataset": {"source": "x", "columns": {"label": "y"}}},
            "",
            "masked-lm has no label column, it reads text",
        ),
        ({"baseline": {"per_device_train_batch_size": 0}}, "/baseline/per_device_train_batch_size", "from 1 to"),
    ],
)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_one_sentence_and_a_pointer(
    api: TestClient, job: Make, changes: dict[str, Any], pointer: str, words: str
) -> None:
    answer = api.post("/v1/jobs", content=json.dumps(job(**changes)), headers=JSON)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "invalid-job" and words in problem["detail"], problem
    assert pointer in [mistake["pointer"] for mistake in problem["errors"]]
    assert "Traceback" not in problem["detail"] and "\n" not in problem["detail"]
    assert api.get("/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
class TestOthers:
    def test_two_mistakes_are_both_told(self, api: TestClient, job: Make) -> None:
        problem = api.post("/v1/jobs", json=job(colour="red", training={"epochs": 0})).json()
        assert {mistake["pointer"] for mistake in problem["errors"]} == {"/colour", "/training/epochs"}

    def test_contradictory_fixed_choices(self, api: TestClient, job: Make, root: Path) -> None:
        (root / "classes.csv").write_text("text,label\ngood,1\nbad,0\n")
        body = job(
            task="sequence-classification",
            dataset={"source": "classes.csv"},
            search={"fixed": {"batching": "packed"}},
        )
        problem = api.post("/v1/jobs", json=body).json()
        assert (
            problem["status"] == 422 and "batching=packed cannot be with sequence-classification" in problem["detail"]
        )

    def test_broken_yaml(self, api: TestClient) -> None:
        answer = api.post("/v1/jobs", content="model: [", headers=YAML)
        assert answer.status_code == 400 and answer.json()["code"] == "malformed-body"
        assert "line 1" in answer.json()["detail"]
        assert api.post("/v1/jobs", content="just text", headers=YAML).status_code == 400
        assert api.post("/v1/jobs", content=b"\xff\xfe\x00", headers=YAML).status_code == 400

    def test_a_large_body(self, api: TestClient) -> None:
        answer = api.post("/v1/jobs", content=b"x" * (30 << 20), headers=JSON)
        assert answer.status_code == 413 and answer.json()["code"] == "body-too-large"

    def test_a_large_body_without_a_length(self, api: TestClient) -> None:
        answer = api.post("/v1/jobs", content=(b"x" * 65536 for _ in range(480)), headers=JSON)
        assert answer.status_code == 413

    def test_a_path_outside_the_roots(self, api: TestClient, job: Make, root: Path, tmp_path: Path) -> None:
        outside = tmp_path / "secret.jsonl"
        outside.write_text((root / "data.jsonl").read_text())
        os.symlink(outside, root / "link.jsonl")
        for source in (str(outside), "../secret.jsonl", "./link.jsonl"):
            problem = api.post("/v1/jobs", json=job(dataset={"source": source})).json()
            assert "outside the allowed folders" in problem["detail"], source

    def test_the_hubs_cache_counts_as_a_root(self, api: TestClient, job: Make, settings: Settings) -> None:
        blob = settings.hub_cache / "blobs" / "b"
        blob.parent.mkdir(parents=True)
        blob.write_text('{"prompt": "a", "completion": "b"}\n')
        os.symlink(blob, settings.hub_cache / "d.jsonl")
        source = str(settings.hub_cache / "d.jsonl")
        assert api.post("/v1/jobs", json=job(dataset={"source": source})).status_code == 202

    def test_code_and_pickles_only_where_allowed(
        self, api: TestClient, job: Make, root: Path, settings: Settings
    ) -> None:
        (root / "code").mkdir()
        (root / "code" / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "x.Y"}}))
        (root / "pickle").mkdir()
        (root / "pickle" / "config.json").write_text("{}")
        (root / "pickle" / "pytorch_model.bin").write_bytes(b"")
        for name, words in (("code", "trust_remote_code"), ("pickle", "pickle")):
            assert words in api.post("/v1/jobs", json=job(model={"source": name})).json()["detail"]
        with here(settings.model_copy(update={"allow_remote_code": True, "allow_pickle": True})) as free:
            assert free.post("/v1/jobs", json=job(model={"source": "code", "weights": "random"})).status_code == 202
            assert free.post("/v1/jobs", json=job(model={"source": "pickle"})).status_code == 202

    def test_an_encoder_decoder_is_refused_with_what_is_supported(self, api: TestClient, job: Make, root: Path) -> None:
        (root / "t5").mkdir()
        (root / "t5" / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
        problem = api.post("/v1/jobs", json=job(model={"source": "t5", "weights": "random"})).json()
        assert problem["detail"] == (
            "model.source: t5 models have an encoder and a decoder, which no task trains; supported are decoders, "
            "such as Llama and Qwen, and encoders, such as BERT."
        )

    def test_unknown_places_and_wrong_queries(self, api: TestClient, job: Make) -> None:
        assert api.get("/v1/jobs/none").json()["code"] == "not-found"
        assert api.get("/v1/trials/none").status_code == 404
        assert api.get("/nowhere").json()["code"] == "not-found"
        assert api.put("/v1/jobs").json()["code"] == "not-allowed"
        assert api.get("/v1/jobs", params={"status": "done"}).json()["code"] == "bad-query"
        assert api.get("/v1/jobs", params={"label": "x"}).status_code == 422
        assert api.get("/v1/jobs", params={"cursor": "x"}).status_code == 422
        assert api.get("/v1/jobs", params={"limit": 0}).status_code == 422
        for cursor in ("\u00b2", "9" * 30, "-1", ""):
            assert api.get("/v1/jobs", params={"cursor": cursor}).json()["code"] == "bad-query", cursor
        job_id = api.post("/v1/jobs", json=job()).json()["id"]
        assert api.get(f"/v1/jobs/{job_id}/events", params={"after": 10**30}).json()["code"] == "bad-query"
