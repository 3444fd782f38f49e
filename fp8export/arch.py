"""What a transformer is, as data: which modules become one matrix, which never leave high precision.

Names are Hugging Face module paths.
"""

import re
from collections.abc import Mapping
from typing import Any

from .model import HIGH_PRECISION_DTYPES, LazyTensor

# Engines multiply each of these as one matrix, so its members share one input and are quantised all or none
# (vLLM packed_modules_mapping, SGLang and TensorRT-LLM alike).
_FUSED = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("gate_up", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
)
_FUSED_BY_MEMBER = {member: (label, members) for label, members in _FUSED for member in members}

# (pattern on the dotted module path, why it stays in high precision), first match wins
_HIGH_PRECISION = (
    (r"(^|\.)(lm_head|output_layer|embed_out|score|classifier)$", "output head"),
    (r"embed|(^|\.)wte$|(^|\.)wpe$", "embedding"),
    (r"(^|\.)(gate|router|shared_expert_gate|wg)$", "router"),
    (r"norm|(^|\.)ln_", "norm"),
    (r"(^|\.)(visual|vision\w*|image\w*|audio\w*|multi_modal\w*|mm_projector)(\.|$)", "not part of the language model"),
)
# a lookup table and not a linear, whatever else has "embed" in its name
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|embed_positions|\w*embeddings?|wte|wpe)$")
_IN_A_BLOCK = re.compile(r"\.\d+\.")
# cuBLAS, CUTLASS and torch._scaled_mm all want 16-byte rows of one-byte elements
_ALIGNMENT = 16
# their "linear" is Conv1D, whose weight is stored [K, N]
_TRANSPOSED_MODEL_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def fused_set(linear: str) -> str:
    """Name the set a linear is multiplied with: `….self_attn.qkv` for q_proj, its own name when it stands alone."""
    parent, _, last = linear.rpartition(".")
    label = _FUSED_BY_MEMBER.get(last)
    return f"{parent}.{label[0]}" if label else linear


def fused_members(linear: str) -> tuple[str, ...]:
    """All members of the linear's set, itself included, whether they exist or not."""
    parent, _, last = linear.rpartition(".")
    label = _FUSED_BY_MEMBER.get(last)
    return tuple(f"{parent}.{member}" for member in label[1]) if label else (linear,)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def is_matrix(key: str, tensor: LazyTensor) -> bool:
    """Tell whether a tensor could be the weight of a linear, by name, rank and type."""
    return (
        key.endswith(".weight")
        and len(tensor.shape) == 2
        and 0 not in tensor.shape
        and tensor.dtype in HIGH_PRECISION_DTYPES
    )


def is_stacked_experts(key: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor holds the matrices of all experts of a layer: [E, N, K]."""
    return len(shape) == 3 and "expert" in key


def is_embedding(module: str) -> bool:
    return bool(_EMBEDDING.search(module))


def high_precision_reason(module: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> str:
    """Say why a weight matrix stays in high precision; empty when it can be FP8."""
    for pattern, reason in _HIGH_PRECISION:
        if re.search(pattern, module):
            return reason
    if not _IN_A_BLOCK.search(module):
        return "outside the decoder layers"
    if config.get("model_type") in _TRANSPOSED_MODEL_TYPES:
        return f"{config['model_type']} stores it transposed"
    if any(size % _ALIGNMENT for size in shape):
        return f"{shape[0]} x {shape[1]} is not a multiple of {_ALIGNMENT}"
    return ""
