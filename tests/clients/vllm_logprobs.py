"""Score prompts with a real vLLM on a GPU and compare its log-probabilities with recorded logits. Run by hand.

    python tests/clients/vllm_logprobs.py --reference tests/data/reference.safetensors --out result.json EXPORT ...

The reference holds `input_ids` [B, T] and tensors named `logits_*` [B, T, V]. Each export is loaded in a process of its
own; prints one line for each and keeps everything as JSON. Needs vllm and a GPU, both outside this project's extras.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def score(folder: Path, reference: Path) -> dict[str, Any]:
    import torch
    import vllm
    from safetensors.torch import load_file

    recorded = load_file(reference)
    prompts = recorded["input_ids"].tolist()
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    llm = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        max_logprobs=-1,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    rows = []
    for output in outputs:
        tables = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        rows.append([[table[i].logprob for i in range(vocabulary)] for table in tables])
    found = torch.tensor(rows, dtype=torch.float64)

    def kinds(model: Any) -> dict[str, str]:
        named = {}
        for name, module in model.named_modules():
            scheme = getattr(module, "scheme", None)
            if ".0." in name and scheme is not None:
                kernels = [type(v).__name__ for v in vars(scheme).values() if "Kernel" in type(v).__name__]
                shapes = {
                    part: list(getattr(module, part).shape)
                    for part in ("weight_scale", "input_scale")
                    if getattr(module, part, None) is not None
                }
                named[name] = f"{type(scheme).__name__} {kernels} {shapes}"
        return named

    result: dict[str, Any] = {"export": folder.name, "layers": llm.apply_model(kinds)[0], "against": {}}
    for key, logits in recorded.items():
        if key.startswith("logits"):
            p = logits.double().log_softmax(-1)
            result["against"][key] = {
                "kl_mean": float((p.exp() * (p - found)).sum(-1).mean()),
                "top1": float((p.argmax(-1) == found.argmax(-1)).double().mean()),
            }
    ids = recorded["input_ids"].long()
    result["perplexity"] = float(torch.exp(-found[:, :-1].gather(-1, ids[:, 1:, None]).mean()))
    result["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.out.write_text(json.dumps(score(options.exports[0], options.reference), indent=1))
        return
    results = []
    for folder in options.exports:
        part = options.out.with_name(f"{options.out.stem}-{folder.name}.json")
        command = [sys.executable, __file__, "--one", "--reference", str(options.reference), "--out", str(part)]
        subprocess.run([*command, str(folder.resolve())], check=True)
        results.append(json.loads(part.read_text()))
        part.unlink()
        print(folder.name, results[-1]["perplexity"], results[-1]["against"], flush=True)
    options.out.write_text(json.dumps({"bench": "vLLM prompt log-probabilities", "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
