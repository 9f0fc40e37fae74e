"""Imported by verl in a test run: torch's own fused AdamW stands where the C kernel stands, behind the same hooks."""

import torch

from bwdfuse.optim import AdamW


def torch_fused_adamw(param, grad, state, group, step):
    torch._fused_adamw_(
        [param],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [torch.tensor(step, dtype=torch.float32)],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


AdamW._kernel = staticmethod(torch_fused_adamw)
