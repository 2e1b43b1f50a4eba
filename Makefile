# Two commands do everything on a fresh machine with Python, git and make:   make book   and   make test.
# How to work on the project: CONTRIBUTING.md.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
NOTEBOOKS = $(wildcard book/*.ipynb)
HTML   := _build/html
export OMP_NUM_THREADS ?= 1
export JUPYTER_PLATFORM_DIRS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup same-python peers address dist book pdf serve demo test test-all soak unit nbval notebooks lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make book       set up, run every notebook, build the book, print where it is"
	@echo "make test       set up, run the whole suite: units, notebooks (nbval), pages, browser"
	@echo "make test-all   the same with the slow tests (kernels in an interpreter, soaks)"
	@echo "make soak       crash, damage and fuzz everything for up to an hour; stores tests/faults/results.json"
	@echo "make pdf        print the whole book to _build/training-ngpt.pdf (needs Chromium)"
	@echo "make demo       train GPT and nGPT side by side for about two minutes and compare them"
	@echo "make serve      serve the built book on localhost"
	@echo "make notebooks  execute every notebook and store its outputs"
	@echo "make unit       run the unit tests; only one file: make unit T=tests/test_ssd.py"
	@echo "make nbval      run every notebook and compare with its stored outputs; only one: ONLY=book/05_gated_adamw.ipynb"
	@echo "make lint       ruff's rules and format, mypy"
	@echo "make format     let ruff fix and format what it can"
	@echo "make address    write the repository's address into notebooks, README and configs: make address URL=https://github.com/OWNER/NAME"
	@echo "make dist       build the wheel and the source distribution into dist/"
	@echo "make clean      remove everything that was built, except .venv"

setup: $(READY)

# An environment keeps its Python: who asks for another one must not get the old one in silence.
same-python:
	@if [ -e $(READY) ] && [ "$(origin PYTHON)" != file ] && [ "$$($(PYTHON) -V 2>&1)" != "$$($(BIN)/python -V 2>&1)" ]; then \
	  echo "make: .venv was made with $$($(BIN)/python -V 2>&1), and '$(PYTHON)' is another Python. To make .venv again: rm -r .venv; to keep it, leave PYTHON= out"; exit 1; fi

# .ready is written last: a .venv without it is incomplete and is rebuilt.
$(READY): pyproject.toml constraints.txt | same-python
	@$(PYTHON) -c "import sys" 2>/dev/null || { echo "make: '$(PYTHON)' was not found. Install Python 3.10, 3.11, 3.12 or 3.13, or give its path: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))" || { echo "make: Python 3.10, 3.11, 3.12 or 3.13 is required, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Choose another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c "import venv, ensurepip" 2>/dev/null || { echo "make: this Python cannot create virtual environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@if [ -d .venv ] && [ ! -e $(READY) ]; then echo "setup: .venv is incomplete; starting over"; fi
	@echo "setup: creating .venv with $$($(PYTHON) -V)"
	@if [ -e $(READY) ]; then true; else $(PYTHON) -m venv --clear .venv; fi
	@echo "setup: installing the package, the book and the tests (torch is large: a few minutes the first time)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[book,hf,dev]" || { echo "make: the installation failed; see the lines above. Check the network and the free disk space."; exit 1; }
	@if [ "$$(uname)" = Linux ]; then echo "setup: peers to test against: Triton (for its interpreter) and mamba-ssm without CUDA"; $(MAKE) -s peers; fi
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || echo "setup: no C++ compiler found. Everything works, but training on the CPU is several times slower. On Debian or Ubuntu: apt-get install g++"
	@touch $(READY)

# A CUDA build of torch comes with its own Triton, which must stay; mamba-ssm's reference and Triton kernels need no compilation.
peers:
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install -q triton || echo "setup: Triton could not be installed; its tests will be skipped"
	@$(BIN)/python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('mamba_ssm') is None)" || { $(BIN)/python -m pip install -q setuptools wheel && MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip install -q --no-build-isolation --no-deps "mamba-ssm>=2.3.2,<2.4"; } || echo "setup: mamba-ssm could not be installed; its tests will be skipped"

book: $(READY)
	@echo "book: executing the notebooks that changed and building the pages (warnings are errors)"
	@$(BIN)/jupyter-book build book --config _config.yml -n -W --keep-going
	@echo "book: open $(HTML)/index.html, or run 'make serve'"

serve: $(READY)
	@test -e $(HTML)/index.html || { echo "make: nothing is built yet. Run first: make book"; exit 1; }
	@echo "serve: http://localhost:8000 (Ctrl-C stops it)"
	@$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(HTML)

pdf: $(READY)
	@test -e $(HTML)/intro.html || $(MAKE) -s book
	@$(BIN)/python -m ngpt_book.printed.whole $(HTML) _build/training-ngpt.pdf

demo: $(READY)
	@$(BIN)/ngpt demo --out runs/demo

test: $(READY)
	@echo "test 1/4: lint, format, types"
	@$(MAKE) -s lint
	@echo "test 2/4: units, twins, peers, ranks; with coverage"
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "$(or $(MARK),not slow and not browser)" --cov --cov-report=html:_build/coverage tests
	@echo "coverage of ngpt_core by the unit tests: $$($(BIN)/coverage report --format=total)% of lines (_build/coverage/index.html)"
	@echo "test 3/4: notebooks, strictly against their stored outputs; then the pages from those outputs"
	@$(MAKE) -s nbval
	@NGPT_BOOK_EXECUTE=off $(BIN)/jupyter-book build book --config _config.yml -n -W --keep-going -q
	@echo "test 4/4: every page in a real browser"
	@NGPT_BOOK_HTML=$(HTML) $(BIN)/python -m pytest -q -m browser tests

test-all:
	@$(MAKE) test MARK="not browser"

soak: $(READY)
	@$(BIN)/python tests/faults/soak.py $(if $(MINUTES),--minutes $(MINUTES))

nbval: $(READY)
	@NGPT_BOOK=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg -p no:cacheprovider $(or $(ONLY),$(NOTEBOOKS))

unit: $(READY)
	@$(BIN)/python -m pytest -q $(if $(T),,-n 2 --dist loadfile) $(or $(T),tests)

notebooks: $(READY)
	@$(BIN)/python book/execute.py $(ONLY)

lint: $(READY)
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "make: the files above are not formatted. To fix them: make format"; exit 1; }
	@$(BIN)/mypy -p ngpt_core

format: $(READY)
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

address: $(READY)
	@PYTHONPATH=book $(BIN)/python -m ngpt_book.sphinx.address $(URL)

dist: $(READY)
	@$(BIN)/python -m build --outdir dist .

clean:
	rm -rf _build dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
