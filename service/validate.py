"""Checks a submitted job as far as is possible without a worker: levers, paths, columns and the model's files."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError

from service.contract.base import Contract
from service.contract.form import form_of
from service.contract.job import JobSpec
from service.contract.paths import UPLOAD, Roots, looks_local, outside
from service.errors import InvalidJob, invalid_job, pointer
from service.jobtext import read
from service.levers import LEVERS, circumstances, excluded, unknown
from service.model_folder import config_of, refused_code, refused_weights
from service.rows import ENDINGS, TooLong
from service.rows import read as read_rows
from service.scaling import ACCUMULATION, MICRO
from service.settings import Settings
from service.tasks import TASKS, untrainable
from service.text import listed

Asked = TypeVar("Asked", bound=Contract)
LONGEST_JOB = 64 << 10  # characters
LONGEST_PATTERN = 500  # characters of a regular expression
LOOKED_AT = 200  # rows of a dataset's file that are checked here; the worker checks all of them
# How alike a name is to an argument that it is taken for a slip of, 1 for the same. One letter less is at 0.98;
# per_device_eval_batch_size, which is another argument, is at 0.87 of per_device_train_batch_size.
SURELY_MEANT = 0.93
MOST_READ = 1 << 20  # characters of that file that are read here, so that no request takes much memory


def parse(body: bytes, kind: type[Asked]) -> Asked:
    """The model of that kind that a YAML or JSON text describes; MalformedBody or InvalidJob when it describes none."""
    return check(read(body, "The body"), kind)


def check(data: dict[str, Any], kind: type[Asked]) -> Asked:
    """The model of that kind that parsed data describe; InvalidJob with all mistakes when they describe none."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise invalid_job(error) from error


def validate(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidJob with one sentence for each mistake that the control plane can see."""
    roots = Roots(settings.data_roots, settings.hub_cache, settings.uploads)
    mistakes = _lines(spec) + _stated(spec)
    mistakes += _readable("model.source", lambda: _model(spec, roots, settings))
    mistakes += _readable("dataset.source", lambda: _dataset(spec, roots))
    mistakes += _readable("dataset.chat_template", lambda: _template(spec, roots))
    _refuse(mistakes)


def validate_model(spec: JobSpec, settings: Settings) -> None:
    """Like `validate`, for an estimate, which reads neither the data nor the model's weights."""
    roots = Roots(settings.data_roots, settings.hub_cache, settings.uploads)
    drawn = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": "random"})})
    _refuse(_stated(spec) + _readable("model.source", lambda: _model(drawn, roots, settings)))


def _refuse(mistakes: list[dict[str, str]]) -> None:
    """InvalidJob with these mistakes, if there are any."""
    if mistakes:
        raise InvalidJob(" ".join(mistake["detail"] for mistake in mistakes), mistakes)


def _stated(spec: JobSpec) -> list[dict[str, str]]:
    """The mistakes that the text of a job or an estimate shows by itself, without its files."""
    return _size(spec) + _device(spec) + _levers(spec) + _adapter(spec)


def _size(spec: JobSpec) -> list[dict[str, str]]:
    """The mistake in how long the job is, which is read with every list of jobs."""
    length = len(spec.model_dump_json())
    if length <= LONGEST_JOB:
        return []
    return [_mistake("", f"The job has {length:,} characters as JSON, and {LONGEST_JOB:,} is the most that is kept.")]


def _device(spec: JobSpec) -> list[dict[str, str]]:
    """The mistake of the device `gpu`: looked for only here, so that jobs stored with it remain readable."""
    if spec.hardware.device != "gpu":
        return []
    return [_mistake("/hardware/device", "hardware.device: 'gpu' is no kind of device; NVIDIA's GPUs are 'cuda'")]


def _adapter(spec: JobSpec) -> list[dict[str, str]]:
    """The mistake in the adapter's modules: peft takes a text as a regular expression of their names."""
    pattern = spec.lora.target_modules if isinstance(spec.lora.target_modules, str) else ""
    if len(pattern) > LONGEST_PATTERN:  # what takes minutes to compile is longer
        said = f"has {len(pattern)} characters, and {LONGEST_PATTERN} is the most"
    elif re.search("[^ -~]", pattern):  # a range of all letters that there are takes a second to compile
        said = "holds more than printable ASCII, of which the names of modules are made"
    else:
        try:
            re.compile(pattern)
            return []
        except (re.error, OverflowError, RecursionError) as error:
            said = f"is no regular expression ({error}); a list takes names as they are"
    return [_mistake("/lora/target_modules", f"lora.target_modules: {said}")]


def _lines(spec: JobSpec) -> list[dict[str, str]]:
    """The mistakes in the name and the labels, which lists of jobs show: each must be one line that can be read."""
    texts = [("/name", "name", spec.name)]
    texts += [(pointer(("labels", key)), "labels", f"{key}={value}") for key, value in spec.labels.items()]
    return [
        _mistake(at, f"{field}: must be one line of text without control characters, not {text!r:.80}")
        for at, field, text in texts
        if not text.isprintable() or not text.strip()
    ]


def _readable(field: str, look: Callable[[], list[dict[str, str]]]) -> list[dict[str, str]]:
    """The mistakes that `look` returns; that a file cannot be read (its OSError) is one as well."""
    try:
        return look()
    except OSError as error:
        text = f"{field}: {error.filename} cannot be read ({error.strerror})"
        return [_mistake(_pointer(field), text)]


def _pointer(field: str) -> str:
    """The JSON pointer of a field whose name has dots, such as `model.source`."""
    return "/" + field.replace(".", "/")


def _mistake(at: str, detail: str) -> dict[str, str]:
    return {"pointer": at, "detail": detail.rstrip(".") + "."}


def _levers(spec: JobSpec) -> list[dict[str, str]]:
    search = spec.search
    found = []
    for at, name in enumerate(search.levers or ()):
        if problem := unknown(name):
            found.append(_mistake(f"/search/levers/{at}", f"search.levers: {problem}"))
    for name, choice in search.fixed.items():
        problem = unknown(name, choice)
        if not problem and LEVERS[name].choice(choice).barred(spec.hardware.device):
            problem = f"{name}={choice} needs an NVIDIA GPU, and hardware.device is {spec.hardware.device}"
        if not problem and not _applies(spec, name, choice):
            problem = f"{name}={choice} means nothing to {spec.task} with method {' or '.join(spec.method)}"
        if problem:
            found.append(_mistake(f"/search/fixed/{name}", f"search.fixed: {problem}"))
    if found:
        return found
    for method in spec.method:
        clash = excluded({**search.fixed, **circumstances(spec, method)})
        if clash:
            names = ", ".join(f"{name}={search.fixed[name]}" for name in clash.when if name in search.fixed)
            found.append(_mistake("/search/fixed", f"search.fixed: {names} cannot be with {spec.task}: {clash.reason}"))
    if isinstance(spec.baseline, dict):
        found += _baseline(spec.baseline)
        for barred in (one for lever in LEVERS.values() for one in lever.choices if one.barred(spec.hardware.device)):
            for name in {name for asked in barred.asked_by if asked.holds(spec.baseline) for name in asked.arguments}:
                text = f"baseline.{name} needs an NVIDIA GPU, and hardware.device is {spec.hardware.device}"
                found.append(_mistake(f"/baseline/{name}", text))
    return found


def _applies(spec: JobSpec, name: str, choice: str) -> bool:
    """Whether a fixed choice has an effect with the task and at least one of the methods, or is the baseline's."""
    lever = LEVERS[name]
    return choice == lever.baseline or any(lever.applies(method, spec.task) for method in spec.method)


def _baseline(mine: dict[str, Any]) -> list[dict[str, str]]:
    found = []
    asked = [ask for lever in LEVERS.values() for choice in lever.choices for ask in choice.asked_by]
    read = {MICRO, ACCUMULATION, *(name for ask in asked for name in ask.arguments)}
    # Most others are arguments that change no speed; what is one letter off is a mistake.
    for name in [name for name in mine if name not in read]:
        if near := get_close_matches(name, read, n=1, cutoff=SURELY_MEANT):
            found.append(_mistake(f"/baseline/{name}", f"baseline.{name} is not known; did you mean {near[0]}?"))
    for name in (MICRO, ACCUMULATION):
        value = mine.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            text = f"baseline.{name} must be a whole number from 1 to 2147483647, not {value!r:.80}"
            found.append(_mistake(f"/baseline/{name}", text))
    if mine.get("bf16") and mine.get("fp16"):
        found.append(_mistake("/baseline/fp16", "baseline.fp16: a run is in bf16 or in fp16; leave out one of the two"))
    for name in ("optim", "attn_implementation"):
        if not isinstance(value := mine.get(name, ""), str):
            found.append(_mistake(f"/baseline/{name}", f"baseline.{name} must be text, not {value!r:.80}"))
    return found


def _model(spec: JobSpec, roots: Roots, settings: Settings) -> list[dict[str, str]]:
    source = spec.model.source
    folder = roots.resolve(source)
    if not looks_local(source) and not folder.exists():
        return []  # a hub id, which only the worker looks up
    # Whether something outside exists is not told, so the order of the two checks matters.
    if sentence := outside("model.source", source, folder, roots):
        return [_mistake("/model/source", sentence)]
    if not folder.exists():
        return [_mistake("/model/source", f"model.source: {folder} does not exist")]
    try:
        config = config_of(folder, source)
    except ValueError as error:
        return [_mistake("/model/source", str(error))]
    if sentence := refused_code(config, source, settings.allow_remote_code) or untrainable(config):
        return [_mistake("/model/source", sentence)]
    found = []
    if spec.model.weights == "pretrained" and (refused := refused_weights(folder, source, settings.allow_pickle)):
        field, sentence = refused
        found.append(_mistake(_pointer(field), sentence))
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and spec.dataset.max_length > limit:
        text = f"dataset.max_length is {spec.dataset.max_length}, but the model has positions for {limit} tokens only"
        found.append(_mistake("/dataset/max_length", text))
    return found


def _dataset(spec: JobSpec, roots: Roots) -> list[dict[str, str]]:
    source = spec.dataset.source
    path = roots.resolve(source)
    if not looks_local(source) and not path.exists():
        return []
    if sentence := outside("dataset.source", source, path, roots):
        return [_mistake("/dataset/source", sentence)]
    if not path.exists():
        named = source if source.startswith(UPLOAD) else path
        return [_mistake("/dataset/source", f"dataset.source: {named} does not exist")]
    if not (path.is_file() or path.is_dir()):
        return [_mistake("/dataset/source", f"dataset.source: {path} is neither a file nor a folder")]
    if path.is_dir() or path.suffix == ".parquet":
        return []  # only the worker reads folders and parquet files
    if path.suffix not in ENDINGS:
        return [_mistake("/dataset/source", f"dataset.source: datasets are read from {', '.join(ENDINGS)} files")]
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(islice(read_rows(path, MOST_READ), LOOKED_AT))
    except TooLong:
        if not rows:
            return []  # only the worker reads that much
    except ValueError as error:
        return [_mistake("/dataset/source", f"dataset.source: {error}")]
    if not rows:
        return [_mistake("/dataset/source", f"dataset.source: {path.name} is empty")]
    return _columns(spec, rows) or _values(spec, rows)


def _columns(spec: JobSpec, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    there, columns, beside = listed(rows[0]), spec.dataset.columns, TASKS[spec.task].beside
    found = [
        _mistake(f"/dataset/columns/{kind}", f"dataset.columns.{kind}: there is no column {name!r}; there are: {there}")
        for kind, name in columns.model_dump(exclude_none=True).items()
        if name not in rows[0] and kind not in beside  # which only some rows may have, and these may come later
    ]
    column = spec.dataset.splits.column
    if column and column not in rows[0]:
        text = f"dataset.splits.column: there is no column {column!r}; there are: {there}"
        found.append(_mistake("/dataset/splits/column", text))
    if not found and (sentence := TASKS[spec.task].lacking(columns.model_dump(), rows[0])):
        found.append(_mistake("/dataset/columns", sentence))
    return found


def _values(spec: JobSpec, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The mistake of the first value that the worker could not read either, of the rows that the job reads."""
    splits, task = spec.dataset.splits, TASKS[spec.task]
    given, every = spec.dataset.columns.model_dump(), {name for row in rows for name in row}
    columns = task.columns_in(given, rows[0], every) or {}
    if splits.column:
        rows = [row for row in rows if str(row.get(splits.column)) in (splits.train, splits.validation)]
    for kind, column in columns.items():
        if kind in task.beside and given[kind] is None:
            continue  # left out where it does not fit
        try:
            form_of(task, {kind: column}, rows)
        except ValueError as error:
            return [_mistake(f"/dataset/columns/{kind}", str(error))]
    return []


def _template(spec: JobSpec, roots: Roots) -> list[dict[str, str]]:
    """The mistake in the path of the job's chat template, if it names one."""
    if spec.dataset.template_file is None:
        return []
    path = roots.resolve(spec.dataset.template_file)
    sentence = outside("dataset.chat_template", spec.dataset.template_file, path, roots)
    if sentence is None and not path.is_file():
        sentence = f"dataset.chat_template: {path} does not exist"
    return [_mistake("/dataset/chat_template", sentence)] if sentence else []
