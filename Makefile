# Everything runs in the project's own virtual environment, which the first target makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup system check test test-all demo demo-pipeline demo-hosts bench bench-pipeline bench-peer bench-disk bench-ladder bench-policies scar chaos chaos-disk chaos-hosts format clean

setup: $(READY)

# torch first and alone: anything that depends on it would otherwise choose a newer one, with gigabytes of CUDA
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

# what the tests need besides Python packages
system:
	sh tests/install_system.sh

check: setup
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

# a file's tests stay together: they share undisturbed runs
test: setup system
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 12

test-all: setup system
	REGROW_TEST_ALL=1 $(BIN)/python -m pytest -q -n 2 --durations 12

demo: setup
	$(BIN)/python examples/demo.py

demo-pipeline: setup
	$(BIN)/python examples/demo.py --pipeline

demo-hosts: setup system
	$(BIN)/python examples/demo_hosts.py

bench: setup
	$(BIN)/python bench/data_parallel.py

bench-pipeline: setup
	$(BIN)/python bench/pipeline.py

bench-peer: setup system
	$(BIN)/python bench/peer.py

bench-disk: setup
	$(BIN)/python bench/disk.py

bench-ladder: setup
	$(BIN)/python bench/ladder.py

bench-policies: setup
	$(BIN)/python bench/policies.py

scar: setup
	$(BIN)/python bench/scar.py

chaos: setup
	$(BIN)/python bench/chaos.py --kills 500

chaos-disk: setup
	$(BIN)/python bench/chaos_disk.py --kills 100

chaos-hosts: setup system
	$(BIN)/python bench/chaos_hosts.py --cuts 50

format: setup
	$(BIN)/ruff format src tests bench examples
	$(BIN)/ruff check --fix src tests bench examples

clean:
	rm -rf $(VENV) build src/*.egg-info bench/out
