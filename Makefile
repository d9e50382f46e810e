# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-all` runs the slow tests too.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS := constraints.txt
INSTALLED := .venv/installed
FOR_DEVELOPERS := .venv/installed-for-developers

.PHONY: demo test test-all bench gpu-check clean

demo: $(INSTALLED)
	@bash scripts/demo

test: $(FOR_DEVELOPERS)
	@bash scripts/check

test-all: $(FOR_DEVELOPERS)
	@bash scripts/check all

bench: $(FOR_DEVELOPERS)
	$(BIN)/python benchmarks/run_all.py

# Needs a GPU and any PyTorch, and no set-up. `GROUPS=truth,env` names groups; `REHEARSE=1` shows without a GPU that the
# check itself works. docs/gpu.md says what it found last, and is made by scripts/gpu_page.py.
gpu-check:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check --out $${OUT:-gpu-check} \
	  $(if $(GROUPS),--groups $(GROUPS)) $(if $(REHEARSE),--rehearse)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[pytorch,examples]'
	@touch $(INSTALLED)

$(FOR_DEVELOPERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $(FOR_DEVELOPERS)

clean:
	rm -rf .venv .flatout .mypy_cache .pytest_cache .ruff_cache build dist
