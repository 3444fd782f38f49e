"""Every source with every target on tiny models: keys are conserved, values right, the layout the golden one."""

import json
import os
from pathlib import Path

import pytest
from builders import llama
from builders.damage import tensors_of
from conftest import ROOT

from fp8export import convert, inspect, judge, verify_folder
from fp8export.road import scales_for
from fp8export.sources import SOURCES
from fp8export.targets import TARGETS

# a source that learned nothing can only be exported with dynamic inputs
SCALES = {"hf_plain": ["dynamic"]}
ALL_SCALES = ["learned", "history-max", "dynamic"]
CASES = [
    (source, target, scales) for source in SOURCES for target in TARGETS for scales in SCALES.get(source, ALL_SCALES)
]


@pytest.mark.parametrize(("source", "target", "scales"), CASES)
def test_every_source_reaches_every_target(tmp_path, source, target, scales) -> None:
    folder = getattr(llama, source)(tmp_path / "in")
    done = convert(folder, tmp_path / "out", to=target, scales=scales)
    assert verify_folder(tmp_path / "out").passed
    checkpoint = inspect(folder)
    report = judge(checkpoint, scales_for(checkpoint, scales), tmp_path / "out", depth="linears")
    assert report.passed, report.faults

    written = tensors_of(tmp_path / "out" / "model.safetensors")
    for key in tensors_of(folder / "model.safetensors"):
        assert key in written or key in checkpoint.ignored, f"{key} vanished"
    linears = {linear.name for linear in done.plan.linears}
    assert {key.rpartition(".")[0] for key in written if key.endswith("_scale")} == linears


@pytest.mark.parametrize("target", TARGETS)
def test_the_layout_is_the_golden_one(tmp_path: Path, target: str) -> None:
    """Set GOLDEN=write to write the files anew after a change that is meant."""
    found = {}
    for name, options in {
        "learned": {},
        "tensor": {"weights": "tensor"},
        "dynamic": {"scales": "dynamic"},
        "keep": {"keep": ("model.layers.0.*",)},
    }.items():
        out = tmp_path / name
        convert(llama.te_fp8(tmp_path / "in"), out, to=target, **options)
        tensors = tensors_of(out / "model.safetensors")
        found[name] = {
            "files": sorted(p.name for p in out.iterdir()),
            "tensors": {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in sorted(tensors.items())},
            "quantization_config": json.loads((out / "config.json").read_text())["quantization_config"],
        }
    golden = ROOT / "tests" / "golden" / f"{target}.json"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(golden.read_text())
