# Set-up and everything that people and CI run. `make demo` and `make test` work on a fresh Debian with Python 3.11 or
# newer, gcc and make. Nothing is installed outside of .venv, but for Debian's packages that tests need (.ci/test-tools).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

NATIVE := $(wildcard native/*.pyx native/*.pxd native/*.h)
# The list of what mypyc compiles is pyproject.toml's.
COMPILED := $(wildcard $(shell sed -n '/^request-path = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml))
BUILD_INPUTS := pyproject.toml setup.py $(NATIVE) $(COMPILED)

# One stamp per level: what runs, what tests need, what checks need. Each is remade when what it was made of changes.
INSTALLED := $(VENV)/.installed
TEST_READY := $(VENV)/.test-ready
CHECK_READY := $(VENV)/.check-ready
CLIENTS_READY := $(VENV)/.clients-ready
# Not made anew where .ci/container just did.
DIST := build/dist/.built
PUBLISHED := $(BUILD_INPUTS) MANIFEST.in README.md LICENSE CHANGELOG.md config.example.toml \
	$(shell find router native -type f ! -name '*.so' ! -name '*.c' ! -path '*/__pycache__/*')

.DELETE_ON_ERROR:
.PHONY: demo test check sanitize container package test-clients test-vllm compare-vllm bench policy-bench clean

demo: $(INSTALLED)
	$(BIN)/kvgate demo $(ARGS)

test: $(TEST_READY)
	.ci/test-tools
	$(BIN)/python -m pytest $(ARGS)

check: $(CHECK_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p router -p native
	$(BIN)/mypy --strict -p loadtest.policy -p loadtest.replay
	$(BIN)/stubtest native --allowlist .ci/stubtest-allowlist
	$(BIN)/hadolint Dockerfile
	$(BIN)/kubernetes-validate --strict --quiet -k 1.29 deploy/kubernetes/*/*.yaml
	$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes/*/*.yaml

sanitize: $(TEST_READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/sanitize

# The Dockerfile's steps and the image they make, without a container engine; as root. Leaves build/dist behind.
container:
	.ci/container $(PYTHON)

# What is published: the source archive, the wheel made from it, and that in an environment of its own.
package: $(TEST_READY) $(DIST)
	$(BIN)/python -m pytest tests/packaging/published.py $(ARGS)

# Real clients through the gateway, with those that `make test` leaves out for their size.
test-clients: $(CLIENTS_READY)
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --strict-config -p no:cacheprovider' \
		tests/blackbox/test_client_litellm.py $(ARGS)

test-vllm: $(TEST_READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/vllm/run $(ARGS)

# Strategies and an sglang-style placement on two real vLLM engines on the CPU, in turn; 40 minutes with its defaults.
compare-vllm: $(TEST_READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" loadtest/compare-vllm $(ARGS)

bench: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" loadtest/bench/run $(ARGS)

# Placement policies against traces, on simulated engines. TRACES: the folder with the traces; those of the repository
# are small cuts, for a first look.
TRACES ?= loadtest/policy/traces
policy-bench: $(TEST_READY)
	$(BIN)/python -m loadtest.policy table --traces $(TRACES) $(if $(ARGS),$(ARGS),--quick)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .ruff_cache
	rm -f router/*.so router/*/*.so native/*.so native/*.c native/*.cpp native/*.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@.ci/prerequisites $(PYTHON)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

# The editable install compiles native/*.pyx and the request path in place.
$(INSTALLED): $(VENV)/.created $(BUILD_INPUTS)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(TEST_READY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --group test --group load
	touch $@

$(CLIENTS_READY): $(TEST_READY)
	$(BIN)/python -m pip install --quiet --group clients
	touch $@

$(CHECK_READY): $(TEST_READY)
	$(BIN)/python -m pip install --quiet --group check
	touch $@

$(DIST): $(PUBLISHED) | $(TEST_READY)
	$(BIN)/python -m pip install --quiet --group package
	rm -rf $(@D)
	$(BIN)/python -m build --outdir $(@D)
	touch $@
