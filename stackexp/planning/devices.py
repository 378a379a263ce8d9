"""The GPUs whose makers' figures are known."""

from dataclasses import dataclass

HEADROOM = 0.06
"""Share of a device's memory left to what no tensor takes: CUDA's context, NCCL, cuBLAS, the allocator's gaps."""


@dataclass(frozen=True)
class Device:
    card: str  # as in the name CUDA gives it
    peak_flops: float  # FLOP/s in bfloat16, dense, from the maker's data sheet
    memory: float  # GiB a process can get of it, as torch.cuda.get_device_properties tells

    @property
    def room(self) -> int:
        """Bytes that tensors may take."""
        return int(self.memory * (1 - HEADROOM) * 2**30)


DEVICES = {
    "a100": Device("A100", 312e12, 79.1),
    "h100-pcie": Device("H100 PCIe", 756e12, 79.1),
    "h100": Device("H100", 989e12, 79.1),
    "h200": Device("H200", 989e12, 139.8),
    "b200": Device("B200", 2250e12, 178.4),
}
"""Those of 80 GB, where there are several. The first whose card stands in a device's name counts."""
