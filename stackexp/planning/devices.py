"""GPUs with known specifications, and the runs whose speed follows from them. Imports no torch."""

from dataclasses import dataclass

from stackexp.config.experiment import ExperimentConfig

DEFAULT_DEVICE, DEFAULT_MFU = "h100", 0.4
MIN_PARAMETERS = 100_000_000
"""The speed of smaller models is not estimated: launches and memory traffic take most of their time."""
NOT_ESTIMATED = (
    "not estimated on CPUs, in 32 or 64 bits, over the tokens, on data other than text, or below "
    f"{MIN_PARAMETERS // 10**6}M parameters"
)

HEADROOM = 0.06
"""Share of device memory reserved for the CUDA context, NCCL, cuBLAS and fragmentation."""


@dataclass(frozen=True)
class Device:
    """The specification of one GPU."""

    card: str  # part of the name that CUDA reports
    peak_flops: float  # FLOP/s in dense bfloat16, from the data sheet
    memory: float  # GiB available to a process, as torch.cuda.get_device_properties reports

    @property
    def usable_bytes(self) -> int:
        """Bytes available to tensors."""
        return int(self.memory * (1 - HEADROOM) * 2**30)


DEVICES = {
    "a100": Device("A100", 312e12, 79.1),
    "h100-pcie": Device("H100 PCIe", 756e12, 79.1),
    "h100": Device("H100", 989e12, 79.1),
    "h200": Device("H200", 989e12, 139.8),
    "b200": Device("B200", 2250e12, 178.4),
}
"""The 80 GB variant where there are several. The first entry whose `card` is part of a device's name applies."""


def can_estimate_speed(config: ExperimentConfig) -> bool:
    """Return True if the speed of a run can be estimated, provided that its model is large enough.

    The share of the bfloat16 peak does not apply to float32 and float64, or to a scan over the tokens.
    """
    memory = getattr(config.model, "memory", None)
    is_parallel = memory is None or getattr(memory, "axis", "depth") == "depth"
    is_bfloat16 = config.trainer.precision in ("bf16-mixed", "bf16-true")
    on_text = config.data.objective == "language_modeling"
    return config.trainer.accelerator != "cpu" and is_bfloat16 and is_parallel and on_text
