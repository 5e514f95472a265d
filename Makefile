# Every target sets up .venv by itself. Three commands matter: make demo, make test, make lint.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format test-gpu clean

demo: $(STAMP)
	$(BIN)/modenorm demo

test: lint
	$(BIN)/pytest -n 2
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 tests/kernels

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a GPU, with whatever Python environment is active there.
test-gpu:
	PYTHONPATH=src $(PYTHON) tests/record_gpu.py results/test_gpu.json

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e ".[lab,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
