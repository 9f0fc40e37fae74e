"""Judges weights with code of its own, the same for every arm: loss on held-out answers, completions, distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bwdfuse.demo.data import Pair

BATCH = 8
IGNORED = -100  # transformers' label of a token that does not count
NEW_TOKENS = 40


class Judge:
    """One model folder, loaded in fp32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def loss(self, pairs: list[Pair], max_length: int) -> float:
        """Mean over the tokens of all answers."""
        encoded = sorted((encode(self.tokenizer, pair, max_length) for pair in pairs), key=lambda item: len(item[0]))
        total = tokens = 0.0
        for start in range(0, len(encoded), BATCH):
            batch = self._padded(encoded[start : start + BATCH])
            count = int((batch["labels"][:, 1:] != IGNORED).sum())
            if count:
                with self.torch.no_grad():
                    total += float(self.model(**batch).loss) * count
                tokens += count
        return total / tokens

    def complete(self, question: str) -> str:
        """The model's own answer, greedily."""
        asked = [{"role": "user", "content": question}]
        inputs = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        out = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = out[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def _padded(self, encoded: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
        width = max(len(ids) for ids, _ in encoded)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        tensor = self.torch.tensor
        return {
            "input_ids": tensor([ids + [pad] * (width - len(ids)) for ids, _ in encoded]),
            "labels": tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in encoded]),
            "attention_mask": tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in encoded]),
        }


def encode(tokenizer: Any, pair: Pair, max_length: int) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and labels that count only those of the answer."""
    prompt = tokenizer.apply_chat_template(pair.messages[:1], add_generation_prompt=True)["input_ids"]
    ids = tokenizer.apply_chat_template(pair.messages)["input_ids"]
    if ids[: len(prompt)] != prompt:
        raise ValueError(
            "the chat template does not begin a conversation with its own prompt; cannot tell the answer's tokens"
        )
    labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
    return ids[:max_length], labels[:max_length]


def largest_difference(one: Path, other: Path) -> float:
    """max |a - b| over all weights of two model folders; NaN if a weight is NaN, so that it equals nothing."""
    first, second = _weights(one), _weights(other)
    if first.keys() != second.keys():
        raise ValueError(f"{one} and {other} hold different weights: {sorted(first.keys() ^ second.keys())[:5]}")
    worst = 0.0
    for name, tensor in first.items():
        distance = float((tensor.double() - second[name].double()).abs().max()) if tensor.numel() else 0.0
        worst = distance if distance != distance else max(worst, distance)
        if worst != worst:
            return worst
    return worst


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
