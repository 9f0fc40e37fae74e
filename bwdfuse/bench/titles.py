"""What the optimizers of `bwdfuse.bench.peers` are called in tables and plots. Importable without torch."""

TITLES = {
    "bwdfuse": "bwdfuse, inside backward",
    "bwdfuse_after": "bwdfuse, after backward",
    "fused_after": "torch fused, after backward",
    "foreach_after": "torch foreach, after backward",
    "apply_fused": "torch _apply_optimizer_in_backward, fused",
    "apply_default": "torch _apply_optimizer_in_backward, default",
    "python_hook": "torch's kernel in a Python hook, no guards",
    "compile_after": "torch.compile of foreach, after backward",
    "deepspeed_after": "DeepSpeedCPUAdam, after backward",
    "deepspeed_hook": "DeepSpeedCPUAdam, one for each parameter",
    "lomo": "LOMO (SGD, no state)",
    "adalomo": "AdaLomo",
    "bitsandbytes_8bit": "bitsandbytes 8-bit",
    "torchao_8bit": "torchao 8-bit",
    "optimi_after": "optimi",
    "optimi_release": "optimi, gradient release",
    "flashoptim_after": "flashoptim, unfused",
    "flashoptim_release": "flashoptim unfused, gradient release",
    "no_optimizer": "no optimizer at all",
}
