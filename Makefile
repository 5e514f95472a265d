# Targets set up .venv by themselves. Three commands matter: make demo, make test, make lint.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs pictures format browser test-browser test-gpu clean

demo: $(STAMP)
	$(BIN)/modenorm demo

# Types are checked while the first tests run.
test: $(STAMP) browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 --dist loadfile && wait $$types
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 tests/kernels

# The report's page and the documentation in a real browser; where there is none and none can be installed, skipped.
test-browser: $(STAMP) browser
	$(BIN)/pytest tests/lab/report/test_browser.py tests/test_site.py

browser:
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) \
	  >/dev/null 2>&1 || echo "no chromium could be installed: the browser tests are skipped"

# The documentation as a site: open site/index.html. Warnings are errors.
docs: $(STAMP)
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning -d site/.doctrees docs site
	@echo "open site/index.html"

# Pictures of the report page and of the built-in data, in README.md and docs/.
pictures: demo browser
	$(BIN)/python docs/picture.py demo/report.html

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
	$(BIN)/pip install --quiet --no-compile torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e ".[lab,dev,docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache site
