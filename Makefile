# What users run lives in .venv; ARGS="…" is passed on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: search test test-oldest setup clean

search: setup
	$(BIN)/dsv4tune search --kernel indexer $(ARGS)

# In an environment of its own, because it pins torch.
test: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/python -m pytest $(ARGS)

# Templates, compiler and interpreter with the oldest supported Triton, in an environment of its own.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest tests/codegen tests/tools/test_interpret.py $(ARGS)

.venv-oldest/.installed: pyproject.toml tests/constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c tests/constraints-oldest.txt -e '.[dev]'
	touch $@

setup: $(STAMP)

# Editable, so that a clone runs what it holds. Takes the newest torch; only tests and CI pin one.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv-test/.installed: pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-test .venv-oldest build dist src/*.egg-info
