# The developer's interface. A fresh clone needs python3 (3.11 or newer, with venv), make and gcc; the rest is installed here.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUESTION ?= How do plants make food? Answer in two sentences.
# hundreds of processes import the same modules: what one has compiled, the others read
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --quiet --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: install demo test test-all fuzz fuzz-coverage faults check fix bench cycles overhead docs table wheel clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("auraflux needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

# fetch a small model on first use and let it answer with the compressed cache
demo: $(INSTALLED)
	$(BIN)/auraflux generate --chat --temperature 0 --prompt "$(QUESTION)" --max-tokens 120

# everything that runs without a GPU in a few minutes
test: $(INSTALLED)
	$(PYTEST) -m "not slow and not gpu"

# also the slow tests, and those for a GPU where there is one
test-all: $(INSTALLED)
	$(PYTEST)

# inputs by chance for everything that strangers may give; FUZZ="--only 'gguf-*' --processes 8" for more, see docs/fuzzing.md
SECONDS ?= 60
FUZZ ?=
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ)

# which branches of the modules at the boundary they reach; needs the package coverage
BOUNDARY := validation weights/fields weights/formats/* weights/formats/methods/* weights/experts/packed_files \
	weights/convert/journal weights/download/checksums models/config quant/gguf_blocks cache/prefix/disk engine/calibration \
	engine/sampling tokenizer/tokenizer tokenizer/gguf_vocabulary distributed/parallel eval/state serve/transport/body serve/failures
comma := ,
space := $() $()
fuzz-coverage: $(INSTALLED)
	$(BIN)/python -m coverage run --branch --include='$(subst $(space),$(comma),$(BOUNDARY:%=auraflux/%.py))' \
		-m tests.fuzz --seconds $(SECONDS) $(FUZZ)
	$(BIN)/python -m coverage report --show-missing

# every n-th write, read and allocation of all that writes files fails, is torn, or is the last before a kill
faults: $(INSTALLED)
	$(BIN)/python -m tests.faults

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy auraflux

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@mkdir -p bench/results
	$(BIN)/auraflux bench ops --save bench/results

# what llvm-mca says of the CPU kernels' inner loops on processors that are not here; needs Debian's llvm-19, or newer
cycles: $(INSTALLED)
	$(BIN)/python -m bench.lab.cycles

# what Python takes around the CPU kernels of each op, where steps are not replayed
overhead: $(INSTALLED)
	$(BIN)/python -m bench.lab.overhead

# docs/cli.md, docs/ops.md and docs/kernels.md
docs: $(INSTALLED)
	$(BIN)/python -m auraflux.cli.output.manual docs

# docs/tested.json, docs/tested.md and the README's table: which families the tests hold to other libraries, in which formats
TABLE := tests/models tests/weights/formats/test_methods.py tests/weights/convert/test_mlx_folder.py tests/weights/formats/test_gguf.py \
	tests/weights/formats/test_gguf_models.py tests/weights/formats/test_gguf_llama_cpp.py tests/loading/test_smollm2.py tests/loading/test_gemma3_270m.py
table: $(INSTALLED)
	$(PYTEST) -m "not gpu" -p tests.tested --tested build/tested.json $(TABLE)
	$(BIN)/python -m tests.tested build/tested.json

# dist/*.whl and dist/*.tar.gz
wheel: $(INSTALLED)
	$(BIN)/python -m build

# what building and testing leave behind; the environment stays
clean:
	rm -rf build dist .coverage *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find auraflux tests -name __pycache__ -type d -prune -exec rm -rf {} +
