"""Lets verl >= 0.9 train where there is no accelerator. For the demo and the tests; no use on a machine with a GPU.

verl has no CPU platform, but takes one from outside. Run it with :data:`ENVIRONMENT` set and :data:`OVERRIDES` on its
command line; verl then imports this module itself. Imported in any other process, it only holds these two.
"""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

#: verl looks engines up by device and knows "cuda" and "npu"; its FSDP engine runs on whatever the platform names.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "bwdfuse.demo.verl_cpu",
}

#: What in verl's defaults needs an accelerator: flash attention, the packed input that it wants, compiled kernels.
OVERRIDES = (
    "trainer.device=cpu",
    "+model.override_config.attn_implementation=sdpa",
    "model.use_remove_padding=False",
    "engine.use_torch_compile=False",
)


def register() -> None:
    """Makes the platform known to verl, and mends three places where it or torch takes the CPU for an accelerator's host."""
    import torch.distributed
    import torch.distributed.fsdp._init_utils
    import verl.utils.fsdp_utils
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    device_module = _device_module()

    @PlatformRegistry.register(platform="cpu")
    class CPUPlatform(PlatformBase):
        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")
        device_module = property(lambda self: device_module)

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # only on request, never detected

        def current_device(self):
            return torch.device("cpu")  # verl passes it to Tensor.to()

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CPU_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    # verl asks for "cpu:gloo,<device>:<backend>"; torch takes each device once.
    init_process_group = torch.distributed.init_process_group

    def init_gloo(backend: str | None = None, *args, **kwargs):
        return init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_gloo
    # FSDP1 wants an accelerator to broadcast the first rank's weights from; gloo does so from here.
    torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = lambda module_states: None
    # A model that it finds on the CPU counts as offloaded and is moved to the device before a checkpoint: it is there.
    verl.utils.fsdp_utils.load_fsdp_model_to_gpu = lambda model: None


def _device_module() -> ModuleType:
    """``torch.cpu`` with the parts of ``torch.cuda`` that verl calls: memory figures (zero) and random state."""
    import torch

    module = ModuleType("bwdfuse_cpu_device")
    vars(module).update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *args, **kwargs: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
        setattr(module, name, lambda *args, **kwargs: None)
    vars(module).update(
        mem_get_info=lambda *args: (0, 0),
        get_device_name=lambda *args: "cpu",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


if os.environ.get("VERL_PLATFORM") == ENVIRONMENT["VERL_PLATFORM"]:
    register()
