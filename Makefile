# Install, demo, tests. A fresh clone needs python3 (3.11 or newer, with venv) and make; the rest is installed here. `make faults`
# needs gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPS := $(VENV)/.develops
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUESTION ?= How do plants make food? Answer in two sentences.
# hundreds of processes import the same modules: what one has compiled, the others read
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --quiet --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: install dev demo test test-all fuzz fuzz-coverage faults check fix bench cycles overhead docs table wheel wheel-cuda clean

# what running and serving need
install: $(INSTALLED)

# also tests and linters
dev: $(DEVELOPS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("auraflux needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[serve]'
	@touch $@

$(DEVELOPS): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $(INSTALLED) $@

# fetch a small model on first use and let it answer with the compressed cache
demo: $(INSTALLED)
	$(BIN)/auraflux generate --chat --temperature 0 --prompt "$(QUESTION)" --max-tokens 120

# everything that runs without a GPU in a few minutes
test: $(DEVELOPS)
	$(PYTEST) -m "not slow and not gpu"

# also the slow tests, and those for a GPU where there is one
test-all: $(DEVELOPS)
	$(PYTEST)

# inputs by chance for everything that strangers may give; FUZZ="--only 'gguf-*' --processes 8" for more, see docs/fuzzing.md
SECONDS ?= 60
FUZZ ?=
fuzz: $(DEVELOPS)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ)

# which branches of the modules at the boundary they reach; needs the package coverage
BOUNDARY := validation weights/fields weights/formats/* weights/formats/methods/* weights/experts/packed_files \
	weights/convert/journal weights/download/checksums models/config quant/gguf_blocks quant/gguf_layouts \
	cache/prefix/disk engine/calibration engine/sampling tokenizer/tokenizer tokenizer/gguf_vocabulary distributed/parallel eval/state \
	serve/transport/body serve/failures
comma := ,
space := $() $()
fuzz-coverage: $(DEVELOPS)
	$(BIN)/python -m coverage run --branch --include='$(subst $(space),$(comma),$(BOUNDARY:%=auraflux/%.py))' \
		-m tests.fuzz --seconds $(SECONDS) $(FUZZ)
	$(BIN)/python -m coverage report --show-missing

# every n-th write, read and allocation of all that writes files fails, is torn, or is the last before a kill
faults: $(DEVELOPS)
	$(BIN)/python -m tests.faults

check: $(DEVELOPS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy auraflux

fix: $(DEVELOPS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEVELOPS)
	@mkdir -p bench/results
	$(BIN)/auraflux bench ops --save bench/results

# what llvm-mca says of the CPU kernels' inner loops on processors that are not here; needs Debian's llvm-19, or newer
cycles: $(DEVELOPS)
	$(BIN)/python -m bench.lab.cycles

# what Python takes around the CPU kernels of each op, where steps are not replayed
overhead: $(DEVELOPS)
	$(BIN)/python -m bench.lab.overhead

# docs/cli.md, docs/ops.md and docs/kernels.md
docs: $(DEVELOPS)
	$(BIN)/python -m auraflux.cli.output.manual docs

# docs/tested.json, docs/tested.md and the README's table: which families the tests hold to other libraries, in which formats
TABLE := tests/models tests/weights/formats/test_methods.py tests/weights/convert/test_mlx_folder.py tests/weights/formats/test_gguf.py \
	tests/weights/formats/test_gguf_models.py tests/weights/formats/test_gguf_llama_cpp.py tests/loading/test_smollm2.py tests/loading/test_gemma3_270m.py
table: $(DEVELOPS)
	$(PYTEST) -m "not gpu" -p tests.tested --tested build/tested.json $(TABLE)
	$(BIN)/python -m tests.tested build/tested.json

# dist/auraflux-*.whl and .tar.gz, and dist/auraflux_kernels_cpu-*.whl with the CPU kernels of this architecture and Python,
# which are compiled for minutes; LEVELS=avx2,avx512-vnni for some processors only (auraflux/ops/simd/compile/levels.py)
wheel: $(INSTALLED)
	$(PIP) install -c constraints.txt build
	$(BIN)/python -m build
	$(BIN)/python -m wheels.build $(if $(LEVELS),--levels $(LEVELS)) dist

# dist/auraflux_kernels_cuda-*.whl, on any machine with triton: CUDA kernels of some models for some GPUs, compiled for about a second
# each by every core; GPUS=9.0 and SHAPES=llama-8b,qwen3-30b-a3b for fewer
wheel-cuda: $(INSTALLED)
	$(BIN)/python -m wheels.build_cuda $(if $(GPUS),--gpus $(GPUS)) $(if $(SHAPES),--shapes $(SHAPES)) dist

# what building and testing leave behind; the environment stays
clean:
	rm -rf build dist .coverage *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find auraflux tests -name __pycache__ -type d -prune -exec rm -rf {} +
