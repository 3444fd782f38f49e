"""What parity found, as data, JSON and a verdict."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

SCHEMA = 1


@dataclass(slots=True)
class LinearParity:
    name: str
    exactness: str = ""  # "exact", "requantised" or "differs"
    why: str = ""
    input_scale: str = ""  # "exact", "unified" in its fused set, "dynamic", "differs", or the policy it came from
    differing_codes: int = 0
    sqnr_db: float = 0.0
    relative_error: float = 0.0
    cosine_distance: float = 0.0
    clipped: float = 0.0
    flushed: float = 0.0
    # teacher-forced: same input for all three forwards
    output_error: float | None = None
    training_error: float | None = None  # training-time FP8 forward against high precision
    export_error: float | None = None  # export against high precision
    saturated_inputs: float | None = None
    flushed_inputs: float | None = None
    headroom_bits: float | None = None


@dataclass(slots=True)
class LogitsParity:
    tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_max_at: tuple[int, int]  # sequence, position
    top1_agreement: float
    top5_agreement: float
    noise_floor_kl: float
    high_precision_kl: float
    perplexity: dict[str, float]


@dataclass(slots=True)
class ParityReport:
    depth: str
    reference: str
    device: str
    kernel: str
    data: str
    tolerances: dict[str, float]
    linears: list[LinearParity] = field(default_factory=list)
    logits: LogitsParity | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def exact(self) -> int:
        return sum(linear.exactness == "exact" for linear in self.linears)

    def worst(self, count: int = 5) -> list[LinearParity]:
        """The linears that lost most: faults first, then by weight error."""
        rank = {"differs": 0, "requantised": 1, "exact": 2}
        return sorted(self.linears, key=lambda x: (rank[x.exactness], x.sqnr_db))[:count]

    def to_json(self) -> str:
        return to_json({"schema": SCHEMA, "passed": self.passed, **asdict(self)})


def to_json(value: object) -> str:
    """JSON that every parser takes: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
