# Everything that a fresh machine with Python >= 3.11 and make needs; `make test` starts from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
PROCESSES := 4
WORKERS := 2
FOLDERS := autopar strategies cost_models benchmarks examples tests

export OMP_NUM_THREADS := 1

.PHONY: install lint test test-all demo clean

install: $(VENV)/installed

# torch goes first: where a package source offers a CPU build of this version, that one is taken.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# Also the slow tests and those that need a GPU; the latter fail, and aren't skipped, where there is none.
# Two workers, each with process pools of its own: while one plans, on one core, the other trains.
test-all: lint
	$(BIN)/python -m pytest -m "" --numprocesses $(WORKERS) --dist worksteal

DEMO := $(BIN)/torchrun --standalone --nproc-per-node $(PROCESSES) examples/train_gpt2.py --compare 20

demo: install
	$(DEMO) --steps 20 --out build/pinned --pin '{"dp": 2, "tp": 2, "sequence": true}'
	$(DEMO)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
