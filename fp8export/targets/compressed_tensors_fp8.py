"""compressed-tensors `float-quantized`, as vLLM 0.20 to 0.33, SGLang 0.5 and transformers 5 load it.

Scales are F32, per tensor [1] (the one shape that all three take) or per channel [N, 1]. The group is called `group_0`
because TensorRT-LLM looked for that name.
"""

from collections.abc import Mapping
from typing import Any

from .. import arch
from ..layout import Layout
from ..model import Grain, ModelPlan
from . import hf_folder
from .format import StoredFormat, is_pattern
from .hf_folder import Options

QUANT_METHOD = "compressed-tensors"
SERVE = "vllm serve {path}"
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


def problems(plan: ModelPlan) -> tuple[str, ...]:
    found = []
    if not plan.config:
        found.append("there is no config.json: name the folder that has one with --hf-config DIR")
    if plan.config.get("quantization_config"):
        found.append("the source's config.json already has a quantization_config")
    stacked = [key for key, tensor in plan.plain.items() if arch.is_stacked_experts(key, tensor.shape)]
    if stacked:
        found.append(f"experts stacked in one tensor are not supported yet: {stacked[0]}")
    return tuple(found)


def lay_out(plan: ModelPlan, options: Options) -> Layout:
    inputs = (
        {"strategy": "token", "dynamic": True}
        if plan.scheme.dynamic_inputs
        else {"strategy": "tensor", "dynamic": False}
    )
    quantization = {
        "quant_method": QUANT_METHOD,
        "format": "float-quantized",
        # without it transformers loads the codes and ignores the scales
        "quantization_status": "compressed",
        "ignore": hf_folder.ignore_list(plan),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_E4M3, "strategy": str(plan.grain), "dynamic": False},
                "input_activations": {**_E4M3, **inputs},
            }
        },
    }
    return hf_folder.lay_out(plan, options, quantization, SERVE)


def read_format(quantization: Mapping[str, Any]) -> tuple[StoredFormat | None, tuple[str, ...]]:
    faults = []
    if quantization.get("format") != "float-quantized":
        faults.append(f"format is {quantization.get('format')!r}, vLLM needs 'float-quantized'")
    if quantization.get("quantization_status") != "compressed":
        faults.append("quantization_status is not 'compressed': transformers would ignore every scale")
    groups = quantization.get("config_groups")
    group = groups.get("group_0") if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        return None, (*faults, "config_groups must be one group_0 with the target Linear")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        return None, (*faults, "group_0 lacks weights or input_activations")
    for part, args in (("weights", weights), ("input_activations", inputs)):
        for key, value in _E4M3.items():
            if args.get(key) != value:
                faults.append(f"{part}.{key} is {args.get(key)!r}, must be {value!r}")
        extra = [key for key, value in args.items() if key not in (*_E4M3, "strategy", "dynamic") and value is not None]
        if extra:
            faults.append(f"{part} has {', '.join(extra)}, which means another scheme")
    if group.get("output_activations") is not None or group.get("format", "float-quantized") != "float-quantized":
        faults.append("group_0 has output_activations or a format of its own")
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if quantization.get(key):
            faults.append(f"{key} is set, and the folder holds nothing for it")
    pair = (weights.get("strategy"), weights.get("dynamic"), inputs.get("strategy"), inputs.get("dynamic"))
    known = {("tensor", False, "tensor", False), ("channel", False, "tensor", False), ("channel", False, "token", True)}
    ignore = quantization.get("ignore")
    if not all(isinstance(value, str | bool) for value in pair) or pair not in known:
        return None, (*faults, f"weights {pair[0]!r} with inputs {pair[2]!r} is a pair that engines do not run")
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        return None, (*faults, "ignore must be a list of names")
    broken = [pattern for pattern in ignore if not is_pattern(pattern)]
    faults += [f"the pattern {pattern!r} is not a regular expression" for pattern in broken]
    ignore = [pattern for pattern in ignore if pattern not in broken]
    return StoredFormat(Grain(str(pair[0])), not pair[3], tuple(ignore)), tuple(faults)
