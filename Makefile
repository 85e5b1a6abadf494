# The same commands locally and in CI. `make setup` is the first half of all of them.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.headgate-installed
OLDER_TRITON := 3.6.0
# Most tests wait for servers: four processes keep two cores busy, and threads of theirs would only be in the way.
TEST_PROCESSES ?= 4
# The rest starts whole servers, of several processes each.
REST_PROCESSES ?= 3
HEADGATE_HOME ?= $(CURDIR)/.headgate
EXTRAS := worker,embedded,postgres,dev

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-rest test-browser test-clients test-packaging test-all test-cpus test-gpu check lint types contracts migrations-check aot soak bench bench-gpu demo-model configuration cli parameters api-reference errors docs dashboards prometheus import-map format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything into it

$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headgate needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c requirements/constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c requirements/constraints.txt -e '.[$(EXTRAS)]'
	touch $(STAMP)

serve: setup ## start gateway, worker, jobs and embedded services on 127.0.0.1:8080
	@exec $(BIN)/headgate up --home $(HEADGATE_HOME) $(ARGS)

# Bytecode is kept: each process imports every test file, and every server that a test starts imports the product again.
# The files begin in the order of their folders, so that the shortest, tests/unit, are left for the end.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: setup ## unit, property, kernel and integration tests, one end-to-end smoke; starts embedded services where none answer
	$(PYTEST) -m "not rest" $(ARGS)

test-rest: setup ## the remainder: end-to-end, chaos, PostgreSQL everywhere, long histories, the benchmarks' own tests
	$(PYTEST) -n $(REST_PROCESSES) -m rest $(ARGS)

test-all: setup ## both
	$(PYTEST) $(ARGS)

# Chromium comes from the system (Debian: apt-get install chromium); pictures of all screens go to .headgate-screenshots.
test-browser: setup ## the console in a real browser: every screen, axe, pictures
	$(BIN)/python -m pip install --disable-pip-version-check -q -c requirements/constraints.txt -e '.[browser]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser $(ARGS)

# Two environments, because half of the clients need openai 2 and the others openai 3, and one for npm's.
CLIENTS := $(addprefix .venv-clients/,openai-2/.installed openai-3/.installed node/.installed)
test-clients: setup $(CLIENTS) ## other people's clients, unmodified, against a running server; installs them first (2 GB)
	HEADGATE_TEST_CLIENTS=1 $(PYTEST) tests/clients $(ARGS)

.venv-clients/openai-%/.installed: requirements/clients-openai-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r $<
	touch $@

.venv-clients/node/.installed: tests/clients/package-lock.json
	mkdir -p $(@D) && cp tests/clients/package.json tests/clients/package-lock.json $(@D)
	cd $(@D) && npm ci --no-audit --no-fund
	touch $@

# Images are built by buildah and run by bubblewrap (Debian: apt-get install buildah bubblewrap mmdebstrap systemd nginx-light caddy).
test-packaging: setup $(VENV)/tools/bin/hadolint ## wheel, images, compose file, Helm chart and units, each in a clean place
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/packaging $(ARGS)

$(VENV)/tools/bin/hadolint: requirements/packaging.txt
	$(PYTHON) -m venv $(VENV)/tools
	$(VENV)/tools/bin/python -m pip install --disable-pip-version-check -q -r requirements/packaging.txt
	touch $@

# What the engine computes with differs between CPUs: each kind hides what is beyond it.
CPUS ?= avx2 avx512 avx512_bf16 amx
test-cpus: setup ## the engine's own tests as on CPUs of other kinds
	set -e; for kind in $(CPUS); do echo "as on $$kind"; HEADGATE_ENGINE_CPU=$$kind $(PYTEST) \
	  tests/kernels tests/unit/engine_model tests/integration/model tests/integration/parallel $(ARGS); done

# Not `setup`: a machine with a GPU brings its own torch and Triton. GPU_PYTHON names the interpreter that has them.
GPU_PYTHON ?= $(PYTHON)
test-gpu: ## what only a GPU shows; needs one, with torch, Triton, transformers and pytest
	HEADGATE_TEST_GPU=1 PYTHONPATH=.:tests $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir tests/gpu tests/gpu $(ARGS)

check: lint types contracts migrations-check aot docs ## linters, types, import contracts, migrations in step with the models, kernels compiled, pages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

migrations-check: setup
	$(BIN)/headgate migrate --check-models

# The pinned Triton, and the older one that GPU images carry: registers and pipelining differ between them.
aot: setup $(VENV)/triton-$(OLDER_TRITON) ## compile every kernel configuration for sm_80 and sm_90, with its budget
	$(BIN)/python -m kernels.ahead $(ARGS)
	PYTHONPATH=$(VENV)/triton-$(OLDER_TRITON) $(BIN)/python -m kernels.ahead $(ARGS)

$(VENV)/triton-$(OLDER_TRITON): | setup
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $@.new triton==$(OLDER_TRITON)
	mv $@.new $@

configuration: setup ## write docs/configuration.md and the known names from the settings classes
	PYTHONPATH=. $(BIN)/python ops/configuration.py

cli: setup ## write docs/cli.md from the commands
	PYTHONPATH=. $(BIN)/python ops/cli.py

parameters: setup ## write the tables of docs/api.md from the table of parameters
	PYTHONPATH=. $(BIN)/python ops/parameters.py

api-reference: setup ## write docs/api-reference.md from the served description
	PYTHONPATH=. $(BIN)/python ops/api_reference.py

dashboards: setup ## write ops/grafana/*.json from the tables in ops/dashboards
	PYTHONPATH=. $(BIN)/python -m ops.dashboards.build

prometheus: setup $(VENV)/prometheus/usr/bin/promtool ## unpack Debian's Prometheus into .venv, for the tests of dashboards and alerts

$(VENV)/prometheus/usr/bin/promtool:
	rm -rf $(VENV)/prometheus && mkdir -p $(VENV)/prometheus.new
	cd $(VENV)/prometheus.new && apt-get -q download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	mv $(VENV)/prometheus.new $(VENV)/prometheus

import-map: setup ## draw docs/design/imports.svg from the imports between folders
	PYTHONPATH=. $(BIN)/python ops/import_map.py

errors: setup ## write docs/errors.md from the errors in the code
	PYTHONPATH=. $(BIN)/python ops/errors.py

docs: setup $(VENV)/docs/bin/mkdocs ## the documentation as a site, in site/; offline, and a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet

$(VENV)/docs/bin/mkdocs: requirements/docs.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --disable-pip-version-check -q -r requirements/docs.txt
	touch $@

format: setup ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: setup ## long fuzzing, chaos and soak runs
	HEADGATE_SOAK=1 $(BIN)/python -m pytest -m "chaos or slow" --timeout 3600 $(ARGS)

bench: setup ## serve.py against a fresh `headgate up`; writes a table and JSON
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-gpu: ## kernels, decode step and engine on this machine's GPU, as ratios to its measured ceilings
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

demo-model: setup ## train the demo model again (about an hour on 2 cores)
	$(BIN)/python ops/demo_model/train.py

clean: ## remove the environment and caches (not the state in .headgate)
	rm -rf $(VENV) .venv-clients .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
