"""How a finished folder stores its linears, in terms that every Hugging Face style target shares."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..model import Grain


def is_pattern(text: str) -> bool:
    """Tell whether an entry of an ignore list can be read: a name, or `re:` and a regular expression."""
    try:
        re.compile(text.removeprefix("re:") if text.startswith("re:") else "")
    except re.error:
        return False
    return True


@dataclass(frozen=True, slots=True)
class StoredFormat:
    weights: Grain
    static_inputs: bool
    ignore: tuple[str, ...]  # exact module names, or `re:` and a regular expression

    def scale_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) if self.weights is Grain.TENSOR else (weight_shape[0], 1)

    def ignored_by(self, module: str) -> str | None:
        """Return the pattern that excludes a module. Loaders compare whole names; `re:` matches from the start."""
        for pattern in self.ignore:
            if pattern == module or (pattern.startswith("re:") and re.match(pattern[3:], module)):
                return pattern
        return None

    def dead_patterns(self, modules: Iterable[str]) -> list[str]:
        names = set(modules)
        return [
            pattern
            for pattern in self.ignore
            if not (
                any(re.match(pattern[3:], name) for name in names) if pattern.startswith("re:") else pattern in names
            )
        ]
