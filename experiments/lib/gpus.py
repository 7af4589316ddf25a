"""GPUs that need not be there: what XLA has to know of one to compile for it, and what its memory can do."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache

MACHINE = 8  # GPUs in a machine, as NVIDIA's DGX and HGX have them


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, in the figures of NVIDIA's data sheets and of XLA's own descriptions of them (OpenXLA, target_config)."""

    name: str  # as its driver has it
    capability: tuple[int, int]  # compute capability, major and minor
    cores: int  # multiprocessors
    lanes: int  # float32 lanes in each multiprocessor
    clock: float  # GHz
    bandwidth: float  # of the memory, bytes a second
    memory: int  # bytes
    cache: int  # bytes of the second-level cache
    shared: int  # bytes of shared memory of a multiprocessor
    shared_block: int  # bytes of shared memory that a block may ask for

    def target_config(self) -> str:
        """What `jax.experimental.topologies` takes: a GpuTargetConfigProto as text, with cuDNN 9.10."""
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.shared_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  name: "{self.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""

    def devices(self, count: int = 1) -> list[Any]:
        """Returns devices for which XLA compiles, in machines of up to eight; needs JAX's CUDA plugin."""
        topology = f"1x{-(-count // MACHINE)}x{min(count, MACHINE)}"  # slices, machines, devices in each machine
        found = topologies.get_topology_desc(
            platform="cuda", target_config=self.target_config(), topology=topology, topology_name=""
        )
        return list(found.devices)


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 4.8e12, 151397597184, 52428800, 233472, 232448),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3.35232e12, 84942979072, 52428800, 233472, 232448),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2.03904e12, 85100068864, 41943040, 167936, 166912),
}


@contextlib.contextmanager
def absent_device() -> Iterator[None]:
    """No compilation cache inside, from where a program without its device cannot be loaded, and no forms for CPUs."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX asks once whether there is one
        with mock.patch.object(jax, "default_backend", lambda: "gpu"):
            yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()
