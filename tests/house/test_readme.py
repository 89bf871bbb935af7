"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvloom.testing.families import random_model, tiny_config

README = Path(__file__).parents[2] / "README.md"


def test_the_python_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    code = blocks[0].replace("2GiB", "4MiB")
    names = {"model": random_model(tiny_config("gpt_oss"), seed=0), "prompt_ids": torch.arange(300).unsqueeze(0)}
    exec(compile(code, str(README), "exec"), names)
    names["engine"].close()
    shown = re.search(r"prints, for a prompt of 300 tokens,\n\n```\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown.group(1)
    assert names["out"].shape[1] > 300
