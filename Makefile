# Every target works from a clean clone with only Python and make. PYTHON chooses the interpreter, VENV the place.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest
RUN := runs/demo

.PHONY: demo test slow lint docs llamacpp clients rehearse walk reproduce reference gpu-check bench bench-quick prove-layouts prove-scale prove-compression prove-study clean help

help:
	@echo "make demo           install, then text to served GPT and BERT in minutes on a laptop CPU"
	@echo "make test           install and run the fast tests"
	@echo "make slow           the tests that take minutes or several processes"
	@echo "make lint           ruff and mypy"
	@echo "make llamacpp       llama.cpp and gguf, so that the tests of GGUF files run too; builds for minutes"
	@echo "make clients        LangChain, LlamaIndex and LiteLLM in an environment of their own, so that their tests run too"
	@echo "make reproduce      reported results beside what this machine measures, predicts or proves (reproduce-NAME: one)"
	@echo "make docs           the book as HTML in build/book; a broken link is an error"
	@echo "make walk           every command of the book's pages, in order; make slow walks most of them with few steps"
	@echo "make rehearse       CUDA without a GPU: training, graphs and exports on a null GPU; 1.6 GB to download"
	@echo "make gpu-check      what needs a CUDA device, in the order of doubt: checks, tests, commands, benchmarks; installs nothing"
	@echo "make bench          every benchmark against its peers, in an hour (NANOGPT=a nanoGPT checkout, SHARED=shared data)"
	@echo "make bench-quick    every claim, of benchmarks and proofs, in small and in ten minutes; keeps no result"
	@echo "make bert-toy       a small BERT on novels until it is as good as transformers' after 20 minutes"
	@echo "make prove-layouts  every parallel layout against the single process"
	@echo "make prove-scale    layouts of thousands of processes, simulated, against the published formulas"
	@echo "make prove-study    five runs against the predictions that were committed before them"
	@echo "make prove-compression  gradients in a fifth of the bytes against whole ones"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,eval,bench,ray,docs,fp8]"
	@for extra in tensorrt-rtx openvino; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$$extra]" || \
		echo "$$extra does not install here: its tests are skipped"; done
	@touch $@

# llama.cpp is compiled from source, which takes about four minutes on two cores
llamacpp: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[llamacpp]" || \
		echo "llama-cpp-python does not build here: its tests are skipped"

clients: build/clients/.installed

build/clients/.installed: tests/clients.txt
	$(PYTHON) -m venv build/clients
	@build/clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients.txt && touch $@ || \
		{ rm -rf build/clients; echo "the clients do not install here: their tests are skipped"; }

demo: $(VENV)/.installed
	@env -u OMP_NUM_THREADS $(BIN)/throughline demo --out $(RUN)
	@echo "  (these commands need the environment: . $(VENV)/bin/activate)"

test: $(VENV)/.installed-test
	$(PYTEST) -n 2 -m "not slow and not gpu"

slow: $(VENV)/.installed-test
	$(PYTEST) -m "slow and not gpu" --durations 15

# an environment of its own, in .venv-rehearse; says why and passes where it cannot be made
rehearse: $(VENV)/.installed-test
	$(BIN)/python tests/rehearsal/start.py

# of the benchmarks, names and calls alone: what the package has renamed must fail here, not in an hour's measurement
BENCHMARK_TYPES = arg-type assignment dict-item func-returns-value index misc no-untyped-def operator return-value union-attr var-annotated

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	mkdir -p build/lint && ln -sfn $(CURDIR) build/lint/throughline
	cd build/lint && $(abspath $(BIN))/python -m mypy --config-file throughline/pyproject.toml -p throughline.core -p throughline.models \
		-p throughline.data -p throughline.planner -p throughline.train -p throughline.prove -p throughline.inference -p throughline.eval -p throughline.cli
	ln -sfn $(CURDIR)/benchmarks build/lint/benchmarks
	cd build/lint && MYPYPATH=.:benchmarks $(abspath $(BIN))/python -m mypy --config-file throughline/pyproject.toml --explicit-package-bases \
		$(BENCHMARK_TYPES:%=--disable-error-code %) benchmarks/*.py

bench: $(VENV)/.installed-test
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/run_all.py $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(SHARED),--shared $(SHARED)) $(BENCHFLAGS)

bench-quick: override BENCHFLAGS += --quick --results build/bench-quick.json
bench-quick: bench

bert-toy: $(VENV)/.installed-test
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bert_toy.py $(BENCHFLAGS)

prove-layouts: $(VENV)/.installed-test
	$(BIN)/python benchmarks/prove_layouts.py $(PROVEFLAGS)

prove-scale: $(VENV)/.installed-test
	$(BIN)/python benchmarks/prove_scale.py $(PROVEFLAGS)

prove-study: $(VENV)/.installed-test
	$(BIN)/python benchmarks/prove_study.py measure $(PROVEFLAGS)

prove-compression: $(VENV)/.installed-test
	$(BIN)/python benchmarks/prove_compression.py $(PROVEFLAGS)

docs: $(VENV)/.installed-test
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/book

# every reported result that this machine can answer, or one of them: make reproduce-NAME (SHARED=shared data: all zero-shot tasks)
reproduce reproduce-%: SHARING := $(if $(SHARED),THROUGHLINE_SHARED=$(SHARED))
reproduce: $(VENV)/.installed-test
	$(SHARING) env -u OMP_NUM_THREADS $(BIN)/python benchmarks/reproduce.py; code=$$?; \
		$(BIN)/python docs/make_reproductions.py && exit $$code

# the commands of the book's pages, as a reader would give them
WALKED := README first-hour own-text own-search bert continue-gpt2 cluster options data layouts faults evaluation serving planner proofs
walk: $(VENV)/.installed-test
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/walk.py $(WALKED)

reproduce-%: $(VENV)/.installed-test
	$(SHARING) env -u OMP_NUM_THREADS $(BIN)/python benchmarks/reproduce.py $*; code=$$?; \
		$(BIN)/python docs/make_reproductions.py && exit $$code

reference: $(VENV)/.installed
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_results.py
	$(BIN)/python docs/make_planning.py
	$(BIN)/python docs/make_reproductions.py

# a bare machine with torch, transformers and onnxruntime: nothing is installed, the checkout itself is put on the path.
# It goes on where it stopped; CHECKFLAGS=--quick for less, --again to begin anew (docs/gpu.md)
gpu-check:
	mkdir -p build/path && ln -sfn $(CURDIR) build/path/throughline
	env -u OMP_NUM_THREADS PYTHONPATH=$(CURDIR)/build/path$${PYTHONPATH:+:$$PYTHONPATH} $(if $(NANOGPT),NANOGPT=$(NANOGPT)) \
		$(PYTHON) benchmarks/gpu_check.py $(CHECKFLAGS)

clean:
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache
