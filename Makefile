# make demo: the main job. make model: fetch SmolLM2, 90 MB to download. make test: everything CI runs; make test DEEP=1: more
# generated cases. make lab: read the book. make book: execute it, render HTML.
PYTHON ?= python3
BIN := .venv/bin
MODEL := fixtures/pycode_qwen3
SMOLLM2 := build/models/SmolLM2-135M-Instruct.Q4_1.gguf

# What pip downloads, measured on Linux with Python 3.11, and what it becomes on the disk.
SIZE_lab := 370 MB to download, 1.2 GB on the disk
SIZE_test := 410 MB to download, 1.3 GB on the disk

# Compiled kernels are kept there, under a hash of all they depend on.
export DDTREE_CACHE := $(CURDIR)/build/ptx

.PHONY: demo model test lab book clean
.DELETE_ON_ERROR:

demo: .venv/base
	$(BIN)/ddtree generate --model $(MODEL) --prompt-file fixtures/prompts/load_config.txt --compare

model: $(SMOLLM2)

test: .venv/test
	-@$(MAKE) --no-print-directory model    # without it, its tests are skipped and say so
	$(BIN)/python -m tools.run_tests $(if $(DEEP),--deep)

lab: .venv/lab
	$(BIN)/python -m tools.lab $(LABFLAGS)

book: .venv/test
	$(BIN)/python -m tools.book --jobs 2

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(SMOLLM2): | .venv/base
	$(BIN)/python -m tools.fetch_model

.venv/made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ddtree needs Python >= 3.11, this is " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/base: pyproject.toml .venv/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --config-settings editable_mode=compat
	@touch $@

.venv/test .venv/lab: .venv/%: pyproject.toml .venv/base
	@echo "Installing what 'make $*' needs: $(SIZE_$*), most of it NVIDIA's compiler; no GPU needed."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' --config-settings editable_mode=compat
	@touch $@
