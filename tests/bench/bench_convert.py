"""Whole-command time and peak memory of a conversion, next to plain copies of the same bytes, in one run.

    python tests/bench/bench_convert.py --gb 2 --folder /tmp/bench [--parity off] [--out results/convert.json]

`copy` reads the source in 8 MB pieces and writes as many bytes as the export has, synced to disk as the export is.
`start` is the time to import torch, which every run pays once. Memory is above an interpreter with torch imported.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from builders import llama, te

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 16000


def make_checkpoint(folder: Path, gigabytes: float) -> Path:
    """A Llama-shaped BF16 checkpoint with learned Transformer Engine states, sharded by layer."""
    from safetensors.torch import save_file

    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    layer_bytes = 2 * sum(n * k for n, k in shapes.values())
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / layer_bytes))
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(1)
    names, weight_map = [f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors" for i in range(layers + 1)], {}
    for i in range(layers):
        state = {}
        for name, shape in shapes.items():
            full = f"model.layers.{i}.{name}"
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
            amax = float(weight.float().abs().max()) * (1 + 0.01 * len(name))
            state[f"{full}.weight"] = weight
            multiplier = float(torch.tensor(448.0) / amax)
            payload = te.delayed([37.3, multiplier, 1.0], [[0.0] * 3] + [[12.0, amax, 0.0]] * 1023)
            state[f"{full}._extra_state"] = te.as_u8(te.pickled(payload))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(state, folder / names[i])
        weight_map |= dict.fromkeys(state, names[i])
    state = {
        key: torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
        for key in ("model.embed_tokens.weight", "lm_head.weight")
    }
    state["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(state, folder / names[-1])
    weight_map |= dict.fromkeys(state, names[-1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    settings = llama.config(layers, hidden_size=HIDDEN, intermediate_size=FFN, vocab_size=VOCABULARY, head_dim=128)
    settings |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident MB of a child; rusage would count this process's pages until the exec."""
    peak = 0
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration, IndexError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, int(next(line for line in lines if line.startswith("VmHWM")).split()[1]))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return time.perf_counter() - began, peak / 1024


def copy(source: Path, target: Path, out_bytes: int) -> float:
    """Read every source byte once, write `out_bytes` of them, sync."""
    buffer = bytearray(8 << 20)
    view, left = memoryview(buffer), out_bytes
    began = time.perf_counter()
    with open(target, "wb", buffering=0) as out:
        for file in sorted(source.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as handle:
                while count := handle.readinto(view):
                    take = min(left, count)
                    out.write(view[:take])
                    left -= take
        os.fsync(out.fileno())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parity", default="off")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = options.folder / f"source-{options.gb:g}"
    if not source.exists():
        make_checkpoint(source, options.gb)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    convert = [sys.executable, "-m", "fp8export", "convert", str(source), "-o", str(options.folder / "out")]
    convert += ["--parity", options.parity]
    times: dict[str, list[float]] = {"convert": [], "copy": [], "start": []}
    peaks: dict[str, list[float]] = {"convert": [], "start": []}
    out_bytes = 0
    for _ in range(options.runs):
        shutil.rmtree(options.folder / "out", ignore_errors=True)
        seconds, peak = measured(convert)
        times["convert"].append(seconds)
        peaks["convert"].append(peak)
        out_bytes = sum(file.stat().st_size for file in (options.folder / "out").glob("*.safetensors"))
        seconds, peak = measured([sys.executable, "-c", "import torch"])
        times["start"].append(seconds)
        peaks["start"].append(peak)
        times["copy"].append(copy(source, options.folder / "copy.bin", out_bytes))
        (options.folder / "copy.bin").unlink()
    middle = {name: statistics.median(values) for name, values in times.items()}
    memory = statistics.median(peaks["convert"]) - statistics.median(peaks["start"])
    work = middle["convert"] - middle["start"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "bench": f"convert {options.gb:g} GB, parity {options.parity}",
        "gpu": None,
        "commit": commit.stdout.strip(),
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "source_bytes": size,
        "output_bytes": out_bytes,
        "seconds": {name: [round(v, 2) for v in values] for name, values in times.items()},
        "rows": [
            {
                "name": "whole command without torch's start-up",
                "ours": round(work, 2),
                "peer": round(middle["copy"], 2),
                "peer_name": "read source, write output bytes, sync",
                "unit": "s",
                "ratio": round(middle["copy"] / work, 3),
            },
            {
                "name": "peak memory above an interpreter with torch",
                "ours": round(memory, 1),
                "peer": 600,
                "peer_name": "budget",
                "unit": "MB",
                "ratio": round(600 / memory, 2),
            },
        ],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
