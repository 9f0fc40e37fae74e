"""A whole training step with one optimizer or another: time, memory, page faults. Knows models and no optimizer.

All start from the same weights. Before anything is timed, each takes some updates, and its losses and weights are compared with
those of torch's fused optimizer after backward. The floor is the same step with no optimizer at all.
"""

from __future__ import annotations

import copy
import resource
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from bwdfuse import memory
from bwdfuse.bench import peers, timing
from bwdfuse.errors import BwdFuseError

FLOOR, REFERENCE = "no_optimizer", "fused_after"
UPDATES = 3  # that the check takes

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """Of a transformer: hidden and intermediate size, layers, vocabulary, heads."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int


SHAPES = {
    "S": Shape(384, 1024, 8, 8192, 6),
    "M": Shape(640, 1728, 10, 16000, 10),
    "L": Shape(768, 2048, 14, 32000, 12),
}
PLAIN = Shape(384, 1536, 8, 8192, 6)  # 20 million parameters
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def llama(size: str, dtype: torch.dtype, tokens: int) -> tuple[torch.nn.Module, torch.Tensor, Loss]:
    """A Llama with random weights, one sequence, and how its loss is had.

    Raises:
        BwdFuseError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise BwdFuseError(f"the Llama models need transformers ({error}): pip install transformers") from None
    shape = SHAPES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        vocab_size=shape.vocabulary,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=max(1024, tokens),
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    ids = torch.randint(0, shape.vocabulary, (1, tokens))
    return model.to(dtype).train(), ids, lambda m, batch: m(input_ids=batch, labels=batch).loss


def plain(dtype: torch.dtype, tokens: int, shape: Shape = PLAIN) -> tuple[torch.nn.Module, torch.Tensor, Loss]:
    """A transformer of torch's own layers, for where there is no other package."""
    torch.manual_seed(0)
    layers = (
        torch.nn.TransformerEncoderLayer(shape.hidden, shape.heads, shape.intermediate, 0.0, batch_first=True)
        for _ in range(shape.layers)
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(shape.vocabulary, shape.hidden),
        *layers,
        torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False),
    )
    ids = torch.randint(0, shape.vocabulary, (1, tokens))

    def loss(m: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(m(batch)[0].float(), batch[0])

    return model.to(dtype).train(), ids, loss


class Step:
    """One model, one optimizer, one training step."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, loss: Loss, peer: peers.Peer | None, threads: int):
        self.model, self.ids, self.loss = model, ids, loss
        self.params = list(model.parameters())
        self.end = peer.attach(model) if peer else self._drop
        self.now = timing.clock(threads)

    def _drop(self) -> None:
        for param in self.params:
            param.grad = None

    def update(self) -> float:
        """Forward, backward, end of the update; returns the loss."""
        loss = self.loss(self.model, self.ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.end()
        return loss.item()

    def timed(self) -> tuple[float, int]:
        """Seconds of one step, and the page faults in it."""
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, self.now()
        self.update()
        return self.now() - start, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    def peak(self) -> dict[str, float]:
        """Live tensor memory above rest over one step, and that of gradients, in MiB."""
        with memory.timeline(self.model) as line:
            self.update()
        return {"above_rest_mib": line.above_rest_mib, "gradients_mib": line.peak_grad_mib}


def check(name: str, rule: str, step: Step, reference: Step, losses: list[float], dtype: torch.dtype) -> None:
    """Compares losses and weights after the same updates with the reference's.

    Raises:
        peers.WrongResult: they are apart by more than rounding explains, or the loss has not fallen.
    """
    own = [step.update() for _ in range(UPDATES)]
    if not own[-1] < own[0]:
        raise peers.WrongResult(f"{name}: the loss does not fall: {own}")
    if rule != "adamw":
        return
    # float32: the first updates are lr times the sign of a gradient, whatever its size, so one that is nearly zero may go either
    # way; hence the mean. bfloat16 rounds each weight to three digits, and the forward pass with it; one that sums with Kahan's
    # method moves weights that the others cannot, by up to one unit.
    near, far = (1e-4, 0.01) if dtype == torch.float32 else (2e-2, 0.25)
    for ours, theirs in zip(own, losses, strict=True):
        if abs(ours - theirs) > near * abs(theirs):
            raise peers.WrongResult(f"{name}: losses {own}, those of {REFERENCE} {losses}")
    for p, q in zip(step.params, reference.params, strict=True):
        apart = float((p.detach().double() - q.detach().double()).abs().mean())
        unit = torch.finfo(dtype).eps * float(q.detach().abs().mean())
        if not apart <= far * UPDATES * peers.LR + unit:
            raise peers.WrongResult(f"{name}: weights are {apart:.2g} from those of {REFERENCE}, on average")


def measure(
    model: torch.nn.Module,
    ids: torch.Tensor,
    loss: Loss,
    names: Iterable[str],
    rounds: int,
    *,
    threads: int = 1,
) -> dict[str, Any]:
    """Times one training step with each optimizer, in turn.

    Returns:
        ``seconds`` (a `Timing` each), ``page_faults`` a step, ``memory`` (`Step.peak`), ``ratio_vs`` (ours over each),
        ``parameters``, ``tensors`` and ``left_out`` (why, by name).

    Raises:
        peers.WrongResult: this package's losses or weights are wrong.
    """
    params = list(model.parameters())
    dtype = params[0].dtype
    found, left_out = peers.usable([REFERENCE, *names], dtype)
    reference = Step(copy.deepcopy(model), ids, loss, found[REFERENCE], threads)
    losses = [reference.update() for _ in range(UPDATES)]
    steps = {FLOOR: Step(copy.deepcopy(model), ids, loss, None, threads), REFERENCE: reference}
    for name, peer in found.items():
        if name == REFERENCE:
            continue
        step = Step(copy.deepcopy(model), ids, loss, peer, threads)
        try:
            check(name, peer.rule, step, reference, losses, dtype)
        except peers.WrongResult as error:
            if name.startswith("bwdfuse"):
                raise
            left_out[name] = f"not timed: {error}"
            continue
        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    for counts, name in timing.turns(steps, rounds):
        taken, faulted = steps[name].timed()
        if counts:
            seconds[name].append(taken)
            faults[name].append(faulted)
    timings = {name: timing.Timing.of(values) for name, values in seconds.items()}
    return {
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "seconds": timings,
        "page_faults": {name: statistics.median(values) for name, values in faults.items()},
        "memory": {name: step.peak() for name, step in steps.items()},
        "ratio_vs": {name: timing.ratio(timings, "bwdfuse", name) for name in timings if name != "bwdfuse"},
        "left_out": left_out,
    }
