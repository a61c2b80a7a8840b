"""The tiny random models: one small configuration for each architecture the package supports.

All share vocabulary, width and depth, so that they differ by architecture only. Head sizes are ones
vLLM's CPU attention takes, heads and experts divide by two (tensor parallel 2), and every sliding
window is 64 tokens, short enough for a test to run past it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from speculators_ext.assets import tiny_tokenizer as tok

HIDDEN = 128
LAYERS = 8
SLIDING_WINDOW = 64

_DENSE: dict[str, Any] = {
    "vocab_size": tok.VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": tok.MAX_LENGTH,
    "pad_token_id": tok.PAD_ID,
    "bos_token_id": tok.BOS_ID,
    "eos_token_id": tok.EOS_ID,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": SLIDING_WINDOW,
    "tie_word_embeddings": True,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
# YaRN, as in the released model. Plain rotary embedding would not do: vLLM 0.32's CPU kernel for it
# reads [tokens, heads * size], latent attention passes [tokens, heads, size], and which rows are
# rotated then depends on how many tokens run at once, so that decode and prefill disagree.
_DEEPSEEK_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": tok.MAX_LENGTH // 2,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class TinySpec:
    """A tiny model.

    Attributes:
        config_class: name of the configuration class in transformers.
        architecture: what ``config.json`` names; transformers' class of that name is used to find
            the tensors, unless `built_as` gives another.
        options: the configuration beyond what all models share.
        raw: keys put into ``config.json`` as they are, for what the class would rename or drop.
        seed: of the weights; chosen so that greedy text does not fall into a loop.
        mtp: writes one multi-token-prediction layer: ``"deepseek"`` or ``"mimo"`` names.
    """

    summary: str
    config_class: str
    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    built_as: str | None = None
    seed: int = 7
    mtp: str | None = None

    def config_options(self) -> dict[str, Any]:
        """Every argument of the configuration class."""
        return {**_DENSE, **self.options}


SPECS: dict[str, TinySpec] = {
    "tiny-llama": TinySpec("random Llama, grouped heads", "LlamaConfig", "LlamaForCausalLM"),
    "tiny-mistral": TinySpec(
        "random Mistral, every layer with a window of 64",
        "MistralConfig",
        "MistralForCausalLM",
        {"sliding_window": SLIDING_WINDOW, "head_dim": 32},
    ),
    "tiny-qwen2": TinySpec(
        "random Qwen2, biased query, key and value", "Qwen2Config", "Qwen2ForCausalLM"
    ),
    "tiny-qwen3": TinySpec(
        "random Qwen3, normalised queries and keys",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 64},
    ),
    "tiny-gemma2": TinySpec(
        "random Gemma 2, alternating windows of 64, capped logits, tied embedding",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA,
        seed=15,
    ),
    "tiny-gemma3": TinySpec(
        "random Gemma 3 (text), five windows of 64 to one full layer, tied embedding",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA,
    ),
    "tiny-phi3": TinySpec("random Phi-3, fused projections", "Phi3Config", "Phi3ForCausalLM"),
    "tiny-mixtral": TinySpec(
        "random Mixtral, 2 of 4 experts",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-qwen3-moe": TinySpec(
        "random Qwen3-MoE, 2 of 4 experts",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, "head_dim": 32, "num_experts": 4, "norm_topk_prob": True},
    ),
    "tiny-deepseek-v3": TinySpec(
        "random DeepSeek-V3: latent attention, experts, one MTP layer",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_MOE,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _DEEPSEEK_ROPE,
        },
        raw={
            "num_nextn_predict_layers": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        },
        mtp="deepseek",
    ),
    "tiny-mimo": TinySpec(
        "random MiMo (Qwen2 layers), one MTP layer",
        "Qwen2Config",
        "MiMoForCausalLM",
        raw={"num_nextn_predict_layers": 1},
        built_as="Qwen2ForCausalLM",
        mtp="mimo",
    ),
}
