"""Build small transformers with each attention backend, and the tokens they run on."""

import functools

import torch

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models import attention_backends
from stackexp.models.transformer import Transformer

END, VOCAB = 0, 13
TOKENS = torch.tensor([[3, 4, END, 5, END, END, 6, 7, 8], [END, 1, 2, 3, 4, 5, 6, 7, END]])
STACK = {"num_heads": 2, "head_dim": 4, "num_slots": 3, "axis": "depth"}


def make_model(backend, memory=None, dtype=torch.float64, **options) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "intermediate_size": 24}
    sizes |= {"num_heads": 4, "num_kv_heads": 2}
    memory = memory and StackMemoryConfig(**memory)
    config = TransformerConfig(**sizes | options, attention=backend.split()[0], memory=memory)
    model = Transformer(config).to(dtype)
    if backend == "varlen of torch 2.11":
        for layer in model.layers:
            kernel, groups, window = layer.attention.attend.args
            assert groups, "the replacement kernel supports grouped queries"
            layer.attention.attend = functools.partial(attention_backends.varlen, kernel, False, window)
    return model
