"""A loop with accelerate, stock and with the optimizer inside backward:

    python examples/accelerate_loop.py
    python examples/accelerate_loop.py --bwd-hook

A small language model, made from scratch, learns to count. What --bwd-hook changes:

    +import bwdfuse
    -optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    +optimizer = bwdfuse.AdamW(model.parameters(), lr=args.lr)
     model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    +optimizer.optimizer.arm(model)
    -        accelerator.clip_grad_norm_(model.parameters(), args.clip)

It is armed after prepare(), which may replace the parameters. One backward per update, so gradient_accumulation_steps
stays 1.
"""

import argparse

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup, set_seed

import bwdfuse


def rows(count=256, length=16, vocabulary=64):
    """Sequences that count upwards, each from its own start and by its own stride."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    stride = torch.randint(1, 5, (count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % vocabulary


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bwd-hook", action="store_true", help="step each parameter inside backward")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="without --bwd-hook")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    args = parser.parse_args(argv)

    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(rows(), batch_size=8, shuffle=True)
    if args.bwd_hook:
        optimizer = bwdfuse.AdamW(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 8, args.epochs * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.bwd_hook:
        optimizer.optimizer.arm(model)

    losses = []
    for epoch in range(args.epochs):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if not args.bwd_hook:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.print(f"epoch {epoch}  loss {losses[-1]:.4f}  rate {scheduler.get_last_lr()[0]:.2e}")
    return losses


if __name__ == "__main__":
    main()
