"""A real client loads what we write: transformers with compressed-tensors, on the CPU, and its logits are compared."""

import math
from pathlib import Path

import pytest
import torch
from builders import llama
from builders.damage import tensors_of
from conftest import EXAMPLE

from fp8export import convert

pytestmark = pytest.mark.client
transformers = pytest.importorskip("transformers")

TE_PERPLEXITY = 4.3976  # FP8 evaluation forward, recorded on the H200 over the same bytes


def load(folder: Path, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval()


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(row[None], use_cache=False).logits for row in ids]).double()


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def perplexity(model) -> float:
    """Over the held-out bytes: 256 windows of 256, the first byte of each unpredicted."""
    data = torch.frombuffer(bytearray((EXAMPLE / "eval_bytes.bin").read_bytes()), dtype=torch.uint8).long()
    windows = data.reshape(256, 256)
    total = 0.0
    with torch.inference_mode():
        for batch in windows.split(16):
            log_p = model(batch, use_cache=False).logits[:, :-1].double().log_softmax(-1)
            total += float(log_p.gather(-1, batch[:, 1:, None]).sum())
    return math.exp(-total / (256 * 255))


@pytest.fixture(scope="module")
def model(exported):
    return load(exported)


def test_every_linear_is_loaded_as_fp8_with_its_scales(model, exported) -> None:
    tensors = tensors_of(exported / "model.safetensors")
    state = model.state_dict()
    for key, value in tensors.items():
        assert key in state, key
        if key.endswith("_scale"):
            assert torch.equal(state[key], value), key


def test_perplexity_is_that_of_the_training_framework(model) -> None:
    found = perplexity(model)
    assert abs(found / TE_PERPLEXITY - 1) < 1e-3, found


def test_logits_are_within_the_noise_floor_of_the_training_framework(model, recorded, example) -> None:
    from fp8export import inspect
    from fp8export.parity.logits import Forwards
    from fp8export.road import scales_for
    from fp8export.store import open_store

    ids = recorded["input_ids"].long()
    trained = recorded["logits_fp8"].double()
    checkpoint = inspect(example)
    forwards = Forwards(checkpoint, scales_for(checkpoint, "learned"), {}, open_store(example), "cpu")
    one, two = forwards.reference(torch.bfloat16), forwards.reference(torch.float32)
    floor = kl(logits(one, ids), logits(two, ids))
    assert kl(trained, logits(model, ids)) <= 1.25 * floor


def test_the_reference_forward_is_itself_within_the_floor_of_the_training_framework(recorded, example) -> None:
    from fp8export import inspect
    from fp8export.parity.logits import Forwards
    from fp8export.road import scales_for
    from fp8export.store import open_store

    ids = recorded["input_ids"].long()
    checkpoint = inspect(example)
    forwards = Forwards(checkpoint, scales_for(checkpoint, "learned"), {}, open_store(example), "cpu")
    one, two = forwards.reference(torch.bfloat16), forwards.reference(torch.float32)
    ours, twin = logits(one, ids), logits(two, ids)
    assert kl(recorded["logits_fp8"], ours) <= 1.25 * kl(ours, twin)


def as_an_engine_computes(folder: Path, settings: dict) -> torch.nn.Module:
    """The same model with dequantised weights and quantised inputs, written from the format's definition."""
    tensors = tensors_of(folder / "model.safetensors")
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {}
    for key, value in tensors.items():
        if value.dtype == torch.float8_e4m3fn:
            state[key] = value.float() * tensors[key.replace(".weight", ".weight_scale")]
        elif not key.endswith("_scale"):
            state[key] = value.float()
    model.load_state_dict(state, strict=False)

    def fake_quantise(scale):
        def hook(module, args):
            x = args[0]
            s = scale if scale is not None else x.abs().amax(-1, keepdim=True) / 448
            return ((x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s,)

        return hook

    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            module.register_forward_pre_hook(fake_quantise(tensors.get(f"{name}.input_scale")))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "tensor"},
        {"scales": "dynamic"},
        {"keep": ("model.layers.0.self_attn.*",)},
        {"shard_size": 10**9},
    ],
)
def test_a_loaded_export_computes_what_its_bytes_mean(tmp_path, options) -> None:
    source = llama.te_fp8(tmp_path / "te")
    convert(source, tmp_path / "out", **options)
    ids = torch.randint(0, 256, (2, 24))
    found = logits(load(tmp_path / "out"), ids)
    expected = logits(as_an_engine_computes(tmp_path / "out", llama.config()), ids)
    assert float((found - expected).abs().max() / expected.abs().max()) < (2e-2 if "scales" in options else 1e-4)


def test_a_tied_and_sharded_export_loads(tmp_path) -> None:
    state = llama.weights()
    del state["lm_head.weight"]
    settings = llama.config(tie_word_embeddings=True)
    source = llama.write(tmp_path / "te", {**state, **llama.states(state)}, settings)
    convert(source, tmp_path / "out", shard_size=50_000)
    model = load(tmp_path / "out")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.isfinite(logits(model, torch.randint(0, 256, (1, 8)))).all()
