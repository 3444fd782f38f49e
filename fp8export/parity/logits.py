"""The logits depth: whole forwards of the same model, told apart only by the arithmetic of their linears.

End to end, FP8 is chaotic: one BF16 rounding upstream flips codes downstream by whole steps. Two faithful forwards
(another residual type, the same codes and scales) differ by the noise floor, and nothing can be held to less.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, RequestError
from ..model import Checkpoint, LazyTensor, Scale, ScaleSet
from ..report import LogitsParity
from ..store import Store
from .stored import StoredLinear, run_stored, run_training, training_codes

FLOOR_FACTOR = 1.25
# perplexity of an export without learned scales, relative to high precision
_DYNAMIC_PERPLEXITY = 1.005
_CAPTURED_ROWS = 256


class _TrainedForward(nn.Module):
    """The linear as training ran it: saturating codes at the learned multipliers, float32 accumulation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, own: Scale, trained: Scale | None) -> None:
        super().__init__()
        self.codes, self.weight_scale = training_codes(weight, trained)
        self.bias, self.own = bias, own

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = run_training(rows, self.own, self.codes, self.weight_scale, self.bias, x.dtype)
        return y.reshape(*x.shape[:-1], -1)


class _ExportForward(nn.Module):
    """The linear as an engine runs what lies on disk."""

    def __init__(self, export: StoredLinear, bias: Tensor | None) -> None:
        super().__init__()
        self.export, self.bias = export, bias

    def forward(self, x: Tensor) -> Tensor:
        return run_stored(self.export, x.reshape(-1, x.shape[-1]), self.bias, x.dtype).reshape(*x.shape[:-1], -1)


class Forwards:
    """The forwards that parity compares, built one at a time from the files."""

    def __init__(
        self, checkpoint: Checkpoint, scales: ScaleSet, export: Mapping[str, StoredLinear], store: Store, device: str
    ) -> None:
        self.checkpoint, self.scales, self.export, self.store, self.device = checkpoint, scales, export, store, device
        self.trained_dtype = checkpoint.linears[0].weight.dtype

    def reference(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The training-time forward; without learned scales the same as `high_precision`."""
        linears: dict[str, nn.Module] = {}
        for linear in self.checkpoint.linears:
            own = self.scales.inputs.get(linear.name)
            if own is not None:
                bias = self._read(linear.bias)
                trained = self.scales.weights.get(linear.name)
                linears[linear.name] = _TrainedForward(linear.weight.read().to(self.device), bias, own, trained)
        return self._model(self.checkpoint.config, self._source_tensors(), linears, dtype or self.trained_dtype)

    def high_precision(self) -> nn.Module:
        return self._model(self.checkpoint.config, self._source_tensors(), {}, self.trained_dtype)

    def exported(self) -> nn.Module:
        linears: dict[str, nn.Module] = {
            name: _ExportForward(linear, self._read(self.store.tensors.get(f"{name}.bias")))
            for name, linear in self.export.items()
        }
        skipped = {f"{name}.{part}" for name in self.export for part in ("weight", "weight_scale", "input_scale")}
        tensors = {key: t for key, t in self.store.tensors.items() if key not in skipped}
        return self._model(self.store.config, tensors, linears, self.trained_dtype)

    def capture(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return each linear's input in the reference forward, [rows, K], at most 256 rows of the first sequence."""
        inputs: dict[str, Tensor] = {}
        names = {linear.name for linear in self.checkpoint.linears}
        model = self.reference()
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_pre_hook(
                    lambda _, args, name=name: inputs.setdefault(name, _first_rows(args[0]))
                )
        with torch.inference_mode():
            model(tokens[:1].to(self.device))
        return inputs

    def _read(self, tensor: LazyTensor | None) -> Tensor | None:
        return None if tensor is None else tensor.read().to(self.device)

    def _source_tensors(self) -> dict[str, LazyTensor]:
        tensors = dict(self.checkpoint.plain)
        for linear in self.checkpoint.linears:
            tensors[f"{linear.name}.weight"] = linear.weight
            if linear.bias is not None:
                tensors[f"{linear.name}.bias"] = linear.bias
        return tensors

    def _model(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, LazyTensor],
        linears: Mapping[str, nn.Module],
        dtype: torch.dtype,
    ) -> nn.Module:
        model = _empty_model(config, dtype)
        for name, module in linears.items():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module)
        own = {key for name in linears for key in (f"{name}.weight", f"{name}.bias")}
        state = {key: tensor.read() for key, tensor in tensors.items() if key not in own}
        absent, unknown = model.load_state_dict(state, strict=False)
        absent = [key for key in absent if key != "lm_head.weight" or not config.get("tie_word_embeddings")]
        if absent or unknown:
            raise CheckpointError(
                "config.json describes another model than the tensors",
                where=f"missing {absent[:3]}, unknown {unknown[:3]}",
                hint="the logits depth needs a config.json that transformers can build this model from",
            )
        return model.to(self.device).eval()


def _empty_model(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise RequestError("transformers is not installed", hint="pip install 'fp8export[hf]'") from error
    settings = {
        k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype", "model_type")
    }
    try:
        built = AutoConfig.for_model(config["model_type"], **settings)
        build: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
        model = build(built, dtype=dtype)
    except Exception as error:  # a config with wrong values fails anywhere in foreign code
        raise CheckpointError(
            f"transformers cannot build this model: {type(error).__name__}: {error}",
            where="config.json",
            hint="the logits depth needs a config.json that transformers understands",
        ) from error
    return model


def _first_rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])[:_CAPTURED_ROWS].clone()


def judge_logits(forwards: Forwards, tokens: Tensor) -> LogitsParity:
    """Run reference, noise floor, high precision and export over `tokens` [sequences, length] and compare."""
    tokens = tokens.to(forwards.device)
    reference = _log_probabilities(forwards.reference(), tokens)
    floor = _log_probabilities(forwards.reference(_other_dtype(forwards.trained_dtype)), tokens)
    high = _log_probabilities(forwards.high_precision(), tokens)
    export = _log_probabilities(forwards.exported(), tokens)
    kl = _kl(reference, export)
    worst = int(kl.argmax())
    best = reference.topk(min(5, reference.shape[-1]), dim=-1).indices
    # both by argmax: BF16 logits tie, and topk breaks ties in another order
    top = export.argmax(-1, keepdim=True)
    return LogitsParity(
        tokens=tokens.numel(),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.flatten().quantile(0.99)),
        kl_max=float(kl.max()),
        kl_max_at=(worst // kl.shape[1], worst % kl.shape[1]),
        top1_agreement=float((reference.argmax(-1, keepdim=True) == top).float().mean()),
        top5_agreement=float((best == top).any(-1).float().mean()),
        noise_floor_kl=float(_kl(reference, floor).mean()),
        high_precision_kl=float(_kl(reference, high).mean()),
        perplexity={
            "training-time FP8": _perplexity(reference, tokens),
            "high precision": _perplexity(high, tokens),
            "export": _perplexity(export, tokens),
        },
    )


def logits_faults(logits: LogitsParity, *, learned: bool, exact: bool) -> list[str]:
    """Compare with the floor, or without learned scales with the perplexity of high precision.

    An export that changed some layers for a stated reason (unified, outgrown, kept) carries a second rounding of the
    same size as FP8 itself on top of the floor.
    """
    if learned:
        limit = FLOOR_FACTOR * (logits.noise_floor_kl + (0 if exact else logits.high_precision_kl))
        if logits.kl_mean <= limit:
            return []
        beside = "the noise floor" if exact else "the noise floor and the distance to high precision"
        return [f"logits: mean KL {logits.kl_mean:.2e} is above {limit:.2e}, {FLOOR_FACTOR} times {beside}"]
    ratio = logits.perplexity["export"] / logits.perplexity["high precision"]
    return [] if ratio <= _DYNAMIC_PERPLEXITY else [f"logits: perplexity is {ratio:.4f} times that of high precision"]


def _other_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float32 else torch.float32


def _log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(row[None]).logits.double().log_softmax(-1) for row in tokens])


def _kl(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) at each position, in nats."""
    return (reference.exp() * (reference - other)).sum(-1)


def _perplexity(log_probabilities: Tensor, tokens: Tensor) -> float:
    picked = log_probabilities[:, :-1].gather(-1, tokens[:, 1:, None])
    return math.exp(-float(picked.mean()))
