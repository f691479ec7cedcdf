# Two commands do everything on a fresh machine: `make demo` and `make test`. `make lint` checks the code.
PYTHON ?= python3
# `make wheelhouse PYTHON=3.12` names a version, not a program.
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python3,$(PYTHON))
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test chaos lint install clean wheelhouse
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(INTERPRETER) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dynotune needs Python 3.11 or newer")'
	$(INTERPRETER) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,parquet,metrics,dev]'
	touch $@

examples/data/functions.jsonl: examples/stdlib_data.py | install
	$(BIN)/python examples/stdlib_data.py --out examples/data

demo: install examples/data/functions.jsonl
	$(BIN)/dynotune tune examples/functions-lora.yaml

test: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -q -m alone

# The tests of what survives, for longer: 1,200 trials under 40 SIGKILLs and 20 SIGSTOPs, 6,250 calls against a model.
chaos: install
	DYNOTUNE_CHAOS=1 $(BIN)/python -m pytest -q tests/service/test_machine.py tests/runner/test_storm.py

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
	rm -rf $(VENV) examples/data dynotune-out wheelhouse
