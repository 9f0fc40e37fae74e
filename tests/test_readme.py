"""The README's Python runs as it stands, its links lead somewhere, and its figures are those of the files it names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def test_python_blocks_run_in_order(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "'updates': 10" in printed and "second gradient" in printed
    assert abs(namespace["param"] - 0.899).max() < 1e-6


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) >= 7
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    ("row", "file", "key", "case"),
    [
        ("1,024 elements", "bench_hook.json", "ratio_vs_apply_fused", "1000x1024"),
        ("64 Ki fp32", "bench_kernel.json", "ratio_vs_torch_fused", "adamw/f32/64Ki/1t"),
        ("64 Mi fp32", "bench_kernel.json", "ratio_vs_torch_fused", "adamw/f32/64Mi/1t"),
        ("64 Mi bf16", "bench_kernel.json", "ratio_vs_torch_fused", "adamw/bf16/64Mi/1t"),
    ],
)
def test_speeds_are_those_measured(row, file, key, case):
    line = next(line for line in TEXT.splitlines() if row in line)
    measured = json.loads((RESULTS / file).read_text())[key][case]
    assert f"| {measured:.2f} of" in line


def test_memory_figures_are_those_of_the_demo():
    demo = json.loads((RESULTS / "demo.json").read_text())
    for figure in (
        f"{demo['peak_mib_off']:.1f} MiB",
        f"**{demo['peak_mib_on']:.1f} MiB**",
        f"{demo['gradient_mib']:.1f} MiB",
        f"{demo['largest_gradient_mib']:.1f} MiB",
        f"{demo['eval_loss_before']:.2f} → {demo['eval_loss_after']:.2f}",
        f"after {demo['updates']} updates",
        "`torch.optim.AdamW`: {seconds_per_step_stock:.2f}) | {seconds_per_step_off:.2f} | {seconds_per_step_on:.2f} |".format(
            **demo
        ),
    ):
        assert figure in TEXT, figure
    assert demo["weights_max_abs_diff"] == 0.0 and "**0.0**" in TEXT


def test_every_setting_it_tells_to_type_is_one_that_messages_tell():
    """What the table says to type is what the refusals themselves say."""
    sources = "".join(path.read_text() for path in (ROOT / "bwdfuse").rglob("*.py"))
    for setting in (
        "optim.clip_grad",
        "data.use_dynamic_bsz",
        "max_grad_norm",
        "gradient_accumulation_steps",
        "engine.strategy",
    ):
        assert setting in TEXT and setting in sources


def test_compatibility_table_quotes_what_is_said():
    """Every row that users ask for is there, and every error text it quotes is one that the sources hold."""
    table = TEXT.split("## What it works with")[1].split("\n\n")[1]
    rows = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in table.splitlines()[2:]}
    for row in ("DistributedDataParallel", "FSDP1", "FSDP2", "tensor parallel", "pipeline parallel", "gradient accumulation",
                "gradient clipping", "fp16 with a `GradScaler`", "`torch.compile`", "LoRA, frozen weights", "tied weights",
                "activation checkpointing"):  # fmt: skip
        assert row in rows, row
    paths = [*(ROOT / "bwdfuse").rglob("*.py"), *(ROOT / "csrc" / "python").glob("*.c")]
    sources = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in paths))
    quoted = [text for cell in rows.values() for text in re.findall("`([^`]+)`", cell)]
    assert len(quoted) >= 8
    for text in quoted:
        assert text in sources, text
