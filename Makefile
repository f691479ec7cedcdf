# Two commands do everything on a fresh machine: `make demo` and `make test`. `make lint` checks the code.
PYTHON ?= python3
# `make wheelhouse PYTHON=3.12` names a version, not a program.
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python3,$(PYTHON))
VENV := .venv
BIN := $(VENV)/bin

# Containers often tell Python not to keep compiled code: the hundreds of processes of a run would each compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test chaos test-torchao test-exports lint install clean wheelhouse
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(INTERPRETER) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dynotune needs Python 3.11 or newer")'
	$(INTERPRETER) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,parquet,metrics,telemetry,dev]'
	touch $@

examples/data/functions.jsonl: examples/stdlib_data.py | install
	$(BIN)/python examples/stdlib_data.py --out examples/data

demo: install examples/data/functions.jsonl
	$(BIN)/dynotune tune examples/functions-lora.yaml

test: install
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -q -m alone tests/e2e

# The tests of what survives, for longer: 1,200 trials under 40 SIGKILLs and 20 SIGSTOPs, 120 under 3 crashes of
# PostgreSQL, 240 jobs whose workers die at six points of their code, 6,250 calls against a model, 33,000 requests.
chaos: install
	DYNOTUNE_CHAOS=1 $(BIN)/python -m pytest -q tests/service/test_machine.py tests/service/test_described.py \
	  tests/runner/test_storm.py tests/runner/test_failpoints.py

# The choices that need torchao, which the other tests' environment does not have, as most users' do not.
test-torchao: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/torchao -c constraints.txt torchao
	PYTHONPATH=build/torchao $(BIN)/python -m pytest -q tests/levers/test_conformance.py -k torchao

# The exports against the trainers themselves: TRL in an environment on top of this one, the others' wheels without more.
test-exports: $(VENV)-exports/.installed
	$(BIN)/python .ci/export_fields.py --check
	$(VENV)-exports/bin/python -m pytest -q tests/exports/test_real_trainers.py

$(VENV)-exports/.installed: constraints.txt | install
	$(BIN)/python -m venv $(VENV)-exports
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(VENV)-exports/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/measuring.pth
	$(VENV)-exports/bin/pip install --quiet --disable-pip-version-check -c constraints.txt trl pillow
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_lengths.py

# The wheels for a GPU machine without network: PYTHON is its version, CUDA=cuda130 trims bitsandbytes to one library.
wheelhouse: install
	$(BIN)/python .ci/wheelhouse.py $(if $(filter 3.%,$(PYTHON)),--python $(PYTHON)) $(if $(CUDA),--cuda $(CUDA))

clean:
	rm -rf $(VENV) $(VENV)-exports build examples/data dynotune-out wheelhouse
