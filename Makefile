# make serve   sets up what is missing and runs the gateway on the demo model
# make test    sets up what is missing and runs the tests
# make bench   sets up parrot-bench (benchmarks, simulator) and measures the gateway's overhead
# make test-bench runs the tests of parrot-bench
# make docs    builds the documentation as a site, build/site; `python3 -m http.server -d build/site` shows it
# make drop-in runs agent frameworks against the gateway and writes docs/compatibility.md
#
# PYTHON=python3.12   the interpreter to use (3.11 to 3.13)
# ARGS="--port 8123"  arguments for `parrot-gateway serve`
# PIP_ARGS="…"        arguments for pip, e.g. --extra-index-url with PyTorch's CPU builds
# UV_DEFAULT_INDEX=…   another package index for the programs of drop-in (see uv's documentation)
# PYTEST_ARGS="-x"    arguments for pytest, instead of all tests in up to four processes

PYTHON ?= python3
VENV ?= .venv
CLIENT_VENV ?= .venv-openai3
DROP_IN_VENV ?= .venv-drop-in
DOCS_VENV ?= .venv-docs
BIN = $(VENV)/bin
ARGS ?=
PIP_ARGS ?=
NPM ?= npm
# Folders whose docstrings begin as .ci/lint_docstrings.py asks.
DOCSTRINGS ?= .ci bench tests engine scheduler parrot_gateway integrations examples
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: serve test test-bench drop-in lint format bench docs clean

serve: $(VENV)/.serve-stamp
	$(BIN)/parrot-gateway serve $(ARGS)

# Hundreds of processes start: Python keeps what it compiles, even where it is told not to elsewhere.
test: $(VENV)/.test-stamp $(CLIENT_VENV)/.stamp lint
	PYTHONDONTWRITEBYTECODE= PARROT_CLIENT_PYTHON=$(abspath $(CLIENT_VENV))/bin/python $(BIN)/python -m pytest $(PYTEST_ARGS)

test-bench: $(VENV)/.test-stamp lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -c bench/pyproject.toml $(PYTEST_ARGS) bench/tests

# Programs of others, in environments of their own; the table says which could not be installed.
drop-in: $(VENV)/.test-stamp $(DROP_IN_VENV)/bin/uv tests/drop_in/node/node_modules/.stamp
	$(BIN)/python tests/drop_in/compatibility.py --uv $(abspath $(DROP_IN_VENV))/bin/uv --python $(abspath $(DROP_IN_VENV))/bin/python --write docs/compatibility.md
	PARROT_AGENTS_PYTHON="$$($(DROP_IN_VENV)/bin/uv python find --script tests/drop_in/programs/p_openai_agents.py)" $(BIN)/python -m pytest tests/drop_in/test_linked_programs.py

lint: $(VENV)/.test-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lint_docstrings.py $(DOCSTRINGS)
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

format: $(VENV)/.test-stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.serve-stamp
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable bench
	$(BIN)/parrot-gateway bench overhead

# The pages keep their places, so that links between them are those of the repository.
docs: $(DOCS_VENV)/.stamp
	rm -rf build/docs build/site && mkdir -p build/docs
	cp --parents -r *.md docs examples deploy bench/results build/docs
	$(NPM) install --no-audit --no-fund --loglevel=error --prefix build/npm mermaid@11
	mkdir -p build/docs/assets && cp build/npm/node_modules/mermaid/dist/mermaid.min.js build/docs/assets
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf build $(VENV) $(CLIENT_VENV) $(DROP_IN_VENV) $(DOCS_VENV) tests/drop_in/node/node_modules

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Not quiet: a first start may download for minutes, and pip's lines are all there is to see of it.
$(VENV)/.serve-stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[engine]'
	@touch $@

$(VENV)/.test-stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[engine,dev]' --editable bench
	-$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[deploy]'
	@touch $@ $(VENV)/.serve-stamp

# The openai client 3.x cannot share an environment with everything that 2.x can: the same
# client tests run once in each.
$(CLIENT_VENV)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(CLIENT_VENV)
	$(CLIENT_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) 'openai>=3,<4' 'pytest>=8.4,<10' 'pytest-asyncio>=1.2,<2' 'pytest-timeout>=2.4,<3'
	@touch $@

$(DOCS_VENV)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) 'mkdocs-material>=9.7,<10'
	@touch $@

# Each Python program names its libraries and gets them in an environment of its own, by uv.
$(DROP_IN_VENV)/bin/uv:
	$(PYTHON) -m venv $(DROP_IN_VENV)
	$(DROP_IN_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) 'uv>=0.9,<1'

tests/drop_in/node/node_modules/.stamp: tests/drop_in/node/package.json
	cd tests/drop_in/node && $(NPM) install --no-audit --no-fund --no-package-lock --loglevel=error || true
	@mkdir -p $(@D) && touch $@
