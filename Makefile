# `make demo` and `make test` work on a fresh clone with Python >= 3.11 and make: they create .venv
# if it is missing. Later runs keep .venv until pyproject.toml changes.

VENV ?= .venv
# The Python interpreter for .venv; empty: the first suitable one in PYTHONS.
PYTHON ?=

BIN := $(VENV)/bin
SOURCES := server policies clients benchmarks tools docs examples
# The tests have run on these versions, the newest first; python3 may be another one.
PYTHONS := python3.13 python3.12 python3.11 python3 python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter of .venv. If .venv exists, run 'make clean' first."

.PHONY: demo
demo: $(VENV)/product ## Run the demo: one request from start to end, on this machine.
	@$(BIN)/moored demo

.PHONY: test
test: lint test-fast ## Run lint and the fast tests: some minutes.

.PHONY: test-all
test-all: $(VENV)/heavy lint test-fast test-heavy ## Run lint and all tests.

.PHONY: lint
lint: $(VENV)/dev ## Check format, style, types, layers, docs, and compatibility with clients.
	$(BIN)/ruff format --check $(SOURCES) tests
	$(BIN)/ruff check $(SOURCES) tests
# The check of types takes as long as all following checks together, on one core.
	@$(MAKE) --no-print-directory types & types=$$!; \
	$(BIN)/lint-imports && $(BIN)/python tools/specifications.py check \
	    && $(MAKE) --no-print-directory docs; others=$$?; \
	wait $$types && exit $$others

.PHONY: types
types: $(VENV)/dev ## Check types.
	$(BIN)/mypy --num-workers 2

.PHONY: docs
docs: $(VENV)/dev ## Build the docs into build/docs, strictly.
	$(BIN)/sphinx-build -E -q -W --keep-going -b html docs build/docs

# Tests start the product hundreds of times. Some images set PYTHONDONTWRITEBYTECODE, and without
# stored bytecode each start would compile the sources again.
test-fast test-portable test-heavy: export PYTHONDONTWRITEBYTECODE =

.PHONY: test-fast
test-fast: $(VENV)/collected ## Run the tests that take seconds.
	$(BIN)/pytest -m "not heavy" $(ON_ALL_CORES) --no-loadscope-reorder --durations 10

# If a worker crashes, pytest ends: a replacement of the worker would wait forever.
ON_ALL_CORES := -n auto --dist loadfile --max-worker-restart 0

# Tests that depend on the version of Python: of cells and their modules, and of users' code and
# files.
PORTABLE := $(addprefix tests/,clients policies/test_catalog.py policy query sandbox slots web)

.PHONY: test-portable
test-portable: demo $(VENV)/dev ## Run the demo, and the fast tests that depend on the version of Python.
	$(BIN)/pytest -m "not heavy" $(ON_ALL_CORES) --no-loadscope-reorder $(PORTABLE)

# A group in tests/conftest.py; empty: all groups.
GROUP ?=
.PHONY: test-heavy
test-heavy: $(VENV)/heavy $(if $(filter-out kubernetes,$(GROUP)),,kubernetes-tools) ## Run the tests that take minutes; with GROUP=ray only those of one group.
# Tests with Ray mostly wait, so they run at the same time as the others. The others run with
# `nice`, since Ray gives up a raylet that starts too slowly.
ifeq ($(GROUP),)
	@mkdir -p build; trap : INT; $(BIN)/pytest -m "heavy and ray" --durations 10 > build/ray.log 2>&1 & ray=$$!; \
	nice $(BIN)/pytest -m "heavy and not ray" $(ON_ALL_CORES) --no-loadscope-reorder \
	    --durations 10; others=$$?; \
	wait $$ray; ray=$$?; cat build/ray.log; exit $$((others | ray))
else ifeq ($(GROUP),ray)
	$(BIN)/pytest -m "heavy and ray" --durations 10
else
	$(BIN)/pytest -m "heavy and $(GROUP)" $(ON_ALL_CORES) --durations 10
endif

.PHONY: kubernetes-tools
kubernetes-tools: $(VENV)/heavy ## Build Kubernetes for the tests, once; without Go these tests are skipped.
	@$(BIN)/python tests/kubernetes/kubernetes_binaries.py

.PHONY: kueue
kueue: $(VENV)/heavy ## Build Kueue for python -m benchmarks.peers: some ten minutes.
	@$(BIN)/python tests/kubernetes/kubernetes_binaries.py kueue

.PHONY: kubernetes-playground
kubernetes-playground: $(VENV)/heavy ## Run a Kubernetes cluster of fake GPU nodes, and a moored.
	@$(BIN)/python tests/kubernetes/playground.py

.PHONY: format
format: $(VENV)/dev ## Format the sources, and correct style as far as tools can.
	$(BIN)/ruff format $(SOURCES) tests
	$(BIN)/ruff check --fix $(SOURCES) tests

.PHONY: specifications
specifications: $(VENV)/dev ## Write the types of the TypeScript client.
	$(BIN)/python tools/specifications.py types

.PHONY: clean
clean: ## Remove .venv and all caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# The packages for the demo: only the product.
$(VENV)/product: pyproject.toml
	@fit='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'; \
	if $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Updating $(VENV)."; \
	else \
	    chosen=; \
	    for each in $(or $(PYTHON),$(PYTHONS)); do \
	        if "$$each" -c "$$fit" >/dev/null 2>&1; then chosen=$$each; break; fi; \
	    done; \
	    if [ -z "$$chosen" ]; then \
	        echo "No suitable Python among: $(or $(PYTHON),$(PYTHONS))." >&2; \
	        echo "Moorage needs Python 3.11 or newer with venv and ensurepip." >&2; \
	        echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	        echo "For a Python in another folder: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "Setting up $(VENV) with $$("$$chosen" --version), once."; \
	    "$$chosen" -m venv --clear $(VENV); \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[server]'
	@touch $@

# Further packages for lint, the fast tests and the docs.
$(VENV)/dev: $(VENV)/product
	@$(BIN)/python -m pip install --quiet --group dev --group docs
	@touch $@

# The bytecode of the tests: without it, each worker of the first run would compile all of them.
# That run reports what cannot be collected.
$(VENV)/collected: $(VENV)/dev
	@$(BIN)/pytest -m "not heavy" --collect-only --quiet >/dev/null || true
	@touch $@

# Further packages for the heavy tests: Ray, and tools for Kubernetes, browsers and AWS.
$(VENV)/heavy: $(VENV)/dev
	@$(BIN)/python -m pip install --quiet --group heavy
	@touch $@
