"""What a server wants. Each target is a module with `problems`, `lay_out` and `read_format`."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import RequestError, UnsupportedError
from ..layout import Layout
from ..model import ModelPlan
from . import compressed_tensors_fp8
from .format import StoredFormat
from .hf_folder import Options

__all__ = ["TARGETS", "Options", "StoredFormat", "Target", "find_target", "lay_out", "read_format"]


class Target(Protocol):
    QUANT_METHOD: str
    SERVE: str  # the command to run next, with {path}

    def problems(self, plan: ModelPlan) -> tuple[str, ...]:
        """Everything the loaders would refuse or misread, in words; empty when the plan can be written."""

    def lay_out(self, plan: ModelPlan, options: Options) -> Layout: ...

    def read_format(self, quantization: Mapping[str, Any]) -> tuple[StoredFormat | None, tuple[str, ...]]:
        """Read the config's own words back; the texts are faults that a loader would stumble over."""


TARGETS: dict[str, Target] = {
    "compressed-tensors": compressed_tensors_fp8,
}


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise RequestError(f"no target is called {name!r}", hint=f"choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def lay_out(name: str, plan: ModelPlan, options: Options) -> Layout:
    """Lay the plan out. Raises UnsupportedError listing all problems."""
    target = find_target(name)
    problems = target.problems(plan)
    if problems:
        raise UnsupportedError(
            f"{name} cannot express this export:\n" + "\n".join(f"    - {text}" for text in problems),
            hint="mend the first line and try again",
        )
    return target.lay_out(plan, options)


def read_format(config: Mapping[str, Any]) -> tuple[StoredFormat | None, tuple[str, ...]]:
    """Read how a finished folder says its weights are stored."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None, ("config.json has no quantization_config: servers would take FP8 bytes for plain weights",)
    method = quantization.get("quant_method")
    for target in TARGETS.values():
        if method == target.QUANT_METHOD:
            return target.read_format(quantization)
    return None, (f"quant_method {method!r} is not a format this program writes",)
