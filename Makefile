# Everything lives in .venv; ARGS="…" is passed on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: search test setup clean

search: setup
	$(BIN)/dsv4tune search --kernel indexer $(ARGS)

test: setup $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

setup: $(STAMP)

# Editable, so that a clone runs what it holds. TORCH="torch==2.13.0" pins it where that matters.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CI),-c tests/constraints.txt) -e .
	touch $@

$(VENV)/.installed-dev: $(STAMP) tests/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
