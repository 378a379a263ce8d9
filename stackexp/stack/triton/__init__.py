"""Triton kernels for CUDA. Experimental: tested in Triton's interpreter, not yet measured on a GPU."""
