# `make demo` is all a newcomer needs. Everything runs in .venv, which set-up makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_BIN := .venv-protos/bin

.PHONY: demo test check format protos bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m midstream.setup_env --venv $(VENV)
	@touch $@

$(PROTO_BIN)/protoc-gen-mypy_grpc:
	@$(PYTHON) -m venv .venv-protos
	@$(PROTO_BIN)/pip install -q --disable-pip-version-check grpcio-tools==1.71.2 mypy-protobuf==3.6.0 'setuptools<80' 2>/dev/null

protos: $(PROTO_BIN)/protoc-gen-mypy_grpc
	@PATH=$(CURDIR)/$(PROTO_BIN):$$PATH $(PROTO_BIN)/python -W ignore -m grpc_tools.protoc -I. --python_out=. --mypy_out=quiet:. protos/*.proto
	@PATH=$(CURDIR)/$(PROTO_BIN):$$PATH $(PROTO_BIN)/python -W ignore -m grpc_tools.protoc -I. --grpc_python_out=. --mypy_grpc_out=quiet:. \
		protos/service.proto protos/scheduler.proto protos/detokenizer.proto
