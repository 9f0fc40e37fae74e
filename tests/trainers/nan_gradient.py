"""Imported by verl in a test run: where nan_loss spoils the loss, this leaves it as it is and spoils its gradient."""

import nan_loss
import torch

# The square root of zero is zero, with an infinite slope.
nan_loss.spoil = lambda loss: loss + torch.sqrt(loss * 0)
