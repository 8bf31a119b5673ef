# The commands for people, CI and releases. `make demo` and `make test` need Python 3.11 and make only.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: demo test quick check bench docs dist clean

# An installed environment; made anew when the dependencies change.
.venv/installed: pyproject.toml constraints.txt hatch_build.py bertkit/tokenizer/wordpiece.c bertkit/model/native/native.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/installed  ## pre-train and tune a small BERT on text that every Python has
	$(BIN)/bertkit demo --out runs/demo

test: .venv/installed  ## all tests, a process for each core; at the end the seconds of each folder
	$(PYTEST)

quick: .venv/installed  ## the tests that take less than some seconds each
	$(PYTEST) -m "not slow"

check: .venv/installed  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -m "not slow" tests/test_imports.py tests/test_docs.py

bench: .venv/installed  ## the benchmarks that take minutes; writes results/*.json (BERTKIT_DATA: data folder)
	for name in tokenization prepare pretraining finetuning embeddings inference; do \
		$(BIN)/python -m benchmarks.$$name || exit 1; done
	$(BIN)/python -m benchmarks.tables

docs: .venv/installed  ## the HTML documentation in docs/_build
	$(BIN)/sphinx-build -q -W -b html docs docs/_build

dist: .venv/installed  ## the wheel and the source archive of a release, checked
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv docs/_build dist .pytest_cache .mypy_cache .ruff_cache
