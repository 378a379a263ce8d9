"""Build small transformers with each attention backend, and the tokens they run on."""

import functools

import small_models
import torch

from stackexp.models import attention
from stackexp.models.transformer import Transformer

END = 0
TOKENS = torch.tensor([[3, 4, END, 5, END, END, 6, 7, 8], [END, 1, 2, 3, 4, 5, 6, 7, END]])
STACK = {"axis": "depth"}


def make_model(backend, memory=None, dtype=torch.float64, **options) -> Transformer:
    options = {"num_layers": 2, "attention": backend.split()[0]} | options
    model = small_models.make_model(memory, dtype, **options)
    if backend == "varlen of torch 2.11":
        for layer in model.layers:
            kernel, groups, window = layer.attention.attend.args
            assert groups, "the replacement kernel supports grouped queries"
            layer.attention.attend = functools.partial(attention.varlen, kernel, False, window)
    return model
