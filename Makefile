# make demo       what fusedvit does on this machine, side by side with the original tower (a minute, no GPU needed)
# make test       ruff, mypy, and the tests that are quick (with a GPU: the gpu tests too)
# make test-all   every test, older transformers too, kernels compiled ahead of time
# make aot-matrix kernels compiled ahead of time on the other Triton versions, some of them emulated
# make test-serving  tests inside serving engines, each in an environment of its own (a GB and a few minutes each)
# make test-vllm, test-sglang, test-dynamo, test-ray   one of them
# make test-gpu   the tests that need a GPU
# make aot, aot-chips  kernels compiled ahead of time on this Triton: for Hopper and a sample, or for every other chip
# make lint       ruff and mypy
# make setup      the environment alone
# make clean      removes the environment and every cache
#
# Everything is installed into VENV at the first call. Overrides:
#   PYTHON=python3.12                      the interpreter that makes the environment
#   VENV_ARGS=--system-site-packages       build on that interpreter's packages: its torch is kept
#   PY=python3                             install nothing: use this interpreter as it is
#   PIP_ARGS=...                           more arguments for every pip call

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
PIP_ARGS ?=
JOBS ?= 2
TORCH := torch==2.13.0 triton==3.7.1
# A hub client that all accept. Of the range's oldest release, and of one that serving engines pin, a part of tests/hf.
TRANSFORMERS := "transformers==5.24.*" "huggingface-hub<2"
OLDER_TRANSFORMERS := 5.16.1 5.20.2
OLDER_TESTS := autocast families family_models family_parents gemma4 generate gradient_checkpointing own_code \
    unsupported processors padded_processors
TORCHVISION := 0.28.0
TORCHVISION_TESTS := unit/test_cli_media \
    $(addprefix hf/test_,processors padded_processors fuse_processor pixel_stream byte_patches)
OLDEST_TRITON := 3.6.0
MIDDLE_TRITON := 3.8.0
NEWEST_TRITON := 3.9.0
OLDEST_VLLM := 0.26.0
OLDEST_SGLANG := 0.5.21

ifdef PY
SETUP :=
TEST_HF :=
TEST_TORCHVISION :=
else
PY := $(VENV)/bin/python
SETUP := $(VENV)/.ready
TEST_HF := test-hf
TEST_TORCHVISION := test-torchvision
endif

PIP := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -p no:cacheprovider
# A worker without work takes over what others have not begun: files of long tests lie side by side.
PARALLEL := -n $(JOBS) --dist worksteal
TYPED := $(VENV)/typed
ENGINES := $(VENV)/engines
OLDER_VLLM := $(VENV)/vllm-$(OLDEST_VLLM)
OLDER_SGLANG := $(VENV)/sglang-$(OLDEST_SGLANG)
DEMO := demo-out
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
FOLDERS := tests/unit/test_compiled_kernels.py
EMULATED := tests/emulator/kernels/test_emulated_kernels.py
# The smallest sample of what other chips than Hopper compile.
SAMPLE := --alike --dtype bf16 --tower Qwen3-VL-8B Qwen2.5-VL-7B --budget 256 4096
AHEAD = $(PY) -m fusedvit.bench.ahead_of_time --jobs $(JOBS)
# Without a GPU conftest.py skips the gpu tests, and says so; with one they run by themselves.
QUICK := $(if $(HAS_GPU),not slow and not gpu,not slow)
EVERY := $(if $(HAS_GPU),-m "not gpu")

.DEFAULT_GOAL := help
.PRECIOUS: $(VENV)/transformers-%/.ready $(VENV)/torchvision-%/.ready $(VENV)/sglang-%/.ready $(ENGINES)/%/.ready
.PHONY: help setup demo test test-all lint ruff mypy test-quick test-cpu test-hf test-torchvision test-gpu \
    test-serving test-vllm test-vllm-processes test-vllm-towers test-sglang test-dynamo test-ray aot aot-chips \
    aot-matrix clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(SETUP)

# Where pip offers a CPU build of this torch it is taken, elsewhere the same line installs the CUDA build. A torch that
# --system-site-packages brings along stays, in whatever version the project's own range allows.
# torchvision is left out on purpose: next to a CPU build of torch it does not import, and that breaks transformers.
$(VENV)/.ready: pyproject.toml
	@echo "installing into $(VENV): torch, transformers and what tests need; a few minutes"
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(PIP) "setuptools>=77"
	$(PY) -c "import torch" 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) --no-build-isolation $(TRANSFORMERS) --editable ".[test,dev]"
	@touch $@

# Another transformers, torchvision or SGLang, to be put in front of the first packages through PYTHONPATH.
$(VENV)/transformers-%/.ready: $(SETUP)
	$(PIP) --no-deps --upgrade --target $(@D) transformers==$*
	@touch $@

$(VENV)/torchvision-%/.ready: $(SETUP)
	$(PIP) --no-deps --upgrade --target $(@D) torchvision==$*
	@touch $@

$(VENV)/sglang-%/.ready: $(SETUP)
	$(PIP) --no-deps --upgrade --target $(@D) sglang==$*
	@touch $@

demo: $(SETUP)
	@mkdir -p $(DEMO)
	@$(PY) -m fusedvit demo --plot $(DEMO)/demo.png --json $(DEMO)/demo.json

test: lint test-quick $(if $(HAS_GPU),test-gpu)

test-all: lint test-cpu $(TEST_HF) $(if $(HAS_GPU),,$(TEST_TORCHVISION)) aot $(if $(HAS_GPU),test-gpu)

lint: ruff mypy

ruff: $(SETUP)
	$(PY) -m ruff check .

# mypy knows no __path__: it reads a folder of links in which kernels/, graphs/ and bench/ lie inside the package.
# No cache: read back from one, packages without an __init__.py lose their modules.
mypy: $(SETUP)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/fusedvit/kernels
	@ln -s $(CURDIR)/fusedvit/* $(CURDIR)/graphs $(CURDIR)/bench $(TYPED)/fusedvit/
	@ln -s $(filter-out %/tuned,$(wildcard $(CURDIR)/kernels/*)) $(TYPED)/fusedvit/kernels/
	MYPYPATH=$(TYPED) $(PY) -m mypy --cache-dir=/dev/null -p fusedvit

# tests/conftest.py lists what is slow.
test-quick: $(SETUP)
	$(PYTEST) $(PARALLEL) -m "$(QUICK)"

test-cpu: $(SETUP)
	$(PYTEST) $(PARALLEL) $(EVERY)

test-hf: $(OLDER_TRANSFORMERS:%=test-hf-%)

test-hf-%: $(VENV)/transformers-%/.ready
	PYTHONPATH=$(abspath $(<D)) $(PYTEST) $(PARALLEL) $(EVERY) $(OLDER_TESTS:%=tests/hf/test_%.py)

# Processors of torchvision's backend, and videos, which have no other. Operators that it asks for by name are made up.
test-torchvision: $(VENV)/torchvision-$(TORCHVISION)/.ready
	PYTHONPATH=$(CURDIR)/tests/serving/vllm/site:$(abspath $(<D)) $(PYTEST) $(PARALLEL) $(EVERY) $(TORCHVISION_TESTS:%=tests/%.py)

test-gpu: $(SETUP)
	$(PYTEST) -m gpu

# An engine's environment sees the packages of VENV behind its own: torch is not installed twice. Python 3.11 at least.
test-serving: test-vllm test-sglang test-dynamo test-ray

ON_A_CPU := DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/serving/vllm/site
ENGINE_PYTEST := python -m pytest -q -p no:cacheprovider
IN_VLLM := $(ON_A_CPU) VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 FUSEDVIT_OLDEST_VLLM=$(abspath $(OLDER_VLLM)) \
    $(ENGINES)/vllm/bin/$(ENGINE_PYTEST)
WITH_RANKS := tests/serving/vllm/test_vllm_processes.py

# In halves, for make -j.
test-vllm: test-vllm-processes test-vllm-towers

test-vllm-processes: $(ENGINES)/vllm/.ready $(OLDER_VLLM)/.ready
	$(IN_VLLM) $(WITH_RANKS)

test-vllm-towers: $(ENGINES)/vllm/.ready $(OLDER_VLLM)/.ready
	$(IN_VLLM) tests/serving/vllm --ignore=$(WITH_RANKS)

# SGLang's compiled functions would take a compiler longer than the tests do. Of the oldest release, towers alone.
IN_SGLANG := TORCHDYNAMO_DISABLE=1 $(ENGINES)/sglang/bin/$(ENGINE_PYTEST) tests/serving/sglang

test-sglang: $(ENGINES)/sglang/.ready $(OLDER_SGLANG)/.ready
	$(ON_A_CPU):$(CURDIR)/tests/serving/sglang/site $(IN_SGLANG)
	$(ON_A_CPU):$(CURDIR)/tests/serving/sglang/site:$(abspath $(OLDER_SGLANG)) $(IN_SGLANG)/test_sglang_towers.py

test-dynamo test-ray: test-%: $(ENGINES)/%/.ready
	$(ON_A_CPU) $(ENGINES)/$*/bin/$(ENGINE_PYTEST) tests/serving/$*

$(ENGINES)/%/.ready: tests/serving/%/requirements.txt pyproject.toml $(SETUP)
	@echo "installing $* without its CUDA packages into $(@D): a minute"
	$(PY) -m venv $(@D)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps "setuptools>=77" -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# The Python files of the oldest release: its code is judged, and not run.
$(OLDER_VLLM)/.ready: $(SETUP)
	@mkdir -p $(OLDER_VLLM)
	$(PIP:install=download) --no-deps --dest $(OLDER_VLLM) vllm==$(OLDEST_VLLM)
	$(PY) tests/serving/vllm/unpack.py $(OLDER_VLLM)
	@touch $@

# Kernels compiled ahead of time, which needs no GPU. On the installed Triton: for Hopper, one of those that differ in
# sizes or 16-bit types alone; for Ampere and smaller Blackwell a sample (aot-matrix has Ada, aot-chips every tower).
aot: $(SETUP)
	$(AHEAD) --alike --arch 90
	$(AHEAD) $(SAMPLE) --arch 86 120

# Every tower on every architecture that is not Hopper's, within its shared memory: half an hour on one core.
aot-chips: $(SETUP)
	$(AHEAD) --alike --arch 80 86 89 100 120

# Kernels in bf16 on the other Triton versions: on the ends of the range every tower at one size for Hopper, and the
# sample for other chips; between them the sample for Hopper. On both ends some of what is compiled for Hopper is run on
# the emulator of its instructions, as pytest does on the installed version (on the oldest also what its tuning tables
# choose), and a folder of kernels is filled. MATRIX="--arch 90" narrows it.
aot-matrix: $(SETUP)
	@set -e; failed=; \
	newest=$$($(PY) -m pip index versions triton $(PIP_ARGS) 2>/dev/null \
	    | sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep -m 1 -E '^3\.[6-9]\.[0-9]+$$' || true); \
	for version in $(OLDEST_TRITON) $(MIDDLE_TRITON) $${newest:-$(NEWEST_TRITON)}; do \
	    folder=$(abspath $(VENV))/triton-$$version; \
	    [ -e $$folder/.ready ] || $(PIP) --no-deps --upgrade --target $$folder triton==$$version; \
	    touch $$folder/.ready; \
	    echo "kernels on Triton $$version"; \
	    compile() { PYTHONPATH=$$folder $(AHEAD) "$$@" $(MATRIX) || failed="$$failed $$version"; }; \
	    case $$version in \
	        $(MIDDLE_TRITON)) compile $(SAMPLE) --arch 90; continue;; \
	        $(OLDEST_TRITON)) chips="80 100"; emulated="tables or 72-fp16";; \
	        *) chips="80 89 100 120"; emulated="72-fp16 or hopper-bf16 or swap_ab-bf16";; \
	    esac; \
	    compile --alike --arch 90 --dtype bf16 --budget 4096; \
	    compile $(SAMPLE) --arch $$chips; \
	    PYTHONPATH=$$folder $(PYTEST) $(PARALLEL) $(EMULATED) -k "$$emulated" || failed="$$failed $$version (emulated)"; \
	    PYTHONPATH=$$folder $(PYTEST) -n 0 $(FOLDERS) || failed="$$failed $$version (folders)"; \
	done; \
	[ -z "$$failed" ] || { echo "failed on Triton$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
