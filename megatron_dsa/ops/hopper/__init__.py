"""What the TileLang kernels of several operations share: tiles, CUDA sources, compiling."""
