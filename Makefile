# Every target sets up what it needs in .venv and touches nothing outside the checkout.
PYTHON ?= python3
BIN := .venv/bin
# Each file's tests stay in one process, which has one thread: processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: demo test test-all gpu-test check format docs clean

demo: .venv/.installed  ## train BackProp and ProxProp side by side on embedded data; ends in out/compare/report.html
	$(BIN)/proxprop compare

test: .venv/.installed  ## the test suite without full crosses of cases, doctests included
	$(PYTEST) -m "not slow"

test-all: .venv/.installed  ## every test
	$(PYTEST) -m ""

gpu-test:  ## every test that needs a GPU, in the Python that has torch for it; writes results/gpu-tests.json
	$(PYTHON) tests/gpu_record.py

check: .venv/.installed  ## format, lint, types, and the tests of `make test`: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

format: .venv/.installed  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/.installed  ## rewrite the documents that are made from tests and records
	$(BIN)/python tests/compatibility.py > docs/compatibility.md.new && mv docs/compatibility.md.new docs/compatibility.md
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/report.py > docs/performance.md.new && mv docs/performance.md.new docs/performance.md
	$(BIN)/python benchmarks/scaling.py > docs/scaling.md.new && mv docs/scaling.md.new docs/scaling.md
	$(BIN)/python benchmarks/running.py > docs/running.md.new && mv docs/running.md.new docs/running.md
	$(BIN)/proxprop bench write
	$(BIN)/python -m proxprop.lab.peers.page > docs/peers.md.new && mv docs/peers.md.new docs/peers.md

clean:  ## remove everything that was built or installed
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --constraint constraints.txt --editable '.[dev]'
	touch $@
