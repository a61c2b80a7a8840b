"""The two tiny MTP models: configurations, and both in one training form.

The MTP module is trained for one step, as released ones are: from the target's state at position
i and the embedding of token i + 1 it predicts token i + 2 (DeepSeek-V3, arXiv 2412.19437,
equations 21 to 25). Which state it reads is what vLLM feeds: DeepSeek's behind the final norm,
MiMo's in front of it.
"""

from __future__ import annotations

from typing import Any

import torch
from mtp_corpus import VOCAB_SIZE
from mtp_layers import Block, Experts
from torch import Tensor, nn

HIDDEN = 192
MAX_LENGTH = 2048
# The spread (of the logarithm) of the final norm's scales. Released models have scales that differ
# several-fold from channel to channel; after a short training they would be near one, and the
# states in front of and behind the norm would be as good as the same.
NORM_SPREAD = 0.7

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "max_position_embeddings": MAX_LENGTH,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3-tiny-mtp": {
        **_SHARED,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "attention_bias": False,
        # YaRN as in the released model; vLLM 0.32's CPU rotary embedding is wrong for the plain
        # kind with latent attention.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_LENGTH // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "mimo-tiny-mtp": {
        **_SHARED,
        "architectures": ["MiMoForCausalLM"],
        # vLLM goes by the architecture. transformers has no "mimo", and would put Qwen2's splitting
        # of text in the place of the tokenizer's own for "qwen2".
        "model_type": "llama",
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


class MtpModule(nn.Module):
    """[state, embedding of the next token] -> state that predicts the token after it.

    Args:
        config: as above.
        embedding_first: the order in which `proj` reads its two halves (DeepSeek's).
    """

    def __init__(self, config: dict[str, Any], embedding_first: bool) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.embedding_first = embedding_first
        self.enorm = nn.RMSNorm(hidden, eps=eps)
        self.hnorm = nn.RMSNorm(hidden, eps=eps)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = Block(config, config["num_hidden_layers"])
        self.norm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """[B, T, H] twice -> [B, T, H], in front of the module's own norm."""
        pair = [self.enorm(embedding), self.hnorm(state)]
        return self.block(self.proj(torch.cat(pair if self.embedding_first else pair[::-1], -1)))


class TinyMtp(nn.Module):
    """A target with one MTP module; embedding and output rows are shared between them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.is_deepseek = "kv_lora_rank" in config
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            [Block(config, layer) for layer in range(config["num_hidden_layers"])]
        )
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.mtp = MtpModule(config, embedding_first=self.is_deepseek)
        self.register_buffer("first_scales", torch.ones(hidden), persistent=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Draws every weight; outputs (of layers and head) start at zero, the final
        norms spread out."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                silent = name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight"))
                nn.init.zeros_(weight) if silent else nn.init.normal_(
                    weight, std=scale, generator=generator
                )
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        with torch.no_grad():
            spread = torch.randn(HIDDEN, generator=generator) * NORM_SPREAD
            for scales in (self.first_scales, self.norm.weight, self.mtp.norm.weight):
                scales.copy_(spread.exp())

    @torch.no_grad()
    def restore_scales(self) -> None:
        """Gives the final norm the scales it started from; what the target computes is unchanged.

        The output rows take the difference, and with them the module's norms: its last one wholly,
        DeepSeek's first one (of the state behind the target's norm) up to one factor a token.
        """
        ratio = self.first_scales / self.norm.weight
        self.norm.weight.copy_(self.first_scales)
        self.lm_head.weight /= ratio
        self.mtp.norm.weight *= ratio
        if self.is_deepseek:
            self.mtp.hnorm.weight /= ratio

    def states(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, H], in front of the final norm."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def mtp_states(self, states: Tensor, following: Tensor) -> Tensor:
        """States [B, T, H] of `states` and the tokens [B, T] after them -> [B, T, H]."""
        given = self.norm(states) if self.is_deepseek else states
        return self.mtp(given, self.embed_tokens(following))

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [B, T] -> of the token after each position [B, T, V], and the module's, of the
        token after that [B, T - 1, V].
        """
        states = self.states(tokens)
        ahead = self.mtp_states(states[:, :-1], tokens[:, 1:])
        return self.lm_head(self.norm(states)), self.lm_head(self.mtp.norm(ahead))

    def balance_experts(self, rate: float) -> None:
        """See `Experts.balance`."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.balance(rate)
