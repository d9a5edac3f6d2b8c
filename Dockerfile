# NVIDIA's PyTorch 26.03: torch 2.11, CUDA 13.2, Python 3.12 and transformer-engine. This file was checked by
# hadolint and has not been built yet. FlashMLA, which is not on PyPI, is left out.
FROM nvcr.io/nvidia/pytorch:26.03-py3
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-dsa
COPY . .
# The image's torch has to stay: its transformer-engine is compiled against it.
RUN before=$(python -c 'import torch; print(torch.__version__)') \
  && pip install --no-cache-dir "/opt/megatron-dsa[train,tilelang,cudnn,muon,data,hf,report]" \
  && python -c 'import sys, torch; assert torch.__version__ == sys.argv[1], torch.__version__' "$before" \
  && python -c 'import megatron.core, megatron_dsa.dsa_kernels'
# The launch scripts of examples/ take this Python instead of setting up an environment.
ENV PYTHON=python3
CMD ["python", "-m", "megatron_dsa", "info"]
