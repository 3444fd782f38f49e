"""Edit finished safetensors folders, one fault at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def tensors_of(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as handle:
        return {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118


def edit_tensors(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    state = tensors_of(file)
    change(state)
    save_file({key: value.contiguous() for key, value in state.items()}, file, metadata={"format": "pt"})


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
