# `make demo` and `make test` work on a fresh clone with Python >= 3.11 and make: each makes .venv
# first, once. A second run costs nothing until pyproject.toml changes.

VENV ?= .venv
# The interpreter that .venv is made with; empty takes the newest that is fit for it.
PYTHON ?=

BIN := $(VENV)/bin
SOURCES := server policies clients benchmarks tools docs examples
# Newest first, by the versions the tests have run on; a plain python3 may be newer still.
PYTHONS := python3.13 python3.12 python3.11 python3 python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show what there is to make.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-21s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter of .venv; 'make clean' first if there is one."

.PHONY: demo
demo: $(VENV)/product ## Show the main job, end to end, on this machine.
	@$(BIN)/moored demo

.PHONY: test
test: lint test-fast ## Check what a change breaks most often: lint and the fast tests, in minutes.

.PHONY: test-all
test-all: $(VENV)/heavy lint test-fast test-heavy ## Check everything.

.PHONY: lint
lint: $(VENV)/dev ## Check format, style, types, layers, what breaks clients, and docs.
	$(BIN)/ruff format --check $(SOURCES) tests
	$(BIN)/ruff check $(SOURCES) tests
# Types take as long as all that follows, and one core.
	@$(MAKE) --no-print-directory types & types=$$!; \
	$(BIN)/lint-imports && $(BIN)/python tools/specifications.py check \
	    && $(MAKE) --no-print-directory docs; others=$$?; \
	wait $$types && exit $$others

.PHONY: types
types: $(VENV)/dev ## Check types.
	$(BIN)/mypy

.PHONY: docs
docs: $(VENV)/dev ## Build the docs into build/docs, strictly.
	$(BIN)/sphinx-build -E -q -W --keep-going -b html docs build/docs

# Tests start the product hundreds of times: without bytecode, as many images have it, each start
# would compile it again.
test-fast test-portable test-heavy: export PYTHONDONTWRITEBYTECODE =

.PHONY: test-fast
test-fast: $(VENV)/dev ## Run the tests that take seconds.
	$(BIN)/pytest -m "not heavy" $(ON_ALL_CORES) --no-loadscope-reorder --durations 10

# Where a worker crashes, another one in its place would wait for ever, and the tests with it.
ON_ALL_CORES := -n auto --dist loadfile --max-worker-restart 0

# What tells one Python from another: cells and their modules, and what reads users' code and files.
PORTABLE := $(addprefix tests/,clients policies/test_catalog.py policy query sandbox slots web)

.PHONY: test-portable
test-portable: demo $(VENV)/dev ## Show the main job, and run the fast tests that tell one Python from another.
	$(BIN)/pytest -m "not heavy" $(ON_ALL_CORES) --no-loadscope-reorder $(PORTABLE)

# One of the groups in tests/conftest.py; empty for all.
GROUP ?=
.PHONY: test-heavy
test-heavy: $(VENV)/heavy $(if $(filter-out kubernetes,$(GROUP)),,kubernetes-tools) ## Run the tests that take minutes; GROUP=ray for those of one group.
# Tests with Ray wait most of the time, beside the others; those leave it the processors, since a
# raylet that does not start at once is given up.
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
kubernetes-tools: $(VENV)/heavy ## Build the Kubernetes that tests need, once; without Go they skip.
	@$(BIN)/python tests/kubernetes/kubernetes_binaries.py

.PHONY: kueue
kueue: $(VENV)/heavy ## Build Kueue, which only python -m benchmarks.peers runs: some ten minutes.
	@$(BIN)/python tests/kubernetes/kubernetes_binaries.py kueue

.PHONY: kubernetes-playground
kubernetes-playground: $(VENV)/heavy ## Run a Kubernetes of fake GPU nodes, and a moored beside it.
	@$(BIN)/python tests/kubernetes/playground.py

.PHONY: format
format: $(VENV)/dev ## Format the sources and mend what can be mended.
	$(BIN)/ruff format $(SOURCES) tests
	$(BIN)/ruff check --fix $(SOURCES) tests

.PHONY: specifications
specifications: $(VENV)/dev ## Write the types of the TypeScript client.
	$(BIN)/python tools/specifications.py types

.PHONY: clean
clean: ## Remove .venv and all caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# The product itself, which is all that the demo needs.
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
	        echo "No fit Python among: $(or $(PYTHON),$(PYTHONS))." >&2; \
	        echo "Moorage needs Python 3.11 or newer with venv and ensurepip." >&2; \
	        echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	        echo "One that lies elsewhere: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "Setting up $(VENV) with $$("$$chosen" --version), once."; \
	    "$$chosen" -m venv --clear $(VENV); \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[server]'
	@touch $@

# What lint, the fast tests and the docs need on top of it.
$(VENV)/dev: $(VENV)/product
	@$(BIN)/python -m pip install --quiet --group dev --group docs
	@touch $@

# What the heavy tests need on top of that: Ray, Kubernetes, browser and AWS tools.
$(VENV)/heavy: $(VENV)/dev
	@$(BIN)/python -m pip install --quiet --group heavy
	@touch $@
