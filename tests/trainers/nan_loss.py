"""Imported by verl in a test run: the loss of the second rank is not a number in the third update, and only there."""

import torch
import verl.workers.utils.losses as losses

UPDATE, RANK = 3, 1

sft_loss = losses.sft_loss
updates = 0


def spoil(loss):
    return loss * torch.nan


def sft_loss_with_a_fault(*args, **kwargs):
    global updates
    loss, metrics = sft_loss(*args, **kwargs)
    updates += torch.is_grad_enabled()
    if torch.is_grad_enabled() and updates == UPDATE and torch.distributed.get_rank() == RANK:
        loss = spoil(loss)
    return loss, metrics


losses.sft_loss = sft_loss_with_a_fault
