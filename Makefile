# Every target sets up what it needs in .venv and touches nothing outside the checkout but pip's own cache.
PYTHON ?= python3
BIN := .venv/bin
# Each file's tests stay in one process, which has one thread: processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile
# Those that the documents quote, first what has changed most since.
GPU_RECORDS := $(addprefix results/bench/,running-h200.json h200-ways-gpt.json h200-ways-mlp-fp32.json \
  h200-ways-resnet.json h200-ways-autoencoder.json ablation.json h200-rotation.json h200-bf16.json h200.json)
GPU_SECONDS ?= inf

.PHONY: demo test test-all coverage gpu-test gpu-records check format docs site linkcheck package rehearsal clean

demo: .venv/.lab  ## train BackProp and ProxProp side by side on embedded data; ends in out/compare/report.html
	$(BIN)/proxprop compare

test: .venv/.dev  ## the test suite without full crosses of cases, doctests included
	$(PYTEST) -m "not slow"

test-all: .venv/.dev  ## every test
	$(PYTEST) -m ""

coverage: .venv/.dev  ## the lines and branches that `make test` covers; writes results/coverage.json
	$(BIN)/python tests/coverage_record.py

gpu-test:  ## every test that needs a GPU, in the Python that has torch for it; writes results/gpu-tests.json
	$(PYTHON) tests/gpu_record.py

gpu-records:  ## measure again what a GPU measured at other commits; GPU_SECONDS=540 begins nothing new after nine minutes
	PYTHONPATH=src $(PYTHON) benchmarks/again.py --seconds $(GPU_SECONDS) $(GPU_RECORDS)

check: .venv/.dev  ## format, lint, types, and the tests of `make test`; CI runs it and `make site`
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --ignore-missing-imports examples/*.py
	$(BIN)/mypy --config-file= --ignore-missing-imports docs/gallery/*.py
	$(PYTEST) -m "not slow"

format: .venv/.dev  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/.dev  ## rewrite the documents that are made from tests and records
	$(BIN)/python tests/compatibility.py > docs/compatibility.md.new && mv docs/compatibility.md.new docs/compatibility.md
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/report.py > docs/performance.md.new && mv docs/performance.md.new docs/performance.md
	$(BIN)/python benchmarks/scaling.py > docs/scaling.md.new && mv docs/scaling.md.new docs/scaling.md
	$(BIN)/python benchmarks/running.py > docs/running.md.new && mv docs/running.md.new docs/running.md
	$(BIN)/python benchmarks/bounds.py write > docs/bounds.md.new && mv docs/bounds.md.new docs/bounds.md
	$(BIN)/proxprop bench write
	$(BIN)/python -m proxprop.lab.peers.page > docs/peers.md.new && mv docs/peers.md.new docs/peers.md

site: .venv/.site  ## the documentation, every cell and example of it run, into out/site/index.html
	$(BIN)/sphinx-build -W --keep-going --jobs auto --doctree-dir out/doctrees docs out/site
	$(BIN)/python docs/extensions/check_site.py out/site

linkcheck: .venv/.site  ## whether the site's links to other sites work; needs a network
	$(BIN)/sphinx-build --builder linkcheck --doctree-dir out/doctrees docs out/linkcheck

package: .venv/.package  ## build sdist and wheel into dist/, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/package_check.py

rehearsal: .venv/.package  ## release this commit to stand-ins on this machine: tag, upload, install, next version
	$(BIN)/python tests/rehearsal.py

clean:  ## remove everything that was built or installed
	rm -rf .venv out dist docs/auto_gallery docs/sg_execution_times.rst .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One stamp for each extra that a target needs: .venv/.lab, .venv/.dev, .venv/.site, .venv/.package.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv
