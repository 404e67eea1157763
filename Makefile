# What users run lives in .venv; ARGS="…" is passed on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help search report doctor test test-oldest test-sglang docs screenshots setup clean

help:
	@echo "make search | report | doctor   what README begins with; installs into $(VENV) first; ARGS=\"...\" is passed on"
	@echo "make setup                      installs alone"
	@echo "make test                       lint, types and tests, in .venv-test; test-oldest and test-sglang in their own"
	@echo "make docs | screenshots         docs/commands.md and docs/images"
	@echo "make clean                      removes what the others installed and built"

search: setup
	$(BIN)/dsv4tune search --kernel indexer $(ARGS)

report doctor: setup
	$(BIN)/dsv4tune $@ $(ARGS)

# In an environment of its own, because it pins torch. What needs a GPU runs by itself there, else it is skipped.
test: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/python -m pytest -m "not gpu" -n 2 --dist loadfile $(ARGS)
	.venv-test/bin/python -m pytest -m gpu -q $(ARGS)

# Templates, compiler and interpreter with the oldest supported Triton, in an environment of its own.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile tests/codegen tests/tools/test_interpret.py $(ARGS)

.venv-oldest/.installed: pyproject.toml tests/constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c tests/constraints-oldest.txt -e '.[dev]'
	touch $@

# The plugin in SGLang's real code on a CPU, our kernels through the interpreter; Python 3.11 or newer.
test-sglang: .venv-sglang/.installed
	TRITON_INTERPRET=1 PYTHONPATH=tests/sglang/stubs .venv-sglang/bin/python -W ignore -m pytest -W ignore \
	    tests/sglang $(ARGS)
	PYTHONPATH=tests/sglang/stubs .venv-sglang/bin/python -W ignore -m pytest -W ignore tests/sglang/test_gpu_capture.py

.venv-sglang/.installed: pyproject.toml tests/sglang/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    -r tests/sglang/requirements.txt sglang==0.5.23
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check -c tests/sglang/requirements.txt \
	    -e . 'pytest>=8.3'
	touch $@

# docs/commands.md, from the commands' own help.
docs: .venv-test/.installed
	.venv-test/bin/python docs/commands.py

# docs/images, by Chromium (Debian: apt-get install chromium).
screenshots: .venv-test/.installed
	PYTHONPATH=tests/support .venv-test/bin/python docs/screenshots.py

setup: $(STAMP)

# Editable, so that a clone runs what it holds. Takes the newest torch; only tests and CI pin one.
$(STAMP): pyproject.toml
	@echo "installing into $(VENV): about 6 GB, most of it torch; pip says nothing meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[report]'
	touch $@

.venv-test/.installed: pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-test .venv-oldest .venv-sglang build dist src/*.egg-info
