"""From evidence to static scales. Every function here returns a ScaleSet."""

from .freeze import POLICIES, freeze, never_updated
from .scale_file import load_scales, save_scales

__all__ = ["POLICIES", "freeze", "load_scales", "never_updated", "save_scales"]
