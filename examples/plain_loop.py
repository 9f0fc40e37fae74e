"""A plain training loop, stock and with the optimizer inside backward:

    python examples/plain_loop.py
    python examples/plain_loop.py --bwd-hook

A small language model, made from scratch, learns the text of a module of the standard library. What --bwd-hook changes:

    +import bwdfuse
    -optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    +optimizer = bwdfuse.AdamW(model.parameters(), lr=args.lr, bwd_hook=True)
    -    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    +    grad_norm = optimizer.grad_norm()

Clipping goes: the norm of all gradients is known only when each has been used. Schedulers, checkpoints (in both
directions) and the rest of the loop stay as they are.
"""

import argparse
import inspect
import textwrap
from pathlib import Path

import torch

import bwdfuse


class Model(torch.nn.Module):
    """A decoder over bytes whose embedding is tied to its head."""

    def __init__(self, width=64, layers=3, context=64):
        super().__init__()
        self.tokens = torch.nn.Embedding(256, width)
        self.positions = torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        torch.nn.init.normal_(self.tokens.weight, std=0.02)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text):
        hidden = self.tokens(text) + self.positions.weight
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def batches(steps, first, size=8, context=64):
    """Rows of text and the same shifted by one byte; batch number n is the same in every run."""
    text = torch.tensor(list(inspect.getsource(textwrap).encode()))
    for step in range(first, steps):
        starts = torch.randint(len(text) - context - 1, (size,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + context + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bwd-hook", action="store_true", help="step each parameter inside backward")
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="without --bwd-hook")
    parser.add_argument("--checkpoint", type=Path, help="written at the end; gone on from where it exists")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Model()
    if args.bwd_hook:
        optimizer = bwdfuse.AdamW(model.parameters(), lr=args.lr, bwd_hook=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        for part, state in zip((model, optimizer, scheduler), saved["state"], strict=True):
            part.load_state_dict(state)
        first = saved["step"]

    losses = []
    for step, (text, target) in enumerate(batches(args.steps, first), start=first):
        torch.manual_seed(step)  # dropout, so that a run that was interrupted goes on as if it had not been
        loss = torch.nn.functional.cross_entropy(model(text).flatten(0, 1), target.flatten())
        loss.backward()
        alive = sum(param.grad is not None for param in model.parameters())
        if args.bwd_hook:
            grad_norm = optimizer.grad_norm()
        else:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == args.steps - 1:
            print(
                f"step {step:3d}  loss {losses[-1]:.4f}  norm {float(grad_norm):.3f}  gradients after backward {alive}"
            )

    if args.checkpoint:
        state = [part.state_dict() for part in (model, optimizer, scheduler)]
        torch.save({"state": state, "step": args.steps}, args.checkpoint)
    return losses


if __name__ == "__main__":
    main()
