"""From evidence to static scales. Every function here returns a ScaleSet."""

from .freeze import POLICIES, covered, freeze, never_updated, usable
from .scale_file import load_scales, save_scales

__all__ = ["POLICIES", "covered", "freeze", "load_scales", "never_updated", "save_scales", "usable"]
