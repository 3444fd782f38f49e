"""Memory does not grow with the checkpoint: weights stream through in pieces."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import llama

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")

PEAK = """
import sys
from fp8export.road import convert
from fp8export.verify import verify_folder
from pathlib import Path
options = {"scales": "dynamic"} if sys.argv[3] == "dynamic" else {"weights": sys.argv[3]}
convert(sys.argv[1], sys.argv[2], **options)
assert verify_folder(Path(sys.argv[2])).passed
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_mb(source: Path, out: Path, how: str) -> float:
    command = [sys.executable, "-P", "-c", PEAK, str(source), str(out), how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


@pytest.mark.parametrize("how", ["auto", "tensor", "dynamic"])
def test_a_checkpoint_of_200_mb_takes_no_more_than_a_tiny_one_and_a_few_buffers(tmp_path, how) -> None:
    def write(name: str, rows: int) -> Path:
        state = llama.weights(layers=1)
        for part in ("gate_proj", "up_proj"):
            state[f"model.layers.0.mlp.{part}.weight"] = torch.randn(rows, 64).bfloat16()
        state["model.embed_tokens.weight"] = torch.randn(rows, 64).bfloat16()
        return llama.write(tmp_path / name, {**state, **llama.states(state)}, llama.config(1))

    tiny = peak_mb(write("tiny", 128), tmp_path / "tiny-out", how)
    large = peak_mb(write("large", 512 * 1024), tmp_path / "large-out", how)
    assert (tmp_path / "large" / "model.safetensors").stat().st_size > 200e6
    assert large - tiny < 100, f"{large:.0f} MB against {tiny:.0f} MB"
