"""A Hugging Face folder in BF16, FP16 or FP32: nothing was learned, so inputs are dynamic or calibrated."""

from ..model import Checkpoint
from ..store import Store
from . import hf_modules


def recognise(store: Store) -> str | None:
    if "quantization_config" in store.config or any(
        key.endswith("._extra_state") for key in (*store.tensors, *store.objects)
    ):
        return None
    if any(str(tensor.dtype).startswith("torch.float8") for tensor in store.tensors.values()):
        return None
    return "high-precision tensors and no training state of any framework"


def read(store: Store) -> Checkpoint:
    return hf_modules.build(
        store,
        source="hf_plain",
        recipe="none: high-precision weights without learned scales",
        evidence=lambda _: (None, None, "the checkpoint holds no FP8 training state"),
        consumed={
            key: "training state, which this source does not read"
            for key in (*store.tensors, *store.objects)
            if key.endswith("._extra_state")
        },
    )
