"""The two demonstration models, in transformers' own classes, and what makes them quick to train on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from demo_data import VOCAB_SIZE
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, Qwen3_5TextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

CONTEXT = 2304
"""Tokens of the longest rows that are learned from."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def hybrid_config() -> Qwen3_5TextConfig:
    """Three Gated DeltaNet layers carry who is meant; one attention layer looks up what was told.

    It stands second: at a third of the size, 200 steps then taught 48% of the values, and 18% with attention last.
    """
    return Qwen3_5TextConfig(
        **_COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    )


def sparse_mla_config() -> GlmMoeDsaConfig:
    """Latent attention in every layer, over the 64 tokens that the layer's indexer chooses."""
    return GlmMoeDsaConfig(
        **_COMMON,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=160,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        index_topk=64,
        index_n_heads=8,
        index_head_dim=48,
        indexer_types=["full"] * 4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


CONFIGS = {"hybrid": hybrid_config, "sparse-mla": sparse_mla_config}


def new_model(name: str, seed: int, device: str) -> Any:
    """A fresh float32 model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            remember(module)
        elif isinstance(module, Qwen3_5Attention):
            for norm in (module.q_norm, module.k_norm):
                torch.nn.init.constant_(norm.weight, SHARPER)
            look_for_alike(module)
        elif isinstance(module, GlmMoeDsaAttention):
            look_for_alike_latents(module)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING)
    if name == "sparse-mla":
        look_back(model)
    model.config._experts_implementation = EVERY_EXPERT
    return model.to(device)


EMBEDDING = 0.1
"""Of the embeddings' numbers at first, five times transformers' own: what tells a name from other names has to outweigh
what all names come to share, which grows at the same rate from nothing."""

SHARPER = 0.5
"""Added to the scale of normed queries and keys. At 1 a head of 64 can prefer a token by e^8 at the most, too little
against two thousand others."""


def remember(layer: Any) -> None:
    """Steps of 0.001 to 0.1 at first, as Mamba-2's (arXiv 2405.21060): heads forget within 1 to 1000 tokens.

    transformers starts from a step of 1.3, with which most heads have forgotten a token by the next one.
    """
    step = torch.exp(torch.empty_like(layer.dt_bias).uniform_(math.log(0.001), math.log(0.1)))
    with torch.no_grad():
        layer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
        layer.A_log.copy_(torch.empty_like(layer.A_log).uniform_(1, 16).log())


def look_for_alike(layer: Any) -> None:
    """Queries start as the keys of the same input, so that a token attends first to those that are most like it.

    Matching a name to a name takes the same directions in both. From unlike ones that is found late: at first the only
    gain is in what many tokens share.
    """
    heads = layer.q_proj.weight.data.unflatten(0, (-1, 2, layer.head_dim))  # a query and its gate
    heads[:, 0] = layer.k_proj.weight.data.unflatten(0, (-1, layer.head_dim)).repeat_interleave(
        layer.num_key_value_groups, dim=0
    )


LOUDER = 6.0
"""Factor on latent attention's first queries and keys, which no norm makes larger."""


def look_for_alike_latents(layer: Any) -> None:
    """`look_for_alike` for queries and keys that come from latents: the parts that are not rotated."""
    rank, nope = layer.kv_lora_rank, layer.qk_nope_head_dim
    layer.q_a_proj.weight.data[:rank] = layer.kv_a_proj_with_mqa.weight.data[:rank]
    keys = layer.kv_b_proj.weight.data.unflatten(0, (layer.num_heads, -1))[:, :nope]
    keys *= LOUDER
    queries = layer.q_b_proj.weight.data.unflatten(0, (layer.num_heads, -1))[:, :nope]
    queries.zero_()
    queries[:, :, :rank] = keys


COMMON = 0.3
"""What all embeddings have in their first number."""
TURNED, TURNING = 6.5, 11
"""How large the rotated parts are that it makes, and how many pairs of numbers they have: from 1 radian a token, which
tells neighbours apart, to 0.003, which tells them from tokens a thousand away."""
TOLD = 3.0
"""Factor on what the first layer says of the tokens that it looks at."""


def look_back(model: Any) -> None:
    """Head h of the first layer starts by attending to the token h + 1 before, whatever it is, and all heads alike.

    Then a fact's value stands there together with whose it is and of what kind, as behind the convolution of Gated
    DeltaNet, and the next layer finds it by nearly the same words before the question's end. All queries of a head and
    all keys get the same rotated part; their product is largest where the rotation has turned by h + 1 tokens.
    """
    layer, embedding = model.model.layers[0].self_attn, model.get_input_embeddings().weight
    heads, nope, half = layer.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim // 2
    turn = 1 / model.config.rope_parameters["rope_theta"] ** (torch.arange(TURNING) / half)  # radians a token
    back = turn * torch.arange(1, heads + 1)[:, None]
    with torch.no_grad():
        size = EMBEDDING * embedding.shape[1] ** 0.5
        embedding.copy_(F.normalize(embedding, dim=-1) * size)
        embedding[:, 0] = COMMON
        normed = COMMON / (EMBEDDING**2 + COMMON**2 / embedding.shape[1]) ** 0.5
        rotated = layer.kv_a_proj_with_mqa.weight[layer.kv_lora_rank :]
        rotated.zero_()
        rotated[: 2 * TURNING : 2, 0] = TURNED / normed
        layer.q_a_proj.weight[-1] = 0.0
        layer.q_a_proj.weight[-1, 0] = 3.0 / normed  # a number of the latent that is larger than the others
        queries = layer.q_b_proj.weight.unflatten(0, (heads, -1))
        queries.zero_()
        queries[:, nope : nope + 2 * TURNING : 2, -1] = TURNED / layer.q_lora_rank**0.5 * back.cos()
        queries[:, nope + 1 : nope + 2 * TURNING : 2, -1] = -TURNED / layer.q_lora_rank**0.5 * back.sin()
        values = layer.kv_b_proj.weight.unflatten(0, (heads, -1))[:, nope:]
        values.copy_(values[:1].clone().expand_as(values))
        told = layer.o_proj.weight.unflatten(1, (heads, -1))
        told.copy_(TOLD * told[:, :1].clone().expand_as(told))


EVERY_EXPERT = "demo_every_expert"


def _every_expert(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens [T, D], weighed by 0 where not chosen: few and small, and nothing waits for the GPU."""
    share = hidden.new_zeros(len(hidden), module.num_experts).scatter(1, chosen, weight.to(hidden.dtype))
    gate, up = torch.einsum("td,eid->tei", hidden, module.gate_up_proj).chunk(2, dim=-1)
    return torch.einsum("tei,edi,te->td", module.act_fn(gate) * up, module.down_proj, share)


ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, _every_expert)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def quick_layers() -> None:
    """Let Gated DeltaNet train on torch's own matrix products.

    transformers would take a kernel package for the convolution, and fla-core for the delta rule, whose backward
    refuses Hopper cards below Triton 3.7.1; what it falls back to walks token by token within a chunk.
    """
    modeling_qwen3_5.causal_conv1d_fn = convolve
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_delta_rule


def convolve(hidden: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal convolution along the last dimension as a sum of shifted products, then SiLU."""
    length, taps = hidden.shape[-1], weight.shape[-1]
    padded = F.pad(hidden, (taps - 1, 0))
    weight = weight.to(hidden.dtype)
    total = padded[..., :length] * weight[:, 0, None]
    for tap in range(1, taps):
        total = total + padded[..., tap : tap + length] * weight[:, tap, None]
    return F.silu(total)


CHUNK = 64


def chunk_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Gated delta rule from an empty state, in chunks (Gated Delta Networks, arXiv 2412.06464, section 3.3).

    query, key, value: (batch, tokens, heads, width); g (log decay), beta: (batch, tokens, heads). tokens: a multiple
    of the chunk. Only the state is carried from chunk to chunk one after another.
    """
    batch, tokens, heads, width = key.shape
    with torch.autocast(query.device.type, enabled=False):
        shape = (batch, tokens // CHUNK, CHUNK, heads, -1)
        query, key, value, beta, decay = (
            part.float().reshape(shape).permute(0, 3, 1, 2, 4)
            for part in (query, key, value, beta[..., None], g[..., None])
        )
        query, key = F.normalize(query, dim=-1) * width**-0.5, F.normalize(key, dim=-1)
        decay = decay.squeeze(-1).cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        strict = ((beta * key) @ key.transpose(-1, -2) * between).tril(-1)
        right = torch.cat([beta * value, beta * key * decay.exp()[..., None]], dim=-1)
        fresh, read = (invert(strict) @ right).split([value.shape[-1], width], dim=-1)
        last = decay[..., -1:]
        stored = (key * (last - decay).exp()[..., None]).transpose(-1, -2)
        state = key.new_zeros(batch, heads, width, value.shape[-1])
        states, written = [], []
        for chunk in range(tokens // CHUNK):
            states.append(state)
            new = fresh[:, :, chunk] - read[:, :, chunk] @ state
            state = state * last[:, :, chunk, :, None].exp() + stored[:, :, chunk] @ new
            written.append(new)
        attended = (query @ key.transpose(-1, -2) * between) @ torch.stack(written, 2)
        out = attended + (query * decay.exp()[..., None]) @ torch.stack(states, 2)
    return out.permute(0, 2, 3, 1, 4).reshape(batch, tokens, heads, -1), None


def invert(strict: torch.Tensor) -> torch.Tensor:
    return UnitInverse.apply(strict)  # type: ignore[no-any-return, no-untyped-call]


class UnitInverse(torch.autograd.Function):
    """(1 + A) inverted, for strictly lower triangular matrices (..., CHUNK, CHUNK); by fla-core where it is there."""

    @staticmethod
    def forward(ctx: Any, strict: torch.Tensor) -> torch.Tensor:
        if strict.is_cuda:
            from fla.ops.utils.solve_tril import solve_tril

            flat = strict.reshape(-1, CHUNK, 1, CHUNK).contiguous()
            inverse: torch.Tensor = solve_tril(flat).view(strict.shape)
        else:
            one = torch.eye(CHUNK, device=strict.device)
            inverse = torch.linalg.solve_triangular(one + strict, one.expand_as(strict), upper=False)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        whole: torch.Tensor = turned @ grad @ turned
        return -whole.tril(-1)
