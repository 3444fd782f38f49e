"""Shared ground: where the example lies, copies of it to damage, seeded randomness."""

import json
import shutil
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny-llama-te"
DATA = ROOT / "tests" / "data"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20260101)


@pytest.fixture(scope="session")
def example() -> Path:
    """A real checkpoint, trained with Transformer Engine."""
    return EXAMPLE


@pytest.fixture(scope="session")
def example_state() -> dict[str, torch.Tensor]:
    return torch.load(EXAMPLE / "pytorch_model.bin", map_location="cpu", weights_only=True)


@pytest.fixture(scope="session")
def layer_io() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(DATA / "layer_io.safetensors")


@pytest.fixture(scope="session")
def recorded() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(DATA / "reference.safetensors")


@pytest.fixture(scope="session")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fp8export import convert

    out = tmp_path_factory.mktemp("export") / "out"
    convert(EXAMPLE, out)
    return out


@pytest.fixture(scope="session")
def exported(_exported: Path) -> Path:
    """The example's export. Do not write to it."""
    return _exported


@pytest.fixture
def export_copy(_exported: Path, tmp_path: Path) -> Path:
    """A copy of the export to damage."""
    return Path(shutil.copytree(_exported, tmp_path / "copy"))


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
