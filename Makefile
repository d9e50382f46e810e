# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-all` runs the slow tests too.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS := constraints.txt
INSTALLED := .venv/installed

.PHONY: demo test test-all bench gpu-check clean

demo: $(INSTALLED)
	@bash scripts/demo

test: $(INSTALLED)
	@bash scripts/check

test-all: $(INSTALLED)
	@bash scripts/check all

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run_all.py

# Needs a GPU and any PyTorch, and no set-up; `make gpu-check REHEARSE=1` shows on a CPU that the check itself works.
gpu-check:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check --out $${OUT:-gpu-check} $(if $(REHEARSE),--rehearse)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[pytorch,examples,dev]'
	@touch $(INSTALLED)

clean:
	rm -rf .venv .flatout .mypy_cache .pytest_cache .ruff_cache build dist
