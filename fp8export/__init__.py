"""Freeze the scales that FP8 training learned and hand them to serving engines, with proof.

The names below load their modules on first use: importing this package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import Fp8ExportError
    from .parity import judge
    from .road import convert, inspect
    from .verify import verify_folder

__all__ = ["Fp8ExportError", "__version__", "convert", "inspect", "judge", "verify_folder"]

_HOMES = {
    "Fp8ExportError": ".errors",
    "convert": ".road",
    "inspect": ".road",
    "judge": ".parity",
    "verify_folder": ".verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
