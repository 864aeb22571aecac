# `make demo` and `make test` need Python 3.10 or later and nothing else: they make .venv themselves, the first without what
# only tests need. With npm, a browser is put there too, for the tests of the report.
PYTHON ?= python3
# options for the commands, as in: make bench BENCH="-n 1024 4096 --backward"
BENCH ?=
DEMO ?=

BIN := .venv/bin
RUNS := .venv/.runs
INSTALLED := .venv/.installed
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test lint bench report clean

demo: $(RUNS)
	$(BIN)/sortattn demo $(DEMO)

# threads that wait for others let these have the core: two processes have two threads each
test: export OMP_WAIT_POLICY := passive
# neighbours, which share what they compile and expect, stay in one process
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find src -name '*.cu')

bench: $(RUNS)
	$(BIN)/sortattn bench $(BENCH)

# the page of the committed results
report: $(INSTALLED)
	$(BIN)/sortattn report --results benchmarks/results --out docs

# made again only when what is to be installed has changed
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[bench]'
	touch $@

$(INSTALLED): $(RUNS)
	$(INSTALL) '.[dev]'
	$(BIN)/python tests/browser.py
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis sortattn-demo
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
