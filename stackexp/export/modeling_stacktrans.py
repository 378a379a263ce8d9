"""StackTrans (arXiv 2507.15343) for Hugging Face transformers: Llama with a differentiable stack in each layer.

For each of H heads and S slots with the top at slot 0, a layer with hidden state h computes

    x  = W_down h                     the pushed vector [D]
    a  = softmax(A x)                 push, pop, no-op
    St[j] = a_push St[j-1] + a_pop St[j+1] + a_noop St[j]      with St[-1] = x
    M[j]  = a_push M[j-1]  + a_pop M[j+1]  + a_noop M[j]       with M[-1] = 1
    R  = softmax_j(w_g . (St[j] M[j])) . St                    the read vector [D]
    h' = g h + W_up concat(R)

The options in `config.memory` choose between this form and its variants. With `axis: depth`, a token's stack passes
from layer to layer; with `time`, a layer's stack passes from token to token; `token_major` runs all layers for one
token, then for the next, with one stack.

This file needs torch and transformers (4.57 or 5) only. stackexp wrote it; changes here are lost in the next export.
"""

import inspect
import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

# transformers has renamed arguments: past_key_values -> cache in 5.24, input_embeds -> inputs_embeds in 5.0
CACHE = "cache" if "cache" in inspect.signature(LlamaDecoderLayer.forward).parameters else "past_key_values"
MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
ATTENTION_ARGUMENTS = inspect.signature(LlamaAttention.forward).parameters


class StackTransConfig(LlamaConfig):
    """A Llama config with the options of the stacks in `memory`."""

    model_type = "stacktrans"
    memory: dict | None = None


class StackTransCache(DynamicCache):
    """Keys and values, and the stacks that pass from token to token (axes time and token_major)."""

    def __init__(self, config):
        super().__init__(config=config)
        self.stacks = {}  # layer, or 0 for token_major -> (slots [B, H, S, D], mask [B, H, S])

    def _map_stacks(self, change):
        self.stacks = {key: tuple(change(tensor) for tensor in stack) for key, stack in self.stacks.items()}

    def reorder_cache(self, beam_idx):
        """Select the continued beams."""
        super().reorder_cache(beam_idx)
        self._map_stacks(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats):
        """Repeat each sequence."""
        super().batch_repeat_interleave(repeats)
        self._map_stacks(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices):
        """Select sequences."""
        super().batch_select_indices(indices)
        self._map_stacks(lambda tensor: tensor[indices.to(tensor.device)])

    def reset(self):
        """Remove all tokens."""
        super().reset()
        self.stacks = {}

    def crop(self, *args, **kwargs):
        """Raise ValueError, because an update of a stack cannot be undone."""
        raise ValueError("StackTrans: a stack over tokens cannot be rolled back; generate without an assistant model")


class StackMemory(nn.Module):
    """The stacks of one site in one layer; see the equations at the top of this file."""

    def __init__(self, config):
        super().__init__()
        self.options, self.norm_eps, hidden = config.memory, config.rms_norm_eps, config.hidden_size
        options, heads, size = self.options, config.memory["num_heads"], config.memory["head_dim"]
        shared = options["projection"] == "shared_slices"
        self.down = self.up = self.actions = self.action_bias = self.query = None
        if options["projection"] != "none":
            outer, inner = (hidden // heads, size) if shared else (hidden, heads * size)
            self.down, self.up = nn.Parameter(torch.empty(inner, outer)), nn.Parameter(torch.empty(outer, inner))
        if options["discipline"] != "push_only":
            self.actions = nn.Parameter(torch.empty(heads, 3, hidden if options["action_input"] == "hidden" else size))
            if options["action_bias"] is not None:
                self.action_bias = nn.Parameter(torch.empty(heads, 3))
        if options["read"] == "global":
            self.query = nn.Parameter(torch.empty(1 if shared else heads, size))
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, h, slots, mask, is_token=None):
        """Update the stacks with h [B, T, d], read them, and return the new h, slots and mask.

        slots are St [B, T, H, S, D] for axis depth and [B, H, S, D] otherwise; mask M has no last dimension. Where
        is_token [B, T] is False, padding leaves stacks over tokens unchanged.
        """
        x = self._project_down(h)  # [B, T, H, D]
        action = self._choose_actions(h, x)  # [B, T, H, 3]
        x = x.to(slots.dtype)
        if self.options["axis"] == "depth":
            slots, mask = self._update(slots, mask, action, x)
            read = self._read(slots, mask)
        else:
            if is_token is not None:
                action = torch.where(is_token[:, :, None, None], action, action.new_tensor([0.0, 0.0, 1.0]))
            reads = []
            for action_t, x_t in zip(action.unbind(1), x.unbind(1), strict=True):
                slots, mask = self._update(slots, mask, action_t, x_t)
                reads.append(self._read(slots, mask))
            read = torch.stack(reads, 1)
        read = self._project_up(read.to(h.dtype))
        h = h + self.gate * read if self.options["residual_gate"] == "read" else self.gate * h + read
        return h, slots, mask

    def _project_down(self, h):
        x = F.linear(h, self.down) if self.options["projection"] == "low_rank" else h
        x = x.unflatten(-1, (self.options["num_heads"], -1))
        x = F.linear(x, self.down) if self.options["projection"] == "shared_slices" else x
        return F.rms_norm(x, x.shape[-1:], eps=self.norm_eps) if self.options["push_norm"] == "head" else x

    def _project_up(self, read):
        read = F.linear(read, self.up) if self.options["projection"] == "shared_slices" else read
        return F.linear(read.flatten(-2), self.up) if self.options["projection"] == "low_rank" else read.flatten(-2)

    def _choose_actions(self, h, x):
        dtype = torch.promote_types(h.dtype, torch.float32)
        if self.actions is None:
            return torch.tensor([1.0, 0.0, 0.0], dtype=dtype, device=h.device).expand(*x.shape[:-1], 3)
        takes_h = self.options["action_input"] == "hidden"
        logits = torch.einsum("...d,had->...ha" if takes_h else "...hd,had->...ha", h if takes_h else x, self.actions)
        if self.options["action_scale"] == "slice":
            logits = logits / math.sqrt(h.shape[-1] / self.options["num_heads"])
        if self.action_bias is not None:
            logits = logits + self.action_bias
        return (self.options["action_sharpness"] * logits).to(dtype).softmax(-1)

    def _update(self, slots, mask, action, x):
        push, pop, no_op = action[..., None, None].unbind(-3)  # [..., H, 1, 1]
        mask = mask.unsqueeze(-1)  # [..., H, S, 1]
        if self.options["discipline"] == "queue":  # a pop removes the oldest element
            occupied = mask >= torch.finfo(mask.dtype).tiny
            popped = slots * torch.where(occupied, _shift_up(mask) / torch.where(occupied, mask, 1), 0)
        else:
            popped = _shift_up(slots)
        slots = push * _shift_down(slots, x.unsqueeze(-2)) + pop * popped + no_op * slots
        mask = push * _shift_down(mask, torch.ones_like(mask[..., :1, :])) + pop * _shift_up(mask) + no_op * mask
        return slots, mask.squeeze(-1)

    def _read(self, slots, mask):
        if self.query is None:  # read: top
            return slots[..., 0, :]
        scores = (self.query.to(slots.dtype).unsqueeze(-2) * slots).sum(-1)
        if self.options["read_mask"] == "multiply":
            scores = scores * mask
        elif self.options["read_mask"] == "log":
            scores = scores + mask.clamp_min(torch.finfo(mask.dtype).tiny).log()
        else:  # additive
            scores = scores + (1 - mask) * -1e9
        return (scores.softmax(-1).unsqueeze(-1) * slots).sum(-2)


def _shift_down(values, first):
    return torch.cat([first, values[..., :-1, :]], -2)


def _shift_up(values):
    return torch.cat([values[..., 1:, :], torch.zeros_like(values[..., :1, :])], -2)


class StackTransLayer(LlamaDecoderLayer):
    """A Llama layer with a memory at one site, or at two with `site: each_sublayer`."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        site = config.memory["site"]
        sites = ("after_attention", "after_block") if site == "each_sublayer" else (site,)
        self.memories = nn.ModuleDict({site: StackMemory(config) for site in sites})

    def forward(self, hidden_states, slots, mask, is_token=None, **attention_inputs):
        """Return the new hidden states, slots and mask. Tensors are positional, for reentrant checkpointing."""

        def use_memory(site, h, slots, mask):
            return self.memories[site](h, slots, mask, is_token) if site in self.memories else (h, slots, mask)

        h, slots, mask = use_memory("before_attention", hidden_states, slots, mask)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(h), **attention_inputs)
        h, slots, mask = use_memory("after_attention", h + attended, slots, mask)
        return use_memory("after_block", h + self.mlp(self.post_attention_layernorm(h)), slots, mask)


class StackTransPreTrainedModel:
    """Settings of both models below that differ from Llama's."""

    config_class = StackTransConfig
    _no_split_modules: ClassVar = ["StackTransLayer"]
    _can_compile_fullgraph = False

    def _init_weights(self, module):
        """Initialize new weights as Llama does; the gate starts at 1, the action bias at its value for push."""
        if not isinstance(module, StackMemory):
            return super()._init_weights(module)
        for name, parameter in module.named_parameters():
            std = 0.0 if name in ("gate", "action_bias") else self.config.initializer_range
            nn.init.normal_(parameter, float(name == "gate"), std)
        if module.action_bias is not None and not getattr(module.action_bias, "_is_hf_initialized", False):
            nn.init.constant_(module.action_bias[:, 0], module.options["action_bias"])


class StackTransModel(StackTransPreTrainedModel, LlamaModel):
    """The decoder without its output projection."""

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(StackTransLayer(config, i) for i in range(config.num_hidden_layers))
        self.axis = config.memory["axis"]
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        """Return the last hidden states, the cache, and with `output_hidden_states` the input of each layer."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("StackTrans: give either input_ids or inputs_embeds")
        if kwargs.get("output_attentions"):
            raise ValueError("StackTrans: output_attentions is not supported; omit it")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
        cache = self._prepare_cache(kwargs.get("cache", kwargs.get("past_key_values")), use_cache, attention_mask)
        start, length = cache.get_seq_length() if cache is not None else 0, h.shape[1]
        if position_ids is None:
            position_ids = torch.arange(start, start + length, device=h.device)[None]
        elif self.axis != "depth" and attention_mask is None and (position_ids.diff() <= 0).any():
            raise ValueError(f"StackTrans: axis {self.axis} cannot separate packed documents; give one per row")
        if self.axis == "token_major":  # all layers for one token, then the next token
            masks = [None if attention_mask is None else attention_mask[:, : start + t + 1] for t in range(length)]
            columns = zip(h.split(1, 1), masks, position_ids.split(1, 1), strict=True)
            columns = [self._run_layers(column, cache, mask, position) for column, mask, position in columns]
            inputs = [torch.cat(layer, 1) for layer in zip(*columns, strict=True)]
        else:
            inputs = self._run_layers(h, cache, attention_mask, position_ids)
        h = self.norm(inputs[-1])
        hidden = (*inputs[:-1], h) if kwargs.get("output_hidden_states") else None
        output = BaseModelOutputWithPast(h, hidden_states=hidden, **{CACHE: cache if use_cache else None})
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _prepare_cache(self, cache, use_cache, attention_mask):
        """Return the cache of this call. That of the axes time and token_major also holds the stacks."""
        use_cache = use_cache and not (self.gradient_checkpointing and self.training)
        if self.axis == "depth":
            return DynamicCache(config=self.config) if cache is None and use_cache else cache
        where = f"StackTrans: axis {self.axis}"
        is_new = type(cache) is DynamicCache and not cache.get_seq_length() and not getattr(cache, "offloading", False)
        if not (cache is None or is_new or isinstance(cache, StackTransCache)):
            raise ValueError(f"{where} does not support this {type(cache).__name__}; leave cache options unset")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"{where} requires an attention_mask [batch, tokens]")
        if self.axis == "token_major" and self.gradient_checkpointing and self.training:
            raise ValueError(f"{where} does not support gradient checkpointing; disable it")
        if is_new:  # the caller passes the same object again, so it must be this one that gets the stacks
            cache.__class__, cache.stacks = StackTransCache, {}
        if isinstance(cache, StackTransCache):
            return cache
        return StackTransCache(self.config) if use_cache or self.axis == "token_major" else None

    def _run_layers(self, h, cache, attention_mask, position_ids):
        """Return the input of each layer and the output of the last, all [B, T, d]."""
        start, length = cache.get_seq_length() if cache is not None else 0, h.shape[1]
        known = {"config": self.config, "attention_mask": attention_mask, "position_ids": position_ids, CACHE: cache}
        known |= {"inputs_embeds": h, "input_embeds": h}
        known["cache_position"] = torch.arange(start, start + length, device=h.device)
        causal_mask = create_causal_mask(**{name: value for name, value in known.items() if name in MASK_ARGUMENTS})
        positions = self.rotary_emb(h, position_ids)
        attention_inputs = {"attention_mask": causal_mask, "position_embeddings": positions, CACHE: cache}
        if "cache_position" in ATTENTION_ARGUMENTS:  # static caches of transformers 4.57 write there
            attention_inputs["cache_position"] = known["cache_position"]
        has_padding = self.axis != "depth" and attention_mask is not None
        is_token = attention_mask[:, -length:].bool() if has_padding else None
        stacks = cache.stacks if isinstance(cache, StackTransCache) else {}
        inputs = [h]
        for i, layer in enumerate(self.layers):
            key = i if self.axis == "time" else 0
            slots, mask = stacks.get(key) or self._make_empty_stacks(h)
            h, slots, mask = layer(h, slots, mask, is_token, **attention_inputs)
            stacks[key] = (slots, mask)
            inputs.append(h)
        return inputs

    def _make_empty_stacks(self, h):
        batch = h.shape[:2] if self.axis == "depth" else h.shape[:1]
        shape = (*batch, *(self.config.memory[key] for key in ("num_heads", "num_slots", "head_dim")))
        slots = torch.zeros(shape, dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        return slots, slots[..., 0]


class StackTransForCausalLM(StackTransPreTrainedModel, LlamaForCausalLM):
    """StackTrans with its output projection."""

    def __init__(self, config):
        super().__init__(config)
        self.model = StackTransModel(config)
        self.post_init()
