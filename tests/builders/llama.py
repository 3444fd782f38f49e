"""A tiny Llama folder with Hugging Face names, in any precision, with or without Transformer Engine states."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from . import te

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 128, 4, 2, 16, 256


def config(layers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def linear_shapes(layers: int = 2) -> dict[str, tuple[int, int]]:
    shapes = {}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj": (FFN, HIDDEN),
            f"{at}.mlp.up_proj": (FFN, HIDDEN),
            f"{at}.mlp.down_proj": (HIDDEN, FFN),
        }
    return shapes


def weights(layers: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    state = {
        f"{name}.weight": torch.randn(shape, generator=random) * 0.05 for name, shape in linear_shapes(layers).items()
    }
    for i in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{norm}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=random)
    state["model.norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=random)
    state["model.embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=random)
    state["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=random) * 0.1
    return {key: value.to(dtype) for key, value in state.items()}


def states(
    state: dict[str, Tensor], *, shared: bool = False, input_amax: float = 6.0, **more: Any
) -> dict[str, Tensor]:
    """One learned state per linear: weight scales that just cover the weights, or one for all when `shared`."""
    names = [key.removesuffix(".weight") for key in state if key.endswith("_proj.weight")]
    largest = max(float(state[f"{name}.weight"].abs().max()) for name in names)
    out = {}
    for i, name in enumerate(names):
        amax = largest if shared else float(state[f"{name}.weight"].abs().max())
        own = input_amax * (1 + (0 if "proj" in name and shared else i // 7))
        history = [[0.0, 0.0, 0.0], [own, amax, 0.0], [own / 2, amax, 0.0]]
        scale = [float(torch.tensor(448.0) / torch.tensor(own)), float(torch.tensor(448.0) / torch.tensor(amax)), 1.0]
        out[f"{name}._extra_state"] = te.as_u8(te.pickled(te.delayed(scale, history, **more)))
    return out


def write(folder: Path, state: dict[str, Tensor], settings: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings or config()))
    return folder


def hf_plain(folder: Path) -> Path:
    return write(folder, weights())


def te_fp8(folder: Path) -> Path:
    state = weights()
    return write(folder, {**state, **states(state)})
