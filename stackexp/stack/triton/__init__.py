"""Triton kernels for CUDA, tested in Triton's interpreter and, with Triton 3.6, on an H200.

Triton 3.6 rejects what later versions accept: a list of integers as an argument of a compiled function, such as
`tl.zeros([2, 4], dtype)` instead of `tl.full([2, 4], 0, dtype)`, and None in a returned tuple.
"""
