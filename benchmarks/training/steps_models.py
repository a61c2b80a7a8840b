"""The two reasoning models: a Llama in training form, its sizes, and the folder vLLM loads."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mtp_layers import FeedForward
from safetensors.torch import load_file, save_file
from steps_data import VOCAB_SIZE
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"
_SHARED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "steps-target-tiny": {
        **_SHARED,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "steps-draft-tiny": {
        **_SHARED,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
SOLVER = "steps-solver"
"""The target's lower half, which solves problems and cannot grade."""
CONFIGS[SOLVER] = CONFIGS["steps-target-tiny"] | {"num_hidden_layers": 5}


class Layout(NamedTuple):
    """Where each token stands, int64 [B, L], and what it may not see: -inf there, else 0,
    fp32 [B, L, L]; B can be 1.
    """

    positions: Tensor
    hidden: Tensor


def chain(length: int) -> Layout:
    """A plain text."""
    hidden = torch.full((1, length, length), -torch.inf).triu(1)
    return Layout(torch.arange(length)[None], hidden)


def branched(length: int, ends: Tensor) -> Layout:
    """A text of ``length`` tokens, and a token more behind each of ``ends`` int64 [B, G] that sees
    the text up to there and itself, as the judging suffix does when a model is served.
    """
    batch, branches = ends.shape
    text = torch.arange(length).expand(batch, length)
    last = torch.cat([text, ends], dim=1)
    of_text = torch.arange(length) <= last[:, :, None]
    own = torch.eye(length + branches, dtype=torch.bool)[:, length:].expand(batch, -1, -1)
    seen = torch.cat([of_text, own], dim=2)
    return Layout(
        torch.cat([text, ends + 1], dim=1), torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    )


class Attention(nn.Module):
    """Multi-head attention with rotated halves.

    At a hundred positions three plain operations take half of the fused one's time.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.dim = config["head_dim"]
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        batch, length, hidden = x.shape
        angles = (layout.positions[..., None] * self.frequencies)[:, :, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k, v = (
            p(x).view(batch, length, self.heads, -1)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (
            part.transpose(1, 2).flatten(0, 1)
            for part in (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        )
        unseen = layout.hidden.to(q.dtype)[:, None].expand(batch, self.heads, -1, -1)
        scores = torch.baddbmm(
            unseen.flatten(0, 1), q, k.transpose(1, 2), alpha=1 / math.sqrt(self.dim)
        )
        mixed = torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, -1)).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, length, hidden))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = FeedForward(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        x = x + self.self_attn(self.input_layernorm(x), layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Whole sequences, no KV cache."""

    def __init__(self, config: dict[str, Any], layers: int | None = None) -> None:
        super().__init__()
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        layers = layers or config["num_hidden_layers"]
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Block(config) for _ in range(layers)])
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Draws every weight; outputs (of layers and head) start at zero."""
        for name, weight in self.named_parameters():
            if weight.ndim != 2:
                continue
            scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=scale, generator=generator)

    def grow(self, config: dict[str, Any], generator: torch.Generator) -> None:
        """Puts fresh layers, silent at first, on top until there are as many as configured."""
        fresh = TinyLlama(config, config["num_hidden_layers"] - len(self.layers))
        fresh.initialize(generator)
        self.layers.extend(fresh.layers)

    def states(self, tokens: Tensor, layout: Layout) -> list[Tensor]:
        """int64 [B, L] -> the residual stream in front of the layers and behind each, [B, L, H]."""
        found = [self.embed_tokens(tokens)]
        for layer in self.layers:
            found.append(layer(found[-1], layout))
        return found

    def logits(self, state: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, V]."""
        return self.lm_head(self.norm(state))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> logits [B, T, V]."""
        return self.logits(self.states(tokens, chain(tokens.shape[1]))[-1])


def export(
    model: TinyLlama, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Configuration, tokenizer and bf16 weights as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    tensors = {_name(k): v.bfloat16().contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path) -> TinyLlama:
    """The training form of an exported model, fp32, in evaluation mode."""
    model = TinyLlama(json.loads((folder / "config.json").read_text()))
    found = load_file(folder / WEIGHTS)
    model.load_state_dict({k: found[_name(k)].float() for k in model.state_dict()})
    return model.eval()


def _name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"
