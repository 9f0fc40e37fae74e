"""Small models, data and runs for the tests of transformers and TRL: made from scratch, no hub, no network."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")

import gc
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch.optim.adamw import adamw

from bwdfuse.optim import AdamW

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]

#: Parameters in float32; the same under bf16 autocast; parameters in bfloat16.
PRECISIONS = ("float32", "autocast", "bfloat16")


def make_model(precision="float32", seed=1):
    """Two layers with dropout, whose embedding is tied to the head."""
    transformers.set_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model.to(torch.bfloat16) if precision == "bfloat16" else model


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_texts(count=96):
    import datasets

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 16, (count,), generator=generator).tolist()
    texts = [" ".join(f"w{i}" for i in torch.randint(0, 61, (n,), generator=generator).tolist()) for n in lengths]
    return datasets.Dataset.from_dict({"text": texts})


def make_tokens(count=96):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, len(WORDS), (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def settings(tmp_path, precision="float32", **changes):
    """24 updates, cosine with warm-up, weight decay, no clipping: what both libraries' arguments take."""
    return {
        "output_dir": str(tmp_path),
        "max_steps": 24,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": precision == "autocast",
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }


# ---- runs ----------------------------------------------------------------------------------------------------------


class TrueNorm(transformers.TrainerCallback):
    """In a stock trainer: the norm of the gradients at hand, summed up in double."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert grads
        self.norms.append(math.sqrt(sum(grad.double().square().sum().item() for grad in grads)))


@dataclass
class Run:
    """What one run leaves behind."""

    losses: list
    rates: list
    norms: list
    weights: dict
    state: dict
    trainer: object = field(repr=False)


def finish(trainer, **options):
    """Trains and collects."""
    trainer.train(**options)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    optimizer = trainer.optimizer.state_dict()["state"]
    return Run(
        losses=[entry["loss"] for entry in logs],
        rates=[entry["learning_rate"] for entry in logs],
        norms=[entry["grad_norm"] for entry in logs],
        weights={name: value.clone() for name, value in trainer.model.state_dict().items()},
        state={i: {key: value.clone() for key, value in entry.items()} for i, entry in optimizer.items()},
        trainer=trainer,
    )


def hyperparameters(args):
    """What transformers passes to AdamW, for optimizer_cls_and_kwargs."""
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def hooks_of(model):
    return [hook for param in model.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]


# ---- torch's kernels behind our hooks ------------------------------------------------------------------------------


def _fused(param, grad, state, group, step):
    torch._fused_adamw_(
        [param.detach()], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(step)],
        lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


def _plain(param, grad, state, group, step):
    adamw(
        [param.detach()], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(step - 1)],
        foreach=False, fused=False, lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


#: By the name that transformers gives to the torch optimizer that uses it.
KERNELS = {"adamw_torch_fused": _fused, "adamw_torch": _plain}


@pytest.fixture
def torch_kernel(monkeypatch):
    """Puts torch's own kernel where the native one stands, so that our mechanism can be compared with stock by bits."""

    def put(optim):
        monkeypatch.setattr(AdamW, "_kernel", staticmethod(KERNELS[optim]))

    return put


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Models this small lose time to threads, and accelerate's gc.collect() to the libraries' own objects."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)
